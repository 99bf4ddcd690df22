"""Where copies go: any domains that are lost leave each part somewhere; no domain has its neighbour's parts alone."""

import itertools
import random

import pytest

from sixfold.dist_ckpt import CheckpointError
from sixfold.dist_ckpt.memory_tier.placement import bytes_per_domain, holders, receivers

LAYOUTS = [
    ["a"],
    ["a", "b"],
    ["a", "a", "b", "b"],
    ["a", "b", "a", "b"],
    ["a", "b", "c", "d"],
    ["a", "a", "a", "b", "c", "c", "d"],
    [f"h{n // 2}" for n in range(12)],
]


@pytest.mark.parametrize("layout", LAYOUTS, ids="".join)
@pytest.mark.parametrize("replicas", [0, 1, 2, 3])
def test_whichever_domains_are_lost_up_to_the_copies_each_part_is_somewhere(layout, replicas):
    domains = sorted({*layout})
    for turn in range(2 * len(domains)):
        places = [{own, *holders(layout, rank, turn, replicas)} for rank, own in enumerate(layout)]
        expected = 1 + min(replicas, len(domains) - 1)
        assert all(len(place) == expected for place in places)
        for lost in itertools.combinations(domains, min(replicas, len(domains) - 1)):
            assert all(place - {*lost} for place in places), (turn, lost)


@pytest.mark.parametrize("layout", LAYOUTS[2:], ids="".join)
def test_in_a_few_turns_each_part_has_been_in_every_other_domain(layout):
    domains = {*layout}
    for rank, own in enumerate(layout):
        turns = range(len(domains) - 1)
        assert {name for turn in turns for name in holders(layout, rank, turn, 1)} == domains - {own}


def test_ranks_of_one_domain_send_to_different_ones():
    layout = [f"h{n // 4}" for n in range(20)]  # five domains of four ranks
    assert len({holders(layout, rank, 3, 1) for rank in range(4)}) == 4


@pytest.mark.parametrize("layout", LAYOUTS, ids="".join)
def test_who_takes_a_copy_is_a_rank_of_its_domain_and_they_share_the_work(layout):
    for turn in range(3):
        taken = [receiver for rank in range(len(layout)) for receiver in receivers(layout, rank, turn, 1)]
        for rank in range(len(layout)):
            own = receivers(layout, rank, turn, 2)
            assert tuple(layout[receiver] for receiver in own) == holders(layout, rank, turn, 2)
        assert all(taken.count(rank) <= 3 for rank in taken)


@pytest.mark.parametrize("seed", range(40))
def test_the_stated_memory_is_the_most_that_two_or_three_generations_take(seed):
    rng = random.Random(seed)
    layout = rng.choice(LAYOUTS)
    shares, replicas, drains = [rng.randint(0, 10**6) for _ in layout], rng.randint(0, 3), rng.random() < 0.5
    held = []
    for turn in range(24):
        found = dict.fromkeys(layout, 0)
        for rank, nbytes in enumerate(shares):
            for name in [layout[rank], *holders(layout, rank, turn, replicas)]:
                found[name] += nbytes
        held.append(found)
    count, grain = 2 + drains, 2**21
    arenas = dict.fromkeys(layout, 0)
    for share, own in zip(shares, layout, strict=True):
        arenas[own] += -(-(share + 4096) // grain) * grain
    most = {n: max(sum(t[n] for t in held[at : at + count]) for at in range(len(held) - count)) for n in layout}
    assert bytes_per_domain(shares, layout, replicas, drains=drains) == {n: most[n] + arenas[n] for n in most}


def test_equal_shares_take_two_generations_with_copies_and_the_arena():
    mib = 2**20
    assert bytes_per_domain([64 * mib - 4096] * 2, ["a", "b"], 1) == dict.fromkeys(
        "ab", 2 * 2 * (64 * mib - 4096) + 64 * mib
    )


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(CheckpointError, match="share_bytes_R has 1 ranks, domain_of_R 2"):
        bytes_per_domain([1], ["a", "b"])
