"""From options to a working engine: groups, buffers, slots, start values.

    options.py --> build (this file) --> Engine

Made in the order of need: groups, what is waited with, units, what moves them, the engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sixfold.fsdp.alloc import TemporaryBucketAllocator
from sixfold.fsdp.board import Boards, open_boards, tidy
from sixfold.fsdp.buffer import ParamAndGradBuffer
from sixfold.fsdp.comm import Ranks
from sixfold.fsdp.control import Control, StoreControl, control_of, exchange
from sixfold.fsdp.engine import Engine
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults import Faults
from sixfold.fsdp.gather import Gathering
from sixfold.fsdp.guard import guard_of
from sixfold.fsdp.initial import agree, set_start_values
from sixfold.fsdp.links import Links
from sixfold.fsdp.options import Options
from sixfold.fsdp.placement import placement_of
from sixfold.fsdp.quantized import Fp8Scales
from sixfold.fsdp.reduce import Reduction
from sixfold.fsdp.scaled import Fp8Matmul, Transposes, fault_of
from sixfold.fsdp.signatures import Signatures
from sixfold.fsdp.streams import make_stream
from sixfold.fsdp.units import Unit, UnitSpec, find_units
from sixfold.fsdp.waiting import Waiting

Owned = dict[tuple[Ranks, bool], list[int]]  # by mesh and trainable: bytes of whole tensors that each rank owns


@dataclass(frozen=True)
class Fp8:
    """What fp8 parameters share in a model; ``transposes``: None where layers multiply no bytes."""

    scales: Fp8Scales
    transposes: Transposes | None


@dataclass(frozen=True)
class Built:
    """What ``build`` makes."""

    engine: Engine
    pool: TemporaryBucketAllocator
    fp8: Fp8
    links: Links


def build(module: nn.Module, options: Options) -> Built:
    """Wrap ``module``: everything but the hooks."""
    groups = _groups(options)
    real = [group for group in groups if group is not None]
    device = _device(module, real)
    boards = open_boards(
        options.mesh, real, options.fault_store, options.timeout_s, alone=options.buffers.always_communicate
    )
    links = Links(boards.messages, device, options.buffers, options.longest_s)
    control = control_of(real, boards.messages, boards.rank, boards.size)
    faults = Faults(
        boards.rank,
        boards.size,
        boards.signs,
        options.timeout_s,
        first_step_timeout_s=options.first_step_timeout_s,
        host_waits=device.type != "cuda",
        abort=links.abort,
        launched=links.launched,
        store_name=boards.name,
    )
    _end_with_faults(faults, control, links, boards)

    def wait(work: Any) -> None:  # of no step and no unit
        faults.wait(work, None, None, "check", on_host=True)

    problem, specs = _look_at(module, options, device)
    # What one rank finds wrong is raised on all: nobody waits for a rank that gave up.
    names = {"units": [spec.name for spec in specs], "fp8": _fp8_names(module, options)}
    agree(module, {**options.settings(), **names}, problem, control, wait)
    if problem is not None:
        raise problem
    ranks = Ranks(shard=links.comm(groups[-1]), outer=links.comm(groups[0] if len(groups) == 2 else None))
    buffers, memory = options.buffers, links.user_buffers()
    with memory.memory():
        units = _units(specs, ranks, options, device)
        placement = placement_of(
            units, options.sharding, buffers.gathered_bytes, align_bytes=buffers.align_bytes, device=device
        )
        pool = _reduce_pool(units, options, device)
    memory.register(lambda mine: all(row[0] for row in exchange(control, [int(mine)], wait)))
    fp8 = _fp8_of(units, options, device)
    waiting = Waiting(faults)
    gathering = Gathering(
        units,
        placement=placement,
        stream=make_stream(device),
        wait=waiting,
        prefetch_bytes=buffers.prefetch_bytes,
        transposes=fp8.transposes,
    )
    reduction = Reduction(
        units,
        precision=options.mixed_precision,
        pool=pool,
        stream=make_stream(device),
        wait=waiting,
        divisor=float(ranks.size if options.grad_divisor is None else options.grad_divisor),
        device=device,
    )
    engine = Engine(
        units,
        ranks=ranks,
        strategy=options.sharding,
        grad_reduce=options.grad_reduce,
        gathering=gathering,
        reduction=reduction,
        waiting=waiting,
        signatures=Signatures(options.checks if ranks.size > 1 else "off", units, control, waiting),
        control=control,
    )
    set_start_values(
        module, engine.records, ranks, control, wait, device=device, init_fn=options.init_fn, initial=options.initial
    )
    for unit in units:
        for stream in unit.streams:
            stream.weights.show_bytes_only(lambda: bool(engine.state_dict_asked))
    engine.draw_curtains()
    return Built(engine, pool, fp8, links)


def _groups(options: Options) -> list[dist.ProcessGroup | None]:
    """[shard] or [replicate, shard]."""
    mesh = options.mesh
    return [options.process_group] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]


def _device(module: nn.Module, groups: Sequence[dist.ProcessGroup]) -> torch.device:
    """Where the parameters are; for a meta module the group's device, else torch's default device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            return tensor.device
    if groups and "cuda:nccl" in str(dist.get_backend_config(groups[-1])) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def _end_with_faults(faults: Faults, control: Control, links: Links, boards: Boards) -> None:
    """The model's thread of messages, communicators and keys end when its faults are closed."""

    def close() -> None:
        if isinstance(control, StoreControl):
            control.close()
        links.close(failed=faults.failed is not None)

    def clear() -> None:
        for store in {boards.messages, boards.signs}:
            if store is not None:
                tidy(store, boards.size)

    faults.at_end(close, clear)


