"""What a rank holds while it runs its list: activations and weight versions.

    one rank's actions --> peaks of what it holds, weight_versions (this file) --> verify, simulate

Torch-free. Memory follows from the order of a list alone; no clock is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.counterexample import broken, missing
from sixfold.pipeline.program.program import Program, Weights

__all__ = ["activation_share", "peak_activations", "peak_outputs", "peak_received", "weight_versions", "with_rounding"]

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def with_rounding(cap: float) -> float:
    """``cap`` and the rounding of sums: of shares such as 1/v, and of sizes in bytes, where no byte more may pass."""
    return cap + 1e-9 + 1e-12 * cap


def activation_share(program: Program) -> tuple[float, ...]:
    """Per stage 1/v: its part of one microbatch's activations on a rank of v stages."""
    return tuple(1.0 / program.placement.count(rank) for rank in program.placement)


def peak_activations(
    program: Program,
    activation: Sequence[float],
    *,
    inputs: Sequence[float] | None = None,
    input_share: float = 0.0,
    deferred: Sequence[float] | None = None,
    cap: float | None = None,
) -> tuple[float, ...]:
    """Largest amount of activations that each rank holds at once.

    F adds its stage's activation and B or W removes it; I removes ``input_share`` of
    it, adds ``deferred`` and W removes the rest. Between F and its RECOMPUTE only the stage's input is held.

    Args:
        activation: per stage, any unit; the result has the same.
        inputs: per stage, size of the stage's input; None counts nothing.
        deferred: per stage, what I adds and W removes; None counts nothing.
        cap: refuse programs that hold more.
    Raises:
        ScheduleError: the first action over ``cap``, with need and cap.
    """
    kept = [0.0] * len(activation) if inputs is None else inputs
    late = [0.0] * len(activation) if deferred is None else deferred
    # What each action adds, per stage; kinds that are not here add nothing.
    adds: dict[Kind, Sequence[float]] = {
        Kind.F: activation,
        Kind.RECOMPUTE: [whole - part for whole, part in zip(activation, kept, strict=True)],
        Kind.B: [-whole for whole in activation],
        Kind.I: [more - whole * input_share for whole, more in zip(activation, late, strict=True)],
        Kind.W: [-more - whole * (1.0 - input_share) for whole, more in zip(activation, late, strict=True)],
    }
    peaks = []
    for rank, actions in enumerate(program.ranks):
        kinds = {entry.kind for entry in actions}
        flat = [part for entry in actions for part in entry.each()] if Kind.OVERLAP_F_B in kinds else actions
        changes = [table[a.stage] for a in flat if (table := adds.get(a.kind)) is not None]
        if Kind.RECOMPUTE in kinds:
            again = {(a.stage, a.microbatch) for a in flat if a.kind is Kind.RECOMPUTE}
            for at, a in enumerate(a for a in flat if a.kind in adds):
                if a.kind is Kind.F and (a.stage, a.microbatch) in again:
                    changes[at] = kept[a.stage]
        peak = max(accumulate(changes), default=0.0)
        if cap is not None and peak > with_rounding(cap):
            raise _over(program, rank, adds, changes, cap)
        peaks.append(peak)
    return tuple(peaks)


def peak_outputs(program: Program) -> tuple[int, ...]:
    """Most stage outputs that each rank holds at once.

    From its F until it was sent, or its taker on the same rank is done with it (B or I), and until autograd is done
    with it: B or I of its own stage. What F of a microbatch with RECOMPUTE makes autograd does not keep; RECOMPUTE
    makes it anew. A program without messages sends where a lowered one does: directly behind F.
    """
    lowered, placement = program.lowered, program.placement
    peaks = []
    for rank, actions in enumerate(program.ranks):
        parts = [part for entry in actions for part in entry.each()]
        again = {(a.stage, a.microbatch) for a in parts if a.kind is Kind.RECOMPUTE}
        held = peak = 0
        for a in parts:
            kind, key = a.kind, (a.stage, a.microbatch)
            if kind is Kind.F:
                held += 1
                peak = max(peak, held)
                last = a.stage + 1 == len(placement)
                held -= key in again and (last or (not lowered and placement[a.stage + 1] != rank))
            elif kind is Kind.RECOMPUTE:
                held += 1
                peak = max(peak, held)
            elif kind is Kind.SEND_F:
                held -= key in again
            elif kind is Kind.B or kind is Kind.I:
                below = (a.stage - 1, a.microbatch)
                held -= 1 + (below in again and placement[a.stage - 1] == rank)
        peaks.append(peak)
    return tuple(peaks)


