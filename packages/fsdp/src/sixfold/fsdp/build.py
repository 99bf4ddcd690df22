"""From options to a working engine: groups, buffers, slots, start values; and the report on them.

FullyShardedDataParallel's arguments --> build (this file) --> Engine
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sixfold.fsdp.alloc import TemporaryBucketAllocator
from sixfold.fsdp.buffer import Granularity, ParamAndGradBuffer, ParamRecord
from sixfold.fsdp.comm import Ranks, comm_of, grad_sum_of
from sixfold.fsdp.config import BufferConfig, MixedPrecision, ShardingStrategy, one_of
from sixfold.fsdp.control import Control, GroupControl, NoControl
from sixfold.fsdp.engine import Engine
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults import Faults, PatientStore
from sixfold.fsdp.gather import Gathering
from sixfold.fsdp.guard import guard_of
from sixfold.fsdp.initial import InitFn, agree, set_start_values
from sixfold.fsdp.reduce import Reduction
from sixfold.fsdp.streams import make_stream
from sixfold.fsdp.units import Selector, Unit, UnitSpec, find_units


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of FullyShardedDataParallel, checked."""

    strategy: ShardingStrategy | str
    fsdp_unit_modules: Sequence[Selector]
    precision: MixedPrecision
    buffers: BufferConfig
    granularity: Granularity | None
    grad_divisor: float | None
    grad_reduce: str
    init_fn: InitFn | None
    initial: str
    checks: str
    fault_store: Store | None
    timeout_s: float

    def __post_init__(self) -> None:
        names = tuple(strategy.value for strategy in ShardingStrategy)
        object.__setattr__(self, "strategy", ShardingStrategy(one_of("strategy", self.strategy, names)))
        if isinstance(self.fsdp_unit_modules, (str, type)):  # a text would be taken apart into letters
            raise FsdpError(f"fsdp_unit_modules is {self.fsdp_unit_modules!r}; it is a list: write [...] around it")
        one_of("grad_reduce", self.grad_reduce, ("auto", "last", "microbatch"))
        one_of("initial", self.initial, ("check", "broadcast", "trust"))
        one_of("checks", self.checks, ("off", "order", "unit"))
        if self.grad_divisor is not None and not 0 < self.grad_divisor < math.inf:
            raise FsdpError(
                f"grad_divisor is {self.grad_divisor}; it is finite and > 0, or None for the ranks of the mesh"
            )
        if not self.timeout_s > 0:
            raise FsdpError(f"timeout_s is {self.timeout_s}; it is > 0")

    @property
    def sharding(self) -> ShardingStrategy:
        """``strategy`` as the enum."""
        return ShardingStrategy(self.strategy)

    def refuse_other_meshes(self, module: nn.Module, mesh_for: Callable[[str], DeviceMesh | None] | None) -> None:
        """Parameters on a mesh of their own are not supported."""
        for name, _ in module.named_parameters() if mesh_for is not None else ():
            if mesh_for is not None and mesh_for(name) is not None:
                raise FsdpError(
                    f"mesh_for gives {name} a mesh of its own, which is not supported; return None for it, or wrap the "
                    "modules of each mesh in a FullyShardedDataParallel of their own"
                )

    def settings(self) -> dict[str, object]:
        """What all ranks must have alike, by name: else their collectives differ."""
        p, b = self.precision, self.buffers
        return {
            "strategy": self.sharding.value,
            "mixed_precision": (p.param_dtype, p.reduce_dtype, p.main_dtype, p.grad_sum),
            "gathered_bytes": b.gathered_bytes,
            "prefetch_bytes": b.prefetch_bytes,
            "align_bytes": b.align_bytes,
            "grad_divisor": self.grad_divisor,
            "grad_reduce": self.grad_reduce,
            "initial": self.initial,
            "checks": self.checks,
        }


