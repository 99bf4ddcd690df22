"""Save and load in one process, which holds all shards of a layout and so stands for any number of ranks."""

import copy
import random
import re
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace

import pytest
import torch
from dist_ckpt_helpers import expected_values, flat_shards, one, random_cut

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    LocalNonpersistentObject,
    MismatchError,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    ShardingError,
)
from sixfold.dist_ckpt.save_load.dtype_conversion import copy_values

SHAPES = [(1,), (12,), (6, 4), (4, 1, 6), (2, 3, 4, 2)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow
def test_flattened_ranges_of_any_grid_load_at_any_other(tmp_path, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors = {f"t{i}": torch.randn(shape) for i, shape in enumerate(SHAPES)}
    before = {key: random_cut(tuple(t.shape), rng) for key, t in tensors.items()}
    dist_ckpt.save({key: flat_shards(key, t, before[key], fill=True) for key, t in tensors.items()}, tmp_path / "c")
    after = {key: random_cut(tuple(t.shape), rng) for key, t in tensors.items()}
    state = {key: flat_shards(key, t, after[key], fill=False) for key, t in tensors.items()}
    loaded = dist_ckpt.load(state, tmp_path / "c")
    for key, tensor in tensors.items():
        expected = expected_values(tensor, after[key])
        assert len(loaded[key]) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(loaded[key], expected, strict=True))
    plain = dist_ckpt.load_plain_tensors(tmp_path / "c")
    assert all(torch.equal(plain[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (4, 1), (2, 2), (4, 6)])
def test_two_dimensional_grids_load_as_one_another(tmp_path, rows, columns):
    whole = torch.randn(8, 12)

    def grid(r, c, fill):
        return [
            ShardedTensor.from_rank_offsets("w", part.clone() if fill else torch.empty_like(part), (0, i, r), (1, j, c))
            for i, band in enumerate(whole.chunk(r, 0))
            for j, part in enumerate(band.chunk(c, 1))
        ]

    dist_ckpt.save({"w": grid(rows, columns, fill=True)}, tmp_path / "c")
    loaded = dist_ckpt.load({"w": grid(2, 3, fill=False)}, tmp_path / "c")
    expected = [part for band in whole.chunk(2, 0) for part in band.chunk(3, 1)]
    assert all(torch.equal(a, b) for a, b in zip(loaded["w"], expected, strict=True))


def test_irregular_uneven_boxes(tmp_path):
    whole = torch.arange(35).view(5, 7)
    boxes = [(0, 0, 2, 7), (2, 0, 3, 3), (2, 3, 1, 4), (3, 3, 2, 4)]
    shards = [
        ShardedTensor("w", whole[r : r + h, c : c + w].clone(), torch.int64, (h, w), (5, 7), (r, c), None)
        for r, c, h, w in boxes
    ]
    dist_ckpt.save({"w": shards}, tmp_path / "c")
    column = ShardedTensor("w", torch.zeros(5, 2, dtype=torch.int64), torch.int64, (5, 2), (5, 7), (0, 2), None)
    loaded = dist_ckpt.load({"w": column}, tmp_path / "c", validate_access_integrity=False)
    assert torch.equal(loaded["w"], whole[:, 2:4])


def test_prepended_axes_stack_layers_and_come_apart_again(tmp_path):
    layers = [torch.randn(3, 2) for _ in range(4)]
    stacked = [
        ShardedTensor.from_rank_offsets("layers.w", layer, (0, i, 4), prepend_axis_num=1)
        for i, layer in enumerate(layers)
    ]
    dist_ckpt.save({"layers": stacked}, tmp_path / "c")
    assert torch.equal(dist_ckpt.load_plain_tensors(tmp_path / "c")["layers.w"], torch.stack(layers))
    for record in stacked:
        record.data = torch.zeros(3, 2)
    loaded = dist_ckpt.load({"layers": stacked}, tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(loaded["layers"], layers, strict=True))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]
)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    values = (torch.randn(9, 5) * 3).to(dtype)
    dist_ckpt.save({"v": one("v", values)}, tmp_path / "c")
    loaded = dist_ckpt.load({"v": one("v", torch.zeros(9, 5).to(dtype))}, tmp_path / "c")["v"]
    assert torch.equal(loaded.view(torch.uint8), values.view(torch.uint8))


