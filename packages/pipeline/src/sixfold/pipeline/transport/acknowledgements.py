"""What a message that comes says about one that was sent: its sender has taken it.

    all ranks' lists --> (RECV here, SEND_B here) --> process_groups.py (this file says which)

gloo does not report that a send is complete. But a rank makes its list in order: a message that it sends behind the
backward that took our gradients says that they came. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator

from sixfold.pipeline.program.action import COMPUTE, Action, Kind
from sixfold.pipeline.program.program import Program

__all__ = ["acknowledgements"]

_SENDS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}
_TAKES = frozenset({Kind.B, Kind.I})


def acknowledgements(program: Program, rank: int) -> Iterator[tuple[Action, Action]]:
    """Pairs (RECV, SEND_B) of ``rank``: where the message of the first is there, the peer has that of the second.

    Of each SEND_B the earliest; none where nothing comes from that peer behind its backward in the program.
    """
    ours = {action for action in program.ranks[rank] if action.kind is Kind.SEND_B}
    for peer in sorted({program.placement[action.stage - 1] for action in ours}):
        found: Action | None = None  # that we receive first of what stands behind, read from the list's end
        behind: Action | None = None  # likewise, but for what the next compute action may hand on early
        for entry in reversed(program.ranks[peer]):
            if entry.kind in _SENDS:
                kind, step = _SENDS[entry.kind]
                if program.placement[entry.stage + step] == rank:
                    found = Action(entry.stage + step, kind, entry.microbatch)
                continue
            parts = tuple(entry.each())
            if not any(part.kind in COMPUTE for part in parts):
                continue
            for part in parts:
                sent = Action(part.stage + 1, Kind.SEND_B, part.microbatch)
                proof = behind if entry.parts else found  # SENDs right behind an overlap are made in its midst
                if part.kind in _TAKES and sent in ours and proof is not None:
                    yield proof, sent
            behind = found
