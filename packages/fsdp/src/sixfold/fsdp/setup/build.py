"""From options to a working engine: groups, buffers, slots, start values.

    options.py --> build (this file) --> Engine

Made in the order of need: groups, what is waited with, units, what moves them, the engine.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.collectives.comm import Launches, Ranks
from sixfold.fsdp.collectives.communicators import Communicators
from sixfold.fsdp.collectives.host_messages import Control, StoreControl, control_of, exchange, exchange_text
from sixfold.fsdp.collectives.own_meshes import Meshes
from sixfold.fsdp.collectives.streams import done_behind, make_stream
from sixfold.fsdp.config import ShardingStrategy
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.engine.gather import Gathering
from sixfold.fsdp.engine.grouped_gather import grouped_gathers
from sixfold.fsdp.engine.rank_agreement import OrderCheck, UsedParameters
from sixfold.fsdp.engine.reduce import Reduction
from sixfold.fsdp.engine.reduction_paths import ReductionPaths, bucket_bytes_of
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.deadlines import Faults
from sixfold.fsdp.faults.heartbeat import Launched
from sixfold.fsdp.faults.local_processes import LocalProcesses, this_process
from sixfold.fsdp.faults.model_store import ModelStores, open_model_stores, tidy
from sixfold.fsdp.fp8.quantized import Fp8Scales
from sixfold.fsdp.fp8.scaled_matmul import Fp8Matmul, Transposes
from sixfold.fsdp.placement.placement import placement_of
from sixfold.fsdp.setup.options import Options
from sixfold.fsdp.setup.parameter_guards import guard_parameters
from sixfold.fsdp.setup.start_values import agree, agree_on_meshes, set_start_values, warn_of_statistics
from sixfold.fsdp.setup.trainable_and_frozen import make_units
from sixfold.fsdp.setup.unit_selection import UnitSpec
from sixfold.fsdp.setup.wrappable import fp8_names_of, look_at


@dataclass(frozen=True)
class Fp8:
    """What fp8 parameters share in a model; ``transposes``: None where layers multiply no bytes."""

    scales: Fp8Scales
    transposes: Transposes | None


@dataclass(frozen=True)
class Built:
    """What ``build`` makes."""

    engine: Engine
    fp8: Fp8
    communicators: Communicators


def build(module: nn.Module, options: Options) -> Built:
    """Wrap ``module``: everything but the hooks."""
    groups = _groups(options)
    chosen, options = options, as_run(options, groups)
    real = [group for group in groups if group is not None]
    device = _device(module, real)
    stores = open_model_stores(
        options.mesh, real, options.fault_store, options.timeout_s, alone=options.buffers.always_communicate
    )
    communicators = Communicators(stores.messages, device, options.buffers, options.longest_s)
    control = control_of(real, stores.messages, stores.rank, stores.size)
    faults = _faults(stores, options, communicators, device, _launched(communicators, groups[-1], control))
    _end_with_faults(faults, control, communicators, stores)

    with contextlib.ExitStack() as given_up:
        given_up.callback(faults.close)  # a wrap that raises leaves no thread and no communicator

        wait = faults.for_control(None, "check")
        faults.local_processes = _local_processes(control, stores.rank, wait)
        problem, specs, meshes = look_at(module, options, device)
        # What one rank finds wrong is raised on all: nobody waits for a rank that gave up.
        names = {
            "units": [_name_on_all_ranks(spec, meshes) for spec in specs],
            "fp8": [name for name in fp8_names_of(module, options) if name not in meshes.own],
        }
        agree(module, {**chosen.settings(), **names}, problem, meshes, control, wait)
        if problem is not None:
            raise problem
        own_meshes = options.mesh_for is not None and agree_on_meshes(module, meshes, control, wait)
        ranks = Ranks(
            shard=communicators.comm(groups[-1]), outer=communicators.comm(groups[0] if len(groups) == 2 else None)
        )
        own = meshes.connect(communicators.comm)
        _refuse_ranks_of_tree(options.mixed_precision.grad_sum, [ranks, *own.values()])
        buffers, memory = options.buffers, communicators.user_buffers()
        with memory.memory():
            units = make_units(specs, lambda name: own.get(name, ranks), options, device)
            bucket_bytes = bucket_bytes_of(units) if buffers.bucket_bytes is None else buffers.bucket_bytes
            if own_meshes:
                bucket_bytes = _plan_alike(units, bucket_bytes, control, wait)
            placement = placement_of(
                units,
                options.sharding,
                buffers.gathered_bytes,
                align_bytes=buffers.align_bytes,
                device=device,
                own_memory=buffers.fill_freed,
            )
            shards_grads = options.sharding.shards_grads
            paths = ReductionPaths(units, options.mixed_precision, shards_grads=shards_grads, bucket_bytes=bucket_bytes)
            pool = paths.make_pool(buffers.reduce_buffers, device, fill=buffers.fill_freed)
        memory.register(lambda mine: all(row[0] for row in exchange(control, [int(mine)], wait)))
        fp8 = _fp8_of(units, options, device)
        used = _used(units, ranks, meshes if own_meshes else None, control, wait)
        gathering = Gathering(
            units,
            placement=placement,
            stream=make_stream(device),
            wait=faults.wait,
            prefetch_bytes=buffers.prefetch_bytes,
            transposes=fp8.transposes,
            fill_freed=buffers.fill_freed,
            grouped=grouped_gathers(units, ranks, buffers, device),
        )
        reduction = Reduction(
            units,
            precision=options.mixed_precision,
            paths=paths,
            pool=pool,
            stream=make_stream(device),
            wait=faults.wait,
            at_once=device.type == "cuda",
            own_meshes=own_meshes,
            divisor=float(ranks.size if options.grad_divisor is None else options.grad_divisor),
            device=device,
            used=used,
        )
        engine = Engine(
            units,
            ranks=ranks,
            strategy=options.sharding,
            grad_reduce=options.grad_reduce,
            gathering=gathering,
            reduction=reduction,
            faults=faults,
            order_check=OrderCheck(options.checks, units, ranks, control, faults, used),
            control=control,
        )
        set_start_values(
            module,
            engine.records,
            ranks,
            meshes,
            control,
            wait,
            device=device,
            init_fn=options.init_fn,
            initial=options.initial,
            own_meshes=own_meshes,
        )
        if ranks.size > 1:
            warn_of_statistics(module)
        guard_parameters(engine, as_sharded=chosen.sharding.shards_params and not options.sharding.shards_params)
        faults.step = 0
        given_up.pop_all()
    return Built(engine, fp8, communicators)


def _refuse_ranks_of_tree(grad_sum: str, meshes: Sequence[Ranks]) -> None:
    sizes = [comm.size for ranks in meshes for comm in (ranks.shard, ranks.outer)]
    odd = next((size for size in sizes if grad_sum == "tree" and size & (size - 1)), None)
    if odd is not None:
        less = 1 << (odd.bit_length() - 1)
        raise FsdpError(
            f"grad_sum is 'tree' and gradients are summed over {odd} ranks: ranks are added in pairs, so their number "
            f"is a power of two; use {less} or {2 * less} ranks, or grad_sum='rank_order'"
        )


def as_run(options: Options, groups: Sequence[dist.ProcessGroup | None]) -> Options:
    """One process has all of everything: unless it is told how much to gather, it runs as ``no_shard``.

    Nothing is then gathered, copied or freed. ``fill_freed`` and ``always_communicate`` try what more ranks do.
    """
    buffers = options.buffers
    several = any(group is not None and group.size() > 1 for group in groups)
    tries = buffers.fill_freed or buffers.always_communicate or options.mesh_for is not None
    if several or tries or buffers.gathered_bytes is not None:
        return options
    return replace(options, strategy=ShardingStrategy.no_shard)


def _launched(
    communicators: Communicators, group: dist.ProcessGroup | None, control: Control
) -> Callable[[], Launched]:
    """What this rank launched, asked by a thread: also when the user has destroyed the group, so by its ranks."""
    ranks: Sequence[int] = dist.get_process_group_ranks(group) if group is not None else ()
    return partial(communicators.launched, ranks, _launches(control) if ranks else None)


def _launches(control: Control) -> Launches | None:
    return control.launches if isinstance(control, StoreControl) else None


def _faults(
    stores: ModelStores,
    options: Options,
    communicators: Communicators,
    device: torch.device,
    launched: Callable[[], Launched],
) -> Faults:
    return Faults(
        stores.rank,
        stores.size,
        stores.signs,
        options.timeout_s,
        first_step_timeout_s=options.first_step_timeout_s,
        busy_timeout_s=options.busy_timeout_s,
        host_waits=device.type != "cuda",
        done_of=lambda work: done_behind(device),
        abort=communicators.abort,
        launched=launched,
        store_name=stores.name,
    )


def _local_processes(control: Control, rank: int, wait: Callable[[Any], None]) -> LocalProcesses:
    """The first thing that ranks tell each other."""
    return (
        LocalProcesses(exchange(control, this_process(), wait), rank)
        if isinstance(control, StoreControl)
        else LocalProcesses()
    )


def _groups(options: Options) -> list[dist.ProcessGroup | None]:
    """[shard] or [replicate, shard]."""
    mesh = options.mesh
    return [options.group] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]


def _device(module: nn.Module, groups: Sequence[dist.ProcessGroup]) -> torch.device:
    """Where the parameters are; for a meta module the group's device, else torch's default device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            return tensor.device
    if groups and "cuda:nccl" in str(dist.get_backend_config(groups[-1])) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def _end_with_faults(faults: Faults, control: Control, communicators: Communicators, stores: ModelStores) -> None:
    """The model's thread of messages, communicators and keys end when its faults are closed."""

    def close() -> None:
        if isinstance(control, StoreControl):
            control.close()
        communicators.close(failed=faults.failed is not None)

    def clear() -> None:
        for store in {stores.messages, stores.signs}:
            if store is not None:
                tidy(store, stores.size)

    faults.at_end(close, clear)