def test_large_tensors_are_read_straight_into_the_target(tmp_path):
    whole = torch.randn(1024, 300)
    dist_ckpt.save({"w": one("w", whole)}, tmp_path / "c")
    shards = [ShardedTensor.from_rank_offsets("w", torch.empty(512, 300), (0, i, 2)) for i in range(2)]
    loaded = dist_ckpt.load({"w": shards}, tmp_path / "c")["w"]
    assert torch.equal(torch.cat(loaded), whole)


def test_scalars_and_tensors_without_elements(tmp_path):
    state = {"s": one("s", torch.tensor(2.5)), "e": one("e", torch.empty(0, 3))}
    dist_ckpt.save(state, tmp_path / "c")
    state["s"].data.zero_()
    loaded = dist_ckpt.load(state, tmp_path / "c")
    assert loaded["s"].item() == 2.5
    assert tuple(loaded["e"].shape) == (0, 3)


def test_common_data_survives_with_integer_keys_and_list_positions(tmp_path):
    common = {
        "step": 7,
        3: {"lr": 1e-3, "name": "adam", "flags": [True, None, 2**70]},
        "groups": [{"lr": 0.1, "params": [1, 2]}, {}],
        "empty": [],
        "tensor": torch.arange(10)[2:5],
        "pair": (1, "two"),
    }
    dist_ckpt.save(common, tmp_path / "c")
    for loaded in (dist_ckpt.load({}, tmp_path / "c"), dist_ckpt.load_common_state_dict(tmp_path / "c")):
        tensor = loaded.pop("tensor")
        assert torch.equal(tensor, common["tensor"])
        assert loaded == {key: value for key, value in common.items() if key != "tensor"}


def test_records_keep_their_place_in_lists_beside_common_data(tmp_path):
    def state(fill):
        return {
            "mixed": [one("a", torch.full((2,), fill)), 5, {"b": one("b", torch.full((1,), fill)), "c": "x"}],
            "params": [LocalNonpersistentObject("mine"), one("d", torch.full((1,), fill))],
        }

    dist_ckpt.save(state(1.0), tmp_path / "c")
    loaded = dist_ckpt.load(state(0.0), tmp_path / "c")
    assert loaded["mixed"][1:] == [5, {"c": "x", "b": torch.ones(1)}]
    assert torch.equal(loaded["mixed"][0], torch.ones(2))
    assert loaded["params"] == ["mine", torch.ones(1)]