@dataclass(frozen=True)
class Built:
    """What ``build`` makes."""

    engine: Engine
    slots: TemporaryBucketAllocator
    pool: TemporaryBucketAllocator


def build(
    module: nn.Module, mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None, options: Options
) -> Built:
    """Wrap ``module``: everything but the hooks."""
    groups = _groups(mesh, process_group)
    ranks = Ranks(shard=comm_of(groups[-1]), outer=comm_of(groups[0] if len(groups) == 2 else None))
    real = [group for group in groups if group is not None]
    control: Control = GroupControl(real[::-1], options.timeout_s) if ranks.size > 1 else NoControl()
    device = _device(module, real)
    store = _private_store(options.fault_store, real, options.timeout_s)
    faults = Faults(
        ranks.rank, ranks.size, store, options.timeout_s, host_waits=device.type != "cuda", abort=_abort_of(real)
    )

    def wait(work: Any) -> None:
        faults.wait(work, None, None, "check", on_host=True)

    problem, specs = _look_at(module, options)
    # What one rank finds wrong is raised on all: nobody waits for a rank that gave up.
    agree(module, {**options.settings(), "units": [spec.name for spec in specs]}, problem, control, wait)
    if problem is not None:
        raise problem
    units = _units(specs, ranks, options, device)
    slots = _gather_slots(units, options, device)
    pool = _reduce_pool(units, options, device)
    records = {record.parameter: record for unit in units for buffer in unit.buffers for record in buffer.records}
    engine = _engine(units, ranks, options, device, slots, pool, faults, control, records)
    set_start_values(
        module, records, ranks, control, wait, device=device, init_fn=options.init_fn, initial=options.initial
    )
    engine.draw_curtains()
    return Built(engine, slots, pool)