def peak_received(program: Program) -> tuple[int, ...]:
    """Most tensors from other ranks that each rank holds at once: inputs, and gradients of outputs.

    From where its receive is posted, the place of its RECV, until the stage's B or I ended; without messages from the
    start of the action that takes it. ``passes.post_ahead`` posts as early as the runner does.
    """
    lowered, placement = program.lowered, program.placement
    peaks = []
    for rank, actions in enumerate(program.ranks):
        held = peak = 0
        for a in (part for entry in actions for part in entry.each()):
            kind, stage = a.kind, a.stage
            backward = kind is Kind.B or kind is Kind.I
            far = stage > 0 and placement[stage - 1] != rank  # its input comes from another rank
            above = stage + 1 < len(placement) and placement[stage + 1] != rank  # so does its output's gradient
            held += kind in _RECEIVES or (not lowered and ((kind is Kind.F and far) or (backward and above)))
            peak = max(peak, held)
            if backward:
                held -= far + above
        peaks.append(peak)
    return tuple(peaks)


def _over(
    program: Program, rank: int, adds: Mapping[Kind, object], changes: Sequence[float], cap: float
) -> ScheduleError:
    """The first action of ``rank`` that goes over ``cap``."""
    places = [(i, a) for i, e in enumerate(program.ranks[rank]) for a in (e.parts or (e,)) if a.kind in adds]
    held, (position, action) = next(
        (held, place) for held, place in zip(accumulate(changes), places, strict=True) if held > with_rounding(cap)
    )
    return broken(program, rank, position, action, f"holds {held:.12g} of activations; memory_cap is {cap:.12g}")


def weight_versions(program: Program) -> tuple[int, ...]:
    """Largest number of weight versions of one stage that each rank needs at once.

    One where weights are flushed, and two for 2BW, or one if there is one STEP. With PipeDream's a microbatch keeps the
    version that its stage had at its forward until its last backward, and the newest one is always there.

    Raises:
        ScheduleError: a forward comes before the STEP that makes the version which it reads, or versions are kept by a
            program without STEPs.
    """
    steps = [action.microbatch or 0 for _, _, action in program.entries() if action.kind is Kind.STEP]
    if not steps:
        if program.weights is not Weights.FLUSHED:
            raise missing(program, program.placement[0], Action(0, Kind.STEP, 0))
        return (1,) * len(program.ranks)
    if program.weights is Weights.PIPEDREAM:
        return tuple(_versions_of_rank(actions) for actions in program.ranks)
    batches = max(steps) + 1
    old = int(program.weights is Weights.TWO_BW)  # batches that a version is behind
    if batches > 1:
        _check_reads(program, max(1, program.microbatches // batches), old)
    return (1 + min(old, batches - 1),) * len(program.ranks)


def _check_reads(program: Program, batch: int, old: int) -> None:
    """Each forward of batch t stands behind STEP t - 1 - ``old`` of its stage."""
    for rank, actions in enumerate(program.ranks):
        made: dict[int, int] = {}
        for position, entry in enumerate(actions):
            for action in entry.each():
                if action.kind is Kind.STEP:
                    made[action.stage] = made.get(action.stage, 0) + 1
                elif action.kind is Kind.F and action.microbatch is not None:
                    needed = action.microbatch // batch - old
                    if needed > made.get(action.stage, 0):
                        step = Action(action.stage, Kind.STEP, needed - 1)
                        rule = (
                            f"it reads W({needed}) ({program.weights} weights) and {step} comes after it; "
                            "a program that keeps older versions says 'weights: pipedream' or 'weights: 2bw'"
                        )
                        raise broken(program, rank, position, action, rule)


def _versions_of_rank(actions: tuple[Action, ...]) -> int:
    newest: dict[int, int] = {}
    used: dict[tuple[int, int | None], int] = {}
    most = 1
    for action in (part for entry in actions for part in entry.each()):
        key = (action.stage, action.microbatch)
        if action.kind is Kind.F:
            used[key] = newest.get(action.stage, 0)
        elif action.kind in (Kind.B, Kind.W):
            used.pop(key, None)
        elif action.kind is Kind.STEP:
            newest[action.stage] = newest.get(action.stage, 0) + 1
            live = {version for (stage, _), version in used.items() if stage == action.stage}
            most = max(most, len(live | {newest[action.stage]}))
    return most