def test_data_goes_into_the_callers_tensor_and_his_dict_stays_as_it_was(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    values = parameter.detach().clone()
    state = {"model": {"w": one("w", parameter)}, "list": [one("v", torch.ones(2)), 1], "it": 5}
    shape_before = copy.deepcopy({"model": list(state["model"]), "list": len(state["list"]), "keys": list(state)})
    dist_ckpt.save(state, tmp_path / "c")
    with torch.no_grad():
        parameter.zero_()
    state["it"] = 99
    loaded = dist_ckpt.load(state, tmp_path / "c")
    assert torch.equal(parameter, values)
    assert loaded["model"]["w"].data_ptr() == parameter.data_ptr()
    assert not loaded["model"]["w"].requires_grad
    assert loaded["it"] == 5
    assert state["it"] == 99
    assert state["model"]["w"].data is parameter
    assert {"model": list(state["model"]), "list": len(state["list"]), "keys": list(state)} == shape_before


def test_a_record_without_data_is_allocated_at_load_and_stays_without(tmp_path):
    dist_ckpt.save({"w": one("w", torch.arange(6.0).view(2, 3))}, tmp_path / "c")
    metadata = dist_ckpt.load_tensors_metadata(tmp_path / "c")
    loaded = dist_ckpt.load(metadata, tmp_path / "c")
    assert loaded["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert metadata["w"].data is None


def test_non_contiguous_tensors_are_saved_and_filled(tmp_path):
    whole = torch.randn(6, 4)
    dist_ckpt.save({"w": one("w", whole.t())}, tmp_path / "c")
    target = torch.zeros(8, 12)
    dist_ckpt.load({"w": one("w", target[::2, ::2])}, tmp_path / "c")
    assert torch.equal(target[::2, ::2], whole.t())
    assert target[1::2].count_nonzero() == 0


def test_replicas_are_written_once_and_loaded_by_all(tmp_path):
    values = torch.randn(64, 64)
    state = {"a": one("w", values), "b": one("w", values.clone(), replica_id=(0, 1))}
    dist_ckpt.save(state, tmp_path / "c")
    assert (tmp_path / "c" / "__0_0.distcp").stat().st_size < 1.5 * values.nbytes
    for record in state.values():
        record.data = torch.zeros(64, 64)
    loaded = dist_ckpt.load(state, tmp_path / "c")
    assert torch.equal(loaded["a"], values)
    assert torch.equal(loaded["b"], values)


def test_objects_come_back_and_another_grid_is_refused(tmp_path):
    cells = [ShardedObject("rng/shard_state", {"rank": i, "bytes": torch.arange(3)}, (2,), (i,)) for i in range(2)]
    dist_ckpt.save({"rng": cells}, tmp_path / "c")
    loaded = dist_ckpt.load({"rng": [cell.without_data() for cell in cells]}, tmp_path / "c")
    assert [cell["rank"] for cell in loaded["rng"]] == [0, 1]
    found = dist_ckpt.load_sharded_metadata(tmp_path / "c")
    assert sorted(found) == ["rng/shard_state/shard_0_2", "rng/shard_state/shard_1_2"]
    with pytest.raises(MismatchError, match=r"grid \(1,\) of objects, saved was \(2,\)"):
        dist_ckpt.load({"rng": ShardedObject("rng/shard_state", None, (1,), (0,))}, tmp_path / "c")


def test_factories_store_something_else_and_merge_it_back(tmp_path):
    def halves(key, data, replica_id, flattened_range):
        assert flattened_range is None
        inner = ShardedTensorFactory(
            f"{key}.low", data[2:], lambda k, d, r, f: {"x": one(k, d, replica_id=r)}, lambda d: d["x"]
        )
        return {"up": one(f"{key}.up", data[:2], replica_id=replica_id), "low": inner}

    def state(data):
        return {"list": [ShardedTensorFactory("w", data, halves, lambda d: torch.cat([d["up"], d["low"]])), "common"]}

    values = torch.randn(4, 3)
    dist_ckpt.save(state(values), tmp_path / "c")
    assert sorted(dist_ckpt.load_plain_tensors(tmp_path / "c")) == ["w.low", "w.up"]
    loaded = dist_ckpt.load(state(torch.zeros(4, 3)), tmp_path / "c")
    assert torch.equal(loaded["list"][0], values)
    assert loaded["list"][1] == "common"


@pytest.mark.parametrize(("asked", "stored"), [((6, 2), (4, 2)), ((3, 2), (4, 2)), ((4, 5), (4, 2)), ((2, 4), (4, 2))])
def test_allowed_shape_mismatch_reads_the_overlap_and_zeroes_the_rest(tmp_path, asked, stored):
    values = torch.arange(1.0, 1 + stored[0] * stored[1]).view(stored)
    dist_ckpt.save({"w": one("w", values)}, tmp_path / "c")
    record = one("w", torch.full(asked, 9.0), allow_shape_mismatch=True)
    loaded = dist_ckpt.load({"w": record}, tmp_path / "c")["w"]
    expected = torch.zeros(asked)
    rows, columns = min(asked[0], stored[0]), min(asked[1], stored[1])
    expected[:rows, :columns] = values[:rows, :columns]
    assert torch.equal(loaded, expected)


def test_a_differing_shape_is_refused_otherwise(tmp_path):
    dist_ckpt.save({"w": one("w", torch.zeros(4, 3))}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"w: asked for global shape \(8, 3\), stored is \(4, 3\)"):
        dist_ckpt.load({"w": one("w", torch.zeros(8, 3))}, tmp_path / "c")


def test_exact_dtype_policy_converts_what_survives_and_names_what_does_not(tmp_path):
    dist_ckpt.save({"w": one("w", torch.arange(128)), "h": one("h", torch.tensor([1.0, 1.1]))}, tmp_path / "c")
    loaded = dist_ckpt.load({"w": one("w", torch.empty(128))}, tmp_path / "c")
    assert torch.equal(loaded["w"], torch.arange(128.0))
    with pytest.raises(
        MismatchError, match=r"h: asked for torch.bfloat16, stored is torch.float32, and the value 1\.1"
    ):
        dist_ckpt.load({"h": one("h", torch.empty(2, dtype=torch.bfloat16))}, tmp_path / "c")


def test_cast_converts_with_one_warning_and_strict_refuses(tmp_path):
    dist_ckpt.save({"h": one("h", torch.tensor([1.0, 1.1]))}, tmp_path / "c")
    asked = {"h": one("h", torch.empty(2, dtype=torch.bfloat16))}
    with pytest.warns(UserWarning, match="converted to another dtype in h") as caught:
        loaded = dist_ckpt.load(asked, tmp_path / "c", dtype_policy="cast")
    assert len(caught) == 1
    assert torch.equal(loaded["h"], torch.tensor([1.0, 1.1]).bfloat16())
    with pytest.raises(MismatchError, match="dtype_policy is 'strict'"):
        dist_ckpt.load(asked, tmp_path / "c", dtype_policy="strict")


def test_part_of_a_tensor_needs_validation_switched_off(tmp_path):
    dist_ckpt.save({"w": one("w", torch.arange(8.0))}, tmp_path / "c")
    part = {"w": ShardedTensor("w", torch.zeros(3), torch.float32, (3,), (8,), (4,), None)}
    with pytest.raises(ShardingError, match="asked for by no main replica"):
        dist_ckpt.load(part, tmp_path / "c")
    assert dist_ckpt.load(part, tmp_path / "c", validate_access_integrity=False)["w"].tolist() == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("validate", [True, False])
def test_a_save_never_lets_a_hole_through(tmp_path, validate):
    half = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 0, 2))}
    with pytest.raises(ShardingError, match=r"w\[4:8\]: saved by no main replica"):
        dist_ckpt.save(half, tmp_path / "c", validate_access_integrity=validate)
    assert list(tmp_path.iterdir()) == []


