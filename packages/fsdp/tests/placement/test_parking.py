"""Units whose bytes wait in gaps of the arena: none is lost, and units of one size are gathered as seldom as can be."""

from __future__ import annotations

import random

import pytest
import torch

from sixfold.fsdp.buffers.temporary_memory import Arena
from sixfold.fsdp.placement.address_assignment import assign_addresses
from sixfold.fsdp.placement.parking import Parking, simulate
from sixfold.fsdp.placement.residency import NEVER, solve


@pytest.mark.parametrize("seed", range(30))
def test_units_of_one_size_are_gathered_as_seldom_as_bytes_allow(seed):
    chance = random.Random(seed)
    names = [f"u{i}" for i in range(chance.randint(2, 9))]
    sizes = dict.fromkeys(names, 8)
    uses = [chance.choice(names) for _ in range(chance.randint(1, 80))]
    arena = 8 * chance.randint(1, len(names)) + chance.randint(0, 7)
    offsets = assign_addresses(uses, sizes, arena_bytes=arena).offsets
    assert simulate(uses, sizes, offsets, arena).gathers == solve(uses, sizes, budget_bytes=arena).gathers


def test_copies_are_made_only_where_they_save_gathers_worth_them():
    names = [f"u{i}" for i in range(60)]
    sizes = dict.fromkeys(names, 8)
    uses = names * 3 + (names[::-1] + names) * 10
    offsets = assign_addresses(uses, sizes, arena_bytes=8 * 15)
    many = simulate(uses, sizes, offsets.offsets, 8 * 15)
    assert many.gathered_bytes < offsets.gathered_bytes
    assert not many.pays_against(offsets.gathered_bytes)
    assert many.pays_against(offsets.gathered_bytes + 8 * many.copies // 64)


@pytest.mark.parametrize("seed", range(30))
def test_bytes_that_waited_come_back_as_they_were(seed):
    chance = random.Random(seed)
    names = [f"u{i}" for i in range(chance.randint(2, 8))]
    sizes = {name: 8 if seed % 2 else 2 * chance.randint(1, 8) for name in names}
    uses = [chance.choice(names) for _ in range(120)]
    nbytes = max(sizes.values()) * 2 + chance.randint(0, sum(sizes.values()))
    offsets = assign_addresses(uses, sizes, arena_bytes=nbytes).offsets
    arena = Arena(nbytes, {name: (offsets[name], sizes[name]) for name in names}, torch.device("cpu"))
    parking, came = Parking(arena, sizes), 0
    for at, name in enumerate(uses):
        later = {one: uses.index(one, at + 1) if one in uses[at + 1 :] else NEVER for one in names}
        if name not in arena.holders:
            for victim in parking.victims(name, (), later.__getitem__):
                parking.drop(victim)
            copies, here = parking.clear(name, (), lambda one: True)
            assert copies >= 0
            if not here:
                waited = arena.parked(name)
                place = arena.take_back(name) if waited else None
                arena.allocate(name)
                if place is not None:
                    arena.memory(name).copy_(place)
                elif not waited:
                    arena.memory(name).fill_(names.index(name) + 1)
                came += waited
            else:
                came += 1
        assert set(arena.memory(name).tolist()) == {names.index(name) + 1}, f"{name} at use {at}"
        assert arena.held_bytes == sum(sizes[one] for one in arena.here) <= nbytes
    assert came or seed % 2 == 0 or len(names) * 8 <= nbytes
