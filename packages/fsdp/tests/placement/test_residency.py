"""residency.plan against brute force, and the actions it gives against a replay that shares no code."""

from __future__ import annotations

import random
import time
from functools import cache

import pytest

from sixfold.fsdp import FsdpError
from sixfold.fsdp.residency import Action, plan, solve


def replay(actions, unit_bytes, budget, keep=()):
    """(uses, gathers, bytes gathered); asserts that every action is legal."""
    here, uses, gathered = set(), [], []
    for action in actions:
        if action.kind == "gather":
            assert action.unit not in here, str(action)
            here.add(action.unit)
            gathered.append(action.unit)
            assert sum(unit_bytes[name] for name in here) <= budget, str(action)
        elif action.kind == "free":
            assert action.unit in here and action.unit not in keep, str(action)
            here.remove(action.unit)
        else:
            assert action.unit in here, str(action)
            uses.append(action.unit)
    return uses, len(gathered), sum(unit_bytes[name] for name in gathered)


def least_bytes(uses, unit_bytes, budget, keep=()):
    """By trying every set of units to keep after every use."""
    names = sorted(set(uses))

    @cache
    def cost(at, here):
        if at == len(uses):
            return 0
        name = uses[at]
        now = here | {name}
        price = 0 if name in here else unit_bytes[name]
        best = float("inf")
        for bits in range(1 << len(names)):
            stay = frozenset(n for i, n in enumerate(names) if bits >> i & 1)
            if name not in stay or not stay <= now or any(n in keep and n not in stay for n in now):
                continue
            if sum(unit_bytes[n] for n in stay) <= budget:
                best = min(best, price + cost(at + 1, stay))
        return best

    return cost(0, frozenset())


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_is_legal_and_gathers_the_fewest_bytes_there_are(seed):
    chance = random.Random(seed)
    names = "abcde"[: chance.randint(1, 5)]
    equal = seed % 3 == 0
    unit_bytes = {name: 4 if equal else chance.randint(1, 6) for name in names}
    uses = [chance.choice(names) for _ in range(chance.randint(0, 14))]
    keep = tuple(name for name in names if chance.random() < 0.15)
    floor = max(unit_bytes.values()) + sum(unit_bytes[name] for name in keep)
    budget = chance.randint(floor, floor + sum(unit_bytes.values()) // 2)
    solution = solve(uses, unit_bytes, budget_bytes=budget, keep=keep)
    done, gathers, nbytes = replay(solution.actions, unit_bytes, budget, keep)
    assert done == uses
    assert (gathers, nbytes) == (solution.gathers, solution.gathered_bytes)
    assert solution.exact
    assert nbytes == least_bytes(tuple(uses), unit_bytes, budget, keep)


def test_a_plan_reads_as_text():
    actions = plan(["a", "b", "a"], {"a": 2, "b": 2}, budget_bytes=2)
    assert [str(action) for action in actions] == [
        "gather a", "use a", "free a", "gather b", "use b", "free b", "gather a", "use a",
    ]  # fmt: skip
    assert actions[0] == Action("gather", "a")
    assert str(Action("use", "")) == "use (root)"


def one_f_one_b(units, microbatches, ahead):
    """Uses of a stage with ``ahead`` forwards before its first backward."""
    forward = [str(i) for i in range(units)]
    order = forward * ahead
    for k in range(microbatches):
        order += forward[::-1] + (forward if k + ahead < microbatches else [])
    return order


def test_in_1f1b_order_a_plan_gathers_as_few_as_every_choice_tried():
    uses = one_f_one_b(4, 5, 2)
    sizes = dict.fromkeys(uses, 10)
    counts = []
    for resident in range(1, 5):
        _, gathers, nbytes = replay(plan(uses, sizes, budget_bytes=10 * resident), sizes, 10 * resident)
        assert nbytes == least_bytes(tuple(uses), sizes, 10 * resident)
        counts.append(gathers)
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 4, "everything fits: each unit once"


def test_a_large_embedding_is_gathered_again_rather_than_all_layers():
    # 4 layers of 10 fit beside nothing else; the embedding of 35 is used at both ends of a step.
    uses = ["e", *"abcd", *"dcba", "e"]
    sizes = {"e": 35, **dict.fromkeys("abcd", 10)}
    for budget in (35, 40, 45, 55, 65, 75):
        solution = solve(uses, sizes, budget_bytes=budget)
        assert solution.exact
        assert solution.gathered_bytes == least_bytes(tuple(uses), sizes, budget)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("units", "equal"), [(200, True), (200, False), (33, False)])
@pytest.mark.slow
def test_ten_thousand_uses_are_planned_within_seconds(units, equal):
    chance = random.Random(0)
    names = [f"blocks.{i}" for i in range(units)]
    sizes = {name: 100 if equal else chance.choice([90, 100, 110, 2000]) for name in names}
    uses = (names + names[::-1]) * (10_000 // (2 * units))
    budget = sum(sizes.values()) // 3
    start = time.process_time()
    solution = solve(uses, sizes, budget_bytes=budget)
    assert time.process_time() - start < 10, "about a second on a quiet machine"
    replay(solution.actions, sizes, budget)
    assert solution.gathered_bytes < 2 * sum(sizes.values()) * len(uses) / (2 * units)


def test_what_cannot_be_planned_is_named():
    with pytest.raises(FsdpError, match=r"'b' needs 9 bytes, and budget_bytes is 8; give at least 9") as caught:
        plan(["a", "b"], {"a": 1, "b": 9}, budget_bytes=8)
    assert caught.value.unit == "b"
    with pytest.raises(FsdpError, match=r"'b' needs 9 bytes beside 1 bytes that are kept"):
        plan(["a", "b"], {"a": 1, "b": 9}, budget_bytes=9, keep=["a"])
    with pytest.raises(FsdpError, match="'c' is used and unit_bytes has no such unit"):
        plan(["c"], {"a": 1}, budget_bytes=8)
    with pytest.raises(FsdpError, match="'a' has -1 bytes"):
        plan(["a"], {"a": -1}, budget_bytes=8)
    with pytest.raises(FsdpError, match="kind is 'drop'"):
        Action("drop", "a")
    assert plan([], {}, budget_bytes=0) == []