REAL = [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64]
REAL += [torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32]
REAL += [torch.float64]
ODD = [0, 1, 2, -1, -2, 127, 128, -128, 255, 256, 2**15, 2**16 - 1, 2**24 + 1, 2**31, -(2**31), 2**32 - 1, 2**53 + 1]
ODD += [2**63 - 1, -(2**63), 2**63, 2**64 - 1, 0.5, -1.5, 1e20, 1e300, float("inf"), -float("inf")]


@pytest.mark.parametrize("asked", REAL, ids=str)
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.slow
def test_exact_gives_the_stored_number_in_any_dtype_or_an_error(asked):
    kept = 0
    for stored in REAL:
        for number in ODD:
            try:
                source = torch.tensor([number], dtype=stored)
            except (RuntimeError, OverflowError, TypeError, ValueError):  # no number of this dtype
                continue
            target = torch.zeros(1, dtype=asked)
            try:
                copy_values("w", source, target, "exact")
            except MismatchError:
                continue
            assert target.item() == source.item(), (stored, source)
            kept += 1
    assert kept > len(REAL) * 2


def test_exact_looks_at_both_parts_of_a_complex_number(tmp_path):
    nan = float("nan")
    fine = torch.tensor([complex(nan, 1.0), complex(0.5, nan), complex(nan, nan)], dtype=torch.complex128)
    dist_ckpt.save({"fine": one("fine", fine), "not": one("not", fine + 0.1j)}, tmp_path / "c")
    loaded = dist_ckpt.load({"fine": one("fine", torch.zeros(3, dtype=torch.complex64))}, tmp_path / "c")["fine"]
    assert repr(loaded.tolist()) == repr(fine.tolist())
    with pytest.raises(MismatchError, match=r"not: .*the value \(nan\+1\.1j\) does not survive"):
        dist_ckpt.load({"not": one("not", torch.zeros(3, dtype=torch.complex64))}, tmp_path / "c")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.arange(4), "data has dtype torch.int64, the record says torch.float32"),
        (torch.zeros(9), r"data has shape \(9,\), local_shape is \(4,\)"),
        (torch.zeros(3), r"data has shape \(3,\), local_shape is \(4,\)"),
        (torch.zeros(8)[::3], r"data has shape \(3,\), local_shape is \(4,\)"),
        (torch.zeros(2, 2), r"data has shape \(2, 2\), local_shape is \(4,\)"),
    ],
)
def test_a_tensor_that_was_put_into_a_record_later_is_checked_too(tmp_path, other, words):
    dist_ckpt.save({"w": one("w", torch.arange(4.0) + 0.5)}, tmp_path / "c")
    record = one("w", torch.zeros(4))
    record.data = other
    for call, place in ((dist_ckpt.save, "new"), (dist_ckpt.load, "c")):
        with pytest.raises(ShardingError, match=f"w: {words}"):
            call({"w": record}, tmp_path / place)
    assert not (tmp_path / "new").exists()


