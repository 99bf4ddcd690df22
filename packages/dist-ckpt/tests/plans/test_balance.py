"""Sharing out replicated data: every element once, by a holder, and the fullest rank near the least possible."""

from itertools import combinations

import pytest
from dist_ckpt_helpers import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.dist_ckpt.plans.balance import Part, Shared, share_out


def lower_bound(shards, ranks):
    """By brute force: data whose holders all lie in a set of ranks must fit on that set."""
    sets = [set(chosen) for n in range(1, ranks + 1) for chosen in combinations(range(ranks), n)]
    return max(sum(s.nbytes for s in shards if set(s.holders) <= chosen) / len(chosen) for chosen in sets)


def loads(shards, parts, ranks):
    total = [0] * ranks
    for shard, found in zip(shards, parts, strict=True):
        for part in found:
            total[part.rank] += (part.stop - part.start) * shard.itemsize
    return total


@st.composite
def states(draw):
    ranks = draw(st.integers(1, 6))
    holders = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    shard = st.builds(Shared, st.integers(0, 2_000_000), st.sampled_from([1, 2, 4, 8]), holders, st.just(1))
    return ranks, draw(st.lists(shard, min_size=1, max_size=30))


@settings(max_examples=EXAMPLES, deadline=None)
@given(states())
def test_the_fullest_rank_is_within_one_percent_of_the_lower_bound(state):
    ranks, shards = state
    parts = share_out(shards, ranks)
    for shard, found in zip(shards, parts, strict=True):
        assert [part.start for part in found[1:]] == [part.stop for part in found[:-1]]
        assert (found[0].start, found[-1].stop) == (0, shard.elements)
        assert all(part.rank in shard.holders for part in found)
    slack_bytes = 8 * ranks  # a cut falls between elements
    assert max(loads(shards, parts, ranks)) <= 1.01 * lower_bound(shards, ranks) + slack_bytes


def test_many_small_shards_are_never_cut():
    shards = [Shared(1000 + index % 7, 4, (0, 1, 2, 3)) for index in range(400)]
    parts = share_out(shards, 4)
    assert all(len(found) == 1 for found in parts)
    assert max(loads(shards, parts, 4)) <= 1.01 * lower_bound(shards, 4)


def test_one_large_shard_is_cut_among_its_holders():
    assert share_out([Shared(100, 4, (0, 1, 3))], 4) == [[Part(0, 0, 34), Part(3, 34, 67), Part(1, 67, 100)]]


def test_cuts_fall_on_units():
    parts = share_out([Shared(120, 4, (0, 1), unit=50)], 2)[0]
    assert [(part.start, part.stop) for part in parts] == [(0, 70), (70, 120)]


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_chain_of_holders_passes_work_along(ranks):
    """Rank r shares only with r + 1, and all the data begins at rank 0."""
    shards = [Shared(1_000_000 if rank == 0 else 10, 1, (rank, rank + 1)) for rank in range(ranks - 1)]
    shards.append(Shared(500_000, 1, (0,)))
    assert max(loads(shards, share_out(shards, ranks), ranks)) <= 1.01 * lower_bound(shards, ranks) + 16


def test_many_ranks_share_many_shards_evenly():
    shards = [Shared(100_000 + index, 2, tuple(range(index % 8, 128, 8))) for index in range(2_000)]
    total = loads(shards, share_out(shards, 128), 128)
    assert max(total) <= 1.01 * sum(total) / 128
