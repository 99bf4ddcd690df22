"""Where a stage's weights are gathered, its gradients reduced, its optimizer stepped.

    Program, positions of its actions --> rules (this file) --> verify

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from sixfold.pipeline.program.action import COMPUTE, Action, Kind
from sixfold.pipeline.program.counterexample import broken, missing
from sixfold.pipeline.program.program import Program

__all__ = ["check_gathers", "check_one_reduction", "check_reductions", "check_steps"]

_REDUCED_TWICE = "gradients are reduced once per step"
_EARLY = "a backward of the stage comes after it in this step"

_NEEDS_WEIGHTS = COMPUTE | {Kind.RECOMPUTE}


def check_gathers(program: Program, rank: int) -> None:
    """A stage that is ever unsharded is so whenever it computes, since its last STEP, and is resharded as often."""
    actions = program.ranks[rank]
    sharded = {action.stage for action in actions if action.kind is Kind.UNSHARD}
    gathered = dict.fromkeys(program.stages_of(rank), 0)
    old: dict[int, Action] = {}  # stages that were gathered before this STEP of theirs
    for position, entry in enumerate(actions):
        for action in entry.parts or (entry,):
            if action.kind is Kind.UNSHARD:
                gathered[action.stage] += 1
            elif action.kind is Kind.RESHARD:
                gathered[action.stage] -= 1
                if gathered[action.stage] < 0:
                    raise broken(program, rank, position, action, "the stage is not unsharded")
                if not gathered[action.stage]:
                    old.pop(action.stage, None)
            elif action.kind is Kind.STEP and gathered[action.stage]:
                old[action.stage] = action
            elif action.stage in sharded and not gathered[action.stage] and action.kind in _NEEDS_WEIGHTS:
                raise broken(program, rank, position, action, "the stage is not unsharded at this compute action")
            elif action.stage in old and action.kind in _NEEDS_WEIGHTS:
                rule = f"the stage was unsharded before {old[action.stage]}; its weights are those of before"
                raise broken(program, rank, position, action, rule)
    for stage, count in gathered.items():
        if count:
            raise missing(program, rank, Action(stage, Kind.RESHARD))


def check_steps(program: Program, starts: list[int], ends: list[int]) -> None:
    """Each stage has STEP 0, 1, ...: as many as every other stage, each behind the backwards of its own batch alone.

    Args:
        starts: position of the B or I of each stage * m + microbatch; I makes gradients too.
        ends: position of its B or W.
    """
    m = program.microbatches
    found: list[list[int]] = [[] for _ in program.placement]
    for rank, actions in enumerate(program.ranks):
        for position, action in enumerate(actions):
            if action.kind is Kind.STEP:
                mine = found[action.stage]
                if action.microbatch != len(mine):
                    rule = f"it is optimizer step {len(mine)} of the stage; steps count from 0"
                    raise broken(program, rank, position, action, rule)
                mine.append(position)
    steps = max(map(len, found))
    for stage, positions in enumerate(found):
        rank = program.placement[stage]
        if len(positions) < steps:
            raise missing(program, rank, Action(stage, Kind.STEP, len(positions)))
        if m % steps:
            rule = f"{steps} steps share {m} microbatches, which they do not divide"
            raise broken(program, rank, positions[-1], Action(stage, Kind.STEP, steps - 1), rule)
        batch = m // steps
        first, last = (at[stage * m : (stage + 1) * m] for at in (starts, ends))
        earliest = list(accumulate(reversed(first), min))[::-1]  # first backward of this microbatch and all later ones
        for step, position in enumerate(positions):
            action = Action(stage, Kind.STEP, step)
            if max(last[step * batch : (step + 1) * batch]) > position:
                rule = f"a backward of its batch (microbatches {step * batch}..{(step + 1) * batch - 1}) comes after it"
                raise broken(program, rank, position, action, rule)
            if (step + 1) * batch < m and (late := earliest[(step + 1) * batch]) < position:
                rule = f"a backward of a later batch is at [{late}]; its gradients are not this step's"
                raise broken(program, rank, position, action, rule)


def check_one_reduction(program: Program, actions: Iterable[tuple[int, int, Action]], ends: list[int]) -> None:
    """Without STEPs: at most one REDUCE_GRAD per stage, behind its last backward; ``ends`` as in ``check_steps``."""
    m, reduced = program.microbatches, set[int]()
    for rank, position, action in actions:
        if action.kind is Kind.REDUCE_GRAD:
            if action.stage in reduced:
                raise broken(program, rank, position, action, _REDUCED_TWICE)
            reduced.add(action.stage)
            if max(ends[action.stage * m : (action.stage + 1) * m]) > position:
                raise broken(program, rank, position, action, _EARLY)


def check_reductions(program: Program, rank: int) -> None:
    """At most one REDUCE_GRAD per stage and STEP, behind that step's last backward and before its STEP."""
    actions = program.ranks[rank]
    stepped = {action.stage for action in actions if action.kind is Kind.STEP}
    # Per stage, what a REDUCE_GRAD would break; the list is read from its end.
    behind = dict.fromkeys(stepped, "no STEP of the stage follows, which would use the sum")
    for position in range(len(actions) - 1, -1, -1):
        entry = actions[position]
        for action in entry.parts or (entry,):
            if action.kind is Kind.STEP:
                behind.pop(action.stage, None)
            elif action.kind is Kind.B or action.kind is Kind.I or action.kind is Kind.W:
                behind[action.stage] = _EARLY
            elif action.kind is Kind.REDUCE_GRAD:
                if action.stage in behind:
                    raise broken(program, rank, position, action, behind[action.stage])
                behind[action.stage] = _REDUCED_TWICE
