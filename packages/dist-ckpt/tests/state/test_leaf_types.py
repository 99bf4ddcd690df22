"""What trainers put into a checkpoint: each kind of value comes back equal and of its type, or save refuses it by name.

Written files are also read by ``torch.load`` itself, as megatron-core reads ``common.pt``.
"""

import argparse
import collections
import copy
import dataclasses
import datetime
import enum
import functools
import io
import json
import pathlib
import random
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, MismatchError, ShardedObject, ShardedTensor, ShardingError, UnsafeError
from sixfold.dist_ckpt.formats import weights_only

try:
    import numpy as np
except ImportError:  # torch alone is enough for this package
    np = None

needs_numpy = pytest.mark.skipif(np is None, reason="needs numpy")


class Color(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


class Subclass(torch.Tensor):
    pass


class Dictionary(dict):
    @classmethod
    def named(cls, name):
        made = cls(a=1)
        made.name = name
        return made


class Numbers(list):
    pass


def trained():
    layer = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    adam.step()
    return layer, adam


def kept_of_numpy():
    return {
        "array": np.arange(6).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big endian": np.arange(3, dtype=">i4"),
        "empty array": np.zeros((0, 3)),
        "array of texts": np.array(["a", "bc"]),
        "numpy scalars": [np.float32(1.5), np.int64(3), np.bool_(True), np.complex64(1 + 2j), np.float16(0.1)],
        "numpy texts": (np.str_("x"), np.bytes_(b"x")),
        "numpy types": [np.dtype("f4"), np.float32],
        "numpy generator": np.random.get_state(),
        "numpy bit generator": np.random.default_rng(0).bit_generator.state,
        "arguments with arrays": argparse.Namespace(a=np.ones(2), inner=argparse.Namespace(a=np.ones(2))),
        "deque of arrays": collections.deque([1, np.ones(1)], maxlen=3),
    }


def kept():
    layer, adam = trained()
    schedule = torch.optim.lr_scheduler
    parts = [schedule.LinearLR(adam), schedule.CosineAnnealingLR(adam, 4)]
    return {
        "torch generator": torch.get_rng_state(),
        "python generator": random.getstate(),
        "dates": [
            datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
            datetime.date(2026, 1, 2),
            datetime.timedelta(1),
            datetime.time(1),
        ],
        "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("c")],
        "arguments": argparse.Namespace(lr=0.1, shape=[1, 2], inner=argparse.Namespace(t=torch.ones(2))),
        "namespace": types.SimpleNamespace(a=1),
        "ordered": collections.OrderedDict(b=1, a=collections.OrderedDict()),
        "default": collections.defaultdict(list, {1: [2]}),
        "default of none": collections.defaultdict(None, {1: 2}),
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, torch.ones(1)], maxlen=3),
        "sets": [{1, "a"}, frozenset([1])],
        "bytes": [b"\x00\xff", bytearray(b"a")],
        "numbers": [2**200, -(2**70), 1 + 2j, True, None, float("inf"), 1e-320],
        "ranges": [range(3), slice(1, 2, None)],
        "keys": {1: 1, (1, "a"): 2, False: 3, None: 4, b"x": 5, 1.5: 6, 2**80: 7},
        "torch words": [torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"), torch.strided, torch.__version__],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "parameter in a buffer": torch.nn.Parameter(torch.arange(9.0)[3:5], requires_grad=False),
        "wants a gradient": torch.ones(2, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "negative": torch.tensor([1 + 2j, 3j]).conj().imag,
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "model": layer.state_dict(),
        "optimizer": adam.state_dict(),
        "schedules": [
            schedule.LambdaLR(adam, lambda epoch: 1.0).state_dict(),
            schedule.OneCycleLR(adam, 1.0, 10).state_dict(),
            schedule.ReduceLROnPlateau(adam).state_dict(),
            schedule.SequentialLR(adam, parts, [2]).state_dict(),
        ],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    } | ({} if np is None else kept_of_numpy())


def same(a, b):
    """Equal and of one type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.is_nested:
            return all(map(same, a.unbind(), b.unbind()))
        dense = [t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (a, b)]
        x, y = (t.dequantize() if t.is_quantized else t.float() if t.dtype.itemsize == 1 else t for t in dense)
        facts = [(t.dtype, t.shape, t.layout, t.requires_grad) for t in (a, b)]
        return facts[0] == facts[1] and torch.equal(x, y)
    if np is not None and isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all()) and b.flags.writeable
    if isinstance(a, dict):
        attributes = [getattr(d, "default_factory", None) for d in (a, b)] + [0]
        return (
            list(map(repr, a)) == list(map(repr, b))
            and all(same(a[key], b[key]) for key in a)
            and attributes[0] == attributes[1]
            and same(list(getattr(a, "__dict__", {}).items()), list(getattr(b, "__dict__", {}).items()))
        )
    if isinstance(a, list | tuple | collections.deque):
        lengths = [getattr(d, "maxlen", None) for d in (a, b)]
        return len(a) == len(b) and lengths[0] == lengths[1] and all(map(same, a, b))
    if isinstance(a, argparse.Namespace | types.SimpleNamespace):
        return same(vars(a), vars(b))
    return a == b


@pytest.fixture(scope="module", autouse=True)
def nothing_allowed_beforehand():
    """megatron-core lets numpy's rebuilding through for the whole process when it is imported."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("leaves") / "c"
    values = kept()
    objects = {name: ShardedObject(name, value, (1,), (0,)) for name, value in values.items()}
    dist_ckpt.save({"values": values, "objects": objects, "w": one("w", torch.ones(1))}, path)
    return values, path


@pytest.mark.parametrize("name", kept())
@pytest.mark.slow
def test_what_trainers_keep_comes_back_equal_and_of_its_type(folder, name):
    values, path = folder
    common = dist_ckpt.load_common_state_dict(path)
    loaded = dist_ckpt.load({"o": ShardedObject(name, None, (1,), (0,))}, path)["o"]
    assert same(values[name], common["values"][name])
    assert same(values[name], loaded)
    peers = torch.load(path / "common.pt", weights_only=False)  # as megatron-core reads it
    assert same(values[name], peers["values"][name])


def test_a_streams_content_comes_back():
    stream = io.BytesIO(b"abc")
    stream.seek(2)
    found = weights_only.load(weights_only.dump(stream, "x"), "x", ())
    assert (type(found), found.getvalue(), found.tell()) == (io.BytesIO, b"abc", 2)


REFUSED = {
    "enum": (lambda: Color.RED, r"add_safe_globals\(\[\S*Color\]\).*safe_globals="),
    "named tuple": (lambda: Pair(1, 2), r"add_safe_globals\(\[\S*Pair\]\)"),
    "data class": (lambda: Settings(), r"add_safe_globals\(\[\S*Settings\]\)"),
    "enum in a namespace": (lambda: argparse.Namespace(a=[1, Color.RED]), r"leaf\.a\[1\] is a \S*Color"),
    "enum as key": (lambda: {Color.RED: 1}, r"is a \S*Color"),
    "tensor subclass": (lambda: torch.ones(2).as_subclass(Subclass), r"add_safe_globals\(\[\S*Subclass"),
    "dict subclass with attributes": (lambda: Dictionary.named("x"), r"without its attributes \(name\). Pass its"),
    "the same in a tuple": (lambda: (Dictionary.named("x"),), r"leaf\[0\] is a .*without its attributes name"),
    "list subclass": (lambda: Numbers([1]), r"is a \S*Numbers, .*\); save list\(value\), which comes back"),
    "meta tensor": (lambda: torch.ones(2, device="meta"), "holds no values"),
    "meta tensor in a tuple": (lambda: (1, torch.ones(2, device="meta")), r"leaf\[1\]: data is on the meta"),
    "generator": (lambda: torch.Generator(), "get_state"),
    "lambda": (lambda: lambda: 1, "is a builtins.function"),
    "function": (lambda: len, "add_safe_globals"),
    "partial": (lambda: functools.partial(int, "3"), "functools.partial"),
    "default of a lambda": (lambda: collections.defaultdict(lambda: 1), "is a collections.defaultdict"),
    "module in a tuple": (lambda: (torch.nn.Linear(1, 1),), "is a tuple that holds a Linear; .* Stateful"),
    "live optimizer state": (lambda: trained()[1].state, "tensors as keys"),
    "record in a tuple": (lambda: (1, one("w", torch.ones(1))), "is a tuple that holds a ShardedTensor"),
    "record in a namespace": (
        lambda: argparse.Namespace(a=one("w", torch.ones(1))),
        r"leaf is a Namespace that holds a .*ShardedTensor",
    ),
}
REFUSED_OF_NUMPY = {
    "objects": (lambda: np.array([None, 1], dtype=object), "holds object"),
    "records": (lambda: np.zeros(2, dtype=[("a", "f4")]), "numbers, truth values and texts"),
    "numpy dates": (lambda: np.datetime64("2020-01-01"), "datetime64"),
    "long double": (lambda: np.longdouble(1), "longdouble"),
}


@pytest.mark.parametrize("name", [*REFUSED, *(pytest.param(name, marks=needs_numpy) for name in REFUSED_OF_NUMPY)])
def test_what_would_not_come_back_is_refused_at_save_by_path_type_and_remedy(tmp_path, name):
    make, pattern = (REFUSED | REFUSED_OF_NUMPY)[name]
    with pytest.raises(ShardingError, match=f"(?s){pattern}") as caught:
        dist_ckpt.save({"model": {"leaf": make()}}, tmp_path / "c")
    assert "model.leaf" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_classes_of_ones_own_go_through_where_torch_is_told_so(tmp_path):
    state = {"a": argparse.Namespace(color=Color.RED), "b": [Pair(1, 2), Settings(0.5)]}
    with torch.serialization.safe_globals([Color, Pair, Settings]):
        dist_ckpt.save(state, tmp_path / "c")
        assert dist_ckpt.load({}, tmp_path / "c") == state
    with pytest.raises(UnsafeError, match=r"safe_globals, or call torch\.serialization\.add_safe_globals"):
        dist_ckpt.load({}, tmp_path / "c")
    assert dist_ckpt.load({}, tmp_path / "c", safe_globals=[Color, Pair, Settings]) == state


def peers_common(folder, value):
    """A checkpoint whose common.pt a peer wrote, numpy's own pickles in it."""
    dcp.save({"w": torch.ones(1)}, checkpoint_id=folder, no_dist=True)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))
    torch.save(value, folder / "common.pt")
    return folder


