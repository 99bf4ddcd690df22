"""The lower bound holds for all that ``verify`` accepts, overlaps too; no plan is longer than what is shipped."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from machine_helpers import random_program
from schedule_helpers import SCHEDULES

from sixfold.pipeline import (
    Action,
    Costs,
    Kind,
    Program,
    ScheduleError,
    dualpipe_v,
    plan,
    plan_over,
    schedules,
    simulate,
    verify,
)
from sixfold.pipeline.plan import search
from sixfold.pipeline.plan.bound import lower_bound, lower_bound_of_any


def random_costs(rng: random.Random, stages: int) -> Costs:
    def row() -> list[float]:
        return [rng.choice((0.0, 0.3, 1.0, 1.0, 1.7)) for _ in range(stages)]

    overlap = rng.choice((0.1, 0.5, 0.8, 1.0, 1.0, 1.6))
    hop = rng.choice((0.0, 0.1, 0.9, [row() for _ in range(stages)]))
    slots = {name: rng.choice((None, row())) for name in ("step", "unshard", "reduce")}
    return Costs(row(), row(), row(), hop=hop, overlap=overlap, **slots)


def holds(program: Program, costs: Costs) -> bool:
    timeline = simulate(program, costs)
    least = timeline.makespan * (1 + 1e-12) + 1e-12
    cap = max(timeline.peak_activations)
    own = lower_bound(costs, program.placement, program.microbatches, cap)
    return max(own, lower_bound_of_any(costs, len(program.ranks), program.microbatches, cap)) <= least


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.slow
def test_no_shipped_schedule_beats_the_bound_at_any_costs(name):
    rng = random.Random(name)
    for _ in range(20):
        program = SCHEDULES[name](rng.randint(1, 4), rng.randint(1, 6))
        assert holds(program, random_costs(rng, program.stages)), program


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(40))
def test_no_valid_program_beats_the_bound_with_any_placement_costs_and_overlaps(seed):
    rng = random.Random(seed)
    for _ in range(10):
        program = random_program(rng)
        verify(program)
        assert holds(program, random_costs(rng, program.stages)), program


def blocks(row: tuple[Action, ...]):
    """Every way to cut a list into single actions and overlaps; none where a stage's own actions are not in order."""
    turn = {"F": 0, "B": 1, "I": 1, "W": 2}
    for a, b in itertools.combinations(row, 2):
        if (a.stage, a.microbatch) == (b.stage, b.microbatch) and turn[a.kind] > turn[b.kind]:
            return
    for cuts in itertools.product((False, True), repeat=len(row) - 1):
        parts = [[row[0]]]
        for action, cut in zip(row[1:], cuts, strict=True):
            parts.append([action]) if cut else parts[-1].append(action)
        yield tuple(part[0] if len(part) == 1 else Action.overlap(*part) for part in parts)


TINY = [
    *(((0, 1), 2, "FB"), ((0, 1), 1, "FIW"), ((0, 0), 1, "FIW")),
    *(((0, 1, 0), 1, "FB"), ((0, 1, 1), 1, "FB"), ((0,), 2, "FB")),
]


@pytest.mark.parametrize(("placement", "m", "kinds"), TINY)
@pytest.mark.slow
def test_the_best_of_all_programs_of_a_tiny_size_is_not_below_the_bound(placement, m, kinds):
    rng = random.Random(f"{placement}{m}{kinds}")
    ranks = max(placement) + 1
    todo = [Action(s, Kind(kind), k) for s in range(len(placement)) for kind in kinds for k in range(m)]
    own = [[action for action in todo if placement[action.stage] == rank] for rank in range(ranks)]
    valid = []
    for rows in itertools.product(*([b for row in itertools.permutations(mine) for b in blocks(row)] for mine in own)):
        program = Program(rows, m, placement)
        try:
            simulate(program, replace(Costs.per_rank(program), overlap=0.5))
        except ScheduleError:  # it hangs, if overlaps are blocks
            continue
        valid.append(program)
    assert valid
    for _ in range(4):
        costs = random_costs(rng, len(placement))
        best = min(simulate(program, costs).makespan for program in valid)
        bound = lower_bound(costs, placement, m)
        assert bound <= best + 1e-12
        if ranks == 1 and kinds == "FB":
            assert bound == pytest.approx(best)  # one rank: all in one overlap, or nothing


