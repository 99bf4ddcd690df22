"""One gather for several small units: it brings their weights to where they wait until a unit is used.

    setup/build.py --> grouped_gathers --> GroupedGather (this file) --> gather.py

A unit is gathered, freed and gathered again as ever; its second gather is a copy. So what a program may do, and the
order in which units take turns in the arena, do not depend on who shares a message. Starts no gather by itself.

[Note: one gather for several] A group's message goes with the first gather of any of its units after main weights
changed. Main weights of all ranks change together, and all ranks use units in one order. So all send it at one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.buffers.weights import Weights
from sixfold.fsdp.collectives.comm import Ranks
from sixfold.fsdp.config import MERGE_BYTES, BufferConfig

_MESSAGE_BYTES = 1 << 20  # of one gather: the next one runs beside the layers of this one


class GroupedGather:
    """Flat buffers of one mesh whose gathers are one message; memory for what it brings."""

    def __init__(self, flat_buffers: Sequence[ParamAndGradBuffer], ranks: Ranks, device: torch.device) -> None:
        self._weights = [one.weights for one in flat_buffers]
        self._comm = ranks.shard
        ends = [0, *accumulate(one.source.nbytes for one in self._weights)]
        self._full = torch.zeros(self._comm.size * ends[-1], dtype=torch.uint8, device=device)
        rows = self._full.view(self._comm.size, -1)
        self._mine = rows[self._comm.rank]
        self._sent = [self._mine[start:stop] for start, stop in pairwise(ends)]
        self._places = {
            weights: rows[:, start:stop] for weights, (start, stop) in zip(self._weights, pairwise(ends), strict=True)
        }
        self._work: Any = None

    @property
    def nbytes(self) -> int:
        """Of the memory in which weights wait."""
        return self._full.nbytes

    def start(self, wait: Callable[[Any], None]) -> bool:
        """A unit of the group is gathered. Returns whether that takes a message: main weights changed."""
        if not any(one.source_stale for one in self._weights):
            return False
        self._arrive(wait)
        for place, weights in zip(self._sent, self._weights, strict=True):
            if weights.source_stale:
                weights.refresh_source(wait)
            place.copy_(weights.source.view(torch.uint8))
        self._work = self._comm.all_gather(self._full, self._mine)
        return True

    def _arrive(self, wait: Callable[[Any], None]) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            wait(work)

    def bring(self, weights: Weights, wait: Callable[[Any], None]) -> None:
        """``weights`` of a flat buffer to where its layers read them."""
        self._arrive(wait)
        weights.gathered.view(torch.uint8).view(self._comm.size, -1).copy_(self._places[weights])


def grouped_gathers(
    units: Sequence[Unit], ranks: Ranks, buffers: BufferConfig, device: torch.device
) -> dict[ParamAndGradBuffer, GroupedGather]:
    """The groups of a model whose layers were merged unasked and which is small as a whole: units that follow each
    other. Over a CPU's back end alone, where a message costs more than its bytes; empty else."""
    unasked = buffers.merge_bytes == "auto" and buffers.gathered_bytes is None and any(unit.beside for unit in units)
    flat_buffers = [flat_buffer for unit in units if unit.shares for flat_buffer in unit.flat_buffers]
    small = sum(one.weights.wire_bytes for one in flat_buffers) <= MERGE_BYTES
    if not unasked or not small or device.type != "cpu" or ranks.shard.size == 1:
        return {}
    groups: list[list[ParamAndGradBuffer]] = []
    held = 0
    for flat_buffer in flat_buffers:
        if flat_buffer.cut.parts == 1 or flat_buffer.ranks is not ranks or flat_buffer.weights.quantized:
            continue
        nbytes = flat_buffer.weights.wire_bytes
        if not groups or held + nbytes > _MESSAGE_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(flat_buffer)
        held += nbytes
    made = [(group, GroupedGather(group, ranks, device)) for group in groups]
    return {flat_buffer: gather for group, gather in made for flat_buffer in group}
