"""fp8 parameters: one scale for each tensor, bytes that travel, and the weights that they stand for.

    main weights --> Fp8Scales, QuantizedTensor (this file) --> buffers/weights.py --> engine/gather.py

Knows no unit's state and no module. For each tensor ``amax`` is max |main| over all ranks. ``scale = amax / 448`` in
fp32, or 1 where that is 0. ``q = clamp(main / scale, +-448)`` as float8_e4m3fn. The weight is ``q * scale``,
multiplied in fp32. The scale is the whole tensor's, so no bit depends on the number of ranks. A NaN or an infinity in
a main weight makes its whole tensor NaN, on all ranks.

[Note: scales before the first gather] Scales are computed when the first gather after a change of main weights begins.
So ``optimizer.step()`` sends nothing for them. The place is the same on all ranks, because gathers have one order.
Frozen parameters have their scales from the first gather on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sixfold.fsdp.collectives.comm import Comm

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
_CHUNK = 1 << 20  # elements in fp32 at a time: what is between main weights and bytes is never a tensor of its own


class Scratch:
    """Memory for what is between main weights and bytes; all tensors of a model share it; 0 elements: none."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.wide = torch.empty(min(numel, _CHUNK), dtype=torch.float32, device=device)
        self.bytes = torch.empty(self.wide.numel(), dtype=torch.uint8, device=device)
        values = torch.arange(256 if numel else 0, dtype=torch.uint8, device=device)
        self.numbers = values.view(FP8).to(torch.float32)  # by byte

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.wide.nbytes + self.bytes.nbytes + self.numbers.nbytes


def scales_of(amax_T: Tensor, largest: float = LARGEST) -> Tensor:
    """(T,) fp32 -> (T,) fp32: ``amax / largest``, and 1 where that is 0."""
    scale_T = amax_T / torch.full_like(amax_T, largest)  # by a tensor: CUDA multiplies by a number's reciprocal
    return scale_T.masked_fill_(scale_T == 0, 1.0)


def quantize(main: Tensor, scale: Tensor, out: Tensor, scratch: Scratch) -> None:
    """``out`` (n,) becomes the bytes of ``main`` (n,) fp32; in an integer dtype of any width."""
    step = scratch.wide.numel() or 1
    for start in range(0, main.numel(), step):
        part = main[start : start + step]
        wide, narrow = scratch.wide[: part.numel()], scratch.bytes[: part.numel()]
        torch.div(part, scale, out=wide)
        wide.clamp_(-LARGEST, LARGEST)
        if out.dtype is torch.uint8:
            out[start : start + step].view(FP8).copy_(wide)
        else:
            narrow.view(FP8).copy_(wide)
            out[start : start + step].copy_(narrow)


def dequantize(q: Tensor, scale: Tensor, out: Tensor, scratch: Scratch) -> None:
    """``out`` (n,) becomes the weights that the bytes ``q`` (n,) stand for; ``q`` in an integer dtype of any width.

    There are 256 of them, and looking them up is five times as fast on a CPU as converting each byte.
    """
    step = scratch.wide.numel() or 1
    weights = (scratch.numbers * scale).to(out.dtype)
    for start in range(0, q.numel(), step):
        part = q[start : start + step]
        at = scratch.wide[: part.numel()].view(torch.int32).copy_(part)
        torch.index_select(weights, 0, at, out=out[start : start + step])


class QuantizedTensor:
    """One fp8 parameter of a flat buffer.

    Attributes:
        name: the parameter's.
        main: what this rank holds of it, flat; None where nothing lies here.
        source: where its bytes wait for the gather (None likewise); an integer dtype as wide as a position.
        gathered: (numel,) where they arrive, in that dtype.
        q: the parameter's shape, uint8: the bytes; ``gathered`` itself unless that is wider.
        compute: (numel,) the weights that they stand for, or None where the bytes themselves are multiplied.
        transposed: (K, N) uint8, a copy of ``q`` for the backward matmul, while there is one.
        scale: () fp32, at an address for ever, a multiple of 16 bytes.
    """

    __slots__ = ("compute", "gathered", "main", "name", "q", "scale", "scratch", "shape", "source", "transposed")

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self.shape = shape
        self.main: Tensor | None = None
        self.source: Tensor | None = None
        self.gathered: Tensor
        self.q: Tensor
        self.compute: Tensor | None = None
        self.transposed: Tensor | None = None
        self.scale: Tensor
        self.scratch: Scratch

    def leave(self) -> None:
        """Main weights to bytes, before the gather."""
        if self.main is not None and self.source is not None:
            quantize(self.main, self.scale, self.source, self.scratch)

    def arrive(self) -> None:
        """After the gather: weights that the layers read."""
        if self.compute is not None:
            dequantize(self.gathered, self.scale, self.compute, self.scratch)
        elif self.gathered.dtype is not torch.uint8:
            self.q.view(-1).copy_(self.gathered)


