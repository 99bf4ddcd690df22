"""Which partial sums a tree over microbatches has: beside a recursive definition, in expressions and in numbers."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest
import torch

from sixfold.fsdp.buffers.microbatch_sums import MicrobatchSums
from sixfold.fsdp.buffers.microbatch_tree import MicrobatchTree, slots_for


def drawn(leaves: set[int], start: int = 0, width: int = 1 << 10) -> str:
    """The definition: halves of halves; what is missing is left out. The lower leaf stands left."""
    inside = {leaf for leaf in leaves if start <= leaf < start + width}
    if len(inside) <= 1:
        return "".join(map(str, inside))
    left = drawn(leaves, start, width // 2)
    right = drawn(leaves, start + width // 2, width // 2)
    return f"({left}+{right})" if left and right else left or right


def first_of(expression: str) -> int:
    return int(expression.strip("(").split("+")[0].strip(")"))


def added(left: str, right: str) -> str:
    return f"({left}+{right})" if first_of(left) < first_of(right) else f"({right}+{left})"


class Slots:
    """What a tree says, done with expressions; a slot that was given up may not be read."""

    def __init__(self) -> None:
        self.tree, self.at, self.most = MicrobatchTree(), {}, 0

    def put(self, leaf: int, closed: int) -> None:
        placed = self.tree.put(leaf, closed)
        if placed.stored is not None:
            assert placed.stored not in self.at, f"slot {placed.stored} is in use: {self.at}"
            self.at[placed.stored] = str(leaf)
        for into, source in placed.adds:
            self._add(into, str(leaf) if source is None else self.at.pop(source))
        assert sorted(self.tree.slots) == sorted(self.at)
        self.most = max(self.most, 1 + max(self.at))

    def _add(self, into: int, other: str) -> None:
        self.at[into] = added(self.at[into], other)

    def total(self, closed: int) -> str:
        for into, source in self.tree.close(closed):
            assert source is not None
            self._add(into, self.at.pop(source))
        *others, last = [self.at[slot] for slot in self.tree.slots]
        for one in reversed(others):
            last = added(one, last)
        return last


def closed_by(leaves: list[int], order: tuple[int, ...], count: int) -> int:
    """Below it all of the first ``count`` in ``order`` have come, or never will."""
    waiting = [leaf for leaf in leaves if leaf not in order[:count]]
    return min(waiting, default=1 << 62)


@pytest.mark.parametrize("count", range(1, 7))
def test_every_order_of_arrival_gives_the_sum_of_the_definition(count):
    for order in permutations(range(count)):
        slots = Slots()
        for at, leaf in enumerate(order):
            slots.put(leaf, closed_by(list(range(count)), order, at + 1))
        assert slots.total(1 << 62) == drawn(set(range(count))), order


@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.slow
def test_every_order_of_more_leaves_gives_the_sum_of_the_definition(count):
    for order in permutations(range(count)):
        slots = Slots()
        for at, leaf in enumerate(order):
            slots.put(leaf, closed_by(list(range(count)), order, at + 1))
        assert slots.total(count) == drawn(set(range(count))), order


@pytest.mark.parametrize("seed", range(40))
def test_missing_leaves_are_left_out_in_any_order_and_after_a_clear(seed):
    random = Random(seed)
    slots = Slots()
    for _ in range(3):  # the slots of one batch serve the next one
        width = random.randint(1, 40)
        leaves = sorted(random.sample(range(width), random.randint(1, width)))
        order = random.sample(leaves, len(leaves))
        for at, leaf in enumerate(order):
            slots.put(leaf, random.choice([0, closed_by(leaves, tuple(order), at + 1)]))
            if random.random() < 0.3:  # somebody looks in the middle: the tree goes on as if nobody had
                closed = closed_by(leaves, tuple(order), at + 1)
                kept = dict(slots.at)
                looked = slots.total(closed)
                assert first_of(looked) == min(order[: at + 1])
                assert {leaf for one in kept.values() for leaf in numbers(one)} == numbers(looked)
        assert len(slots.tree) == len(slots.at)
        assert slots.total(1 << 62) == drawn(set(leaves)), (leaves, order)
        slots.tree.clear()
        slots.at.clear()
        assert len(slots.tree) == 0 and not any(leaf in slots.tree for leaf in range(width))


def numbers(expression: str) -> set[int]:
    return {int(one) for one in expression.replace("(", " ").replace(")", " ").replace("+", " ").split()}


def test_leaves_that_come_in_order_take_the_slots_of_a_binary_counter():
    for microbatches in range(1, 70):
        slots = Slots()
        for leaf in range(microbatches):
            slots.put(leaf, leaf + 1)
            assert len(slots.tree) == (leaf + 1).bit_count()
        assert slots.most == slots_for(microbatches) == (microbatches + 1).bit_length() - 1, microbatches


def test_the_tree_of_the_page_is_drawn_as_it_says():
    assert drawn(set(range(8))) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert drawn(set(range(12))) == "((((0+1)+(2+3))+((4+5)+(6+7)))+((8+9)+(10+11)))"
    assert drawn({0, 3, 5}) == "((0+3)+5)"


def test_a_leaf_that_comes_twice_is_a_fault_of_ours():
    tree = MicrobatchTree()
    tree.put(2, 0)
    with pytest.raises(AssertionError, match="leaf 2 came twice"):
        tree.put(2, 0)


# ---- tensors


def recursive(values: dict[int, torch.Tensor], start: int, width: int) -> torch.Tensor | None:
    if width == 1:
        return values.get(start)
    left = recursive(values, start, width // 2)
    right = recursive(values, start + width // 2, width // 2)
    return (left if right is None else right) if left is None or right is None else left + right


@pytest.mark.parametrize("seed", range(20))
def test_sums_have_the_bits_of_the_definition_in_pieces_in_place_or_not(seed):
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    numel, sums = 24, MicrobatchSums(24, 1, dtype=torch.float32, device=torch.device("cpu"))
    for batch in range(3):
        leaves = sorted(random.sample(range(16), random.randint(1, 16)))
        order = tuple(random.sample(leaves, len(leaves)) if batch else leaves)
        values = {leaf: torch.randn(numel, generator=generator) for leaf in leaves}
        for at, leaf in enumerate(order):
            sums.begin(leaf, closed_by(leaves, order, at + 1))
            cut = random.choice([0, 7, 24])
            for start, stop in ((0, cut), (cut, numel)):
                if start == stop:
                    continue
                place = sums.place(start, stop)
                if place is not None and random.random() < 0.5:  # a collective writes there by itself
                    sums.land(place.copy_(values[leaf][start:stop]), start, stop)
                else:
                    sums.land(values[leaf][start:stop].clone(), start, stop)
        for closed in (0, 1 << 62):  # looking changes nothing
            expected = recursive(values, 0, 16)
            if closed or sorted(order) == list(order):
                found = sums.total(closed or order[-1] + 1, torch.full((numel,), float("nan")))
                assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (leaves, order)
        sums.clear()
    assert sums.nbytes <= 4 * numel * 16
