"""Kernels of the readers beside plain loops: every type of id, every level of instructions, ranges that lie."""

import numpy as np
import pytest

from sixfold.blending.batches.gather import FIELDS, gather
from sixfold.blending.batches.gpt_arrays import TokenRows
from sixfold.blending.documents.part import Part
from sixfold.blending.numbers.kernels import Level, forced, kernels, levels

PAD = -1
TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
COMPILED = [level for level in levels() if level != Level.NUMPY]


class Flat:
    """One flat run of ids as a source; its only sequence is all of it."""

    def __init__(self, tokens):
        self.tokens, self.dtype, self._ids = tokens, tokens.dtype, tokens
        self.sequence_lengths = np.array([tokens.size], dtype=np.int32)
        self.sequence_pointers = np.zeros(1, dtype=np.int64)

    def get(self, idx, offset=0, length=None):
        return self._ids[offset : offset + length]


def anywhere(rng, dtype, size):
    """Random ids whose first byte lies at any address, as in a file behind a header."""
    dtype = np.dtype(dtype)
    limits = np.iinfo(dtype)
    ids = rng.integers(limits.min, limits.max, size, dtype=dtype, endpoint=True)
    room = np.empty(size * dtype.itemsize + 8, dtype=np.uint8)
    moved = room[int(rng.integers(8)) :][: size * dtype.itemsize].view(dtype)
    moved[:] = ids
    return moved


def new_rows(rows, width):
    return TokenRows(
        np.full((rows, width), 999), np.full((rows, width), 999), np.ones((rows, width), dtype=np.bool_), PAD
    )


def random_ranges(rng, maps, rows, width):
    """Pieces of random rows, cut into ranges of random sources; and the tokens and labels that they make, by loops."""
    ranges, expected = [], new_rows(rows, width)
    expected.tokens[:], expected.labels[:], expected.begins[:] = PAD, PAD, False
    expected.begins[:, 0] = True
    for row in range(rows):
        column = 0
        while column < width and rng.random() < 0.8:
            shown = int(rng.integers(1, width - column + 1))
            read, done = shown + int(rng.random() < 0.8), 0  # with or without the token behind the piece
            while done < read:
                source = int(rng.integers(len(maps)))
                length = int(min(rng.integers(1, read - done + 1), maps[source].size))
                begin = int(rng.integers(0, maps[source].size - length + 1))
                here = max(0, min(length, shown - done))
                ranges.append((source, 0, begin, begin, length, here, row, column + done, length - (done == 0)))
                for place in range(length):
                    id_ = int(maps[source][begin + place])
                    if done + place < shown:
                        expected.tokens[row, column + done + place] = id_
                    if done + place > 0:
                        expected.labels[row, column + done + place - 1] = id_
                if here:
                    expected.begins[row, column + done] = True
                done += length
            column += shown
    return np.array(ranges, dtype=np.int64).reshape(-1, len(FIELDS)), expected


def opened(maps):
    return tuple(kernels().open_map(ids) for ids in maps)


def same(rows, expected):
    return all(np.array_equal(getattr(rows, name), getattr(expected, name)) for name in ("tokens", "labels", "begins"))


def test_ranges_of_many_maps_become_the_rows_that_a_loop_makes(level):
    for seed in range(12):
        check_random_ranges(level, seed)


def check_random_ranges(level, seed):
    rng = np.random.default_rng(seed)
    maps = [anywhere(rng, dtype, int(rng.integers(1, 400))) for dtype in rng.permutation(TYPES)]
    parts = [Part(Flat(ids), range(1)) for ids in maps]
    rows, width = int(rng.integers(1, 6)), int(rng.integers(1, 200))
    ranges, expected = random_ranges(rng, maps, rows, width)
    made = new_rows(rows, width)
    gather(parts, () if level == Level.NUMPY else opened(maps), ranges, made)
    assert same(made, expected)


