"""A rank's list written as phases of words: "F0 F0 F1 I1 W1 ...".

    words --> actions of one rank (this file) --> zb_v, dualpipe_v

A word is a kind and the number of one of the rank's chunks; "F0+B1" is an overlap. Each word takes the next microbatch
of its kind on its chunk. So the orders ascend by themselves, and a phase is a string times a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from sixfold.pipeline.program.action import Action, Kind

__all__ = ["numbered"]


def numbered(words: Sequence[str], stages: Sequence[int], microbatches: int) -> tuple[Action, ...]:
    """The actions that ``words`` spell, without those of microbatch ``microbatches`` and later.

    Args:
        words: such as "I1", the next input gradient of ``stages[1]``; B counts as I and W.
        stages: of the rank, chunk 0 first.
    """
    turns = {(kind, stage): 0 for kind in (Kind.F, Kind.I, Kind.W) for stage in stages}
    row = []
    for word in words:
        parts = []
        for piece in word.split("+"):
            kind, stage = Kind(piece[0]), stages[int(piece[1:])]
            k = turns[Kind.I if kind is Kind.B else kind, stage]
            for counted in (Kind.I, Kind.W) if kind is Kind.B else (kind,):
                assert turns[counted, stage] == k, f"{word}: {kind} of stage {stage} after {turns} would not ascend"
                turns[counted, stage] += 1
            if k < microbatches:
                parts.append(Action(stage, kind, k))
        if parts:
            row.append(parts[0] if len(parts) == 1 else Action.overlap(*parts))
    return tuple(row)