def _fp8_names(module: nn.Module, options: Options) -> list[str]:
    chosen = options.mixed_precision.fp8
    return [] if chosen is None else [name for name, _ in module.named_parameters() if chosen(name)]


def _fp8_of(units: Sequence[Unit], options: Options, device: torch.device) -> Fp8:
    """Scales of all fp8 parameters, and where their layers multiply bytes, transposed copies of them."""
    streams = [stream for unit in units for stream in unit.streams]
    scales = Fp8Scales(
        (
            (stream.ranks.shard if stream.cut.parts > 1 else None, stream.trainable, stream.weights.quantized)
            for stream in streams
        ),
        device,
    )
    for stream in streams:
        stream.weights.scales = scales if stream.weights.quantized else None
    if not Fp8Matmul(options.mixed_precision.fp8_matmul).on_bytes:
        return Fp8(scales, None)
    tensors = {
        unit.name: (len(unit.around) if unit.index else -1, [t for one in unit.streams for t in one.weights.quantized])
        for unit in units
    }
    return Fp8(scales, Transposes(tensors, device))


def _look_at(module: nn.Module, options: Options, device: torch.device) -> tuple[FsdpError | None, list[UnitSpec]]:
    """The units, or what is wrong with the module."""
    for name, part in module.named_modules():
        if hasattr(part, "main_parameters"):
            return FsdpError(f"{name or 'the module'} is a {type(part).__name__} already; wrap a model once"), []
    for name, parameter in module.named_parameters():
        fault = _fault_of(parameter, options.mixed_precision.main_dtype)
        if fault is not None:
            return FsdpError(f"{name} {fault}"), []
    fault = _fp8_fault(module, options, device)
    if fault is not None:
        return FsdpError(fault), []
    try:
        return None, find_units(module, options.fsdp_unit_modules, root_units=options.root_units)
    except FsdpError as error:
        return error, []


def _fp8_fault(module: nn.Module, options: Options, device: torch.device) -> str | None:
    matmul = Fp8Matmul(options.mixed_precision.fp8_matmul)
    names = _fp8_names(module, options) if matmul.on_bytes else []
    for name in names:
        fault = fault_of(module.get_parameter(name), device)
        if fault is not None:
            return (
                f"{name} {fault}: fp8_matmul={matmul.value!r} cannot multiply it; leave it out of MixedPrecision.fp8, "
                "or use fp8_matmul='emulate'"
            )
    return None


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
    held: Owned = {}
    for spec in sorted(specs, key=lambda one: bool(one.name) or bool(one.inside)):  # the root unit first
        around = tuple(by_name[name] for name in sorted(spec.inside) if name and name in by_name)
        streams = _streams(spec, ranks, options, device, held)
        unit = Unit(spec.name, len(units), spec.module, around, streams, device, large=spec.large)
        by_name[spec.name] = unit
        units.append(unit)
    return units


def _streams(
    spec: UnitSpec, ranks: Ranks, options: Options, device: torch.device, held: Owned
) -> tuple[ParamAndGradBuffer, ...]:
    """A stream for each mesh of the unit's parameters and for trainable and frozen ones; ``held`` grows."""
    chosen: dict[tuple[Ranks, bool], list[tuple[str, nn.Parameter]]] = {}
    for trainable in (True, False):
        for name, parameter in spec.parameters:
            if parameter.requires_grad is trainable:
                chosen.setdefault((ranks, trainable), []).append((name, parameter))
    streams = []
    for (mesh, trainable), parameters in chosen.items():
        owned = held.setdefault((mesh, trainable), [0] * mesh.shard.size)
        stream = ParamAndGradBuffer(
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
        if stream.cut.parts > 1:
            held[mesh, trainable] = [a + b for a, b in zip(owned, stream.cut.layout.whole_bytes(), strict=True)]
        streams.append(stream)
    return tuple(streams)


def _reduce_pool(units: Sequence[Unit], options: Options, device: torch.device) -> TemporaryBucketAllocator:
    """Local gradient buffers that units take turns in; the root's gradients come all through a backward."""
    sizes = [sum(stream.gradients.pool_bytes for stream in unit.trained) for unit in units[1:] if unit.trained]
    if not options.sharding.shards_grads or not sizes:
        return TemporaryBucketAllocator([], device)
    return TemporaryBucketAllocator([max(sizes)] * min(options.buffers.reduce_buffers, len(sizes)), device)


def end_with(module: nn.Module, engine: Engine, handles: Sequence[Any]) -> None:
    """For a module that ``fully_shard`` wrapped: when it is gone, with the hooks that it held itself, the rest goes."""
    weakref.finalize(module, _close_rest, engine.wait.faults, handles)
    tidy_with(module, engine)


def _close_rest(faults: Faults, handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
    faults.close()


def tidy_with(owner: object, engine: Engine) -> weakref.finalize[..., object]:
    """When ``owner`` is dropped, keys are deleted; not at the end of the process, where stores go too."""
    end: weakref.finalize[..., object] = weakref.finalize(owner, engine.wait.faults.tidy)
    end.atexit = False
    return end


def close(engine: Engine, handles: Sequence[Any]) -> None:
    """The model is gone: its hooks and its watchdog go too."""
    for handle in handles:
        handle.remove()
    engine.wait.faults.close()
    for curtain in engine.curtains:
        curtain.close()