@needs_numpy
def test_numpys_own_pickles_of_peers_are_read_without_calling_numpys_rebuilding(tmp_path, monkeypatch):
    values = {
        name: value
        for name, value in kept().items()
        if name not in ("default", "default of none", "deque", "deque of arrays")
    }
    folder = peers_common(tmp_path / "c", {**values, "again": (values["array"], [values["array"]])})
    loaded = dist_ckpt.load({"w": one("w", torch.ones(1))}, folder)
    assert all(same(value, loaded[name]) for name, value in values.items())
    assert loaded["again"][0] is loaded["again"][1][0] is loaded["array"]


@needs_numpy
@pytest.mark.parametrize("count", range(1, 6))
def test_names_that_the_caller_lets_through_are_the_callers(tmp_path, count):
    """megatron-core lets numpy's own rebuilding through when it is imported; files of both kinds still load."""
    multiarray = np._core.multiarray
    given = [np.ndarray, np.dtype, multiarray._reconstruct, np.dtypes.UInt32DType, multiarray.scalar][:count]
    values = {"a": np.arange(4, dtype=np.uint32), "s": [np.uint32(7)]}
    theirs = peers_common(tmp_path / "theirs", values)
    with torch.serialization.safe_globals(given):
        dist_ckpt.save(values, tmp_path / "ours")
        assert all(same(value, dist_ckpt.load({}, tmp_path / "ours")[name]) for name, value in values.items())
        if count in (2, 3):  # numpy's own dtype without the class of its instances: torch asks for that too
            with pytest.raises(UnsafeError, match=r"add_safe_globals\(\[numpy\.dtypes\.UInt32DType\]\)"):
                dist_ckpt.load({}, theirs)
        else:
            loaded = dist_ckpt.load({}, theirs)
            assert all(same(loaded[name], values[name]) for name in ("a", "s"))


