"""Ranges in an arena: against every way to put units into slots, and a replay of what an order costs."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from sixfold.fsdp import FsdpError
from sixfold.fsdp.buffers.temporary_memory import Arena
from sixfold.fsdp.placement.address_assignment import assign_addresses
from sixfold.fsdp.residency import plan, solve


def replay(uses, sizes, offsets, stays=None):
    """(gathers, bytes, gathers whose range overlaps that of the use before) of an order, one use after another."""
    here, gathers, nbytes, exposed, before = set(), 0, 0, 0, None

    def clash(one, other):
        ends = offsets[one] + sizes[one], offsets[other] + sizes[other]
        return max(offsets[one], offsets[other]) < min(ends)

    for at, name in enumerate(uses):
        if name not in here:
            gathers, nbytes = gathers + 1, nbytes + sizes[name]
            exposed += before is not None and before != name and clash(name, before)
            here = {other for other in here if not clash(name, other)} | {name}
        if stays is not None and not stays[at]:
            here.discard(name)
        before = name
    return gathers, nbytes, exposed


@pytest.mark.parametrize("seed", range(40))
def test_a_colouring_costs_what_it_says_and_stays_inside_the_arena(seed):
    chance = random.Random(seed)
    names = [f"u{i}" for i in range(chance.randint(1, 9))]
    sizes = {name: chance.randint(0, 9) for name in names}
    uses = [chance.choice(names) for _ in range(chance.randint(0, 60))]
    apart = [pair for pair in itertools.combinations(names[:3], 2) if chance.random() < 0.3]
    arena = max(sizes.values()) * 2 + sum(sizes[name] for name in names[:3])
    stays = [chance.random() < 0.7 for _ in uses] if seed % 4 == 0 else None
    found = assign_addresses(uses, sizes, arena_bytes=arena, apart=apart, ahead=bool(seed % 2), stays=stays)
    assert found.offsets.keys() == sizes.keys()
    assert all(0 <= found.offsets[name] <= arena - sizes[name] for name in names)
    assert found.arena_bytes == max(found.offsets[name] + sizes[name] for name in names) <= arena
    for one, other in apart:
        first, second = sorted((one, other), key=lambda name: found.offsets[name])
        assert found.offsets[first] + sizes[first] <= found.offsets[second] or not sizes[first] * sizes[second]
    assert (found.gathers, found.gathered_bytes, found.exposed) == replay(uses, sizes, found.offsets, stays)
    assert found.gathered_bytes >= solve(uses, sizes, budget_bytes=arena).gathered_bytes or stays is not None


def test_units_that_fit_side_by_side_are_gathered_once_each():
    found = assign_addresses([*"abcba", "c"], {"a": 3, "b": 5, "c": 2}, arena_bytes=10)
    assert (found.gathers, found.gathered_bytes, found.arena_bytes) == (3, 10, 10)


ONE_F_ONE_B = "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0F5 0B3 0B4 0B5"
INTERLEAVED = "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
ZB_V = "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3"


def uses_of(program, units):
    """Units of a stage in order at F, backwards at B and I; W needs no weights."""
    uses = []
    for action in program.split():
        names = [f"{action[0]}.{i}" for i in range(units)]
        uses += names if action[1] == "F" else names[::-1] if action[1] in "BI" else []
    return uses


def fewest_in_slots(uses, slots):
    """By trying every way to put equal units into slots."""
    names = sorted(set(uses))
    best = len(uses)
    for choice in itertools.product(range(slots), repeat=len(names) - 1):
        offsets = dict(zip(names, (0, *choice), strict=True))
        best = min(best, replay(uses, dict.fromkeys(names, 1), offsets)[0])
    return best


@pytest.mark.parametrize(
    ("program", "units", "table"),
    [  # resident units: (gathers by bytes alone, with ranges for life)
        (ONE_F_ONE_B, 4, {1: (41, 41), 2: (28, 30), 3: (15, 19), 4: (4, 4)}),
        (INTERLEAVED, 2, {1: (31, 31), 2: (18, 22), 3: (11, 13), 4: (4, 4)}),
        (ZB_V, 2, {1: (26, 26), 2: (13, 14), 3: (8, 9), 4: (4, 4)}),
    ],
)
def test_ranges_for_life_reach_the_fewest_gathers_that_any_slots_reach(program, units, table):
    uses = uses_of(program, units)
    for resident, counts in table.items():
        sizes = dict.fromkeys(uses, 10)
        found = assign_addresses(uses, sizes, arena_bytes=10 * resident)
        assert found.gathers == fewest_in_slots(uses, resident)
        assert (solve(uses, sizes, budget_bytes=10 * resident).gathers, found.gathers) == counts


def test_forward_and_backward_in_turn_reach_the_plan_by_bytes():
    for units, resident in itertools.product((5, 8), (2, 3, 5)):
        names = [str(i) for i in range(units)]
        uses = (names + names[::-1]) * 3
        sizes = dict.fromkeys(names, 10)
        found = assign_addresses(uses, sizes, arena_bytes=10 * resident + 9)
        assert found.gathers == solve(uses, sizes, budget_bytes=10 * resident + 9).gathers
        ahead = assign_addresses(uses, sizes, arena_bytes=10 * resident, ahead=True)
        assert ahead.exposed == 0, "neighbours do not overlap, so that each can be gathered while the other runs"


def test_a_large_embedding_beside_layers():
    uses = ["e", *"abcd", "h", "h", *"dcba", "e"] * 2
    sizes = {"e": 40, "h": 40, **dict.fromkeys("abcd", 10)}
    for arena in (40, 50, 60, 80, 90, 120):
        least = solve(uses, sizes, budget_bytes=arena)
        found = assign_addresses(uses, sizes, arena_bytes=arena)
        assert least.gathered_bytes <= found.gathered_bytes <= 1.3 * least.gathered_bytes


def test_a_given_plan_is_coloured_by_what_it_keeps():
    uses = ["a", "b", "a", "b", "c", "a"]
    sizes = dict.fromkeys("abc", 4)
    actions = plan(uses, sizes, budget_bytes=8)
    assert sum(action.kind == "gather" for action in actions) == 3
    found = assign_addresses(uses, sizes, arena_bytes=8, stays=[True, True, True, False, False, False])
    assert found.gathers == 3


@pytest.mark.slow
def test_two_hundred_units_are_coloured_within_seconds():
    names = [str(i) for i in range(200)]
    uses = (names + names[::-1]) * 25
    start = time.process_time()
    found = assign_addresses(uses, dict.fromkeys(names, 10), arena_bytes=500)
    assert time.process_time() - start < 10, "about a second on a quiet machine"
    assert found.gathers == solve(uses, dict.fromkeys(names, 10), budget_bytes=500).gathers


def test_units_inside_others_have_a_place_wherever_the_largest_pair_has():
    sizes = {"a": 60, "a.x": 10, "b": 20, "b.x": 50, "b.y": 50, "c": 5, "c.x": 65}
    apart = [(name, name[0]) for name in sizes if "." in name]
    for order in (list(sizes), list(sizes)[::-1]):
        found = assign_addresses([*order, *order[::-1]], sizes, arena_bytes=70, apart=apart)
        assert found.gathers == replay([*order, *order[::-1]], sizes, found.offsets)[0]
        for one, other in apart:
            low, high = sorted((one, other), key=lambda name: found.offsets[name])
            assert found.offsets[low] + sizes[low] <= found.offsets[high]


def test_units_that_run_inside_each_other_need_room_side_by_side():
    with pytest.raises(FsdpError, match=r"no place side by side in 10 bytes; together they are 11") as caught:
        assign_addresses(["a", "b"], {"a": 6, "b": 5}, arena_bytes=10, apart=[("a", "b")])
    assert caught.value.unit in ("a", "b")


def test_an_owner_of_an_arena_gets_the_same_memory_every_time_and_never_anothers():
    arena = Arena(96, {"a": (0, 64), "b": (64, 32), "c": (32, 40)}, torch.device("cpu"))
    addresses = set()
    for _ in range(3):
        arena.allocate("a")
        addresses.add(arena.memory("a").data_ptr())
        assert arena.in_the_way("c") == ["a"]
        with pytest.raises(FsdpError, match=r"'c' overlaps \['a'\]"):
            arena.allocate("c")
        arena.free("a")
    assert len(addresses) == 1
    arena.allocate("a")
    arena.allocate("b")
    assert (arena.held_bytes, arena.peak_bytes, arena.nbytes, arena.used_bytes) == (96, 96, 96, 96)
    with pytest.raises(FsdpError, match="holds its range already"):
        arena.allocate("a")
    arena.free("a")
    with pytest.raises(FsdpError, match="does not hold"):
        arena.free("a")
    with pytest.raises(FsdpError, match="'z' has no range"):
        arena.memory("z")
    assert arena.shares("a") and arena.shares("b")
    arena.free("b")
    with pytest.raises(FsdpError, match=r"'a' has bytes \[90, 100\) of an arena of 96"):
        arena.move({"a": (90, 10)})
