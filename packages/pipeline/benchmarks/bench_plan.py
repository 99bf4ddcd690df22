"""How good plans are after five seconds: beside proven optima, and beside the best schedule that PyTorch ships.

    nox -s "bench(pipeline)" -- -k plan        # or: python benchmarks/bench_plan.py   for the table alone
    python benchmarks/bench_plan.py controllable    # V-Half and V-Min beside their authors', a minute
    python benchmarks/bench_plan.py large           # plans for 16 to 64 ranks beside the best shipped, two minutes
    python benchmarks/bench_plan.py large cpu       # the same with five seconds of this process's CPU time each

Four ranks, eight microbatches, V placement. The optima are those of the specification, proven by integer
programming elsewhere. Bubbles are bubble_over_ideal; a cap of 4 microbatches is what 1F1B holds.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from sixfold.pipeline import Costs, Program, schedules, simulate, v_half, v_min
from sixfold.pipeline.plan import search
from sixfold.pipeline.plan.search import Plan, plan
from sixfold.pipeline.program.placement import vee

RANKS, MICROBATCHES = 4, 8
EQUAL, MEASURED = (1.0, 1.0, 1.0, 0.0), (1.0, 1.6, 0.6, 0.1)  # F, I, W of a rank's share; hop
OPTIMA = [(EQUAL, 4.0, 0.0625), (EQUAL, 3.0, 0.104), (EQUAL, 2.5, 0.167), (EQUAL, 2.0, 0.229)]
OPTIMA += [(MEASURED, 5.0, 0.0898), (MEASURED, 6.0, 0.0703)]


def costs_of(times, stages):
    forward, backward_input, backward_weight, hop = times
    share = RANKS / stages
    return Costs(
        [forward * share] * stages,
        [backward_input * share] * stages,
        [backward_weight * share] * stages,
        hop,
        activation=[share] * stages,
    )


@pytest.mark.parametrize(("times", "cap", "optimum"), OPTIMA)
def test_plan(benchmark, times, cap, optimum):
    costs = costs_of(times, 2 * RANKS)
    found = benchmark.pedantic(
        plan,
        (costs,),
        {"ranks": RANKS, "microbatches": MICROBATCHES, "memory_cap": cap, "placement": vee(RANKS)},
        rounds=1,
    )
    bubble = found.timeline.bubble_over_ideal
    over = (1 + bubble) / (1 + optimum) - 1
    benchmark.extra_info.update(
        cap=cap, bubble=round(bubble, 4), optimum=optimum, over_optimum=round(over, 4), gap=round(found.gap, 4)
    )


def test_plan_in_the_memory_of_torchs_best_schedules(benchmark):
    """They hold four microbatches, as 1F1B does; no optimum is known here."""
    found = benchmark.pedantic(equal_memory, rounds=1)
    bubble = found.timeline.bubble_over_ideal
    benchmark.extra_info.update(cap=4.0, bubble=round(bubble, 4), gap=round(found.gap, 4))


def equal_memory() -> Plan:
    """The plan at the measured costs under 1F1B's memory."""
    costs = costs_of(MEASURED, 2 * RANKS)
    return plan(costs, ranks=RANKS, microbatches=MICROBATCHES, memory_cap=4.0, placement=vee(RANKS))


def test_torch_best_schedule_at_the_measured_costs(benchmark):
    bubbles = benchmark.pedantic(torch_bubbles, rounds=1)
    benchmark.extra_info.update({name: (round(bubble, 4), memory) for name, (bubble, memory) in bubbles.items()})


