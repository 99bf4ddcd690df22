"""Indices that two ranks share out are megatron-core's: arrays of both ranks, file names and bytes, for random configs.

``--megatron-cases 1000`` builds that many.
"""

import os
import warnings
from collections import Counter

import numpy as np
import pytest
from megatron_peer import (
    arrays_of,
    assert_same_indices,
    build,
    build_peer,
    files_of,
    parts_of,
    random_case,
    would_loop_for_ever,
    write_pairs,
)

from sixfold.blending import BlendingError
from sixfold.blending.numbers.kernels import forced, levels

ranktest = pytest.importorskip("ranktest", reason="needs tools/ranktest")
FIRST_SEED = 1_000_000  # none of those that one process builds


def build_on_rank(rank: int, ranks: int, cases):
    """Per config the arrays of every part, or why they were refused."""
    import torch.distributed as dist

    os.fsync = lambda _: None  # it guards against a power cut, which no test makes
    warnings.simplefilter("ignore")
    found = []
    for number, (fields, sizes) in enumerate(cases):
        try:
            with forced(levels()[(number + rank) % len(levels())]):  # the ranks at different ones
                ours = build(fields, sizes, group=dist.group.WORLD)
        except BlendingError as error:
            found.append(str(error))
        else:
            empty = not all(part.part.tokens for part in parts_of(ours))
            found.append("no tokens" if empty else [arrays_of(data) for data in ours])
    return found


def outcome(rank_0, rank_1, fields, sizes, ours):
    """What came of one config."""
    theirs = fields | {"path_to_cache": f"{ours}-peer"}
    if isinstance(rank_0, str):
        assert rank_0 == rank_1
        if would_loop_for_ever(rank_0):
            return "without tokens, the peer would loop for ever"
        with pytest.raises((IndexError, AssertionError)):
            build_peer(theirs, sizes)
        return "refused by both"
    try:
        expected = [arrays_of(data) for data in build_peer(theirs, sizes)]
    except AssertionError:
        return "refused by the peer"
    assert_same_indices(rank_0, expected)
    assert_same_indices(rank_1, expected)
    assert files_of(ours) == files_of(f"{ours}-peer")
    return "identical on 2 ranks"


@pytest.mark.slow
def test_indices_built_by_two_ranks_are_the_peers_on_both_with_its_files(megatron_chunk, tmp_path, record_property):
    prefixes = write_pairs(tmp_path, np.random.default_rng(0))
    cases, folders = [], []
    for seed in megatron_chunk:
        fields, sizes = random_case(np.random.default_rng(FIRST_SEED + seed), prefixes)
        folders.append(str(tmp_path / f"cache-{seed}"))
        cases.append((fields | {"path_to_cache": folders[-1]}, sizes))
    both = zip(*ranktest.run_ranks(build_on_rank, 2, cases), strict=True)
    found = [outcome(*arrays, *case, ours) for arrays, case, ours in zip(both, cases, folders, strict=True)]
    record_property("megatron_chunk", Counter(found))
    assert 4 * found.count("identical on 2 ranks") >= len(found), found
