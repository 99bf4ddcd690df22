"""Validation across ranks: every problem of every rank, in one list."""

import pytest
import torch

from sixfold.dist_ckpt import ShardedObject, ShardedTensor, ShardingError
from sixfold.dist_ckpt.plans.shard_table import merge, object_problems, raise_problems, table_problems, tabulate


def shard(key, offset, size, shape, *, replica=0, dtype=torch.float32):
    return ShardedTensor(key, None, dtype, size, shape, offset, None, replica)


def tensor_problems(by_rank, verb):
    return table_problems(merge([tabulate(records)[0].encode() for records in by_rank]), verb)


def test_a_whole_cover_has_no_problem():
    grid = [[shard("w", (2 * i, 3 * j), (2, 3), (4, 6))] for i in range(2) for j in range(2)]
    assert tensor_problems(grid, "saved") == []


def test_replicas_are_not_counted():
    ranks = [[shard("w", (0,), (4,), (4,))], [shard("w", (0,), (4,), (4,), replica=1)]]
    assert tensor_problems(ranks, "saved") == []


def test_a_hole_names_the_box_and_its_neighbours():
    (line,) = tensor_problems([[shard("w", (0, 0), (512, 8), (1024, 8))], []], "saved")
    assert line.startswith("w[512:1024, :]: saved by no main replica (rank 0 has [0:512, :])")


def test_an_overlap_names_both_ranks_and_boxes():
    ranks = [[shard("w", (0,), (3,), (4,))], [shard("w", (2,), (2,), (4,))]]
    (line,) = tensor_problems(ranks, "saved")
    assert "w[0:3] of rank 0 and w[2:4] of rank 1 overlap" in line


def test_an_overlap_that_hides_a_hole_shows_both():
    ranks = [[shard("w", (0,), (2,), (4,))], [shard("w", (1,), (2,), (4,))]]
    assert ["overlap" in line or "w[3:4]" in line for line in tensor_problems(ranks, "saved")] == [True, True]


def test_only_replicas_is_a_problem_of_its_own():
    (line,) = tensor_problems([[], [shard("w", (0,), (4,), (4,), replica=(0, 1))]], "saved")
    assert "no main replica; ranks [1] hold replicas only" in line


def test_differing_dtypes_and_shapes_name_both_ranks():
    ranks = [
        [shard("a", (0,), (4,), (8,)), shard("b", (0,), (4,), (8,))],
        [shard("a", (4,), (4,), (8,), dtype=torch.int32), shard("b", (4,), (4,), (9,))],
    ]
    dtype, shape = tensor_problems(ranks, "saved")
    assert "rank 0 says dtype torch.float32, rank 1 says torch.int32" in dtype
    assert "rank 0 says global shape (8,), rank 1 says (9,)" in shape


def test_a_box_outside_the_tensor_is_named():
    (line,) = tensor_problems([[shard("w", (6,), (4,), (8,))]], "saved")
    assert "w[6:10]: rank 0's box leaves" in line


def test_tensors_without_elements_are_whole():
    assert tensor_problems([[shard("w", (0, 0), (0, 3), (0, 3))]], "saved") == []


def test_all_problems_are_in_one_error():
    lines = tensor_problems([[shard(key, (0,), (1,), (2,)) for key in "abc"]], "saved")
    with pytest.raises(ShardingError, match=r"(?s)3 problems in what is saved:.*a\[1:2\].*b\[1:2\].*c\[1:2\]"):
        raise_problems(lines, "saved", ShardingError)


def test_object_grids_need_each_cell_once():
    def cell(offset, shape, replica=0):
        return ShardedObject("o", None, shape, offset, replica)

    assert object_problems([[cell((0,), (2,))], [cell((1,), (2,)), cell((0,), (2,), 1)]], "saved") == []
    (empty,) = object_problems([[cell((0,), (2,))]], "saved")
    assert "cells [(1,)]" in empty
    (twice,) = object_problems([[cell((0,), (1,))], [cell((0,), (1,))]], "saved")
    assert "by ranks [0, 1]" in twice
    (grids,) = object_problems([[cell((0,), (1,))], [cell((0,), (2,))]], "saved")
    assert "grids [(1,), (2,)]" in grids