def _fp8_of(units: Sequence[Unit], options: Options, device: torch.device) -> Fp8:
    """Scales of all fp8 parameters, and where their layers multiply bytes, transposed copies of them."""
    flat_buffers = [one for unit in units for one in unit.flat_buffers]
    scales = Fp8Scales(
        (
            (one.ranks.shard if one.cut.parts > 1 else None, one.trainable, one.weights.quantized)
            for one in flat_buffers
        ),
        device,
    )
    for flat_buffer in flat_buffers:
        flat_buffer.weights.scales = scales if flat_buffer.weights.quantized else None
    if not Fp8Matmul(options.mixed_precision.fp8_matmul).on_bytes:
        return Fp8(scales, None)
    tensors = {
        unit.name: (
            len(unit.around) if unit.index else -1,
            [t for one in unit.flat_buffers for t in one.weights.quantized],
        )
        for unit in units
    }
    return Fp8(scales, Transposes(tensors, device))


def _name_on_all_ranks(spec: UnitSpec, meshes: Meshes) -> str:
    """A unit of experts may have another name on other ranks."""
    alike = not spec.parameters or any(name not in meshes.own for name, _ in spec.parameters)
    return spec.name if alike else "(a unit on a mesh of its own)"


def _plan_alike(units: Sequence[Unit], bucket_bytes: int, control: Control, wait: Callable[[Any], None]) -> int:
    """Ranks whose own meshes differ plan with the most that any has: gathers and pieces come in one order on all."""
    rows = exchange(control, [bucket_bytes, *(unit.gathered_bytes for unit in units)], wait)
    bucket_bytes, *turns = map(max, zip(*rows, strict=True))
    for unit, most in zip(units, turns, strict=True):
        unit.turn_bytes = most
    return bucket_bytes