class Crafted:
    """Pickles as a numpy array whose dtype names bytes far outside of it."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return np.dtype, ("V8", False, True), self.state


@needs_numpy
@pytest.mark.parametrize(
    "state",
    [
        (3, "|", None, ("a",), {"a": (np and np.dtype("O"), 100_000)}, 8, 1, 63),
        (3, "<", None, None, None, 400_000, 4, 0),
        (4, "<", None, None, None, -1, -1, 0),
    ],
)
def test_a_crafted_dtype_is_refused_and_never_reaches_numpy(tmp_path, state):
    folder = peers_common(tmp_path / "c", {"x": (Crafted(state),)})
    with pytest.raises(CorruptError, match="numpy dtype"):
        dist_ckpt.load_common_state_dict(folder)


@needs_numpy
@pytest.mark.parametrize(("shape", "code"), [((10**12,), "<f8"), ((-1,), "<f8"), ((1,), "O"), ((1,), "<f8, <f8")])
def test_a_crafted_array_is_refused_before_memory_is_asked_for(tmp_path, shape, code):
    class Array:
        def __reduce__(self):
            return np.ndarray, (shape, code, bytearray(8))

    folder = peers_common(tmp_path / "c", {"x": Array()})
    with pytest.raises(CorruptError, match="numpy"):
        dist_ckpt.load_common_state_dict(folder)


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: (t,), lambda t: argparse.Namespace(t=t), lambda t: {1: [(t,)]}]
)
def test_a_view_writes_its_own_elements_and_not_the_storage_behind_it(tmp_path, wrap):
    view = torch.arange(5_000_000)[7:8]
    state = {"common": wrap(view), "o": ShardedObject("o", wrap(view), (1,), (0,)), "w": one("w", view)}
    dist_ckpt.save(state, tmp_path / "c")
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) < 20_000


def test_a_tensor_of_zeros_without_memory_is_refused(tmp_path):
    with pytest.raises(ShardingError, match=r"w\[:\]: data is a tensor of zeros without memory"):
        dist_ckpt.save({"w": one("w", torch._efficientzerotensor(3))}, tmp_path / "c")


def test_ordered_dicts_keep_their_kind_and_attributes_where_records_stand_in_them(tmp_path):
    state = torch.nn.Linear(2, 2).state_dict()  # an OrderedDict with _metadata
    for name in list(state):
        state[name] = one(name, state[name])
    default = collections.defaultdict(dict, {1: {"w": one("d", torch.ones(1))}})
    dist_ckpt.save({"model": state, "default": default, "top": 1}, tmp_path / "c")
    loaded = dist_ckpt.load({"model": state, "default": default}, tmp_path / "c")
    assert type(loaded["model"]) is collections.OrderedDict
    assert loaded["model"]._metadata == state._metadata
    assert list(loaded["model"]) == ["weight", "bias"]
    assert (type(loaded["default"]), loaded["default"].default_factory) == (collections.defaultdict, dict)
    torch.nn.Linear(2, 2).load_state_dict(loaded["model"])
    assert isinstance(state["weight"], ShardedTensor)


@pytest.mark.parametrize(
    ("saved", "asked", "filled"),
    [
        ((torch.ones(2), torch.eye(2)), [torch.zeros(2), torch.zeros(2, 2)], [torch.ones(2), torch.eye(2)]),
        ((torch.ones(2), torch.eye(2)), {1: torch.zeros(2, 2)}, {1: torch.eye(2)}),
        (
            {"a": (torch.ones(2), {"x": torch.eye(3)})},
            {"a": [torch.zeros(2), {"x": torch.zeros(3, 3)}]},
            {"a": [torch.ones(2), {"x": torch.eye(3)}]},
        ),
    ],
    ids=["list", "places", "deep"],
)
def test_a_tuple_that_is_asked_for_as_a_list_is_returned_and_fills_the_list(tmp_path, saved, asked, filled):
    own, module = copy.deepcopy(asked), torch.nn.Linear(2, 2)
    dist_ckpt.save({"v": saved, "m": module}, tmp_path / "c", group=None)
    loaded = dist_ckpt.load({"v": own, "m": torch.nn.Linear(2, 2)}, tmp_path / "c", group=None)
    assert repr(loaded["v"]) == repr(saved)
    assert repr(own) == repr(filled)
    assert torch.equal(loaded["m"].weight, module.weight)


def test_a_module_whose_state_was_saved_in_a_tuple_gets_it(tmp_path):
    then, now = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    dist_ckpt.save({"v": (then.state_dict(), 3)}, tmp_path / "c", group=None)
    dist_ckpt.load({"v": [now]}, tmp_path / "c", group=None)
    assert torch.equal(now.weight, then.weight)


@pytest.mark.parametrize("saved", [torch.arange(4.0).reshape(2, 2), "text"])
def test_elements_of_a_tensor_or_a_text_are_no_values_of_their_own(tmp_path, saved):
    dist_ckpt.save({"v": saved}, tmp_path / "c", group=None)
    with pytest.raises(MismatchError, match=r"v\.0: asked for, not in the checkpoint"):
        dist_ckpt.load({"v": [torch.zeros(2)]}, tmp_path / "c", group=None)
