"""Every kind of input into every stored dtype under several vocabularies: the exact ids, or an error and no change.

The oracle is Python's integers: what an input holds is known before any array is made of it, and which ids a dtype
and a vocabulary hold is written out in BOUNDS.
"""

import itertools
import struct

import numpy as np
import pytest
from indexed_data_helpers import write_pair

from sixfold.indexed_data import IndexedDataError, IndexedDataset, IndexedDatasetBuilder, verify

BOUNDS = {
    "uint8": (0, 2**8 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
STORED = ["uint8", "int8", "int16", "int32", "int64", "uint16", "float32", "float64"]
EXACT_FLOATS = {"float32": 2**24, "float64": 2**53}
VOCABULARIES = [None, 1, 100, 128, 50_257, 70_000, 100_000, 2**31, 2**33]
# Ids at and beside every border; those that an input type cannot hold are left out of it.
EDGES = sorted({b + d for b in (0, 100, *VOCABULARIES[2:], 2**7, 2**8, 2**15, 2**16, 2**24, 2**31, 2**32, 2**53, 2**63)
                for d in (-1, 0, 1)} | {-5, -20_000, -(2**7), -(2**15), -(2**31), -(2**63), 2**64 - 1})  # fmt: skip


def rows(low, high):
    """Rows of ids from low to high: each border between sound ids, the outermost two alone."""
    held = [i for i in EDGES if low <= i <= high]
    return [[], [held[0]], [held[-1]], *([0, i, 0] for i in held)]


def numpy_kinds():
    for name, (low, high) in BOUNDS.items():
        dtype = np.dtype(name)
        swapped = dtype.newbyteorder(">")
        yield name, low, high, lambda ids, dtype=dtype: np.array(ids, dtype)
        yield f"{name} big-endian", low, high, lambda ids, dtype=swapped: np.array(ids, dtype)
        yield f"{name} strided", low, high, lambda ids, dtype=dtype: np.repeat(np.array(ids, dtype), 3)[::3]
        yield f"{name} backwards", low, high, lambda ids, dtype=dtype: np.array(ids[::-1], dtype)[::-1]
        yield (
            f"{name} read-only",
            low,
            high,
            lambda ids, dtype=dtype: np.frombuffer(np.array(ids, dtype).tobytes(), dtype),
        )
        yield (
            f"{name} unaligned",
            low,
            high,
            lambda ids, dtype=dtype: np.frombuffer(b"x" + np.array(ids, dtype).tobytes(), dtype, offset=1),
        )


def torch_kinds():
    torch = pytest.importorskip("torch", reason="these rows are torch's")
    for name in BOUNDS:
        yield f"torch {name}", *BOUNDS[name], lambda ids, name=name: torch.from_numpy(np.array(ids, name))
        yield (
            f"torch {name} strided",
            *BOUNDS[name],
            lambda ids, name=name: torch.from_numpy(np.repeat(np.array(ids, name), 2))[::2],
        )


def python_kinds():
    low, high = -(2**63) - 1, 2**64
    yield "list", low, high, list
    yield "tuple", low, high, tuple
    yield "list of numpy integers", *BOUNDS["int64"], lambda ids: [np.int64(i) for i in ids]
    yield "object array", low, high, lambda ids: np.array(ids, object)


@pytest.fixture(params=[numpy_kinds, torch_kinds, python_kinds], ids=lambda make: make.__name__)
def kinds(request):
    return list(request.param())


def holds(stored, vocab_size, ids):
    """Whether the pair may hold them, by the integers alone."""
    if stored in EXACT_FLOATS:
        width = "f" if stored == "float32" else "d"
        return all(struct.unpack(width, struct.pack(width, i))[0] == i for i in ids)
    low, high = BOUNDS[stored] if vocab_size is None else (0, vocab_size - 1)
    return all(low <= i <= high for i in ids)


def builders(folder):
    """(stored dtype, vocab_size, builder) of every pair that can be made at all."""
    for stored, vocab_size in itertools.product(STORED, VOCABULARIES):
        if vocab_size is None or (stored in BOUNDS and vocab_size - 1 <= BOUNDS[stored][1]):
            yield (
                stored,
                vocab_size,
                IndexedDatasetBuilder(folder / f"{stored}-{vocab_size}.bin", stored, vocab_size=vocab_size),
            )


@pytest.mark.slow
def test_ids_of_every_type_are_stored_exactly_or_refused(tmp_path, kinds):
    given = [(name, ids, make(ids)) for name, low, high, make in kinds for ids in rows(low, high)]
    refused = 0
    for stored, vocab_size, builder in builders(tmp_path):
        kept = []
        for number, (name, ids, tensor) in enumerate(given):
            case = f"{name} {ids} into {stored}, vocabulary {vocab_size}"
            call = (builder.add_document, lambda t, b=builder: b.add_document(t, [len(t)]), builder.add_item)[
                number % 3
            ]
            if holds(stored, vocab_size, ids):
                call(tensor)
                if call == builder.add_item:
                    builder.end_document()
                kept.append(ids)
                continue
            refused += 1
            try:
                call(tensor)
            except IndexedDataError:
                continue
            raise AssertionError(f"{case} was taken")
        builder.finalize()
        dataset = IndexedDataset(tmp_path / f"{stored}-{vocab_size}")
        assert [s.tolist() for s in dataset] == kept, f"{stored}, vocabulary {vocab_size}"
        assert dataset.document_indices.tolist() == list(range(len(kept) + 1))
    assert refused > 100  # or the test says nothing


@pytest.mark.parametrize("stored", STORED)
def test_verify_finds_the_first_id_outside_the_vocabulary_and_no_other(tmp_path, stored):
    low, high = BOUNDS.get(stored, (-(2**20), 2**20))
    held = [i for i in EDGES if low <= i <= high]
    write_pair(tmp_path / "a", stored, [[[0]], [held, []], [[0]]])
    for vocab_size in [*VOCABULARIES[1:], 2**63, 2**65]:
        outside = [i for i, each in enumerate(held) if not 0 <= each < vocab_size]
        problems = verify(tmp_path / "a", vocab_size=vocab_size).problems
        if not outside:
            assert problems == ()
            continue
        (problem,) = problems
        assert problem.where.endswith(f"document 1, sequence 1, position {outside[0]}")
        assert problem.value in (f"id {held[outside[0]]}", f"id {float(held[outside[0]])}")


@pytest.mark.parametrize("stored", ["int8", "int16", "int32", "int64"])
def test_verify_finds_a_negative_id_under_any_vocabulary(tmp_path, stored):
    for row in ([-1], [5, -1, -5], [0] * 1000 + [BOUNDS[stored][0]]):
        write_pair(tmp_path / "a", stored, [[row]])
        for vocab_size in VOCABULARIES[1:]:
            assert not verify(tmp_path / "a", vocab_size=vocab_size).ok, f"{row[-3:]}, vocabulary {vocab_size}"


def test_verify_takes_no_fraction_for_an_id(tmp_path):
    write_pair(tmp_path / "a", "float32", [[[1.0, 2.5]]])
    (problem,) = verify(tmp_path / "a", vocab_size=10).problems
    assert problem.where.endswith("position 1")


@pytest.mark.parametrize("vocab_size", [0, -1, 1.5, "10"])
def test_verify_refuses_what_is_no_vocabulary(tmp_path, vocab_size):
    write_pair(tmp_path / "a", "int32", [[[1]]])
    with pytest.raises(IndexedDataError, match="vocab_size is"):
        verify(tmp_path / "a", vocab_size=vocab_size)


@pytest.mark.parametrize("stored", ["int16", "uint16", "int32"])
def test_a_pair_with_ids_outside_the_vocabulary_cannot_be_added(tmp_path, stored):
    write_pair(tmp_path / "good", stored, [[[0, 99]], [[5]]])
    for i, bad in enumerate((100, BOUNDS[stored][1], -1 if stored != "uint16" else 2**15)):
        write_pair(tmp_path / f"bad{i}", stored, [[[1]], [[0, 99, bad]]])
    with IndexedDatasetBuilder(tmp_path / "a.bin", stored, vocab_size=100) as builder:
        builder.add_document([1])
        for i in range(3):
            with pytest.raises(IndexedDataError, match="every id lies in the vocabulary"):
                builder.add_index(tmp_path / f"bad{i}")
        builder.add_index(tmp_path / "good")
    assert [s.tolist() for s in IndexedDataset(tmp_path / "a")] == [[1], [0, 99], [5]]


TEXTS = {
    "one text": "123",
    "bytes": b"123",
    "a list": ["1", "2"],
    "a list with one text": [1, "2"],
    "a list of bytes": [1, b"2"],
    "an array": np.array(["1", "2"]),
    "an array of bytes": np.array([b"1"]),
    "an object array": np.array([1, "2"], object),
}


@pytest.mark.parametrize("stored", ["uint16", "int32", "float32"])
@pytest.mark.parametrize("what", TEXTS)
def test_ids_given_as_text_are_refused_as_text(tmp_path, stored, what):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", stored)
    with pytest.raises(IndexedDataError, match=r"document 0: .*text"):
        builder.add_document(TEXTS[what])
    builder.finalize()
    assert len(IndexedDataset(tmp_path / "a")) == 0


class Broken:
    def __index__(self):
        raise ValueError("no integer today")


NO_IDS = {
    "a mask": np.array([True, False]),
    "a list of a mask": [True, False],
    "True among ids": [5, True],
    "False among ids": (0, 70, False, 1),
    "numpy's True among ids": [5, np.True_],
    "objects with True": np.array([5, True], dtype=object),
    "masked values": np.ma.array([1, 2, 3], mask=[0, 1, 0]),
    "a shape of none": np.array(5),
    "two dimensions": np.ones((2, 3), int),
    "dates": np.array(["2026-01-01"], "M8[D]"),
    "complex numbers": np.array([1j]),
    "records": np.zeros(2, "i4,i4"),
    "None": [None],
    "a set": {1, 2},
    "a generator": (i for i in (1, 2)),
    "nested lists": [[1], [2]],
    "an object that breaks": [1, Broken()],
}


@pytest.mark.parametrize("stored", ["uint16", "float64"])
@pytest.mark.parametrize("what", NO_IDS)
def test_what_is_no_row_of_ids_is_the_typed_error_in_every_dtype(tmp_path, stored, what):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", stored)
    with pytest.raises(IndexedDataError, match="document 0: "):
        builder.add_document(NO_IDS[what])
    builder.add_document(np.ma.array([1, 2]))  # a masked array that masks nothing
    builder.add_document(np.arange(4, dtype=np.longlong))
    builder.finalize()
    assert [s.tolist() for s in IndexedDataset(tmp_path / "a")] == [[1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    "values",
    [[2**53 + 1], np.array([2**53 + 1]), [2**53 + 1, 0.5], [np.int64(2**53 + 1)], [2**2000], np.array([2**63 - 1])],
)
def test_integers_that_a_float_would_round_are_refused(tmp_path, values):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", np.float64)
    with pytest.raises(IndexedDataError, match="position 0"):
        builder.add_document(values)


@pytest.mark.parametrize(
    "values", [[0.5, float("nan"), float("inf"), 3, np.float32(0.25)], np.array([0.5, np.nan, -0.0])]
)
def test_floats_of_a_float_dtype_are_stored_exactly(tmp_path, values):
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.float32) as builder:
        builder.add_document(values)
    expected = b"".join(struct.pack("f", float(value)) for value in values)
    assert (tmp_path / "a.bin").read_bytes() == expected
