"""One rank's program, on all ranks; and the last word before ranks refuse what they were told.

    program of the rank that decides --> control channel (this file) --> runner

Torch-free.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.failures.deadlines import PeerLost
from sixfold.pipeline.program.program import Program

if TYPE_CHECKING:
    from sixfold.pipeline.transport.protocol import Control, Links

__all__ = ["all_know", "broadcast"]


def all_know(control: Control) -> None:
    """Wait until every rank has read what this one has; all ranks that are about to refuse it call this.

    Whoever refuses ends its links, and with them what is still on its way to others. A rank that is left behind here
    knows all too, and finds the same.
    """
    with contextlib.suppress(PeerLost):
        control.gather(0)


def broadcast(program: Program | None, source: int, links: Links) -> Program:
    """``program`` of rank ``source``; that of other ranks is not looked at. All ranks call it.

    Raises:
        ScheduleError: on all ranks, when the source has none.
        PeerLost: a rank did not take part before the deadline.
    """
    if links.rank != source:
        return _read(links.control.receive(source), source)
    written = _written(program)
    for peer in range(links.ranks):
        if peer != source:
            links.control.send(written, peer)
    return _read(written, source)


def _written(program: Program | None) -> bytes:
    if program is None:
        return b"{}"
    whole = {"text": str(program), "microbatches": program.microbatches, "name": program.name}
    return json.dumps(whole | {"placement": program.placement}).encode()


def _read(data: bytes, source: int) -> Program:
    told = json.loads(data)
    if not told:
        raise ScheduleError(f"program is None on rank {source}, which decides; give it there", rank=source)
    program = Program.parse(told["text"], told["microbatches"])
    return replace(program, placement=tuple(told["placement"]), name=told["name"])