@pytest.mark.parametrize("compiled", COMPILED)
def test_sources_without_a_map_are_asked_and_the_others_copied(compiled):
    rng = np.random.default_rng(1)
    maps = [anywhere(rng, dtype, 300) for dtype in ("uint16", "int32", "uint8")]
    parts = [Part(Flat(ids), range(1)) for ids in maps]
    ranges, expected = random_ranges(rng, maps, 4, 100)
    parts[1].source.tokens = None  # as with mmap=False
    with forced(compiled):
        made = new_rows(4, 100)
        gather(parts, (opened(maps)[0], False, opened(maps)[2]), ranges, made, frozenset({1}))
    assert same(made, expected)


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_range_that_lies_is_refused_before_anything_is_read(compiled):
    for seed in range(40):
        check_lying_ranges(compiled, seed)


def check_lying_ranges(compiled, seed):
    """Every field in turn becomes any number: the range fits, or its place is returned and no array is touched."""
    rng = np.random.default_rng(seed)
    maps = [anywhere(rng, dtype, int(rng.integers(1, 60))) for dtype in rng.choice(TYPES, 3)]
    rows, width = 3, int(rng.integers(1, 40))
    ranges, _ = random_ranges(rng, maps, rows, width)
    if not len(ranges):
        return
    extreme = [-1, -(2**63), 2**63 - 1, 2**62, 2**32, 2**31, width, width + 1, rows, 3, 60, 0, 1]
    with forced(compiled):
        for field in range(len(FIELDS)):
            lying = ranges.copy()
            at = int(rng.integers(len(lying)))
            lying[at, field] = extreme[int(rng.integers(len(extreme)))]
            made = new_rows(rows, width)
            arrays = (made.tokens, made.labels, made.begins)
            done = kernels().gather(opened(maps), len(lying), PAD, rows, lying, *arrays)
            source, _, _, begin, length, shown, row, column, labels = lying[at].tolist()
            fits = (
                0 <= source < len(maps)
                and begin >= 0
                and 0 <= length <= width - column + 1
                and begin + length <= maps[source].size
                and 0 <= shown <= min(length, width - column)
                and 0 <= row < rows
                and 0 <= column <= width
                and labels in (length - 1, length)
                and labels >= 0
                and (labels < length or column > 0 or length == 0)
            )
            assert done == (len(lying) if fits else at), (lying[at], width)
            if not fits:
                assert same(made, new_rows(rows, width))


@pytest.mark.parametrize("compiled", COMPILED)
def test_arrays_that_do_not_fit_each_other_are_refused(compiled):
    map_ = opened([np.arange(9, dtype=np.uint16)])
    good = (
        np.zeros((1, 9), np.int64),
        np.zeros((2, 8), np.int64),
        np.zeros((2, 8), np.int64),
        np.zeros((2, 8), np.bool_),
    )

    def gather_with(maps=map_, found=1, rows=2, **arrays):
        given = dict(zip(("ranges", "tokens", "labels", "begins"), good, strict=True)) | arrays
        return kernels().gather(maps, found, PAD, rows, *given.values())

    with forced(compiled):
        assert gather_with() == 1
        assert gather_with(maps=(None,)) == 0  # the place of the range: no source that is not open is taken for read
        for wrong in (
            {"found": 2}, {"found": -1}, {"rows": 3}, {"rows": -2}, {"rows": 0}, {"tokens": np.zeros((2, 9), np.int64)},
            {"begins": np.zeros((2, 7), np.bool_)}, {"labels": np.zeros((2, 8), np.int32)}, {"ranges": np.zeros(9)},
            {"tokens": np.zeros((2, 16), np.int64)[:, ::2]}, {"maps": list(map_)}, {"maps": ("map",)},
            {"maps": (object(),)}, {"tokens": memoryview(bytes(128)).cast("q")},
        ):  # fmt: skip
            with pytest.raises((ValueError, TypeError, BufferError)):
                gather_with(**wrong)
    for ids in (np.zeros(3, np.float32), np.zeros(3, np.uint64), np.zeros((3, 2), np.int32)[:, 0], "text", None):
        with pytest.raises((ValueError, TypeError, BufferError)):
            kernels().open_map(ids)


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_map_outlives_the_array_it_was_opened_on(compiled):
    ids = np.arange(1000, dtype=np.uint16)
    map_ = opened([ids])
    del ids
    made = new_rows(1, 999)
    with forced(compiled):
        gather([None], map_, np.array([[0, 0, 0, 0, 1000, 999, 0, 0, 999]]), made)
    assert made.tokens[0].tolist() == list(range(999))
    assert made.labels[0].tolist() == list(range(1, 1000))
