"""The common data of a checkpoint by the unpickler in C: the same values as torch's own reader, and nothing runs."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict, defaultdict

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt.formats import weights_only
from sixfold.dist_ckpt.state.placeholders import placeholder

SHARED = torch.arange(6.0)


def trained():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def described(node):
    """Everything that one can see of a value."""
    if isinstance(node, torch.Tensor):
        values = None if node.is_meta else node.tolist()
        return type(node), node.dtype, node.device.type, tuple(node.shape), node.stride(), node.requires_grad, values
    if isinstance(node, dict):
        return (
            type(node),
            vars(node) if hasattr(node, "__dict__") else None,
            [(described(name), described(part)) for name, part in node.items()],
        )
    if isinstance(node, list | tuple | set):
        return type(node), [described(part) for part in node]
    return type(node), repr(node)


USUAL = {
    "numbers and texts": {"step": 3, "big": 1 << 80, "loss": float("inf"), "name": "ü", 7: None, "ok": True},
    "containers": {"t": (1, [2, {"x": ()}]), "o": OrderedDict(a=1)},
    "an optimizer": trained(),
    "dtypes of tensors": [
        torch.ones(2, dtype=dtype) for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.int64)
    ],
    "views and strides": {"a": torch.arange(6.0).view(2, 3).T, "b": torch.tensor(2.0)},
    "a dtype": {"dtype": torch.bfloat16},
    "a placeholder": {"w": placeholder(torch.empty(3, 4)), "v": placeholder(torch.empty(3, 4))},
}
UNUSUAL = {
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "a gradient is wanted": torch.ones(2, requires_grad=True),
    "a size": torch.Size([2]),
    "a defaultdict": defaultdict(int, a=1),
    "bytes": b"\0",
    "a set": {1},
    "no elements": torch.empty(0),
    "complex": torch.ones(2, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_values_are_those_that_torch_reads(name):
    data = weights_only.dump(USUAL[name], "value")
    is_usual, value = weights_only.read_usual(data)
    assert is_usual
    assert described(value) == described(weights_only.load(data, "value", ()))


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_left_to_torch_and_comes_back(name):
    data = weights_only.dump({"x": UNUSUAL[name]}, "value")
    assert weights_only.read_usual(data) == (False, None)
    found = weights_only.load(data, "value", (), trusted_bytes=True)
    assert described(found) == described(weights_only.load(data, "value", ()))


def test_tensors_that_shared_memory_share_it_again():
    value = io.BytesIO()
    torch.save({"a": SHARED, "b": SHARED[2:]}, value)
    _, found = weights_only.read_usual(value.getvalue())
    found["a"][3] = -1
    assert found["b"].tolist() == [2, -1, 4, 5]


def test_a_load_reads_usual_common_data_without_torchs_reader(tmp_path, monkeypatch):
    dist_ckpt.save({"optim": trained(), "step": 3}, tmp_path / "c")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load reads it"))
    assert dist_ckpt.load({"step": 0}, tmp_path / "c", strict="ignore_all")["step"] == 3


def test_bytes_without_a_digest_are_left_to_torch(tmp_path, monkeypatch):
    dist_ckpt.save({"step": 3}, tmp_path / "c")
    monkeypatch.setattr(weights_only, "read_usual", lambda _: pytest.fail("by the unpickler in C"))
    assert dist_ckpt.load({"step": 0}, tmp_path / "c", verify="off")["step"] == 3


class Bomb:
    def __reduce__(self):
        return os.putenv, ("SIXFOLD_BOMB", "1")


def opcodes(*parts):
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name(module, attribute):
    return text(module) + text(attribute) + b"\x93"


MAKE = name("torch._utils", "_rebuild_tensor_v2")
STORAGE = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x02tQ"
HOOKS = name("collections", "OrderedDict") + b")R"
ODD = {
    "a function and its call": pickle.dumps(Bomb(), 2),
    "a name of torch": opcodes(name("torch", "load")),
    "a name behind a known one": opcodes(name("collections", "OrderedDict.__init__.__globals__")),
    "a module": opcodes(name("antigravity", "x")),
    "an extension code": opcodes(b"\x82\x01"),
    "INST": b"(S'1'\nios\nsystem\n.",
    "a tensor beyond its storage": opcodes(MAKE, b"(", STORAGE, b"K\x01K\x02\x85K\x01\x85\x89", HOOKS, b"tR"),
    "a tensor before its storage": opcodes(
        MAKE, b"(", STORAGE, b"J\xf0\xff\xff\xff", b"K\x02\x85K\x01\x85\x89", HOOKS, b"tR"
    ),
    "a storage that is none": opcodes(MAKE, b"(K\x01K\x00K\x02\x85K\x01\x85\x89", HOOKS, b"tR"),
    "hooks": opcodes(MAKE, b"(", STORAGE, b"K\x00K\x02\x85K\x01\x85\x89}K\x01K\x01s", b"tR"),
    "state for a stand-in": opcodes(MAKE, b"}", text("x"), b"K\x01sb"),
    "attributes of a stand-in": opcodes(MAKE, b"N}", text("__call__"), b"K\x01s\x86b"),
    "attributes of a storage": opcodes(STORAGE, b"N}", text("memory"), b"K\x01s\x86b"),
    "state for a dtype": opcodes(name("torch", "float32"), b"N}", text("itemsize"), b"K\x01s\x86b"),
    "attributes of a class": opcodes(name("collections", "OrderedDict"), b"N}", text("x"), b"K\x01s\x86b"),
    "a record that is not there": opcodes(STORAGE.replace(b"\x010", b"\x019")),
    "another length": opcodes(STORAGE.replace(b"K\x02", b"K\x07")),
    "no pickle": b"\xff" * 9,
    "nothing": b"",
}


@pytest.mark.parametrize("which", ODD)
def test_a_pickle_that_asks_for_more_is_given_up_and_nothing_of_it_runs(which, monkeypatch):
    monkeypatch.delenv("SIXFOLD_BOMB", raising=False)
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", ODD[which])
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3")
        archive.writestr("archive/data/0", bytes(8))
    before = dict(vars(weights_only))
    assert weights_only.read_usual(found.getvalue()) == (False, None)
    assert dict(vars(weights_only)) == before and not hasattr(OrderedDict, "x")
    assert os.environ.get("SIXFOLD_BOMB") is None


def test_the_forged_archives_are_of_the_form_that_is_read():
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", opcodes(MAKE, b"(", STORAGE, b"K\x00K\x02\x85K\x01\x85\x89", HOOKS, b"tR"))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3")
        archive.writestr("archive/data/0", bytes(8))
    is_usual, value = weights_only.read_usual(found.getvalue())
    assert is_usual and value.tolist() == [0, 0]
