"""Records: what they accept, what they refuse, and where their data lies."""

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardingError

try:
    import numpy as np
except ImportError:  # torch alone is enough for this package
    np = None


def of_numpy(kind, value):
    """A number of a type of numpy's, for a table of cases."""
    if np is None:
        return pytest.param(None, id=kind, marks=pytest.mark.skip(reason="needs numpy"))
    return pytest.param(getattr(np, kind)(value), id=kind)


def test_rank_offsets_give_offset_and_global_shape_per_axis():
    record = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4), (1, 2, 3))
    assert (record.global_shape, record.global_offset) == ((8, 9), (2, 6))
    assert record.global_slice() == (slice(2, 4), slice(6, 9))
    assert str(record) == "w[2:4, 6:9]"


def test_a_prepended_axis_has_local_length_one():
    record = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 5, 8), (1, 1, 2), prepend_axis_num=1)
    assert (record.global_shape, record.global_offset, record.local_shape) == ((8, 4, 3), (5, 2, 0), (2, 3))
    assert record.global_slice() == (5, slice(2, 4), slice(0, 3))


@pytest.mark.parametrize(
    ("offsets", "word"),
    [
        ([(-1, 0, 2)], "axis -1"),
        ([(2, 0, 2)], "axis 2"),
        ([(0, 2, 2)], "rank 2"),
        ([(0, -1, 2)], "rank -1"),
        ([(0, 0, 0)], "rank 0"),
        ([(0, 0, 2), (0, 1, 2)], "named twice"),
        ([0, 0, 2], "0 is no tuple"),
        ([(0, 2)], r"\(0, 2\) is no tuple"),
        ([(0, 0.5, 2)], "no tuple"),
    ],
)
def test_impossible_rank_offsets_are_refused(offsets, word):
    with pytest.raises(ShardingError, match=f"w: .*{word}"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), *offsets)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"data": [1.0]}, "data is a list"),
        ({"dtype": torch.float64}, "dtype"),
        ({"local_shape": (1, 3)}, r"\(2, 3\)"),
        ({"global_shape": (4,)}, "dimensions"),
        ({"global_offset": (0,)}, "dimensions"),
        ({"prepend_axis_num": 1}, "dimensions"),
        ({"global_offset": (1, 0)}, "multiple"),
        ({"flattened_range": slice(0, 7)}, "leaves"),
        ({"flattened_range": slice(0, 4, 2)}, "step"),
        ({"flattened_range": slice(0, 6)}, "needs"),
    ],
)
def test_contradictions_in_a_record_are_refused(changes, word):
    fields = {
        "data": torch.zeros(2, 3),
        "dtype": torch.float32,
        "local_shape": (2, 3),
        "global_shape": (4, 3),
        "global_offset": (2, 0),
        "axis_fragmentations": (2, 1),
    }
    ShardedTensor("w", **fields)
    with pytest.raises(ShardingError, match=f"w: .*{word}"):
        ShardedTensor("w", **{**fields, **changes})


@pytest.mark.parametrize(
    "make",
    [
        lambda: ShardedTensor.from_rank_offsets(5, torch.zeros(2)),
        lambda: ShardedObject(b"rng", None, (1,), (0,)),
        lambda: ShardedTensor.from_rank_offsets("w", [1, 2]),
        lambda: ShardedTensor.from_rank_offsets_flat("w", (1, 2), (2,), flattened_range=slice(0, 2)),
    ],
)
def test_arguments_of_another_type_are_named_with_what_they_are(make):
    with pytest.raises(ShardingError, match=r"is a int|is a bytes|data is a list|data is a tuple"):
        make()


def test_an_irregular_cut_may_start_anywhere():
    record = ShardedTensor("w", torch.zeros(2, 3), torch.float32, (2, 3), (7, 3), (5, 0), None)
    assert not record.has_regular_grid
    assert str(record) == "w[5:7, :]"


def test_flattened_data_has_the_length_of_its_range():
    with pytest.raises(ShardingError, match=r"flattened_range 2:5 needs \(3,\)"):
        ShardedTensor.from_rank_offsets_flat("w", torch.zeros(4), (2, 3), flattened_range=slice(2, 5))
    with pytest.raises(ShardingError, match="from_rank_offsets_flat"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(4), flattened_range=slice(0, 4))


def test_pieces_of_a_flattened_shard_are_views_of_its_data():
    data = torch.arange(5.0)
    record = ShardedTensor.from_rank_offsets_flat("w", data, (3, 4), (0, 1, 2), flattened_range=slice(2, 7))
    pieces = list(record.pieces())
    assert [(piece.box.offset, piece.box.size) for piece in pieces] == [((3, 2), (1, 2)), ((4, 0), (1, 3))]
    assert [record.view(piece).tolist() for piece in pieces] == [[[0.0, 1.0]], [[2.0, 3.0, 4.0]]]
    record.view(pieces[1]).zero_()
    assert data.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_init_data_allocates_what_the_record_says():
    whole = ShardedTensor("w", None, torch.int32, (2, 3), (2, 3), (0, 0), None)
    whole.init_data("cpu", torch.zeros)
    assert (tuple(whole.data.shape), whole.data.dtype) == ((2, 3), torch.int32)
    flat = ShardedTensor("w", None, torch.int32, (2, 3), (2, 3), (0, 0), None, flattened_range=slice(1, 4))
    flat.init_data("cpu", torch.zeros)
    assert tuple(flat.data.shape) == (3,)


