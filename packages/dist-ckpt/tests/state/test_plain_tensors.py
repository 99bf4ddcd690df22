"""Plain tensors are tensors of the checkpoint: in the index under DCP's names, in blocks, filled in place.

Oracles: the tensors themselves, the names that torch's ``flatten_state_dict`` gives, torch's own reader and writer.
"""

import collections
import itertools
import logging
import warnings

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import dcp_load, dcp_save
from dist_ckpt_helpers import flip_byte, one
from plain_tensors_helpers import (
    alike,
    all_dtypes,
    assert_same,
    bits,
    blank_like,
    by_torch,
    flat_tensors,
    full_state,
    go_on,
    odd_tensors,
    tensor_entries,
    trained,
)
from torch import nn

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CheckpointManager,
    CorruptError,
    MismatchError,
    ShardedObject,
    ShardedTensor,
    ShardingError,
    tools,
)
from sixfold.dist_ckpt.stores import MemoryStore

LIMIT = 64 * 1024  # bytes of plain tensors that common.pt keeps a second copy of


def distcp_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def with_values(common):
    """Names of the tensors that have their values."""
    return {name for name, value in flat_tensors(common).items() if not value.is_meta}


SIZES = {
    "below the limit": [LIMIT - 4],
    "at the limit": [LIMIT],
    "above the limit": [LIMIT + 4],
    "one large among small": [4, 16 * LIMIT, 8, 400],
    "many that pass the limit together": [4096] * 24,
    "many small": [40] * 60,
    "none": [],
    "empty": [0, 4],
}


