"""The parameters of a unit in groups, trainable and frozen ones apart: each group is a flat buffer.

    UnitSpec --> groups by mesh and requires_grad (this file) --> ParamAndGradBuffer of each --> Unit

``requires_grad`` decides, as it is when the model is wrapped; one that is frozen later stays in its group. The head of
buffers/flat_buffer.py says why the two do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.collectives.comm import Ranks
from sixfold.fsdp.setup.options import Options
from sixfold.fsdp.setup.unit_selection import UnitSpec

Owned = dict[tuple[Ranks, bool], list[int]]  # by mesh and trainable: bytes of whole tensors that each rank owns


def make_units(
    specs: Sequence[UnitSpec], ranks_of: Callable[[str], Ranks], options: Options, device: torch.device
) -> list[Unit]:
    """The units in order, the root first, each with its flat buffers."""
    units: list[Unit] = []
    by_name: dict[str, Unit] = {}
    held: Owned = {}
    for spec in sorted(specs, key=lambda one: bool(one.name) or bool(one.around)):  # the root unit first
        around = tuple(by_name[name] for name in sorted(spec.around) if name and name in by_name)
        flat_buffers = _flat_buffers_of(spec, ranks_of, options, device, held)
        unit = Unit(
            spec.name, len(units), spec.module, around, flat_buffers, device, large=spec.large, beside=spec.beside
        )
        by_name[spec.name] = unit
        units.append(unit)
    return units


def _flat_buffers_of(
    spec: UnitSpec, ranks_of: Callable[[str], Ranks], options: Options, device: torch.device, held: Owned
) -> tuple[ParamAndGradBuffer, ...]:
    """A flat buffer for each group of parameters: of one mesh, all trainable or all frozen. ``held`` grows."""
    groups: dict[tuple[Ranks, bool], list[tuple[str, nn.Parameter]]] = {}
    for trainable in (True, False):
        for name, parameter in spec.parameters:
            if parameter.requires_grad is trainable:
                groups.setdefault((ranks_of(name), trainable), []).append((name, parameter))
    flat_buffers = []
    for (mesh, trainable), parameters in groups.items():
        owned = held.setdefault((mesh, trainable), [0] * mesh.shard.size)
        flat_buffer = ParamAndGradBuffer(
            spec.name,
            parameters,
            ranks=mesh,
            strategy=options.sharding,
            precision=options.mixed_precision,
            align_bytes=options.buffers.align_bytes,
            device=device,
            granularity=options.granularity,
            held=owned,
        )
        if flat_buffer.cut.parts > 1:
            held[mesh, trainable] = [a + b for a, b in zip(owned, flat_buffer.cut.layout.whole_bytes(), strict=True)]
        flat_buffers.append(flat_buffer)
    return tuple(flat_buffers)