def fitting(ranks: int, m: int, chunks: int, cap: float, costs: Costs) -> list[Program]:
    """The shipped schedules of that many ranks, microbatches and chunks that keep the cap."""
    made = [getattr(schedules, name)(ranks, m) for name in schedules.__all__ if name != "pipedream_2bw"]
    made += [schedules.interleaved(ranks, m, chunks), schedules.looped_bfs(ranks, m, chunks)]
    made += [schedules.hanayo(ranks, m, chunks // 2)] if chunks % 2 == 0 else []
    made = [program for program in made if program.stages == ranks * chunks]
    return [p for p in made if max(simulate(p, costs).peak_activations) <= cap + 1e-9]


@pytest.mark.sampled
@pytest.mark.parametrize("overlap", [1.0, 0.8])
@pytest.mark.parametrize(("ranks", "m", "chunks"), [(2, 3, 1), (4, 8, 2), (3, 7, 2), (2, 5, 4), (3, 5, 3), (4, 6, 1)])
@pytest.mark.slow
def test_a_plan_is_never_longer_than_the_best_shipped_schedule(ranks, m, chunks, overlap, monkeypatch):
    rng = random.Random(f"{ranks} {m} {chunks} {overlap}")
    for cap in (math.inf, ranks + 0.5):
        stages = ranks * chunks
        times = [[rng.choice((0.5, 1.0, 1.0, 1.5)) for _ in range(stages)] for _ in range(3)]
        costs = Costs(*times, hop=rng.choice((0.0, 0.2)), activation=[1.0 / chunks] * stages, overlap=overlap)
        ticks = itertools.count()  # orders are counted, not seconds
        monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda ticks=ticks: float(next(ticks))))
        found = plan(costs, ranks=ranks, microbatches=m, memory_cap=cap, time_limit_s=200.0)
        shipped = fitting(ranks, m, chunks, cap, costs)
        best = min((simulate(p, costs).makespan for p in shipped), default=math.inf)
        assert found.timeline.makespan <= best + 1e-9
        assert found.lower_bound <= found.timeline.makespan + 1e-9
        report = verify(found.program, costs=costs)
        assert max(report.peak_activations) <= cap + 1e-9
        assert found.timeline == simulate(found.program, costs)


@pytest.mark.slow
def test_a_plan_that_could_gain_by_overlap_does_not_say_that_it_is_optimal():
    costs = Costs([0.5] * 8, [0.5] * 8, [0.5] * 8, overlap=0.8)
    found = plan(costs, ranks=4, microbatches=8, time_limit_s=0.5)
    ours = simulate(dualpipe_v(4, 8), costs).makespan
    assert found.timeline.makespan <= ours == pytest.approx(24.6)
    assert 0 < found.lower_bound <= 0.8 * 25.5 + 1e-9  # everything could run in overlaps
    assert found.gap == pytest.approx(found.timeline.makespan / found.lower_bound - 1) and found.gap > 0


def test_links_of_different_speed_count_in_a_plan():
    table = [[0.0, 0.1, 5.0], [0.1, 0.0, 0.1], [5.0, 0.1, 0.0]]  # the ends are far from each other
    costs = Costs([0.5] * 6, [0.5] * 6, [0.5] * 6, hop=lambda a, b: table[a][b])
    found = plan(costs, ranks=3, microbatches=4, time_limit_s=0.3)
    assert found.timeline == simulate(found.program, replace(costs, hop=table))
    assert found.lower_bound <= found.timeline.makespan <= simulate(schedules.zb_v(3, 4), costs).makespan + 1e-9


@pytest.mark.slow
def test_overlap_counts_among_several_ways_too():
    def way(m, chunks):
        row = [8.0 / m / chunks / 3] * (2 * chunks)
        return m, Costs(row, row, row, hop=0.05, overlap=0.7)

    found = plan_over([way(4, 1), way(8, 2)], ranks=2, time_limit_s=0.3)
    assert found.timeline.makespan <= simulate(dualpipe_v(2, 8), way(8, 2)[1]).makespan + 1e-9
    assert found.lower_bound <= found.timeline.makespan
