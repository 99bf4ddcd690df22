"""What a user chooses: strategy, number formats, buffers.

    ShardingStrategy, MixedPrecision, BufferConfig (this file) --> wrapper/fully_sharded.py --> buffers, engine

Pure values that refuse what cannot work when they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.strategy import ShardingStrategy, one_of

__all__ = ["BufferConfig", "MixedPrecision", "ShardingStrategy", "one_of"]

MERGE_BYTES = 4 << 20  # of single layers that are merged unasked; docs/decisions/fsdp.md


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Number formats of weights, sums and main copies.

    Args:
        param_dtype: dtype of compute weights; None keeps each parameter's own.
        reduce_dtype: dtype that travels in a reduction; None means ``main_dtype``.
        main_dtype: dtype of main weights and of every local sum.
        grad_sum: ``"backend"`` or ``"rank_order"`` (sum over ranks 0, 1, 2 ... in main_dtype, reproducible).
        grad_dtype: storage of main gradients between reduction and step; None means ``main_dtype``. What rounds
            where: a micro-batch's gradients are summed locally, over ranks and divided in main_dtype (and reduce_dtype
            for what travels); the result is rounded to grad_dtype once, and so is each sum of it with what earlier
            reductions left: one rounding for each reduction of a step. With ``no_shard`` and ``optim`` that is one if
            earlier micro-batches run under ``microbatch(last=False)`` or ``no_sync()``, else one a micro-batch.
            ``step()`` finds gradients in main_dtype, since torch's optimizers take no other: copies of one unit at a
            time; for its whole length with LBFGS, Muon over pieces, optimizers outside ``torch.optim``, and a ``step``
            that was replaced on the object before ``fully_shard_optimizer``. With copies of one unit at a time a
            user's step pre-hook sees gradients in grad_dtype.
        cast_inputs: cast floating inputs of the root call to ``param_dtype``.
        fp8: ``(name) -> bool``: whether a parameter is gathered as float8_e4m3fn bytes with one scale, computed after
            each step. Main weights are float32, gradients as ever; None: no parameter is.
        fp8_matmul: ``"emulate"``: layers read the weights that the bytes stand for, in ``param_dtype``. ``"scaled"``:
            ``F.linear`` (and so ``nn.Linear``) multiplies the bytes by ``torch._scaled_mm``, activations and gradients
            scaled by tensor; ``"scaled_rows"``: by row.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    main_dtype: torch.dtype = torch.float32
    grad_sum: str = "backend"
    grad_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    fp8: Callable[[str], bool] | None = None
    fp8_matmul: str = "emulate"

    def __post_init__(self) -> None:
        one_of("grad_sum", self.grad_sum, ("backend", "rank_order"))
        for field in ("param_dtype", "reduce_dtype", "main_dtype", "grad_dtype"):
            dtype = getattr(self, field)
            if dtype is not None and not dtype.is_floating_point:
                raise FsdpError(f"{field} is {dtype}; it is a floating dtype or None")
        one_of("fp8_matmul", self.fp8_matmul, ("emulate", "scaled", "scaled_rows"))
        if self.fp8 is not None and not callable(self.fp8):
            raise FsdpError(f"fp8 is {self.fp8!r}; it is a function of a parameter's name, or None")
        if self.fp8 is None and self.fp8_matmul != "emulate":
            raise FsdpError(f"fp8_matmul is {self.fp8_matmul!r} and fp8 is None; name the parameters by fp8")
        if self.fp8 is not None and self.main_dtype != torch.float32:
            raise FsdpError(
                f"main_dtype is {self.main_dtype} and fp8 is set: float32 scales quantise float32 main weights; use "
                "main_dtype=torch.float32, or fp8=None"
            )
        if self.grad_dtype is not None and self.grad_dtype.itemsize > self.main_dtype.itemsize:
            raise FsdpError(
                f"grad_dtype is {self.grad_dtype}, main_dtype {self.main_dtype}: main gradients are sums in "
                "main_dtype, and gain nothing in a wider one; leave it None"
            )
        if self.grad_dtype not in (None, self.main_dtype) and not hasattr(torch.Tensor, "grad_dtype"):
            raise FsdpError(
                f"grad_dtype is {self.grad_dtype}: this torch lets no parameter have a gradient of another dtype "
                "(Tensor.grad_dtype); leave it None, or use torch 2.10 or newer"
            )


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """Where gathered weights and local gradients lie.

    Args:
        gathered_bytes: None: ``"double"``, and in one process whatever costs least (it runs as ``no_shard``);
            ``"double"`` (the root and two slots, or the largest unit where that is more), ``"all"`` (a
            buffer per unit, gathered once a step), or the bytes of gathered weights at most, prefetched ones and the
            root's included: from the second step on units lie where the recorded order gathers the fewest bytes.
        prefetch_bytes: how far gathers run ahead along the recorded order; None means one unit, 0 none. Under a byte
            budget a number > 0 places units so that no gather has to wait for the unit before it, at the price of more
            gathers; None takes what (nearly) the fewest gathers leave.
        reduce_buffers: local gradient buffers shared by the units when gradients are sharded, >= 1.
        align_bytes: every tensor starts on such a border (NCCL user buffers need 128-byte starts).
        user_buffers: gathered weights, gather sources and local sums in memory that NCCL uses without a copy:
            ``"off"``, ``"auto"`` (where it can be had; ``report()`` says which path, or why none) or ``"require"``.
        bucket_bytes: a unit whose local sums are larger is reduced in pieces of this size, so that no sum of the whole
            exists where gradients are reduced in the backward that makes them. In bytes of main_dtype; None: the
            largest unit whose class occurs more than once, and at least a sixteenth of the largest unit.
        merge_bytes: neighbouring units (same units around them, none inside) are one unit while their elements take at
            most so many bytes of main_dtype: fewer and larger collectives, and gathered memory for all of them at
            once; ``checks="order"`` does not compare the order of modules inside a merged unit. ``"auto"``: only units
            that are single layers of one block (an element of a list) and were named by class, up to 4 MiB; none with
            ``mesh_for`` or with a number for ``gathered_bytes``. On CPUs a model with such units whose gathered weights
            take at most 4 MiB in all gathers several of them by one collective, once after each change of main weights,
            and holds what came a second time. None: one collective per unit (and piece).
        nccl_min_ctas, nccl_max_ctas: fewest and most thread blocks of a collective, on the NCCL groups made here.
        always_communicate: a group of one goes through its back end too (one GPU then tests NCCL).
        share_communicator: gathers and reductions on the given group itself, for few file descriptors; else each has
            a communicator of its own, made from the given group once.
        fill_freed: a debug mode: whatever memory units take turns in is filled with NaN when it is given up, and before
            it is received into; with ``"double"`` each unit has memory of its own for that. A loss that is NaN then,
            and not without, reads memory of another unit.
        offload: optimizer state lives in host memory; a step brings it to the device unit by unit, two at a time.
    """

    gathered_bytes: int | str | None = None
    prefetch_bytes: int | None = None
    reduce_buffers: int = 2
    align_bytes: int = 128
    user_buffers: str = "auto"
    bucket_bytes: int | None = None
    merge_bytes: int | str | None = "auto"
    nccl_min_ctas: int | None = None
    nccl_max_ctas: int | None = None
    always_communicate: bool = False
    share_communicator: bool = False
    offload: bool = False
    fill_freed: bool = False

    def __post_init__(self) -> None:
        self._check_gathered_bytes()
        self._check_ctas()
        if self.prefetch_bytes is not None and self.prefetch_bytes < 0:
            raise FsdpError(f"prefetch_bytes is {self.prefetch_bytes}; it is >= 0 or None (one unit)")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise FsdpError(f"bucket_bytes is {self.bucket_bytes}; it is >= 1 or None (the largest repeated unit)")
        if isinstance(self.merge_bytes, str):
            one_of("merge_bytes", self.merge_bytes, ("auto",))
        elif self.merge_bytes is not None and self.merge_bytes < 1:
            raise FsdpError(f"merge_bytes is {self.merge_bytes}; it is >= 1, 'auto' or None (no unit is merged)")
        if self.reduce_buffers < 1:
            raise FsdpError(f"reduce_buffers is {self.reduce_buffers}; it is >= 1")
        if self.align_bytes < 16 or self.align_bytes & (self.align_bytes - 1):
            raise FsdpError(f"align_bytes is {self.align_bytes}; it is a power of two >= 16")
        one_of("user_buffers", self.user_buffers, ("off", "auto", "require"))

    def _check_ctas(self) -> None:
        fewest, most = self.nccl_min_ctas, self.nccl_max_ctas
        for field, value in (("nccl_min_ctas", fewest), ("nccl_max_ctas", most)):
            if value is not None and value < 1:
                raise FsdpError(f"{field} is {value}; it is >= 1, or None for NCCL's own choice")
        if fewest is not None and most is not None and fewest > most:
            raise FsdpError(f"nccl_min_ctas is {fewest} and nccl_max_ctas {most}; the first is at most the second")

    def _check_gathered_bytes(self) -> None:
        value = self.gathered_bytes
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            one_of("gathered_bytes", value, ("double", "all"))
        elif value <= 0:
            raise FsdpError(f"gathered_bytes is {value}; it is None, 'double', 'all' or a number of bytes > 0")