def test_narrow_shrinks_the_global_tensor_as_every_rank_narrows():
    data = torch.arange(12.0).view(4, 3)
    (half,) = ShardedTensor.from_rank_offsets("w", data, (0, 1, 2)).narrow(0, 2, 2)
    assert (half.local_shape, half.global_shape, half.global_offset) == ((2, 3), (4, 3), (2, 0))
    assert torch.equal(half.data, data[2:])


def test_narrow_of_a_shard_without_elements_is_refused():
    with pytest.raises(ShardingError, match="narrow needs equal parts"):
        ShardedTensor.from_rank_offsets("w", torch.ones(0, 2)).narrow(0, 0, 0)


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (1, 5), (5, 8), (6, 12), (7, 11)])
def test_narrow_of_a_flattened_shard_keeps_the_common_elements(start, stop):
    data = torch.arange(12.0)[start:stop]
    record = ShardedTensor.from_rank_offsets_flat("w", data, (4, 3), flattened_range=slice(start, stop))
    kept = record.narrow(0, 2, 2)
    expected = [value for value in data.tolist() if value >= 6]
    assert [value for part in kept for value in part.data.tolist()] == expected
    assert [(part.flattened_range.start, part.flattened_range.stop) for part in kept] == (
        [(max(start, 6) - 6, stop - 6)] if expected else []
    )


@pytest.mark.parametrize("key", ["rng", "a/b", "a_b_c", "shard_x", "a/shard_1.2_3.4", "a/shard_b"])
@pytest.mark.parametrize(("offset", "shape"), [((), ()), ((0,), (1,)), ((1, 10), (2, 12))])
def test_stored_keys_of_objects_parse_whatever_the_key_holds(key, offset, shape):
    record = ShardedObject(key, None, shape, offset)
    parsed = ShardedObject.empty_from_unique_key(record.unique_key)
    assert (parsed.key, parsed.global_offset, parsed.global_shape) == (key, offset, shape)


@pytest.mark.parametrize("text", ["plain", "a/shard_1", "a/shard_x_y", "a/shard_5_3"])
def test_other_keys_are_not_taken_for_objects(text):
    with pytest.raises(ShardingError):
        ShardedObject.empty_from_unique_key(text)


def test_an_object_outside_its_grid_is_refused():
    with pytest.raises(ShardingError, match="not in the grid"):
        ShardedObject("o", 1, (2,), (2,))


def test_unwrap_gives_the_object_back():
    thing = object()
    assert LocalNonpersistentObject(thing).unwrap() is thing


class Counted:
    """An integer in all but name, as jax and numpy have them."""

    def __index__(self):
        return 2


@pytest.mark.parametrize("two", [2, of_numpy("int64", 2), of_numpy("uint8", 2), torch.tensor(2), Counted()])
def test_integers_of_any_kind_are_integers(tmp_path, two):
    zero = two - two if np is not None and isinstance(two, np.generic) else 0
    data = torch.arange(4.0).reshape(2, 2)
    records = [
        ShardedTensor("plain", data, data.dtype, (two, 2), (two, 2), (zero, 0), (1, 1), zero, zero),
        ShardedTensor.from_rank_offsets("grid", data, (0, zero, 1), replica_id=(zero, 0)),
        ShardedTensor.from_rank_offsets_flat("flat", data[0], (1, two), flattened_range=slice(zero, two)),
        ShardedTensor("replica", data, data.dtype, (2, 2), (2, 2), (0, 0), None, replica_id=two),
    ]
    assert all(type(n) is int for r in records for n in (*r.local_shape, *r.global_shape, *r.global_offset))
    assert [type(records[1].replica_id[0]), type(records[2].flattened_range.stop)] == [int, int]
    cell = ShardedObject("o", 1, (two,), (0,), zero)
    other = ShardedObject("o", 1, (two,), (1,))
    assert cell.unique_key == "o/shard_0_2"
    records[0].replica_id = zero  # as megatron's own code assigns it, unchecked
    dist_ckpt.save({"r": records[:3], "o": [cell, other]}, tmp_path / "c")
    assert torch.equal(dist_ckpt.load_plain_tensors(tmp_path / "c")["plain"], data)


@pytest.mark.parametrize("wrong", [2.0, True, of_numpy("float32", 2), of_numpy("bool_", True), "2", None])
@pytest.mark.parametrize("field", ["local_shape", "global_shape", "global_offset", "replica_id", "flattened_range"])
def test_floats_and_truth_values_are_no_integers(wrong, field):
    fields = {"local_shape": (2,), "global_shape": (2,), "global_offset": (0,), "axis_fragmentations": None}
    if field == "flattened_range":
        fields[field] = slice(0, wrong)
    else:
        fields[field] = wrong if field == "replica_id" else (wrong,)
    with pytest.raises(ShardingError, match=field):
        ShardedTensor("w", torch.zeros(2), torch.float32, **fields)
    if field in ("global_shape", "global_offset", "replica_id"):
        cell = {"global_shape": (2,), "global_offset": (0,), field: fields[field]}
        with pytest.raises(ShardingError, match=field):
            ShardedObject("o", 1, **cell)


def test_a_truth_value_is_no_rank():
    with pytest.raises(ShardingError, match="no tuple"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, True, 2))
