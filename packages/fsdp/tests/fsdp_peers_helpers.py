"""Peers as their users write them: FSDP2, DDP, megatron-fsdp, and the plain module. One step is equal work on all.

    make (this file) --> a step: forward, backward, clip, optimizer, zero_grad --> benchmarks/bench_table.py

megatron-fsdp 0.6.1 asks for CUDA streams everywhere: on CPU they are stand-ins that do nothing. "megatron" is as
shipped. "megatron repaired" is the same wrapped with rate and decay 0 and its optimizer state cleared, because its
``fully_shard`` steps the optimizer once (weight decay applied, Adam's step is 1 before training).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sixfold.fsdp import FullyShardedDataParallel, fully_shard_optimizer

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class _Null:
    """A CUDA stream or event where there is no CUDA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self


def cuda_stand_ins() -> None:
    """Streams and events that do nothing, for a process that has no CUDA."""
    null = _Null()
    changes = {
        "Stream": _Null,
        "Event": _Null,
        "current_device": lambda: 0,
        "current_stream": lambda *args: null,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
    }
    for name, value in changes.items():
        setattr(torch.cuda, name, value)
    changes = {"record_stream": lambda self, stream: None, "cuda": lambda self, *args, **kwargs: self}
    for name, value in changes.items():
        setattr(Tensor, name, value)


def import_megatron_fsdp() -> Any:
    """The package alone: beside another version of megatron-core it takes that one's classes and fails."""
    warnings.filterwarnings("ignore", module="megatron_fsdp")
    for name in ("megatron", "megatron.core"):
        sys.modules[name] = None  # type: ignore[assignment]
    import megatron_fsdp
    from megatron_fsdp import param_and_grad_buffer

    def scale_and_sum(gradient: Tensor, factor: float | None, config: Any) -> Any:
        """Its own way for bf16, which back ends other than NCCL can do: scale first, then sum."""
        if factor is not None:
            gradient.mul_(factor)
        return dist.ReduceOp.SUM

    if dist.get_backend() == "gloo":
        param_and_grad_buffer.gradient_reduce_preprocessing = scale_and_sum
    return megatron_fsdp


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def make(
    kind: str,
    net: nn.Module,
    units: type,
    batch: Tensor,
    group: Any,
    optimizer_of: MakeOptimizer = adamw,
    **options: Any,
) -> SimpleNamespace:
    """``.step()`` and its parts ``forward_backward``, ``clip``, ``optimizer_step``; ``.model``, ``.optimizer``."""
    if kind in ("plain", "ddp"):
        wrapped = (
            net
            if kind == "plain"
            else nn.parallel.DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)
        )
        return _parts(wrapped, optimizer_of(net.parameters()), batch, None)
    if kind == "fsdp2":
        return _fsdp2(net, units, batch, group, optimizer_of, **options)
    if kind.startswith("megatron"):
        return _megatron(net, units, batch, group, optimizer_of, repaired=kind.endswith("repaired"))
    model = FullyShardedDataParallel(net, process_group=group, fsdp_unit_modules=[units], initial="trust", **options)
    optimizer = fully_shard_optimizer(optimizer_of(net.parameters()), model)
    return _parts(model, optimizer, batch, lambda: model.clip_grad_norm_(1.0))


def _parts(model: nn.Module, optimizer: Any, batch: Tensor, clip: Callable[[], Any] | None) -> SimpleNamespace:
    def forward_backward() -> None:
        model(batch).sum().backward()

    def clip_all() -> None:
        if clip is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            clip()

    def optimizer_step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step(*, clipped: bool = True) -> None:
        forward_backward()
        if clipped:
            clip_all()
        optimizer_step()

    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        step=step,
        forward_backward=forward_backward,
        clip=clip_all,
        optimizer_step=optimizer_step,
    )


def _fsdp2(net: nn.Module, units: type, batch: Tensor, group: Any, optimizer_of: MakeOptimizer, **options: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for module in [one for one in net.modules() if isinstance(one, units)]:
        fully_shard(module, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return _parts(net, optimizer_of(net.parameters()), batch, None)


def _megatron(
    net: nn.Module, units: type, batch: Tensor, group: Any, optimizer_of: MakeOptimizer, *, repaired: bool
) -> SimpleNamespace:
    cuda_stand_ins()
    package = import_megatron_fsdp()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(group), 1), mesh_dim_names=("dp", "tp"))
    given = optimizer_of(net.parameters())
    kept = [(group["lr"], group.get("weight_decay", 0.0)) for group in given.param_groups]
    for group_options in (
        (given.defaults, *given.param_groups) if repaired else ()
    ):  # it may build another from defaults
        group_options.update(lr=0.0, weight_decay=0.0)
    model, optimizer = package.fully_shard(
        net,
        given,
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[units],
        device=torch.device("cpu"),
    )
    if repaired:
        optimizer.state.clear()
        for group_options, (rate, decay) in zip(optimizer.param_groups, kept, strict=True):
            group_options.update(lr=rate, weight_decay=decay)
    return _parts(model, optimizer, batch, None)
