"""What an action is and what it waits for, in words.

    Program, Costs, Timeline --> action's text -> a sentence or two (this file) --> tooltips

Of a timeline that ``simulate`` made: when inputs arrive is read from the ends of the events that make them.
"""

from __future__ import annotations

from collections.abc import Iterator

from sixfold.pipeline import Action, Costs, Kind, Program, Timeline

__all__ = ["inputs", "words"]

_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradients",
    Kind.RECOMPUTE: "forward once more",
    Kind.STEP: "optimizer step",
}
_FORWARD: tuple[Kind, ...] = (Kind.F,)
_BACKWARD: tuple[Kind, ...] = (Kind.B, Kind.I)

Ends = dict[tuple[int, Kind, int | None], float]  # stage, kind, microbatch -> when it ended


def words(program: Program, costs: Costs, timeline: Timeline) -> dict[str, str]:
    """A text for each action of ``timeline``, by the action's own text."""
    ends = ends_of(costs, timeline)
    said: dict[str, str] = {}
    free: dict[int, float] = {}
    before: dict[int, Action] = {}
    for rank, action, start, end in timeline.events:
        parts = list(action.each())
        lines = [_is(program, rank, part) for part in parts]
        if len(parts) > 1:
            lines = [f"{len(parts)} actions in this order: {'; '.join(lines)}"]
        lines[0] += f". From {start:g} to {end:g}."
        waits = [
            f"{maker} of rank {source}, there at {arrival:g}"
            for part in parts
            for maker, source, arrival in inputs(program, costs, ends, part)
        ]
        if rank in before:
            waits.append(f"its rank, which runs {before[rank]} until {free[rank]:g}")
        lines.append(f"Waits for {' and for '.join(waits)}." if waits else "Waits for nothing.")
        if left := [str(own) for part in parts if (own := _own(part)) is not None]:
            lines.append(f"Uses what {' and '.join(left)} left on this rank.")
        said[str(action)] = " ".join(lines)
        free[rank], before[rank] = end, action
    return said


def ends_of(costs: Costs, timeline: Timeline) -> Ends:
    """When each action ended; parts of an overlap end one after the other within it."""
    ends: Ends = {}
    for _, action, start, end in timeline.events:
        at, parts = start, list(action.each())
        for part in parts:
            at = end if part is parts[-1] else at + _lasts(costs, part)
            ends[part.stage, part.kind, part.microbatch] = at
    return ends


def inputs(program: Program, costs: Costs, ends: Ends, action: Action) -> Iterator[tuple[Action, int, float]]:
    """(maker, its rank, arrival) of the tensor that ``action`` takes from a neighbouring stage, if it takes one."""
    if action.kind is Kind.F and action.stage > 0:
        near, kinds = action.stage - 1, _FORWARD
    elif action.kind in _BACKWARD and action.stage + 1 < program.stages:
        near, kinds = action.stage + 1, _BACKWARD
    else:
        return
    source, rank = program.placement[near], program.placement[action.stage]
    for kind in kinds:
        if (end := ends.get((near, kind, action.microbatch))) is not None:
            yield Action(near, kind, action.microbatch), source, end + costs.between(source, rank)


def _is(program: Program, rank: int, action: Action) -> str:
    stages = program.stages_of(rank)
    where = f"stage {action.stage} (rank {rank}"
    where += f", chunk {stages.index(action.stage)})" if len(stages) > 1 else ")"
    if action.kind is Kind.STEP:
        return f"{action}: {_NAMES[action.kind]} {action.microbatch} of {where}"
    return f"{action}: {_NAMES.get(action.kind, str(action.kind))} of microbatch {action.microbatch} on {where}"


def _own(action: Action) -> Action | None:
    """The action of the same stage and microbatch that leaves what this one needs."""
    of = {Kind.W: Kind.I, Kind.B: Kind.F, Kind.I: Kind.F, Kind.RECOMPUTE: Kind.F}.get(action.kind)
    return None if of is None else Action(action.stage, of, action.microbatch)


def _lasts(costs: Costs, action: Action) -> float:
    forward, gradient, weight = (
        row[action.stage] for row in (costs.forward, costs.backward_input, costs.backward_weight)
    )
    return {Kind.F: forward, Kind.I: gradient, Kind.W: weight, Kind.B: gradient + weight}.get(action.kind, 0.0)
