"""Pieces of a flat buffer: what travels together, against a plain walk over elements."""

from __future__ import annotations

import random

import pytest
import torch

from sixfold.fsdp.buffers.column_ranges import Copy, columns, copies


@pytest.mark.parametrize("seed", range(30))
def test_copies_fill_every_element_of_a_piece_once_with_the_right_element(seed):
    rng = random.Random(seed)
    rows, row = rng.randint(1, 5), rng.randint(1, 40)
    total, ranges, at = rows * row, [], 0
    while at < total:
        at += rng.choice([0, 0, 1, 5])  # padding
        numel = rng.choice([0, 1, 3, row, 2 * row + 1])
        if at + numel > total:
            break
        ranges.append((at, at + numel))
        at += numel
    rng.shuffle(ranges)
    whole = torch.zeros(total, dtype=torch.int64)  # element e of tensor t is 1000 * (t + 1) + e
    for index, (first, last) in enumerate(ranges):
        whole[first:last] = torch.arange(last - first) + 1000 * (index + 1)
    for start in range(0, row, 7):
        stop = min(start + 7, row)
        piece, times = torch.full((rows, stop - start), -1), torch.zeros(rows, stop - start, dtype=torch.int64)
        for one in copies(ranges, rows, row, start, stop):
            place = slice(one.row, one.row + one.rows), slice(one.column, one.column + one.columns)
            times[place] += 1
            for r in range(one.rows):
                begin = one.start + r * row
                values = torch.arange(begin, begin + one.columns)
                piece[one.row + r, one.column : one.column + one.columns] = (
                    0 if one.tensor is None else values + 1000 * (one.tensor + 1)
                )
        assert torch.equal(times, torch.ones_like(times))
        assert torch.equal(piece, whole.view(rows, row)[:, start:stop])


def test_a_tensor_that_fills_whole_rows_is_one_copy_for_any_number_of_ranks():
    assert copies([(0, 640)], 64, 10, 2, 6) == (Copy(0, 2, 0, 0, 64, 4),)


def test_the_drawn_example():
    assert copies([(0, 8), (8, 11)], 2, 6, 2, 4) == (Copy(0, 2, 0, 0, 1, 2), Copy(1, 0, 1, 0, 1, 2))


@pytest.mark.parametrize(
    ("row", "rows", "bucket", "expected"),
    [
        (256, 2, 2048, [(0, 256)]),  # just fits
        (256, 2, 2047, [(0, 128), (128, 256)]),  # 255 elements fit: two pieces, as equal as multiples of 64 are
        (320, 2, 2047, [(0, 192), (192, 320)]),
        (256, 2, 1024, [(0, 128), (128, 256)]),
        (256, 2, 1, [(0, 64), (64, 128), (128, 192), (192, 256)]),  # never narrower than a unit
        (0, 2, 8, []),
    ],
)
def test_columns_are_as_wide_as_a_bucket_allows(row, rows, bucket, expected):
    assert list(columns(row, rows, 4, bucket, unit=64)) == expected
