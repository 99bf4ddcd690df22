"""What a user chooses: strategy, number formats, buffers.

    ShardingStrategy, MixedPrecision, BufferConfig (this file) --> wrapper/fully_sharded.py --> buffers, engine

Pure values that refuse what cannot work when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.strategy import ShardingStrategy, one_of

T = TypeVar("T")

__all__ = ["BufferConfig", "MixedPrecision", "ShardingStrategy", "one_of"]

# What torch's MixedPrecision of FSDP1 and MixedPrecisionPolicy of FSDP2 take beside.
_TORCHS_PRECISION = {
    "buffer_dtype": "module buffers keep their dtype; leave it out",
    "cast_forward_inputs": "use cast_inputs, for the root call's inputs",
    "cast_root_forward_inputs": "use cast_inputs",
    "keep_low_precision_grads": "use grad_dtype",
    "output_dtype": "outputs keep the dtype of the last layer; cast them in the loss, and leave it out",
}

MERGE_BYTES = 4 << 20  # of single layers that are merged unasked; docs/decisions/fsdp.md


def _naming_ours(foreign: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """A class decorator: a ``foreign`` argument is an FsdpError that says what to write, and no bare TypeError."""

    def decorate(cls: type[T]) -> type[T]:
        make = cls.__init__

        @wraps(make)
        def checked(self: T, *positional: Any, **given: Any) -> None:
            for name in given.keys() & foreign:
                raise FsdpError(f"{name} is no option of {cls.__name__}; {foreign[name]}")
            make(self, *positional, **given)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate


@_naming_ours(_TORCHS_PRECISION)
@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Number formats of weights, sums and main copies.

    Args:
        param_dtype: dtype of compute weights; None keeps each parameter's own.
        reduce_dtype: dtype that travels in a reduction; None means ``main_dtype``.
        main_dtype: dtype of main weights and of every local sum.
        grad_sum: ``"backend"``: the collective of the back end adds. ``"rank_order"``: ranks 0, 1, 2 ... are added in
            that order, in main_dtype; the bits are reproducible.
            ``"tree"``: each micro-batch is reduced as its backward ends. All of a batch are added in one tree, pair by
            pair: first over ranks, then over micro-batches. Rank r of N runs one backward for each of the micro-batches
            r, r + N, r + 2 N ... of the batch; then no bit of a gradient depends on N, a power of two. ``last=False``
            and ``no_sync()`` postpone no reduction then, and what travels is in main_dtype.
        grad_dtype: storage of main gradients between reduction and step. None means ``main_dtype``.
            Gradients are summed on the rank, summed over ranks and divided in main_dtype. They travel in reduce_dtype.
            The result, added to what earlier reductions left, is rounded to grad_dtype: one rounding a reduction.
            With ``no_shard`` and ``optim`` a step has one reduction for each micro-batch. It has a single one if
            earlier micro-batches run under ``microbatch(last=False)`` or ``no_sync()``.
            torch's optimizers take gradients in main_dtype only. So ``step()`` makes copies, of one unit at a time; a
            step pre-hook then sees gradients in grad_dtype. The copies are of all units with LBFGS, Muon over pieces
            and optimizers outside ``torch.optim``. So they are with a ``step`` that was replaced on the object before
            ``fully_shard_optimizer``.
        cast_inputs: cast floating inputs of the root call to ``param_dtype``.
        fp8: ``(name) -> bool``: whether a parameter is gathered as float8_e4m3fn bytes with one scale. Scales are
            computed after each step. Main weights are float32; gradients do not change. None: no parameter is.
        fp8_matmul: ``"emulate"``: layers read the weights that the bytes stand for, in ``param_dtype``.
            ``"scaled"``: ``F.linear`` (and so ``nn.Linear``) multiplies the bytes by ``torch._scaled_mm``. Activations
            and gradients have one scale per tensor. ``"scaled_rows"``: they have one scale per row.
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
        one_of("grad_sum", self.grad_sum, ("backend", "rank_order", "tree"))
        self._check_tree()
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

    def _check_tree(self) -> None:
        if self.grad_sum != "tree":
            return
        if self.main_dtype.itemsize < 4:
            raise FsdpError(
                f"main_dtype is {self.main_dtype} and grad_sum 'tree': its sums are in float32 or wider; use "
                "main_dtype=torch.float32"
            )
        if self.reduce_dtype not in (None, self.main_dtype):
            raise FsdpError(
                f"reduce_dtype is {self.reduce_dtype} and grad_sum 'tree': what travels would be rounded, and how much "
                "travels depends on the ranks; leave reduce_dtype None, or use grad_sum='rank_order'"
            )


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """Where gathered weights and local gradients lie.

    Args:
        gathered_bytes: how many gathered weights a rank holds.
            ``"double"``: the root unit and two slots, or the largest unit where that is more.
            ``"all"``: memory for each unit, gathered once a step.
            A number: at most so many bytes, those of prefetched units and of the root included. From the second step
            on, units lie where the recorded order gathers the fewest bytes.
            None: ``"double"``; one process runs as ``no_shard``.
        prefetch_bytes: how many bytes are gathered ahead, in the recorded order. None means one unit, 0 none.
            Under a byte budget, a number > 0 places units so that no gather waits for the unit before it; that needs
            more gathers. None gathers ahead where (nearly) the fewest gathers allow it.
        reduce_buffers: local gradient buffers that units share when gradients are sharded, >= 1.
        align_bytes: every tensor starts at a multiple of it (NCCL user buffers need 128-byte starts).
        user_buffers: whether weights, gather sources and local sums lie in memory that NCCL uses without a copy.
            ``"off"``: no. ``"auto"``: where possible; ``report()`` says which path, or why none. ``"require"``: yes,
            else an error.
        bucket_bytes: a unit with larger local sums is reduced in pieces of this size, in bytes of main_dtype. If
            gradients are reduced in the backward that makes them, no sum of the whole unit exists then.
            None: the largest unit whose class occurs more than once, and at least a sixteenth of the largest unit.
        merge_bytes: neighbouring units become one while their elements take at most so many bytes of main_dtype.
            Neighbours have the same units around them and none inside. Collectives are fewer and larger then, and
            all parts of a merged unit are gathered at once. ``checks="order"`` does not compare the order inside it.
            ``"auto"``: merges only single layers of one block (an element of a list) that a class names, up to 4 MiB.
            It merges none with ``mesh_for`` or with a number for ``gathered_bytes``. On CPUs, if the gathered weights
            of such a model take at most 4 MiB, one collective gathers several units. It runs once after each change of
            main weights, and what came is held a second time.
            None: one collective per unit (and piece).
        nccl_min_ctas, nccl_max_ctas: fewest and most thread blocks of a collective, on the NCCL groups made here.
        always_communicate: a group of one rank uses its back end too (one GPU then tests NCCL).
        share_communicator: gathers and reductions run on the given group itself, which needs fewer file descriptors.
            False: each has a communicator of its own, made once from the given group.
        fill_freed: a debug mode. Memory that units share is filled with NaN when a unit releases it, and before a
            gather fills it. With ``"double"`` each unit has memory of its own for that. A loss that is NaN only with
            this option reads memory of another unit.
        offload: optimizer state lies in host memory. A step brings it to the device unit by unit, two at a time.
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