def _used(
    units: Sequence[Unit], main: Ranks, meshes: Meshes | None, control: Control, wait: Callable[[Any], None]
) -> UsedParameters:
    """The bit of each trainable parameter: those on the main mesh, then those of each mesh of its own that any rank has
    (``meshes``; None: there is none)."""
    first: dict[ParamAndGradBuffer, int] = {}
    count = 0
    if main.size == 1:
        return UsedParameters(first, count)
    beside: dict[str, list[ParamAndGradBuffer]] = {}
    for flat_buffer in (one for unit in units for one in unit.trained):
        if flat_buffer.ranks is main or meshes is None:
            first[flat_buffer] = count
            count += len(flat_buffer.records)
        else:
            place = ",".join(map(str, meshes.own[flat_buffer.records[0].name].place))
            beside.setdefault(place, []).append(flat_buffer)
    if meshes is not None:
        sizes = {place: sum(len(one.records) for one in flat_buffers) for place, flat_buffers in beside.items()}
        texts = exchange_text(control, "\n".join(f"{place}|{size}" for place, size in sizes.items()), wait)
        told = {line.split("|")[0]: int(line.split("|")[1]) for text in texts for line in text.split("\n") if line}
        for place in sorted(told):
            at = count
            for flat_buffer in beside.get(place, ()):
                first[flat_buffer] = at
                at += len(flat_buffer.records)
            count += told[place]
    return UsedParameters(first, count)


def end_with(module: nn.Module, engine: Engine, handles: Sequence[Any]) -> None:
    """For a module that ``fully_shard`` wrapped: when it is gone, with the hooks that it held itself, the rest goes."""
    weakref.finalize(module, _close_rest, engine.faults, handles)
    tidy_with(module, engine)


def _close_rest(faults: Faults, handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
    faults.close()


def tidy_with(owner: object, engine: Engine) -> weakref.finalize[..., object]:
    """When ``owner`` is dropped, keys are deleted; not at the end of the process, where stores go too."""
    end: weakref.finalize[..., object] = weakref.finalize(owner, engine.faults.tidy)
    end.atexit = False
    return end


def close(engine: Engine, handles: Sequence[Any]) -> None:
    """The model is gone: its hooks and its watchdog go too."""
    for handle in handles:
        handle.remove()
    engine.faults.close()
    for guard in engine.guards:
        guard.close()