def test_check_finite_looks_at_plain_tensors(tmp_path):
    model = {"layers": [torch.zeros(2, 3), torch.tensor([[1.0, 2.0], [3.0, float("nan")]])], "step": float("inf")}
    with pytest.raises(ShardingError, match=r"model\.layers\.1\[1, 1\] is nan on rank 0, and check_finite is set"):
        dist_ckpt.save({"model": model}, tmp_path / "c", check_finite=True)
    assert not (tmp_path / "c").exists()
    model["layers"][1] = torch.eye(3).to_sparse()
    dist_ckpt.save({"model": model}, tmp_path / "c", check_finite=True)


def as_array(tensor):
    pytest.importorskip("numpy", reason="needs numpy, for its arrays")
    return tensor.numpy()


NAN, ONES = torch.tensor([1.0, float("nan")]), torch.ones(2)


@pytest.mark.parametrize(
    ("of", "place"),
    [
        (lambda value: (value,), "v[0][1]"),
        (lambda value: [{"a": ({"b": value},)}], "v[0].a[0].b[1]"),
        (lambda value: deque([0, value]), "v[1][1]"),
        (lambda value: Namespace(held=value), "v.held[1]"),
        (lambda value: Counter(held=value), "v.held[1]"),
        (lambda value: as_array(value), "v[1]"),
        (lambda value: (as_array(value),), "v[0][1]"),
        (lambda value: dist_ckpt.PerRank(value), "v[1]"),
        (lambda value: dist_ckpt.PerRank({"a": as_array(value)}), "v.a[1]"),
        (lambda value: ShardedObject("o", {"a": [value]}, (1,), (0,)), "o.a[0][1]"),
        (lambda value: value.to_sparse(), "v.values[1]"),
        (lambda value: value.repeat(2, 1).to_sparse_csr(), "v.values[1]"),
        (lambda value: torch.nested.nested_tensor([value, value]), "v.values[1]"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_check_finite_looks_into_values_of_any_kind(tmp_path, of, place):
    with pytest.raises(ShardingError, match=re.escape(f"{place} is nan on rank 0, and check_finite is set")):
        dist_ckpt.save({"v": of(NAN)}, tmp_path / "c", check_finite=True)
    assert not (tmp_path / "c").exists()
    dist_ckpt.save({"v": of(ONES), "loss": float("nan")}, tmp_path / "c", check_finite=True)


def test_check_finite_names_key_index_and_rank(tmp_path):
    values = torch.zeros(4, 3)
    values[2, 1] = float("nan")
    state = {"w": ShardedTensor.from_rank_offsets_flat("w", values.view(-1), (4, 3), flattened_range=slice(0, 12))}
    with pytest.raises(ShardingError, match=r"w\[2, 1\] is nan on rank 0"):
        dist_ckpt.save(state, tmp_path / "c", check_finite=True)
    assert list(tmp_path.iterdir()) == []
    dist_ckpt.save(state, tmp_path / "c")


class _Custom:
    pass


@pytest.mark.parametrize("leaf", [_Custom(), lambda: None, (1, _Custom())])
def test_common_data_that_would_not_come_back_is_refused_at_save(tmp_path, leaf):
    with pytest.raises(ShardingError, match=r"common data: a\.b\[1\](\[1\])? is a .*weights-only"):
        dist_ckpt.save({"a": {"b": [0, leaf]}}, tmp_path / "c")
    with pytest.raises(ShardingError, match=r"the object o/shard_0_1.*weights-only"):
        dist_ckpt.save({"o": ShardedObject("o", leaf, (1,), (0,))}, tmp_path / "c")


def test_content_metadata_is_saved_with_the_common_data(tmp_path):
    dist_ckpt.save({"it": 1}, tmp_path / "c", content_metadata={"format": 3})
    assert dist_ckpt.load_content_metadata(tmp_path / "c") == {"format": 3}
    common = dist_ckpt.load_common_state_dict(tmp_path / "c")
    assert dist_ckpt.load_content_metadata(preloaded_state_dict=common) == {"format": 3}


@pytest.mark.parametrize("strategy", [("zarr", 2), ("torch_dist", 2), ("tensorstore", 1)])
def test_unknown_strategies_are_named(tmp_path, strategy):
    with pytest.raises(MismatchError, match=strategy[0]):
        dist_ckpt.save({}, tmp_path / "c", sharded_strategy=strategy)
    with pytest.raises(MismatchError, match=strategy[0]):
        dist_ckpt.load({}, tmp_path / "c", sharded_strategy=strategy)


def test_a_load_of_objects_alone_reads_no_window(tmp_path):
    state = {"w": one("w", torch.ones(2)), "o": ShardedObject("o", [1], (1,), (0,))}
    dist_ckpt.save(state, tmp_path / "c", None)
    for verify in ("touched", "full", "off"):
        assert dist_ckpt.load({"o": state["o"].without_data()}, tmp_path / "c", verify=verify)["o"] == [1]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_records_and_common_data_of_a_dict_come_back_in_the_order_of_the_request(tmp_path, kind):
    state = {"model": kind(w=one("w", torch.ones(1)), step=3, b=one("b", torch.ones(1)), last=4), "it": 1, "a": 2}
    dist_ckpt.save(state, tmp_path / "c")
    loaded = dist_ckpt.load(state, tmp_path / "c")
    assert list(loaded) == ["model", "it", "a"]
    assert list(loaded["model"]) == ["w", "step", "b", "last"]
    loaded = dist_ckpt.load({"new": {}, "model": {"b": state["model"]["b"]}}, tmp_path / "c")
    assert list(loaded["model"]) == ["b", "step", "last"]
    common = {"z": {"b": 1, "a": 2}}
    dist_ckpt.save(common, tmp_path / "common")
    assert list(dist_ckpt.load({"z": {"a": 0, "b": 0}}, tmp_path / "common")["z"]) == ["b", "a"], "as it was saved"


def test_a_record_in_a_namespace_is_refused_at_save_and_at_load(tmp_path):
    record = one("w", torch.zeros(1))
    dist_ckpt.save({"w": one("w", torch.ones(1))}, tmp_path / "c")
    for call in (dist_ckpt.save, dist_ckpt.load):
        for holder in (Namespace(w=[record]), SimpleNamespace(w=record)):
            with pytest.raises(ShardingError, match=r"^a is a \w*Namespace that holds a ShardedTensor"):
                call({"a": holder}, tmp_path / "c")


@pytest.mark.parametrize("dtype", [torch.uint1, torch.uint4, torch.int4])
def test_a_dtype_that_torch_does_not_save_is_an_error_that_names_the_key(tmp_path, dtype):
    record = one("w", torch.zeros(8, dtype=torch.uint8).view(dtype))
    with pytest.raises(ShardingError, match=r"^w\[:\]: torch has no saved form of torch\.u?int\d; save its bytes"):
        dist_ckpt.save({"w": record}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_check_finite_lets_four_bits_through(tmp_path):
    packed = torch.arange(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    dist_ckpt.save({"w": one("w", packed), "c": packed}, tmp_path / "c", check_finite=True)
    loaded = dist_ckpt.load({"w": one("w", torch.empty_like(packed))}, tmp_path / "c")
    assert all(torch.equal(loaded[key].view(torch.uint8), packed.view(torch.uint8)) for key in "wc")


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("stored", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("asked", [torch.uint8, torch.uint16, torch.int64])
def test_exact_between_integers_and_complex_numbers(stored, asked):
    there, back = torch.empty(2, dtype=asked), torch.empty(2, dtype=stored)
    copy_values("w", torch.tensor([3 + 0j, 100], dtype=stored), there, "exact")
    copy_values("w", there, back, "exact")
    assert there.tolist() == [3, 100] == back.tolist()
    for value in (300.5, 2.0**64, 1j, complex("nan"), *((-1.0,) if not asked.is_signed else ())):
        with pytest.raises(MismatchError, match="w: asked for"):
            copy_values("w", torch.tensor([1, value], dtype=stored), there, "exact")


@pytest.mark.parametrize("of", [lambda: torch.ones(3), lambda: as_array(torch.ones(3)), lambda: [torch.ones(2)], dict])
@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_all"])
def test_a_load_returns_what_the_caller_keeps_for_itself_of_any_kind(tmp_path, of, strict):
    own = of()
    dist_ckpt.save({"w": torch.ones(2), "x": {"own": LocalNonpersistentObject(own)}}, tmp_path / "c", group=None)
    asked = {"w": torch.zeros(2), "x": {"own": LocalNonpersistentObject(own)}, "rows": [LocalNonpersistentObject(own)]}
    loaded = dist_ckpt.load(asked, tmp_path / "c", group=None, strict=strict)
    assert (loaded["x"]["own"] is own, loaded["rows"][0] is own, loaded["w"].tolist()) == (True, True, [1, 1])
