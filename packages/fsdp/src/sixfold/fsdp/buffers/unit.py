"""A unit at work: parameters that are gathered and freed together, and the modules whose calls use them.

    setup/unit_selection.py's UnitSpec + flat buffers --> Unit (this file) --> engine/engine.py

Data alone: starts nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.flat_tensor import ParamRecord


@dataclass(eq=False)
class Unit:
    """A unit at work: its flat buffers, whether it ``shares`` gathered memory, and the stage that drives it or None.

    ``flat_buffers`` are keyed by (mesh, trainable), trainable ones first. ``gathered_bytes`` lie here; ``turn_bytes``
    count where units take turns, the most that any rank gathers: all ranks plan alike.
    """

    name: str
    index: int
    module: nn.Module
    around: tuple[Unit, ...]  # units that hold this one, the root left out
    flat_buffers: tuple[ParamAndGradBuffer, ...]
    device: torch.device
    shares: bool = False
    stage: object | None = None
    large: bool = False  # large_modules made it
    beside: tuple[nn.Module, ...] = ()  # modules that were merged into it

    def __post_init__(self) -> None:
        self.trained = tuple(one for one in self.flat_buffers if one.trainable)
        self.gathered_bytes = sum(one.weights.padded_bytes for one in self.flat_buffers)
        self.gathered_ranges: tuple[tuple[int, int], ...] = ()  # addresses of what turns to other units' weights
        self.turn_bytes = self.gathered_bytes

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Whose calls use it: one, unless small units were merged."""
        return self.module, *self.beside

    @property
    def records(self) -> list[ParamRecord]:
        """Of all flat buffers, trainable ones first."""
        return [record for flat_buffer in self.flat_buffers for record in flat_buffer.records]


def tied_in_root(root: Unit) -> list[str]:
    """Names of the root unit's parameters that several modules register: no unit can hold them."""
    registrations = Counter(parameter for part in root.module.modules() for parameter in part._parameters.values())
    return [record.name for record in root.records if registrations[record.parameter] > 1]