def torch_bubbles() -> dict[str, tuple[float, float]]:
    """bubble_over_ideal and memory, in microbatches, of each of PyTorch's schedules at the measured costs."""
    peer = pytest.importorskip("torch.distributed.pipelining.schedules", reason="the peer")
    bubbles = {}
    for name, chunks in [
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleLoopedBFS", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ]:
        rows = generated(getattr(peer, name), chunks)
        if rows is not None:
            program = Program.from_csv(rows)
            timeline = simulate(program, costs_of(MEASURED, program.stages))
            bubbles[name] = timeline.bubble_over_ideal, max(timeline.peak_activations)
    return bubbles


def generated(schedule: type, chunks: int) -> str | None:
    """The compute-only CSV of one of PyTorch's schedule classes; its stages do nothing but say how many they are."""

    class Stage:
        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages, self.group_rank, self.group_size = index, RANKS * chunks, 0, RANKS
            self.is_first, self.is_last, self.has_backward, self.submod = index == 0, False, True, None
            self.stage_index_to_group_rank: dict[int, int] = {}

    stages = [Stage(at * RANKS) for at in range(chunks)]
    try:
        made = schedule(stages, MICROBATCHES, loss_fn=lambda *_: None)
    except Exception as error:
        pytest.skip(f"{schedule.__name__} cannot be made without processes: {error}")
    order = made.pipeline_order
    return "".join(",".join("" if a is None else str(a) for a in order[rank]) + "\n" for rank in range(RANKS))


# The authors' public greedy, timed by ``simulate``: memory in microbatches, bubble at EQUAL, at MEASURED.
GREEDY = {
    (v_half, 8, 16): (5, 0.177, 0.504),
    (v_half, 12, 36): (7, 0.134, 0.416),
    (v_half, 16, 64): (9, 0.107, 0.360),
    (v_half, 16, 128): (9, 0.053, 0.258),
    (v_half, 24, 96): (13, 0.113, 0.371),
    (v_half, 32, 128): (17, 0.116, 0.376),
    (v_min, 4, 8): (2, 0.229, 0.887),
    (v_min, 8, 16): (4, 0.281, 1.002),
    (v_min, 12, 36): (5, 0.190, 0.921),
    (v_min, 16, 64): (6, 0.154, 0.882),
    (v_min, 16, 128): (6, 0.077, 0.779),
    (v_min, 24, 96): (9, 0.155, 0.890),
    (v_min, 32, 128): (12, 0.160, 0.900),
}


def controllable() -> None:
    """V-Half and V-Min: memory and bubbles beside the authors'."""
    print("| schedule | memory | theirs | bubble at F = I = W | theirs | at 1 : 1.6 : 0.6, hop 0.1 | theirs |")
    print("|---|---|---|---|---|---|---|")
    for (make, ranks, microbatches), (memory, equal, measured) in GREEDY.items():
        program = make(ranks, microbatches)
        ours = [simulate(program, Costs.per_rank(program, *times)) for times in (EQUAL, MEASURED)]
        bubbles = [timeline.bubble_over_ideal for timeline in ours]
        print(
            f"| {make.__name__}({ranks}, {microbatches}) | {max(ours[0].peak_activations):g} | {memory} | "
            f"{bubbles[0]:.3f} | {equal:.3f} | {bubbles[1]:.3f} | {measured:.3f} |"
        )


def large() -> None:
    """Plans of five seconds on many ranks beside the best shipped schedule that keeps the cap."""
    print("| ranks, microbatches, cap | best shipped | its bubble | plan's | bound's | seconds |")
    print("|---|---|---|---|---|---|")
    for ranks, microbatches, cap in (
        (16, 64, 9),
        (16, 64, 16),
        (16, 128, 16),
        (32, 64, 17),
        (32, 64, 32),
        (64, 128, 64),
    ):
        share = [0.5] * (2 * ranks)
        forward, backward_input, backward_weight, hop = MEASURED
        rows = [[time * part for part in share] for time in (forward, backward_input, backward_weight)]
        costs = Costs(*rows, hop, activation=share)
        shipped = {}
        for name in ("zb_v", "v_half", "v_min", "interleaved", "dualpipe_v", "hanayo"):
            program = schedules.by_name(name).with_chunks(ranks, microbatches, 2)
            timeline = simulate(program, costs)
            if max(timeline.peak_activations) <= cap + 1e-9:
                shipped[name] = timeline.bubble_over_ideal
        best = min(shipped, key=shipped.__getitem__)
        began = time.perf_counter()
        found = plan(costs, ranks=ranks, microbatches=microbatches, memory_cap=cap)
        took = time.perf_counter() - began
        bound = found.lower_bound / found.timeline.ideal - 1
        print(
            f"| {ranks}, {microbatches}, {cap} | {best} | {shipped[best]:.4f} | "
            f"{found.timeline.bubble_over_ideal:.4f} | {bound:.4f} | {took:.1f} |",
            flush=True,
        )


def optima() -> None:
    """The table of four ranks."""
    for times, cap, optimum in OPTIMA:
        found = plan(
            costs_of(times, 2 * RANKS), ranks=RANKS, microbatches=MICROBATCHES, memory_cap=cap, placement=vee(RANKS)
        )
        bubble = found.timeline.bubble_over_ideal
        over = (1 + bubble) / (1 + optimum) - 1
        print(
            f"F,I,W,hop {times}  cap {cap}: bubble {bubble:.4f}, optimum {optimum}, "
            f"{100 * over:.2f} % over, gap {found.gap:.4f}"
        )
    same = equal_memory()
    print(f"F,I,W,hop {MEASURED}  cap 4.0: bubble {same.timeline.bubble_over_ideal:.4f}, gap {same.gap:.4f}")
    for name, (bubble, memory) in sorted(torch_bubbles().items(), key=lambda item: item[1]):
        print(f"{name}: bubble {bubble:.4f} at {MEASURED}, memory {memory:g}")


if __name__ == "__main__":
    if "cpu" in sys.argv[2:]:
        time = search.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore
    {"optima": optima, "controllable": controllable, "large": large}[sys.argv[1] if sys.argv[1:] else "optima"]()
