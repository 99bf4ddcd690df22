"""The arguments of FullyShardedDataParallel as one checked value.

wrapper/fully_sharded.py --> Options (this file) --> build.py, report/model_report.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from sixfold.fsdp.buffers.flat_buffer import Granularity
from sixfold.fsdp.collectives.default_group import resolve_group
from sixfold.fsdp.config import BufferConfig, MixedPrecision, ShardingStrategy, one_of
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.setup.meta_device import InitFn
from sixfold.fsdp.setup.unit_selection import Selector


@dataclass(frozen=True, kw_only=True)
class Options:
    """Each field is the argument of that name; a new argument is a field here and a line of the signature there."""

    mesh: DeviceMesh | None
    process_group: dist.ProcessGroup | str | None
    strategy: ShardingStrategy | str
    fsdp_unit_modules: Sequence[Selector]
    root_units: bool
    mixed_precision: MixedPrecision
    buffers: BufferConfig
    granularity: Granularity | None
    mesh_for: Callable[[str], DeviceMesh | None] | None
    grad_divisor: float | None
    grad_reduce: str
    init_fn: InitFn | None
    initial: str
    checks: str
    fault_store: Store | None
    timeout_s: float
    busy_timeout_s: float
    first_step_timeout_s: float

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All options."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """Those of ``arguments`` that are options."""
        return cls(**{name: arguments[name] for name in cls.names()})

    def __post_init__(self) -> None:
        names = tuple(strategy.value for strategy in ShardingStrategy)
        object.__setattr__(self, "strategy", ShardingStrategy(one_of("strategy", self.strategy, names)))
        if self.mesh is not None and self.process_group not in (None, "world"):
            raise FsdpError("mesh and process_group are both given; give one, or neither for all ranks")
        object.__setattr__(self, "process_group", None if self.mesh is not None else resolve_group(self.process_group))
        if self.mesh is not None and self.mesh.ndim not in (1, 2):
            raise FsdpError(f"mesh has {self.mesh.ndim} dimensions; it is 1-D (shard) or 2-D (replicate, shard)")
        if isinstance(self.fsdp_unit_modules, (str, type)):  # a text would be taken apart into letters
            raise FsdpError(f"fsdp_unit_modules is {self.fsdp_unit_modules!r}; it is a list: write [...] around it")
        one_of("grad_reduce", self.grad_reduce, ("auto", "last", "microbatch"))
        one_of("initial", self.initial, ("check", "broadcast", "trust"))
        one_of("checks", self.checks, ("off", "order", "unit"))
        if self.grad_reduce == "last" and self.mixed_precision.grad_sum == "tree":
            raise FsdpError(
                "grad_reduce is 'last' and grad_sum 'tree', which reduces each micro-batch; use grad_reduce='auto', or "
                "grad_sum='rank_order'"
            )
        if self.mesh_for is not None and isinstance(self.buffers.merge_bytes, int):
            raise FsdpError(
                f"merge_bytes is {self.buffers.merge_bytes} and mesh_for is set: ranks with experts of other sizes "
                "would merge other units; leave merge_bytes None, or name larger modules in fsdp_unit_modules"
            )
        if self.grad_divisor is not None and not 0 < self.grad_divisor < math.inf:
            raise FsdpError(
                f"grad_divisor is {self.grad_divisor}; it is finite and > 0, or None for the ranks of the mesh"
            )
        for name in ("timeout_s", "busy_timeout_s", "first_step_timeout_s"):
            if not getattr(self, name) > 0:
                raise FsdpError(f"{name} is {getattr(self, name)}; it is > 0")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """``process_group``, looked up; None: one process, or a mesh."""
        assert not isinstance(self.process_group, str), f"{self.process_group!r} was not looked up"
        return self.process_group

    @property
    def longest_s(self) -> float:
        """The longest wait for one collective."""
        return max(self.timeout_s, self.busy_timeout_s, self.first_step_timeout_s)

    @property
    def sharding(self) -> ShardingStrategy:
        """``strategy`` as the enum."""
        return ShardingStrategy(self.strategy)

    def settings(self) -> dict[str, object]:
        """What all ranks must have alike, by name: else their collectives differ. Deadlines may differ."""
        values = {name: value for name, value in _plain_values(self) if not name.endswith("timeout_s")}
        return {"strategy": self.sharding.value, "mesh_for": "given" if self.mesh_for else "none", **values}


def _plain_values(options: Any) -> list[tuple[str, object]]:
    """Numbers, texts and dtypes, those inside the configurations too; callables and groups are a rank's own."""
    found: list[tuple[str, object]] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            found += _plain_values(value)
        elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            found.append((field.name, value))
    return found
