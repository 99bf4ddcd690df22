"""The tools on what users bring: optimizer states of torch's own, classes in common data, integers of 64 bits."""

import math
import pathlib
import sys
from fractions import Fraction

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, ShardedObject, ShardedTensor, StorageError
from sixfold.dist_ckpt.__main__ import main
from sixfold.dist_ckpt.tools import commands as tools


def test_a_nested_state_of_dcp_loads_from_the_converted_checkpoint_as_from_its_own(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([{"params": [weight], "lr": 0.25, "name": "a.b"}])
    weight.sum().backward()
    optimizer.step()
    groups = optimizer.state_dict()["param_groups"]
    dcp.save({"optim": optimizer.state_dict(), "step": 2}, checkpoint_id=str(tmp_path / "c"))
    tools.convert(tmp_path / "c", tmp_path / "d", to="torch_dist")
    other = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.ones(3))], "lr": 9.0, "name": "c"}])
    asked = other.state_dict() | {
        "state": {0: {key: torch.zeros_like(x) for key, x in optimizer.state[weight].items()}}
    }
    loaded = dist_ckpt.load({"optim": asked, "step": 0}, tmp_path / "d", group=None)
    assert loaded["step"] == 2
    assert loaded["optim"]["param_groups"] == groups
    assert all(torch.equal(loaded["optim"]["state"][0][key], x) for key, x in optimizer.state[weight].items())
    assert not any("." in key for key in loaded)


def test_diff_tells_apart_integers_that_are_one_number_as_float64(tmp_path):
    most = {torch.int64: 2**53 + 1, torch.uint64: 2**64 - 1}
    for name, less in (("a", 0), ("b", 1)):
        numbers = {str(kind): torch.tensor([5, number - less], dtype=kind) for kind, number in most.items()}
        sharded = {key: ShardedTensor.from_rank_offsets(key, number) for key, number in numbers.items()}
        dist_ckpt.save(sharded, tmp_path / name, group=None)
    found = tools.diff(tmp_path / "a", tmp_path / "b")
    assert [(entry["count"], entry["max_abs"]) for entry in found["different"]] == [(1, 1.0)] * 2
    assert tools.diff(tmp_path / "a", tmp_path / "b", rtol=1e-12)["equal"]


def test_classes_in_common_data_and_objects_are_converted_when_they_are_passed_as_the_error_says(tmp_path):
    with torch.serialization.safe_globals([Fraction]):
        state = {"w": one("w", torch.ones(3)), "x": one("x", torch.ones(2)), "share": Fraction(1, 3)}
        state["o"] = ShardedObject("o", {"share": Fraction(2, 3)}, (1,), (0,))
        dist_ckpt.save(state, tmp_path / "c", group=None)
    with pytest.raises(CheckpointError, match="pass the class in safe_globals"):
        tools.convert(tmp_path / "c", tmp_path / "d", to="torch_dist")
    tools.convert(tmp_path / "c", tmp_path / "d", to="torch_dist", safe_globals=[Fraction])
    dist_ckpt.remove_sharded_tensors(tmp_path / "d", "x", safe_globals=[Fraction])
    assert Fraction not in torch.serialization.get_safe_globals()
    loaded = dist_ckpt.load({"o": state["o"].without_data()}, tmp_path / "d", group=None, safe_globals=[Fraction])
    assert (loaded["share"], loaded["o"]) == (Fraction(1, 3), {"share": Fraction(2, 3)})
    assert list(dist_ckpt.load_tensors_metadata(tmp_path / "d")) == ["w"]


@pytest.mark.parametrize("x", [5.0, math.nan, -math.inf])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_tolerance_takes_infinity_for_nothing_but_itself(tmp_path, x, kind):
    for name, value in (("a", x), ("b", math.inf)):
        dist_ckpt.save({"w": one("w", torch.tensor([value, math.inf, 1.0], dtype=kind))}, tmp_path / name, group=None)
    for sides in ("ab", "ba"):
        found = tools.diff(*(tmp_path / side for side in sides), rtol=0.5)
        assert [entry["count"] for entry in found["different"]] == [1]


@pytest.mark.parametrize(
    ("a", "b"), [(1, True), (1, 1.0), (0.0, False), (1, 1 + 0j), (b"a", bytearray(b"a")), ({1}, frozenset([1]))]
)
def test_diff_tells_kinds_of_values_apart_that_python_calls_equal(tmp_path, a, b):
    for name, value in (("a", a), ("b", b), ("c", a)):
        dist_ckpt.save({"v": [value], "t": (0, value)}, tmp_path / name, group=None)
    assert tools.diff(tmp_path / "a", tmp_path / "b")["common_differs"] == ["t", "v[0]"]
    assert tools.diff(tmp_path / "a", tmp_path / "c")["equal"]


@pytest.mark.parametrize("writer", ["torch", "ours"])
def test_a_tensor_within_a_tuple_is_no_silent_loss_of_an_export(tmp_path, writer):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors, an extra")
    state = {"model": {"w": torch.ones(2)}, "betas": (0.9, [torch.ones(1)]), "step": (1, "a")}
    if writer == "torch":
        dcp.save(state, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    else:
        dist_ckpt.save(state, tmp_path / "c", group=None)
    with pytest.raises(CheckpointError, match=r"betas is a tuple that holds tensors; .*keys .*'model\.\*'"):
        tools.convert(tmp_path / "c", tmp_path / "d", to="safetensors")
    tools.convert(tmp_path / "c", tmp_path / "d", to="safetensors", keys="model.*")
    assert list(safetensors.load_file(tmp_path / "d" / "model.safetensors")) == ["model.w"]
    tools.convert(tmp_path / "c", tmp_path / "e", to="torch_dist")
    assert dist_ckpt.load({}, tmp_path / "e", group=None)["betas"] == state["betas"]


@pytest.mark.parametrize("key", ["__metadata__", "w\ud800"])
def test_a_name_that_safetensors_cannot_hold_is_refused_and_the_rest_goes_out_by_keys(tmp_path, key):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors, an extra")
    dist_ckpt.save({"x": one(key, torch.ones(2)), "a": one("a", torch.zeros(2))}, tmp_path / "c", group=None)
    with pytest.raises(CheckpointError, match="safetensors knows no tensor of this name; leave it out with keys"):
        tools.convert(tmp_path / "c", tmp_path / "d", to="safetensors")
    assert not (tmp_path / "d").exists()
    tools.convert(tmp_path / "c", tmp_path / "d", to="safetensors", keys="a")
    assert list(safetensors.load_file(tmp_path / "d" / "model.safetensors")) == ["a"]


def test_the_status_tells_what_was_found_though_there_is_no_standard_error_and_a_full_disk_is_no_damage(
    tmp_path, monkeypatch, capsys
):
    dist_ckpt.save({"w": one("w", torch.ones(2))}, tmp_path / "c", group=None)
    with monkeypatch.context() as patched, open("/dev/full", "w") as full:
        patched.setattr(sys, "stdout", full)
        assert main(["verify", str(tmp_path / "c")]) == 2
    assert "StorageError: No space left on device" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["verify", str(tmp_path / "c")]) == 0
    assert main(["verify", "--json", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().out.endswith("by checksum)\n")


def test_verify_of_what_the_system_does_not_show_is_an_error_of_the_package(tmp_path, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    dist_ckpt.save({"w": one("w", torch.ones(2))}, tmp_path / "c", group=None)
    monkeypatch.setattr(pathlib.Path, "exists", denied)
    with pytest.raises(StorageError, match=r"Permission denied: .*c"):
        tools.verify(tmp_path / "c")