@pytest.mark.sampled
@pytest.mark.parametrize("megatron", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_tensors_of_any_size_are_in_the_index_and_on_disk_once(tmp_path, sizes, megatron):
    state = {"step": 3, "w": [torch.randn(size // 4) for size in sizes], "b": {"name": "x"}}
    folder, total = tmp_path / "c", sum(sizes)
    dist_ckpt.save(state, folder, group=None, megatron=megatron)
    expected = flat_tensors(state)
    assert tensor_entries(folder).keys() == expected.keys()
    assert_same(by_torch(folder), expected)
    assert_same(flat_tensors(dist_ckpt.load({}, folder, group=None)), expected)
    assert_same(dist_ckpt.load_plain_tensors(folder), expected)
    asked = blank_like(state)
    loaded = dist_ckpt.load(asked, folder, group=None, verify="full")
    assert_same(flat_tensors(asked), expected)
    assert (loaded["step"], loaded["b"]) == (3, {"name": "x"})
    assert total <= distcp_bytes(folder) <= total + 4096 * (len(sizes) + 1)
    common = dist_ckpt.load_common_state_dict(folder)
    copied = with_values(common)
    if megatron or total <= LIMIT:
        assert_same(flat_tensors(common), expected)
    else:
        assert sum(expected[name].nbytes for name in copied) <= LIMIT
    if sizes == SIZES["one large among small"] and not megatron:
        assert copied == {"w.0", "w.2", "w.3"}
    assert tools.verify(folder)["problems"] == []


def test_common_pt_is_read_by_torch_alone_and_is_small(tmp_path):
    state = {"w": torch.randn(100_000), "tiny": torch.arange(3), "step": 3}
    dist_ckpt.save(state, tmp_path / "c", group=None)
    found = torch.load(tmp_path / "c" / "common.pt", weights_only=True)
    assert found["step"] == 3
    assert found["tiny"].tolist() == [0, 1, 2]
    assert found["w"].is_meta
    assert (tmp_path / "c" / "common.pt").stat().st_size < 2 * LIMIT


def test_a_small_view_of_a_large_storage_costs_its_own_bytes(tmp_path):
    base = torch.randn(1_000_000)
    state = {"head": base[:3], "column": base.view(1000, 1000)[:, 7], "row": base.view(1000, 1000)[5]}
    expected = {name: value.clone() for name, value in state.items()}
    for name, options in {"c": {}, "m": {"megatron": True}}.items():
        dist_ckpt.save(state, tmp_path / name, group=None, **options)
        assert sum(path.stat().st_size for path in (tmp_path / name).iterdir()) < 100_000
        assert_same(flat_tensors(dist_ckpt.load({}, tmp_path / name, group=None)), expected)
        assert_same(flat_tensors(dist_ckpt.load_common_state_dict(tmp_path / name)), expected)


def test_bits_of_every_dtype_come_back_through_torch_and_in_place(tmp_path):
    state = {"of": all_dtypes()}
    expected = {f"of.{name}": value.clone() for name, value in state["of"].items()}
    dist_ckpt.save(state, tmp_path / "c", group=None)
    asked = blank_like(state)
    dist_ckpt.load(asked, tmp_path / "c", group=None)
    assert_same(flat_tensors(asked), expected)
    assert_same(flat_tensors(dist_ckpt.load({}, tmp_path / "c", group=None)), expected)
    assert_same(by_torch(tmp_path / "c"), expected)
    dist_ckpt.save(state, tmp_path / "m", group=None, megatron=True)
    assert_same(flat_tensors(dist_ckpt.load_common_state_dict(tmp_path / "m")), expected)


def test_views_strides_and_graphs_are_saved_as_their_values_and_torch_reads_them(tmp_path):
    state = odd_tensors()
    expected = {name: value.detach().clone() for name, value in state.items()}
    dist_ckpt.save(state, tmp_path / "c", group=None)
    assert_same(flat_tensors(dist_ckpt.load({}, tmp_path / "c", group=None)), expected)
    assert_same(by_torch(tmp_path / "c"), expected)
    assert_same(dist_ckpt.load_plain_tensors(tmp_path / "c"), expected)
    dist_ckpt.save(state, tmp_path / "m", group=None, megatron=True)
    assert_same(flat_tensors(dist_ckpt.load_common_state_dict(tmp_path / "m")), expected)
    assert_same(flat_tensors(dist_ckpt.load({}, tmp_path / "m", group=None)), expected)


def test_strided_targets_are_filled_in_place_and_keep_their_strides(tmp_path):
    kept = ("turned", "every second", "channels last", "conjugate", "negative", "real part", "parameter", "0-dim")
    whole = odd_tensors()
    saved = {name: whole[name] for name in kept}
    dist_ckpt.save(saved, tmp_path / "c", group=None)
    pairs = torch.zeros(20_000, dtype=torch.complex64)
    asked = {
        "turned": torch.zeros(200, 300).t(),
        "every second": torch.zeros(60_000)[::2],
        "channels last": torch.zeros(2, 64, 16, 16).to(memory_format=torch.channels_last),
        "conjugate": torch.zeros(20_000, dtype=torch.complex64).conj(),
        "negative": torch.zeros(20_000, dtype=torch.complex64).conj().imag,
        "real part": pairs.real,
        "parameter": nn.Parameter(torch.zeros(150, 150)),
        "0-dim": torch.zeros(5)[2],
    }
    before = {name: (value.data_ptr(), value.stride()) for name, value in asked.items()}
    loaded = dist_ckpt.load(asked, tmp_path / "c", group=None)
    for found in (asked, loaded):
        assert_same(found, {name: value.detach() for name, value in saved.items()})
        assert {name: (value.data_ptr(), value.stride()) for name, value in found.items()} == before
    assert not pairs.imag.any()


def test_an_expanded_target_is_refused_with_its_name(tmp_path):
    dist_ckpt.save({"w": torch.arange(30_000.0)}, tmp_path / "c", group=None)
    with pytest.raises(ShardingError, match=r"\bw\b.*several elements in one place"):
        dist_ckpt.load({"w": torch.zeros(1).expand(30_000)}, tmp_path / "c", group=None)


def test_tied_weights_are_tied_after_a_load_and_unlike_ones_are_an_error(tmp_path):
    def tied(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(300, 100), "head": nn.Linear(100, 300, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    saved, other = tied(0), tied(1)
    dist_ckpt.save({"model": saved.state_dict()}, tmp_path / "c", group=None)
    dist_ckpt.load({"model": other.state_dict()}, tmp_path / "c", group=None)
    assert other["head"].weight is other["embed"].weight
    assert torch.equal(other["head"].weight, saved["head"].weight)
    assert tensor_entries(tmp_path / "c").keys() == {"model.embed.weight", "model.head.weight"}
    apart = {name: value.clone() for name, value in saved.state_dict().items()}
    apart["head.weight"][7, 7] += 1
    dist_ckpt.save({"model": apart}, tmp_path / "apart", group=None)
    with pytest.raises(MismatchError, match=r"(?s)model\.(embed|head)\.weight.*model\.(embed|head)\.weight"):
        dist_ckpt.load({"model": tied(1).state_dict()}, tmp_path / "apart", group=None)


def nested_state(scale=1.0):
    big = torch.arange(20_000.0) * scale
    ordered = collections.OrderedDict(z=big + 1, a=collections.OrderedDict(m=torch.tensor([scale])))
    by_number = collections.defaultdict(list, {3: [big + 2, {"deep": torch.tensor(scale)}], 0: [torch.ones(2) * scale]})
    return {
        "list": [big, [torch.ones(1) * scale, {"x": big + 3}], 5, "text"],
        "ordered": ordered,
        "default": by_number,
        7: {8: big + 4, "nine": None},
        "state": {0: {"step": torch.tensor(scale), "exp_avg": big + 5}, 1: {}},
        "a b/c": {"with.dot": big + 6, "": torch.ones(1) * scale},
        "none": [],
    }


@pytest.mark.parametrize("options", [{}, {"megatron": True}, {"metadata": "compact"}], ids=str)
def test_nested_containers_come_back_as_they_were_under_the_names_of_torch(tmp_path, options):
    dist_ckpt.save(nested_state(), tmp_path / "c", group=None, **options)
    assert alike(dist_ckpt.load({}, tmp_path / "c", group=None), nested_state())
    asked = nested_state(0.0)
    loaded = dist_ckpt.load(asked, tmp_path / "c", group=None)
    assert alike(loaded, nested_state())
    assert loaded["default"][3][0].data_ptr() == asked["default"][3][0].data_ptr()
    assert dist_ckpt.load_tensors_metadata(tmp_path / "c").keys() == flat_tensors(nested_state()).keys()
    if not options:
        torch_dcp.save(nested_state(), checkpoint_id=tmp_path / "t", no_dist=True)
        assert tensor_entries(tmp_path / "c").keys() == tensor_entries(tmp_path / "t").keys()


def test_torchs_own_load_fills_a_nested_state_from_ours_and_ours_from_torchs(tmp_path):
    def tensors_only(scale):  # torch sorts keys, and keeps plain values as tensors are
        state = nested_state(scale)
        return {key: state[key] for key in ("ordered", "state", "default")} | {"list": state["list"][:2]}

    dist_ckpt.save(tensors_only(1.0), tmp_path / "c", group=None)
    theirs = tensors_only(0.0)
    del theirs["state"][1]  # an empty dict, which is common data of ours
    dcp_load(theirs, torch_dcp.FileSystemReader(tmp_path / "c"), no_dist=True)
    assert_same(flat_tensors(theirs), flat_tensors(tensors_only(1.0)))
    dcp_save(tensors_only(1.0), torch_dcp.FileSystemWriter(tmp_path / "t"), no_dist=True)
    ours = tensors_only(0.0)
    dist_ckpt.load(ours, tmp_path / "t", group=None)
    assert_same(flat_tensors(ours), flat_tensors(tensors_only(1.0)))


def test_tensors_in_tuples_come_back_whole_at_any_size(tmp_path):
    for name, elements in {"small": 3, "large": 40_000}.items():
        state = {"pair": (torch.arange(float(elements)), 1), "deep": [{"t": (torch.ones(elements),)}]}
        dist_ckpt.save(state, tmp_path / name, group=None)
        for asked in ({}, {"pair": (torch.zeros(elements), 0), "deep": [{"t": (torch.zeros(elements),)}]}):
            loaded = dist_ckpt.load(asked, tmp_path / name, group=None)
            assert torch.equal(loaded["pair"][0], state["pair"][0])
            assert torch.equal(loaded["deep"][0]["t"][0], state["deep"][0]["t"][0])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_has_no_dense_memory_stays_readable_beside_dense_ones(tmp_path):
    state = {
        "coo": torch.eye(300).to_sparse(),
        "csr": torch.eye(300).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "dense": torch.randn(300, 300),
    }
    dist_ckpt.save({"m": state}, tmp_path / "c", group=None)
    for asked in ({}, {"m": state | {"dense": torch.zeros(300, 300)}}):
        loaded = dist_ckpt.load(asked, tmp_path / "c", group=None)["m"]
        assert torch.equal(loaded["coo"].to_dense(), torch.eye(300))
        assert torch.equal(loaded["csr"].to_dense(), torch.eye(300))
        assert torch.equal(loaded["quantised"].dequantize(), state["quantised"].dequantize())
        assert [part.tolist() for part in loaded["nested"].unbind()] == [[1, 1], [1, 1, 1]]
        assert torch.equal(loaded["dense"], state["dense"])
    assert_same(by_torch(tmp_path / "c"), {"m.dense": state["dense"]})


COLLISIONS = {
    "number and text": lambda a, b: {"m": {1: a, "1": b}},
    "list and dict": lambda a, b: {"m": [a], "m.0": b},
    "dot and level": lambda a, b: {"m.w": a, "m": {"w": b}},
    "true and text": lambda a, b: {"m": {True: a, "True": b}},
}


@pytest.mark.sampled
@pytest.mark.parametrize("elements", [4, 40_000])
@pytest.mark.parametrize("make", COLLISIONS.values(), ids=COLLISIONS)
def test_two_places_that_read_alike_keep_both_tensors(tmp_path, make, elements):
    state = make(torch.full((elements,), 1.0), torch.full((elements,), 2.0))
    dist_ckpt.save(state, tmp_path / "c", group=None)
    assert alike(dist_ckpt.load({}, tmp_path / "c", group=None), state)
    asked = make(torch.zeros(elements), torch.zeros(elements))
    assert alike(dist_ckpt.load(asked, tmp_path / "c", group=None), state)


def test_a_name_that_an_object_or_record_has_too_loses_neither(tmp_path):
    def state(scale):
        return {
            "o": ShardedObject("cell", {"x": scale}, (1,), (0,)),
            "cell": torch.full((20_000,), scale),
            "s": one("rec", torch.full((20_000,), 2 * scale)),
            "rec": torch.full((20_000,), 3 * scale),
            "cell/shard_0_1": torch.full((20_000,), 4 * scale),
        }

    dist_ckpt.save(state(1.0), tmp_path / "c", group=None)
    loaded = dist_ckpt.load(state(0.0), tmp_path / "c", group=None)
    assert loaded["o"] == {"x": 1.0}
    assert [loaded[name].unique().tolist() for name in ("cell", "s", "rec", "cell/shard_0_1")] == [[1], [2], [3], [4]]


@pytest.mark.sampled
@pytest.mark.parametrize("width", [8, 600])
@pytest.mark.parametrize("options", [{}, {"megatron": True}], ids=str)
def test_the_state_dict_of_a_new_optimizer_gets_moments_back(tmp_path, width, options):
    model, optimizer = trained(0, 3, width)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    dist_ckpt.save(state, tmp_path / "c", group=None, **options)
    go_on(model, optimizer, range(3, 6))
    other, new = trained(1, 0, width)
    loaded = dist_ckpt.load(
        {"model": other.state_dict(), "optimizer": new.state_dict(), "step": 0}, tmp_path / "c", group=None
    )
    assert loaded["step"] == 3
    new.load_state_dict(loaded["optimizer"])
    go_on(other, new, range(3, 6))
    assert_same(other.state_dict(), model.state_dict())


def test_an_older_save_gives_the_state_dict_of_a_new_optimizer_its_moments(tmp_path, older_saves):
    test_the_state_dict_of_a_new_optimizer_gets_moments_back(tmp_path, 8, {})


def test_a_stored_dtype_is_converted_refused_or_cast_as_the_policy_says(tmp_path):
    third = torch.full((20_000,), 1 / 3, dtype=torch.float64)
    saved = {"half": torch.ones(20_000).bfloat16() / 3, "third": third, "few": torch.tensor([1.5, 2.0]), "n": third[0]}
    dist_ckpt.save(saved, tmp_path / "c", group=None)
    asked = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in saved.items()}
    loaded = dist_ckpt.load({"half": asked["half"], "few": asked["few"]}, tmp_path / "c", group=None)
    assert torch.equal(loaded["half"], saved["half"].float())
    for name in ("third", "n"):
        with pytest.raises(MismatchError, match=name):
            dist_ckpt.load({name: asked[name]}, tmp_path / "c", group=None)
    with pytest.raises(MismatchError, match="few"):
        dist_ckpt.load({"few": torch.zeros(2, dtype=torch.int64)}, tmp_path / "c", group=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dist_ckpt.load(asked, tmp_path / "c", group=None, dtype_policy="cast")
    assert_same(loaded, {name: value.float() for name, value in saved.items()})
    for name in saved:
        if saved[name].dtype != torch.float32:
            with pytest.raises(MismatchError, match=name):
                dist_ckpt.load({name: asked[name]}, tmp_path / "c", group=None, dtype_policy="strict")


def test_another_shape_is_an_error_that_names_the_tensor_at_any_size(tmp_path):
    dist_ckpt.save({"m": {"few": torch.ones(3), "many": torch.ones(40_000)}}, tmp_path / "c", group=None)
    for asked in ({"few": torch.zeros(3, 1)}, {"many": torch.zeros(200, 200)}, {"few": torch.zeros(())}):
        with pytest.raises(MismatchError, match=rf"m\.{next(iter(asked))}.*shape"):
            dist_ckpt.load({"m": asked}, tmp_path / "c", group=None)


def test_whatever_stands_for_a_stored_tensor_or_number_gets_the_stored_value(tmp_path):
    state = {"w": torch.arange(30_000.0), "few": torch.arange(3), "step": 5, "lr": 0.5}
    dist_ckpt.save(state, tmp_path / "c", group=None)
    asked = {"w": None, "few": 0, "step": torch.tensor(0), "lr": torch.tensor(0.0)}
    loaded = dist_ckpt.load(asked, tmp_path / "c", group=None)
    assert torch.equal(loaded["w"], state["w"])
    assert torch.equal(torch.as_tensor(loaded["few"]), state["few"])
    assert (float(loaded["step"]), float(loaded["lr"])) == (5, 0.5)


def mixed(scale):
    return {
        "shard": one("s", torch.full((4,), scale)),
        "w": torch.full((30_000,), scale),
        "few": torch.full((3,), scale),
        "step": int(scale),
    }


@pytest.mark.parametrize("name", ["w", "few"])
def test_strict_modes_mind_a_plain_tensor_that_nobody_asks_for(tmp_path, name, caplog):
    dist_ckpt.save(mixed(1.0), tmp_path / "c", group=None)
    assert dist_ckpt.load(mixed(0.0), tmp_path / "c", group=None, strict="raise_all")["w"][0] == 1
    asked = mixed(0.0)
    del asked[name]
    with pytest.raises(MismatchError, match=rf"\b{name}\b"):
        dist_ckpt.load(asked, tmp_path / "c", group=None, strict="raise_all")
    loaded, missing, unexpected = dist_ckpt.load(asked, tmp_path / "c", group=None, strict="return_all")
    assert (missing, unexpected) == ({name}, set())
    assert loaded["shard"].tolist() == [1, 1, 1, 1]
    with caplog.at_level(logging.WARNING, "sixfold.dist_ckpt"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dist_ckpt.load(asked, tmp_path / "c", group=None, strict="log_all")
    assert name in caplog.text + " ".join(str(warning.message) for warning in told)
    for strict in ("raise_unexpected", "ignore_all", "log_unexpected"):
        dist_ckpt.load(asked, tmp_path / "c", group=None, strict=strict)


@pytest.mark.parametrize("elements", [3, 30_000])
def test_strict_modes_mind_a_plain_tensor_that_is_not_stored(tmp_path, elements):
    dist_ckpt.save(mixed(1.0), tmp_path / "c", group=None)
    asked = {**mixed(0.0), "new": {"x": torch.full((elements,), 9.0)}}
    for strict in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        with pytest.raises(MismatchError, match=r"new\.x: asked for, not in the checkpoint"):
            dist_ckpt.load(asked, tmp_path / "c", group=None, strict=strict)
    for strict in ("return_unexpected", "return_all"):
        loaded, missing, unexpected = dist_ckpt.load(asked, tmp_path / "c", group=None, strict=strict)
        assert (missing, unexpected) == (set(), {"new.x"})
        assert loaded["w"].unique().tolist() == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for strict in ("log_all", "log_unexpected", "ignore_all"):
            loaded = dist_ckpt.load(mixed(0.0) | {"new": asked["new"]}, tmp_path / "c", group=None, strict=strict)
            assert loaded["w"].unique().tolist() == [1]
    assert asked["new"]["x"].unique().tolist() == [9.0]


def place_of(folder, name):
    """File and first byte of a tensor, by the index."""
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    (place,) = [info for index, info in metadata.storage_data.items() if index.fqn == name]
    return folder / place.relative_path, place.offset + place.length


def test_a_flipped_byte_of_a_plain_tensor_is_found_and_named(tmp_path):
    state = {"first": torch.randn(3_000_000), "second": torch.randn(20_000), "few": torch.arange(5.0)}
    dist_ckpt.save(state, tmp_path / "c", group=None)
    file, end = place_of(tmp_path / "c", "second")
    flip_byte(file, end - 4000)
    problems = tools.verify(tmp_path / "c")["problems"]
    assert [problem["key"] for problem in problems] == ["second"]
    asked = blank_like(state)
    for verify in ("touched", "full"):
        with pytest.raises(CorruptError, match="second"):
            dist_ckpt.load(asked, tmp_path / "c", group=None, verify=verify)
    with pytest.raises(CorruptError):
        dist_ckpt.load({}, tmp_path / "c", group=None)
    loaded = dist_ckpt.load(blank_like(state), tmp_path / "c", group=None, verify="off")
    assert (loaded["second"] != state["second"]).sum() == 1
    assert torch.equal(loaded["first"], state["first"])


def test_a_flipped_byte_of_the_second_copy_or_the_first_of_a_small_tensor_is_found(tmp_path):
    state = {"few": torch.arange(100.0), "step": 3}
    for name in ("common", "distcp"):
        folder = tmp_path / name
        dist_ckpt.save(state, folder, group=None)
        if name == "common":
            where = (folder / "common.pt").read_bytes().find(bytes(bits(state["few"]).tolist()))
            assert where > 0
            flip_byte(folder / "common.pt", where + 40)
        else:
            file, end = place_of(folder, "few")
            flip_byte(file, end - 8)
        assert not tools.verify(folder)["ok"]
        with pytest.raises(CorruptError):
            dist_ckpt.load({}, folder, group=None, verify="full")
        with pytest.raises(CorruptError):
            dist_ckpt.load({"few": torch.zeros(100)}, folder, group=None, verify="full")


def test_a_plain_value_that_is_not_finite_is_found_by_check_finite(tmp_path):
    for elements in (4, 30_000):
        value = torch.ones(elements)
        value[elements // 2] = torch.nan
        with pytest.raises(dist_ckpt.CheckpointError, match=r"m\.w"):
            dist_ckpt.save({"m": {"w": value}}, tmp_path / "c", group=None, check_finite=True)
        assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_a_background_save_has_the_plain_values_of_the_call(tmp_path):
    state = odd_tensors() | {"nested": {"x": [torch.randn(30_000), torch.ones(2)]}, "step": 3}
    expected = {name: value.detach().clone() for name, value in flat_tensors(state).items()}
    handle = dist_ckpt.async_save(state, tmp_path / "c", group=None)
    for value in flat_tensors(state).values():
        if 0 not in value.stride() and value.layout is torch.strided:
            value.detach().zero_()
    handle.wait()
    assert_same(flat_tensors(dist_ckpt.load({}, tmp_path / "c", group=None)), expected)
    assert_same(by_torch(tmp_path / "c"), expected)
    common = dist_ckpt.load_common_state_dict(tmp_path / "c")
    small = with_values(common)
    assert "nested.x.1" in small
    assert_same({k: v for k, v in flat_tensors(common).items() if k in small}, {k: expected[k] for k in small})


def test_the_manager_keeps_and_restores_plain_tensors_of_each_step(tmp_path):
    with CheckpointManager(tmp_path, group=None, background=False) as manager:
        for step in (1, 2, 3):
            state = {"w": torch.full((30_000,), float(step)), "few": torch.full((2,), step), "at": step}
            manager.save(step, state, force=True)
        for step in (2, 1, 3):
            asked = {"w": torch.zeros(30_000), "few": torch.zeros(2, dtype=torch.int64), "at": 0}
            restored = manager.restore(asked, step)
            assert restored.state["at"] == step
            assert (asked["w"].unique().tolist(), asked["few"].tolist()) == ([step], [step, step])


@pytest.mark.slow
def test_saves_in_a_row_by_one_strategy_keep_no_value_shape_or_name_of_before(tmp_path):
    from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy

    strategy = TorchDistSaveShardedStrategy()
    states = [
        {"few": torch.full((3,), 1.0), "w": torch.full((30_000,), 1.0)},
        {"few": torch.full((3,), 2.0), "w": torch.full((30_000,), 2.0)},
        {"few": torch.full((30_000,), 3.0), "w": torch.full((3,), 3.0)},
        {"w": torch.full((3,), 4.0), "few": torch.full((30_000,), 4.0)},
        {"w": torch.full((3,), 5, dtype=torch.int32), "few": [torch.full((30_000,), 5.0)]},
    ]
    for state, (number, folder) in itertools.product(states, enumerate([tmp_path / "same", tmp_path / "other"])):
        dist_ckpt.save(state, folder, strategy if number else None, group=None)
        expected = flat_tensors(state)
        assert_same(flat_tensors(dist_ckpt.load({}, folder, group=None, verify="full")), expected)
        assert_same(by_torch(folder), expected)
        common = dist_ckpt.load_common_state_dict(folder)
        small = with_values(common)
        assert_same({k: v for k, v in flat_tensors(common).items() if k in small}, {k: expected[k] for k in small})


def test_the_metadata_of_tensors_is_a_state_dict_to_load_with(tmp_path):
    state = full_state()
    dist_ckpt.save(state, tmp_path / "c", group=None)
    expected = dist_ckpt.load_plain_tensors(tmp_path / "c")
    described = dist_ckpt.load_tensors_metadata(tmp_path / "c")
    for record in described.values():
        record.init_data("cpu", torch.zeros)
    loaded = dist_ckpt.load(described, tmp_path / "c", group=None)
    assert_same({name: loaded[name] for name in described}, expected)


def test_a_store_that_is_no_folder_holds_plain_tensors_too(tmp_path):
    store, state = MemoryStore(), nested_state()
    dist_ckpt.save(state, store, group=None)
    assert alike(dist_ckpt.load({}, store, group=None), state)
    asked = nested_state(0.0)
    dist_ckpt.load(asked, store, group=None)
    assert alike(asked, state)


def test_a_record_of_a_tensor_loads_into_a_plain_one_and_back(tmp_path):
    whole = torch.arange(40_000.0).view(200, 200)
    halves = [ShardedTensor.from_rank_offsets("m.w", half.clone(), (0, i, 2)) for i, half in enumerate(whole.chunk(2))]
    dist_ckpt.save({"x": halves}, tmp_path / "c", group=None)
    asked = {"m": {"w": torch.zeros(200, 200)}}
    dist_ckpt.load(asked, tmp_path / "c", group=None)
    assert torch.equal(asked["m"]["w"], whole)
    dist_ckpt.save({"m": {"w": whole}}, tmp_path / "d", group=None)
    columns = [ShardedTensor.from_rank_offsets("m.w", torch.zeros(200, 100), (1, i, 2)) for i in range(2)]
    loaded = dist_ckpt.load({"x": columns}, tmp_path / "d", group=None)
    assert torch.equal(torch.cat(loaded["x"], dim=1), whole)


def test_a_save_leaves_the_callers_tensors_and_dict_as_they_were(tmp_path):
    state = nested_state()
    version = state["list"][0]._version
    dist_ckpt.save(state, tmp_path / "c", group=None)
    assert alike(state, nested_state())
    assert state["list"][0]._version == version
    asked = nested_state(0.0)
    loaded = dist_ckpt.load(asked, tmp_path / "c", group=None)
    loaded["list"].append(1)
    assert len(asked["list"]) == 4


@pytest.mark.slow
def test_megatron_core_reads_small_tensors_and_with_megatron_all_of_them(tmp_path):
    peer = pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is the oracle")
    state = full_state()
    dist_ckpt.save(state, tmp_path / "m", group=None, megatron=True)
    common = {key: value for key, value in state.items() if key != "shard"}
    assert alike(peer.load_common_state_dict(tmp_path / "m"), common)
    small = {"few": torch.arange(100.0), "step": 3, "rng": [torch.get_rng_state()]}
    dist_ckpt.save(small, tmp_path / "c", group=None)
    assert alike(peer.load_common_state_dict(tmp_path / "c"), small)


def test_keys_that_are_no_texts_name_their_tensors_as_in_torch(tmp_path):
    big = torch.arange(20_000.0)
    state = {"k": {None: big, (1, "a"): big + 1, 1.5: big + 2, True: torch.ones(2), b"x": big + 3}, -1: big + 4}
    dist_ckpt.save(state, tmp_path / "c", group=None)
    assert tensor_entries(tmp_path / "c").keys() == flat_tensors(state).keys()
    assert alike(dist_ckpt.load({}, tmp_path / "c", group=None), state)
    asked = blank_like(state)
    dist_ckpt.load(asked, tmp_path / "c", group=None)
    assert alike(asked, state)


def test_tensors_of_content_metadata_keep_their_values(tmp_path):
    content = {"mask": torch.arange(40_000), "few": torch.ones(2)}
    dist_ckpt.save({"w": torch.ones(40_000)}, tmp_path / "c", group=None, content_metadata=content)
    assert alike(dist_ckpt.load_content_metadata(tmp_path / "c"), content)
    loaded = dist_ckpt.load({"w": torch.zeros(40_000)}, tmp_path / "c", group=None)
    assert alike(dist_ckpt.load_content_metadata(preloaded_state_dict=loaded), content)


def test_beside_shards_no_tensor_comes_back_without_values_or_in_another_place(tmp_path):
    few, many = torch.arange(3.0), torch.arange(40_000.0)
    state = {"s": one("s", torch.ones(4)), "l": [many, few, 5], "d": {"many": many, "few": few, "n": 1}}
    for name, options in {"c": {}, "m": {"megatron": True}}.items():
        dist_ckpt.save(state, tmp_path / name, group=None, **options)
        loaded = dist_ckpt.load({"s": one("s", torch.zeros(4))}, tmp_path / name, group=None)
        assert not any(value.is_meta for value in flat_tensors(loaded).values())
        assert torch.equal(loaded["d"]["few"], few)
        assert loaded["d"]["n"] == 1
        if "l" in loaded:
            assert torch.equal(loaded["l"][1], few)
            assert loaded["l"][2] == 5
        if options:
            assert torch.equal(loaded["l"][0], many)


class Marked(torch.Tensor):
    """A subclass of a user's without behaviour of its own."""


@pytest.mark.parametrize("elements", [3, 40_000])
def test_a_tensor_of_a_subclass_is_refused_by_its_path(tmp_path, elements):
    with pytest.raises(ShardingError, match=r"m\.w is a .*Marked"):
        dist_ckpt.save({"m": {"w": torch.ones(elements).as_subclass(Marked)}}, tmp_path / "c", group=None)
    assert not (tmp_path / "c").exists()
