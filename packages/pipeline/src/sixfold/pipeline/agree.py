"""One rank's program, on all ranks.

    program of the rank that decides --> control channel (this file) --> run

Torch-free.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program import Program

if TYPE_CHECKING:
    from sixfold.pipeline.transport import Links

__all__ = ["broadcast"]


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
