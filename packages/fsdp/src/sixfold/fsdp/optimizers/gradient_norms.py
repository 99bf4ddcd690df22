"""Arithmetic on all main gradients: squares, scaling, true division.

    main gradients --> square_sum, scale, divide (this file) --> wrapper/fully_sharded.py
    exact_squares.py --> square_sum with grad_sum="tree" (this file)

No host reads a device value here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.engine.reduce import Reduction
from sixfold.fsdp.optimizers import exact_squares

Beyond = Callable[[Tensor, dist.ReduceOp.RedOpType], None]  # a tensor becomes its sum or maximum over further ranks

_OWNER = "the norm"
_PART_NUMEL = 1 << 16  # elements in float64 at a time: 512 KiB stay in a cache


def square_sum(engine: Engine, include: Callable[[str], bool], beyond: Beyond | None, *, exact: bool) -> Tensor:
    """Float64 scalar over the main mesh, each element once, and over what ``beyond`` adds.

    On the main mesh every rank has all (no_shard), or replicas are equal. What is on a mesh of its own is counted by
    its shards, or by its first rank, and added over the whole main mesh: its expert-parallel peers are there.

    Args:
        exact: the same bits for every cut. [Note: squares on two grids]
    """
    records = [record for record in engine.records.values() if record.main is not None and include(record.name)]
    on_main = _gradients_of([record for record in records if record.flat_buffer.ranks is engine.ranks])
    on_own = _gradients_of(
        [record for record in records if record.flat_buffer.ranks is not engine.ranks and _counts(record)]
    )
    if not exact:
        sums = torch.stack([_squares(on_main, engine), _squares(on_own, engine)])
        _add_over_main_mesh(engine, sums)
        square = sums.sum()
        if beyond is not None:
            beyond(square, dist.ReduceOp.SUM)
        return square
    with torch._C.DisableTorchFunctionSubclass():
        exponent = exact_squares.largest_exponent(on_main + on_own, engine.units[0].device)
        for comm in (engine.ranks.shard, engine.ranks.outer):
            engine.faults.wait(comm.maximum(exponent), None, "reduce")
        if beyond is not None:
            beyond(exponent, dist.ReduceOp.MAX)
        limbs = torch.stack([exact_squares.square_limbs(one, exponent) for one in (on_main, on_own)])
    _add_over_main_mesh(engine, limbs)
    limbs = limbs.sum(0)
    if beyond is not None:
        beyond(limbs, dist.ReduceOp.SUM)
    return exact_squares.total(limbs, exponent)


def _add_over_main_mesh(engine: Engine, sums: Tensor) -> None:
    """``sums``: the first of what the main mesh shares, the second of what lies on meshes of its own."""
    shard, outer, own = engine.ranks.shard, engine.ranks.outer, engine.reduction.own_meshes
    if engine.shards_optimizer:
        engine.faults.wait(shard.all_reduce(sums if own else sums[:1]), None, "reduce")
    elif own:
        engine.faults.wait(shard.all_reduce(sums[1:]), None, "reduce")
    if own:
        engine.faults.wait(outer.all_reduce(sums[1:]), None, "reduce")


def _counts(record: ParamRecord) -> bool:
    return record.flat_buffer.cut.parts > 1 or record.flat_buffer.ranks.rank == 0


def _gradients_of(records: Sequence[ParamRecord]) -> list[Tensor]:
    return [record.main.grad for record in records if record.main is not None and record.main.grad is not None]


def _squares(gradients: list[Tensor], engine: Engine) -> Tensor:
    device = engine.units[0].device
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cpu":
        return _squares_in_parts(gradients, engine.reduction)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()


def _squares_in_parts(gradients: Sequence[Tensor], reduction: Reduction) -> Tensor:
    """On a CPU, whose norms make a whole copy in float64 first: part by part, in a slot that no reduction needs now."""
    pool = reduction.pool
    slot = pool.allocate(_OWNER, 0) if pool.slot_bytes else None
    try:
        memory = reduction.spare() if slot is None or pool.slot_bytes[slot] < 8 else pool.memory(slot)
        wide = memory[: min(_PART_NUMEL, memory.numel() // 8) * 8].view(torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        with torch._C.DisableTorchFunctionSubclass():
            for gradient in gradients:
                flat = gradient.reshape(-1)
                for at in range(0, flat.numel(), wide.numel()):
                    part = flat[at : at + wide.numel()]
                    copied = wide[: part.numel()].copy_(part)
                    total += torch.dot(copied, copied)
        return total
    finally:
        if slot is not None:
            pool.free(_OWNER)


def _gradients(engine: Engine) -> tuple[list[Tensor], list[Tensor]]:
    """Those in main_dtype, and those in a narrower ``grad_dtype``."""
    wide: list[Tensor] = []
    narrow: list[Tensor] = []
    for record in engine.records.values():
        if record.main is not None and record.main.grad is not None:
            (wide if record.main.grad.dtype == record.main.dtype else narrow).append(record.main.grad)
    return wide, narrow


def _on_device(engine: Engine, value: float | Tensor) -> Tensor:
    # A host number would be turned into a product with its reciprocal on CUDA.
    dtype = next((record.main.dtype for record in engine.records.values() if record.main is not None), torch.float32)
    return torch.as_tensor(value, dtype=dtype, device=engine.units[0].device)


def scale(engine: Engine, factor: float | Tensor) -> None:
    """Multiply."""
    with torch._C.DisableTorchFunctionSubclass():
        (wide, narrow), number = _gradients(engine), _on_device(engine, factor)
        if wide:
            torch._foreach_mul_(wide, number)
        for gradient in narrow:  # (1,): a scalar would take the gradient's dtype before it is used
            gradient.mul_(number.view(1))


def divide(engine: Engine, count: float | Tensor) -> None:
    """Divide, truly."""
    with torch._C.DisableTorchFunctionSubclass():
        (wide, narrow), number = _gradients(engine), _on_device(engine, count)
        if wide:
            torch._foreach_div_(wide, number)
        for gradient in narrow:
            gradient.div_(number.view(1))