class _ScaleGroup:
    """Tensors whose scales change together: of one mesh, all trainable or all frozen."""

    def __init__(self, comm: Comm | None, tensors: Sequence[QuantizedTensor], device: torch.device) -> None:
        self.comm = comm
        self.tensors = tuple(tensors)
        self.stale = True
        self.amax_T = torch.zeros(len(tensors), dtype=torch.float32, device=device)
        # Each at a multiple of 16 bytes: cuBLASLt multiplies by no other.
        self._scales_T4 = torch.ones(len(tensors), 4, dtype=torch.float32, device=device)
        self.scale_T = self._scales_T4[:, 0]
        held = [(i, one.main) for i, one in enumerate(tensors) if one.main is not None and one.main.numel()]
        self._mains = [main for _, main in held]
        self._places = torch.tensor([i for i, _ in held], dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.amax_T.nbytes + self._scales_T4.nbytes + self._places.nbytes

    def refresh(self, wait: Callable[[Any], None]) -> None:
        """[Note: scales before the first gather] One all-reduce of the bits of ``amax``."""
        self.amax_T.zero_()
        if self._mains:
            norms = torch._foreach_norm(self._mains, float("inf"))
            self.amax_T.index_copy_(0, self._places, torch.stack(norms).to(torch.float32))
        if self.comm is not None:
            # As integers: bits of numbers >= 0 have their order, and NaN, above infinity, wins on every back end.
            bits_T = self.amax_T.view(torch.int32)
            bits_T.bitwise_and_(0x7FFFFFFF)
            wait(self.comm.maximum(bits_T))
        self.scale_T.copy_(scales_of(self.amax_T))
        self.stale = False


class Fp8Scales:
    """The scales of all fp8 tensors of a model.

    Args:
        flat_buffers: (its mesh or None where every rank holds all, whether it is trainable, its fp8 tensors) of each.
    """

    def __init__(
        self, flat_buffers: Iterable[tuple[Comm | None, bool, Sequence[QuantizedTensor]]], device: torch.device
    ) -> None:
        by_comm: dict[tuple[int, bool], tuple[Comm | None, list[QuantizedTensor]]] = {}
        for comm, trainable, tensors in flat_buffers:
            if tensors:
                by_comm.setdefault((id(comm), trainable), (comm, []))[1].extend(tensors)
        self._groups = [_ScaleGroup(comm, tensors, device) for comm, tensors in by_comm.values()]
        self._of = {id(one): group for group in self._groups for one in group.tensors}
        largest = max((_numel(one.shape) for group in self._groups for one in group.tensors), default=0)
        self.scratch = Scratch(max(largest, 1) if self._of else 0, device)
        self.reductions = 0
        for group in self._groups:
            for at, one in enumerate(group.tensors):
                one.scale, one.scratch = group.scale_T[at], self.scratch

    @property
    def tensors(self) -> int:
        """How many."""
        return len(self._of)

    @property
    def nbytes(self) -> int:
        """Bytes of scales and of what is between main weights and bytes."""
        return self.scratch.nbytes + sum(group.nbytes for group in self._groups)

    def refresh(self, tensors: Sequence[QuantizedTensor], wait: Callable[[Any], None]) -> None:
        """A gather of ``tensors`` begins: their scales, and those of all that change with them, are those of today."""
        if tensors and self._of[id(tensors[0])].stale:
            group = self._of[id(tensors[0])]
            group.refresh(wait)
            self.reductions += group.comm is not None

    def main_changed(self, tensors: Sequence[QuantizedTensor]) -> None:
        """Main weights of ``tensors`` are other ones."""
        if tensors:
            self._of[id(tensors[0])].stale = True


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