def _groups(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> list[dist.ProcessGroup | None]:
    """[shard] or [replicate, shard]."""
    if mesh is not None and group is not None:
        raise FsdpError("mesh and process_group are both given; give one, or neither for one process")
    if mesh is None:
        return [group]
    if mesh.ndim not in (1, 2):
        raise FsdpError(f"mesh has {mesh.ndim} dimensions; it is 1-D (shard) or 2-D (replicate, shard)")
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def _device(module: nn.Module, groups: Sequence[dist.ProcessGroup]) -> torch.device:
    """Where the parameters are; for a meta module the group's device, else torch's default device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            return tensor.device
    if groups and "cuda:nccl" in str(dist.get_backend_config(groups[-1])) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def _private_store(store: Store | None, groups: Sequence[dist.ProcessGroup], timeout_s: float) -> Store | None:
    """A corner of ``store`` for this model: its ranks, and how many models these ranks had before."""
    if store is None or not groups:
        return None
    members = "x".join(",".join(map(str, dist.get_process_group_ranks(group))) for group in groups)
    me = dist.get_process_group_ranks(groups[-1])[dist.get_rank(groups[-1])]
    try:
        ordinal = PatientStore(store, timeout_s).add(f"sixfold.fsdp/{members}/{me}", 1)
    except RuntimeError as error:
        raise FsdpError(f"fault_store does not answer ({error}); give one whose process runs, or None") from error
    return PrefixStore(f"sixfold.fsdp/{members}/model{ordinal}", store)


def _abort_of(groups: Sequence[dist.ProcessGroup]) -> Callable[[], None]:
    def abort() -> None:
        for group in groups:
            end = getattr(group, "abort", None)
            if end is not None:
                end()

    return abort


def _look_at(module: nn.Module, options: Options) -> tuple[FsdpError | None, list[UnitSpec]]:
    """The units, or what is wrong with the module."""
    for name, part in module.named_modules():
        if hasattr(part, "main_parameters"):
            return FsdpError(f"{name or 'the module'} is a {type(part).__name__} already; wrap a model once"), []
    for name, parameter in module.named_parameters():
        fault = _fault_of(parameter, options.precision.main_dtype)
        if fault is not None:
            return FsdpError(f"{name} {fault}"), []
    try:
        return None, find_units(module, options.fsdp_unit_modules)
    except FsdpError as error:
        return error, []


def _fault_of(parameter: nn.Parameter, main_dtype: torch.dtype) -> str | None:
    """What is wrong with a parameter, and what to do."""
    if guard_of(parameter) is not None:
        return (
            "was wrapped before, and its weights lie in that wrapper's buffers; wrap the whole model once and name its "
            "units in fsdp_unit_modules"
        )
    if is_lazy(parameter):
        return "has no shape yet (a lazy module); run one forward before wrapping"
    if is_traceable_wrapper_subclass(parameter):
        return (
            f"is a {type(parameter).__name__}; parameters are plain tensors. Give the local tensors of tensor-parallel "
            "weights, and keep other axes outside the mesh given here"
        )
    if not parameter.is_floating_point():
        return f"is {parameter.dtype}; parameters are floating, others are buffers"
    if parameter.dtype.itemsize > main_dtype.itemsize:
        return (
            f"is {parameter.dtype} and main weights would be {main_dtype}, which rounds it; use "
            f"MixedPrecision(main_dtype={parameter.dtype}) or convert the module before wrapping"
        )
    return None


def _units(specs: Sequence[UnitSpec], ranks: Ranks, options: Options, device: torch.device) -> list[Unit]:
    units: list[Unit] = []
    by_name: dict[str, Unit] = {}
    for spec in sorted(specs, key=lambda one: bool(one.name) or bool(one.inside)):  # the root unit first
        streams: list[ParamAndGradBuffer | None] = []
        for trainable in (True, False):
            chosen = [(name, p) for name, p in spec.parameters if p.requires_grad is trainable]
            streams.append(_buffer(spec.name, chosen, ranks, options, device) if chosen else None)
        around = tuple(by_name[name] for name in sorted(spec.inside) if name and name in by_name)
        unit = Unit(spec.name, len(units), spec.module, around, streams[0], streams[1], device)
        by_name[spec.name] = unit
        units.append(unit)
    return units


def _buffer(
    unit: str, parameters: list[tuple[str, nn.Parameter]], ranks: Ranks, options: Options, device: torch.device
) -> ParamAndGradBuffer:
    return ParamAndGradBuffer(
        unit,
        parameters,
        shards=ranks.shard.size,
        rank=ranks.shard.rank,
        strategy=options.sharding,
        precision=options.precision,
        align_bytes=options.buffers.align_bytes,
        device=device,
        granularity=options.granularity,
    )


def _gather_slots(units: Sequence[Unit], options: Options, device: torch.device) -> TemporaryBucketAllocator:
    """Two slots for each depth of units inside units; the root, and everything where it is kept, has its own memory."""
    colours: dict[str, int] = {}
    sizes: list[int] = []
    if options.sharding.shards_params and options.buffers.gathered_bytes == "double":
        counts: dict[int, int] = {}
        for unit in units[1:]:
            if not unit.buffers:
                continue
            depth = len(unit.around)
            unit.slot = 2 * depth + counts.get(depth, 0) % 2
            counts[depth] = counts.get(depth, 0) + 1
            sizes += [0] * (unit.slot + 1 - len(sizes))
            sizes[unit.slot] = max(sizes[unit.slot], unit.gathered_bytes)
            colours[unit.name] = unit.slot
    slots = TemporaryBucketAllocator(sizes, device, colours=colours)
    for unit in units:
        at = 0
        for buffer in unit.buffers:
            if unit.slot is None:
                buffer.bind(None)
            else:
                buffer.bind(slots.memory(unit.slot)[at : at + buffer.gathered_bytes])
                at += buffer.slot_bytes
    return slots


def _reduce_pool(units: Sequence[Unit], options: Options, device: torch.device) -> TemporaryBucketAllocator:
    """Local gradient buffers that units take turns in; the root's gradients come all through a backward."""
    main = options.precision.main_dtype
    sizes = [unit.trainable.full_numel * main.itemsize for unit in units[1:] if unit.trainable is not None]
    if not options.sharding.shards_grads or not sizes:
        return TemporaryBucketAllocator([], device)
    return TemporaryBucketAllocator([max(sizes)] * min(options.buffers.reduce_buffers, len(sizes)), device)


def _engine(
    units: Sequence[Unit],
    ranks: Ranks,
    options: Options,
    device: torch.device,
    slots: TemporaryBucketAllocator,
    pool: TemporaryBucketAllocator,
    faults: Faults,
    control: Control,
    records: Mapping[nn.Parameter, ParamRecord],
) -> Engine:
    engines: list[Engine] = []

    def wait(work: Any, unit: str | None, op: str) -> None:
        engines[0].wait(work, unit, op)

    name = options.precision.grad_sum
    gathering = Gathering(units, ranks, slots, make_stream(device), wait, options.buffers.prefetch_bytes)
    reduction = Reduction(
        units,
        ranks,
        options.precision,
        (grad_sum_of(name, ranks.shard), grad_sum_of(name, ranks.outer)),
        pool,
        make_stream(device),
        wait,
        float(ranks.size if options.grad_divisor is None else options.grad_divisor),
        device,
    )
    engine = Engine(
        units,
        ranks,
        options.sharding,
        gathering,
        reduction,
        faults,
        control,
        checks=options.checks,
        grad_reduce=options.grad_reduce,
    )
    engines.append(engine)
    assert len(engine.records) == len(records), f"{len(records)} parameters, {len(engine.records)} records"
    return engine


def close_process_hooks(handles: Sequence[Any]) -> None:
    """A module that ``fully_shard`` wrapped is gone, and with it the hooks that it held itself."""
    for handle in handles:
        handle.remove()


def close(engine: Engine, handles: Sequence[Any]) -> None:
    """The model is gone: its hooks and its watchdog go too."""
    for handle in handles:
        handle.remove()
    engine.faults.close()
    for curtain in engine.curtains:
        curtain.close()


def report(
    engine: Engine, options: Options, slots: TemporaryBucketAllocator, pool: TemporaryBucketAllocator
) -> dict[str, Any]:
    """Bytes on this rank, and choices."""
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    return {
        "strategy": options.sharding.value,
        "ranks": {"shard": engine.ranks.shard.size, "replicate": engine.ranks.outer.size},
        "units": {
            unit.name: {
                "parameters": sum(record.spec.numel for buffer in unit.buffers for record in buffer.records),
                "gathered_bytes": unit.gathered_bytes,
                "padding_bytes": sum(buffer.layout.padding_bytes for buffer in unit.buffers),
                "slot": unit.slot,
                "layout": [str(buffer.layout) for buffer in unit.buffers],
            }
            for unit in engine.units
        },
        "bytes": {
            "main_weights": sum(buffer.main.flat.nbytes for buffer in buffers if not buffer.main_in_gathered),
            "gather_source": sum(
                buffer.source.nbytes for buffer in buffers if buffer.shards_params and not buffer.aliased
            ),
            "kept_gathered": sum(unit.gathered_bytes for unit in engine.units if unit.slot is None),
            "gather_slots": sum(slots.slot_bytes),
            "reduce_buffers": sum(pool.slot_bytes),
            "local_gradients": sum(buffer.own_local_bytes for buffer in buffers),
            "main_gradients": sum(buffer.home_bytes for buffer in buffers),
        },
        "gathers": engine.gathering.gathers,
        "reductions": engine.reduction.reductions,
        "prefetch": "recorded order, " + ("one unit" if options.buffers.prefetch_bytes is None else "by bytes"),
        "grad_sum": options.precision.grad_sum,
        "user_buffers": "off: registration with NCCL is not supported",
    }
