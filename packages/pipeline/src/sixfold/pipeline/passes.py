"""Passes: from a program to a program.

    schedules/*, text, CSV --> lower, split_backward, recompute, unshard, ... (this file) --> verify, simulate, runner

Torch-free, and none changes its argument. Each takes a compute-only program or a lowered one,
except ``lower`` itself, and looks at every action once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.program.action import BACKWARD_ENDS, COMPUTE, Action, Kind
from sixfold.pipeline.program.lowering import lower, post_ahead, reduce_grad
from sixfold.pipeline.program.placement import at_least_one
from sixfold.pipeline.program.program import Program, Weights

__all__ = [
    "lower",
    "merge_backward",
    "optimizer_step",
    "post_ahead",
    "recompute",
    "reduce_grad",
    "split_backward",
    "strip",
    "unshard",
]

_SENDS = (Kind.SEND_F, Kind.SEND_B)
_NEEDS_WEIGHTS = COMPUTE | {Kind.RECOMPUTE}
_VERSIONS = {weights.value: weights for weights in (Weights.PIPEDREAM, Weights.TWO_BW)}


def strip(program: Program) -> Program:
    """Remove RECOMPUTE and STEP, which PyTorch's CSV has no word for, and every REDUCE_GRAD but a stage's last.

    Without STEPs the whole program is one flush, whose gradients are reduced once, and its weights are flushed.
    """

    def stripped(actions: tuple[Action, ...]) -> list[Action]:
        row: list[Action] = []  # from the end
        reduced: set[int] = set()
        for action in reversed(actions):
            if action.kind is Kind.RECOMPUTE or action.kind is Kind.STEP:
                continue
            if action.kind is Kind.REDUCE_GRAD:
                if action.stage in reduced:
                    continue
                reduced.add(action.stage)
            row.append(action)
        return list(reversed(row))

    return replace(_per_rank(program, stripped), weights=Weights.FLUSHED)


def split_backward(program: Program) -> Program:
    """Write every B as I and W: ``3B0`` becomes ``3I0 3W0``, with the SEND of the gradient between them."""

    def split(actions: tuple[Action, ...]) -> list[Action]:
        row: list[Action] = []
        for position, entry in enumerate(actions):
            if entry.kind is Kind.OVERLAP_F_B:
                row.append(Action.overlap(*(half for part in entry.parts for half in _halves(part))))
            elif _sends_gradient_of(entry, actions[position - 1]):
                row.insert(-1, entry)  # behind I and before W
            else:
                row += _halves(entry)
        return row

    return _per_rank(program, split)


def _halves(action: Action) -> tuple[Action, ...]:
    if action.kind is not Kind.B:
        return (action,)
    return replace(action, kind=Kind.I), replace(action, kind=Kind.W)


def _sends_gradient_of(entry: Action, before: Action) -> bool:
    """Whether ``entry`` is the SEND_B of the B ``before`` it."""
    own = (entry.stage, entry.microbatch) == (before.stage, before.microbatch)
    return own and entry.kind is Kind.SEND_B and before.kind is Kind.B


def merge_backward(program: Program) -> Program:
    """Write a W that directly follows its I as one B, which costs less to run; a SEND_B between them goes behind."""

    def merged(actions: tuple[Action, ...]) -> list[Action]:
        row: list[Action] = []
        for entry in actions:
            at = -2 if len(row) > 1 and row[-1].kind is Kind.SEND_B else -1
            before = row[at] if row else entry
            own = (before.stage, before.microbatch) == (entry.stage, entry.microbatch)
            if entry.kind is Kind.W and before.kind is Kind.I and own:
                row[at] = replace(before, kind=Kind.B)
            else:
                row.append(entry)
        return row

    return _per_rank(program, merged)


def unshard(program: Program, max_active: int = 3) -> Program:
    """Add UNSHARD and RESHARD, so that each stage's weights are there when it computes.

    Before an action its rank has gathered the stages that it computes next: ``max_active`` different ones. All others
    are resharded, and each stage before its STEP. The result equals what PyTorch's runtime adds to a compute-only
    file.

    Args:
        max_active: stages of a rank that are gathered at once, >= 1; an overlap takes as many as it needs.
    Raises:
        ScheduleError: ``max_active`` is below one, or the program has such actions already.
    Cost: O(actions * stages of a rank).
    """
    at_least_one(max_active=max_active)
    _refuse(program, (Kind.UNSHARD, Kind.RESHARD), "unshard")
    return _per_rank(program, lambda actions: _with_gathers(actions, max_active))


def _with_gathers(actions: tuple[Action, ...], max_active: int) -> list[Action]:
    upcoming: list[int] = []  # stages in the order of their next use
    wanted: list[tuple[int, ...]] = []  # of each compute action, from the end
    for entry in reversed(actions):
        if entry.kind in _NEEDS_WEIGHTS:
            own = list(dict.fromkeys(part.stage for part in entry.each()))
            upcoming = own + [stage for stage in upcoming if stage not in own]
            wanted.append(tuple(upcoming[: max(max_active, len(own))]))
    row: list[Action] = []
    active: list[int] = []
    for entry in actions:
        if entry.kind in _NEEDS_WEIGHTS:
            stages = wanted.pop()
            row += (Action(stage, Kind.RESHARD) for stage in sorted(active) if stage not in stages)
            row += (Action(stage, Kind.UNSHARD) for stage in stages if stage not in active)
            active = list(stages)
        elif entry.kind is Kind.STEP and entry.stage in active:
            active.remove(entry.stage)
            row.append(Action(entry.stage, Kind.RESHARD))
        row.append(entry)
    return row + [Action(stage, Kind.RESHARD) for stage in sorted(active)]


def recompute(program: Program, *, microbatches: int | Iterable[int] | None = None) -> Program:
    """Run the forward of some microbatches again, directly before their backward, instead of holding its activations.

    Args:
        microbatches: how many of the m, spread evenly, so that a rank with few in flight gains in proportion; or
            which; None means all.
    Raises:
        ScheduleError: there is no such microbatch or number of them, or the program recomputes already.
    """
    m = program.microbatches
    _refuse(program, (Kind.RECOMPUTE,), "recompute")
    if microbatches is None or not isinstance(microbatches, Iterable):
        count = m if microbatches is None else _whole_or_which(microbatches)
        if not 0 <= count <= m:
            raise ScheduleError(f"recompute of {count} microbatches; the program has {m}")

        def chosen(k: int) -> bool:
            return (k + 1) * count // m > k * count // m

    else:
        which = {whole(f"recompute of microbatch {k!r}: it", k) for k in microbatches}
        if beyond := sorted(k for k in which if not 0 <= k < m):
            raise ScheduleError(f"recompute of microbatch {beyond[0]}; microbatches are 0..{m - 1}")

        def chosen(k: int) -> bool:
            return k in which

    def with_recomputes(actions: tuple[Action, ...]) -> list[Action]:
        row: list[Action] = []
        for entry in actions:
            for part in entry.each():
                if part.kind in (Kind.B, Kind.I) and part.microbatch is not None and chosen(part.microbatch):
                    row.append(replace(part, kind=Kind.RECOMPUTE))
            row.append(entry)
        return row

    return _per_rank(program, with_recomputes)


def _whole_or_which(microbatches: object) -> int:
    try:
        return whole("microbatches", microbatches)
    except ScheduleError as error:
        raise ScheduleError(f"{error}, or which of them") from None


def optimizer_step(program: Program, *, when: str = "flush", steps: int = 1) -> Program:
    """Add the optimizer's STEPs to each stage.

    Args:
        when: where they stand. "flush": at the end of each rank's list, for an optimizer that needs all gradients
            first, such as for their norm. "post_validated": as soon as the stage's own gradients are complete. Such an
            optimizer checks the norm afterwards and takes a step back if it must (arXiv 2401.10241, section 4).
            "pipedream" and "2bw": after the last backward of each batch of ``microbatches / steps``. Each batch then
            makes a weight version, as the program's ``weights`` say (arXiv 1806.03377, 2006.09503).
        steps: batches in the program; more than one with "pipedream" and "2bw" only.
    Raises:
        ScheduleError: ``when`` is unknown, ``steps`` does not divide the microbatches or does not go with ``when``, or
            the program has STEPs already.
    """
    if when not in ("flush", "post_validated", *_VERSIONS):
        raise ScheduleError(f"when is {when!r}; it is 'flush', 'post_validated', 'pipedream' or '2bw'")
    at_least_one(steps=steps)
    steps = int(steps)
    if program.microbatches % steps:
        raise ScheduleError(f"steps is {steps}; it divides the program's {program.microbatches} microbatches")
    if steps > 1 and when not in _VERSIONS:
        raise ScheduleError(f"steps is {steps}; with when={when!r} there is one")
    _refuse(program, (Kind.STEP,), "optimizer_step")
    if when == "flush":
        rows = (
            (*actions, *(Action(stage, Kind.STEP, 0) for stage in program.stages_of(rank)))
            for rank, actions in enumerate(program.ranks)
        )
        return replace(program, ranks=tuple(rows), weights=Weights.FLUSHED)
    stepped = _per_rank(program, lambda actions: _with_steps(actions, program.microbatches // steps))
    return replace(stepped, weights=_VERSIONS.get(when, Weights.FLUSHED))


def _with_steps(actions: tuple[Action, ...], batch: int) -> list[Action]:
    """A STEP behind every ``batch``-th end of a stage's backwards, or behind the REDUCE_GRAD of that batch.

    A program from elsewhere may have messages between the two. The SENDs that follow come first.
    """
    ends: dict[int, int] = {}
    place: dict[tuple[int, int], int] = {}  # (stage, step) -> position of what it stands behind
    for position, entry in enumerate(actions):
        for part in entry.each():
            if part.kind in BACKWARD_ENDS:
                ends[part.stage] = ends.get(part.stage, 0) + 1
            elif part.kind is not Kind.REDUCE_GRAD:
                continue
            count = ends.get(part.stage, 0)
            if count and count % batch == 0:
                place[part.stage, count // batch - 1] = position
    steps: dict[int, list[Action]] = {}
    for (stage, step), position in place.items():
        steps.setdefault(position, []).append(Action(stage, Kind.STEP, step))
    row: list[Action] = []
    due: list[Action] = []
    for position, entry in enumerate(actions):
        if due and entry.kind not in (*_SENDS, Kind.REDUCE_GRAD):
            row += due
            due = []
        row.append(entry)
        due += steps.get(position, ())
    return row + due


def _refuse(program: Program, kinds: Collection[Kind], name: str) -> None:
    for rank, position, action in program.entries():
        if action.kind in kinds:
            raise ScheduleError(
                f"rank {rank} [{position}] {action}: the program has {action.kind}s already; {name} adds its own",
                rank=rank,
                position=position,
                action=action,
            )


def _per_rank(program: Program, change: Callable[[tuple[Action, ...]], Iterable[Action]]) -> Program:
    return replace(program, ranks=tuple(tuple(change(actions)) for actions in program.ranks))
