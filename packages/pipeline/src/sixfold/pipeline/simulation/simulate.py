"""Time and memory of a program, before any process starts.

    Program, Costs --> Timeline (this file) --> draw, plan
    measured events --> Timeline (this file) --> draw(beside=...)

Torch-free. A rank runs its list in order. An action starts when the rank is free and its inputs are there. A tensor
from another rank arrives a hop after its maker ended. Sending costs the rank nothing. Messages in the lists change
nothing, so a program and its lowered form have one timeline. Only UNSHARD and REDUCE_GRAD with a price change it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from operator import add

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import WORK, Action, Kind
from sixfold.pipeline.program.entry_times import play, stuck
from sixfold.pipeline.program.program import Program, Weights, program_given
from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.memory import (
    activation_share,
    peak_activations,
    peak_outputs,
    peak_received,
    weight_versions,
)

__all__ = ["Event", "Timeline", "measured", "simulate"]

Event = tuple[int, Action, float, float]  # rank, action, start, end


@dataclass(frozen=True)
class Timeline:
    """When each action runs. Times are in the unit of the costs, sizes in that of ``Costs.activation``.

    Attributes:
        makespan: end of the last event, which in a measured timeline may be a message.
        ideal: time for which the busiest rank works: computes, recomputes or steps. Messages, UNSHARD, RESHARD and
            REDUCE_GRAD are no work, and work on two streams at once counts once.
        bubble_over_ideal: (makespan - ideal) / ideal (Megatron's bubble).
        bubble_over_total: 1 - sum of work / (ranks * makespan) (zero-bubble's "bubble rate").
        span_over_ideal: (longest time from the start of a rank's first work to the end of its last - ideal) / ideal.
        peak_activations: per rank.
        weight_versions: per rank.
        events: of rank 0 in order, then rank 1, and so on. Simulated events are work and what else ``Costs`` prices.
            An overlap whose parts run in order with a gap stands there as its parts.
        peak_outputs: per rank, most stage outputs held at once. An output is held from its F, or RECOMPUTE, to its B
            or I. A recomputed one is also held from its F until it was sent.
        weights: the program's.
        peak_received: per rank, most inputs and gradients from other ranks held at once, each from its RECV to the end
            of its B or I. ``passes.post_ahead`` posts receives as the runner does.
    """

    makespan: float
    ideal: float
    bubble_over_ideal: float
    bubble_over_total: float
    span_over_ideal: float
    peak_activations: tuple[float, ...]
    weight_versions: tuple[int, ...]
    events: tuple[Event, ...]
    peak_outputs: tuple[int, ...] = ()
    weights: Weights = Weights.FLUSHED
    peak_received: tuple[int, ...] = ()


def simulate(program: Program, costs: Costs) -> Timeline:
    """Run ``program`` on paper.

    Raises:
        ScheduleError: the costs are for another number of stages or add up to infinity, the program hangs, or it
            reads weights before the STEP that makes them.
    Cost: O(actions).
    """
    program_given(program)
    if len(costs.forward) != program.stages:
        raise ScheduleError(f"costs are for {len(costs.forward)} stages; the program has {program.stages}")
    timed = WORK | {kind for kind, price in ((Kind.UNSHARD, costs.unshard), (Kind.REDUCE_GRAD, costs.reduce)) if price}
    rows = [[a for a in actions if a.kind in timed] for actions in program.ranks]
    events = _play(program, rows, costs)
    for rank, row in enumerate(events):
        if row and row[-1][3] == math.inf:
            raise ScheduleError(
                f"the times of rank {rank} add up to inf; costs are small enough to be added up: give them in a larger "
                "unit"
            )
    activation = costs.activation if costs.activation is not None else activation_share(program)
    peaks = peak_activations(
        program, activation, inputs=costs.input, input_share=costs.input_share, deferred=costs.deferred
    )
    return _timeline(program, events, peaks)


def measured(events: Iterable[Event], weights: Weights = Weights.FLUSHED) -> Timeline:
    """A timeline of what happened: events of any order, from a trace or a clock, times from 0 on.

    Activations count 1/v per stage, in the order in which the actions began. Messages and the actions of sharded
    stages may run beside work.

    Args:
        weights: of the program that ran.
    Raises:
        ScheduleError: a time is negative or not finite, or an end is before its start. An action with a microbatch is
            there more than once, as in events of several steps. A rank or a stage below the highest has no event. Or a
            forward began before the STEP that makes its weights.
    """
    events = list(events)
    _check_events(events)
    by_rank: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda event: event[2:]):
        by_rank.setdefault(event[0], []).append(event)
    lines = (f"{rank}: {' '.join(str(event[1]) for event in row)}" for rank, row in by_rank.items())
    program = replace(Program.parse("\n".join(lines)), weights=weights)
    rows = [by_rank[rank] for rank in range(len(by_rank))]
    return _timeline(program, rows, peak_activations(program, activation_share(program)))


def _check_events(events: Sequence[Event]) -> None:
    for rank, action, start, end in events:
        if not 0 <= start <= end < math.inf:
            rule = "times are finite and >= 0, and the end is not before the start"
            raise ScheduleError(f"{action} of rank {rank} is at {start}..{end}; {rule}", rank=rank)
    # UNSHARD and REDUCE_GRAD have no microbatch: a stage may be gathered several times, and reduced once per STEP.
    numbered = (part for _, action, *_ in events for part in action.each() if part.microbatch is not None)
    for action, times in Counter(numbered).most_common(1):
        if times > 1:
            raise ScheduleError(f"{action} is there {times} times; give the events of one step and one timeline")


def _timeline(program: Program, events: list[list[Event]], peaks: tuple[float, ...]) -> Timeline:
    """Sum up the events of each rank."""
    worked = [[(start, end) for _, action, start, end in row if action.kind in WORK] for row in events]
    work = [_covered(times) for times in worked]
    makespan = max((end for row in events for *_, end in row), default=0.0)
    span = max((max(end for _, end in times) - times[0][0] for times in worked if times), default=0.0)
    ideal = max(work, default=0.0)
    return Timeline(
        makespan=makespan,
        ideal=ideal,
        bubble_over_ideal=(makespan - ideal) / ideal if ideal else 0.0,
        bubble_over_total=1.0 - sum(work) / (len(work) * makespan) if makespan else 0.0,
        span_over_ideal=(span - ideal) / ideal if ideal else 0.0,
        peak_activations=peaks,
        weight_versions=weight_versions(program),
        events=tuple(event for row in events for event in row),
        peak_outputs=peak_outputs(program),
        weights=program.weights,
        peak_received=peak_received(program),
    )


def _covered(times: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the intervals runs; they ascend in their starts."""
    total, until = 0.0, 0.0
    for start, end in times:
        if end > until:
            total += end - max(start, until)
            until = end
    return total


def _play(program: Program, rows: list[list[Action]], costs: Costs) -> list[list[Event]]:
    """Start and end of every action, rank by rank."""
    lasts = _durations(costs)

    def overlap(entry: Action) -> float:
        return costs.overlap * sum(lasts(part.kind, part.stage) for part in entry.parts)

    in_order = costs.overlap == 1.0  # overlaps are their parts
    lists = [[part for entry in row for part in entry.each()] for row in rows] if in_order else rows
    starts, ends = play(program.placement, lists, lasts, overlap, costs.between)
    if (entry := stuck(lists, starts)) is not None:
        rank, _, action = entry
        raise ScheduleError(f"rank {rank}: {action} never starts; verify(program) shows why", rank=rank, action=action)
    events = [
        list(zip(repeat(rank), *row, strict=False)) for rank, row in enumerate(zip(lists, starts, ends, strict=True))
    ]
    if in_order and any(entry.parts for row in rows for entry in row):
        return [_joined(row, played) for row, played in zip(rows, events, strict=True)]
    return events


def _durations(costs: Costs) -> Callable[[Kind, int], float]:
    none = (0.0,) * len(costs.forward)
    both = tuple(map(add, costs.backward_input, costs.backward_weight))
    of = {Kind.F: costs.forward, Kind.RECOMPUTE: costs.forward, Kind.B: both}
    of |= {Kind.I: costs.backward_input, Kind.W: costs.backward_weight}
    of |= {Kind.STEP: costs.step or none, Kind.UNSHARD: costs.unshard or none, Kind.REDUCE_GRAD: costs.reduce or none}
    return lambda kind, stage: of.get(kind, none)[stage]


def _joined(row: list[Action], played: list[Event]) -> list[Event]:
    """An overlap whose parts follow each other without a gap as one event; one with a gap stays as its parts."""
    joined: list[Event] = []
    at = 0
    for entry in row:
        parts = played[at : at + max(1, len(entry.parts))]
        at += len(parts)
        if entry.parts and all(a[3] == b[2] for a, b in pairwise(parts)):
            parts = [(parts[0][0], entry, parts[0][2], parts[-1][3])]
        joined += parts
    return joined
