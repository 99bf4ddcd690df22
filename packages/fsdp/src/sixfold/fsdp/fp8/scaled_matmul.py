"""``F.linear`` over the bytes of an fp8 parameter: ``torch._scaled_mm`` in forward and for the input's gradient.

    F.linear(x, weight) --> ScaledWeight --> _ScaledLinear (this file) --> torch._scaled_mm

Knows one tensor's bytes and scale; gathers nothing. Activations and gradients are scaled by what is in them at that
moment. By tensor, activations are float8_e4m3fn and gradients float8_e5m2. By row both are float8_e4m3fn, as torch's
kernels for scales by row take them. The weight's own gradient uses no fp8: it is the product of gradient and
activation as they came.

[Note: a transposed copy for backward] CUDA's kernel wants its second matrix in columns. In the forward that is the
weight as it lies; the backward needs it transposed. ``Transposes`` makes that copy when a unit's weights are there for
its backward. Units of one depth take turns in its memory. It is dropped when the unit is freed or a forward begins.
What looks for a copy that is not there makes one for itself, so a copy dropped too early costs time, never a bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.fp8.quantized import FP8, QuantizedTensor, scales_of

_HIDDEN = "_sixfold_fsdp_bytes"  # in the Parameter's own __dict__
_STEP = 128  # bytes: every transposed copy starts on such a border
# Of properties those that give values; of functions all but those that give none.
_GIVES_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_GIVES_NONE = frozenset({
    "size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_contiguous", "is_complex",
    "data_ptr", "storage_offset", "untyped_storage", "get_device", "register_hook", "requires_grad_", "new_tensor",
    "register_post_accumulate_grad_hook", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like",
    "randn_like", "new_empty", "new_zeros", "new_ones", "new_full", "__len__", "__hash__", "__format__", "__repr__",
})  # fmt: skip


class Fp8Matmul(StrEnum):
    """What the layers multiply: the weights that bytes stand for, or the bytes."""

    emulate = "emulate"
    scaled = "scaled"
    scaled_rows = "scaled_rows"

    @property
    def on_bytes(self) -> bool:
        """``torch._scaled_mm`` multiplies."""
        return self is not Fp8Matmul.emulate


class ScaledWeight(nn.Parameter):
    """An fp8 parameter while its unit's call runs: ``F.linear`` multiplies its bytes, and nothing else can read it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            return _linear(*args, **kwargs)
        name = getattr(func, "__name__", type(func).__name__)
        if name in ("__get__", "__set__", "__delete__"):
            forbidden, name = func.__self__.__name__ in _GIVES_VALUES, func.__self__.__name__
        else:
            forbidden = name not in _GIVES_NONE
        leaves = pytree.tree_leaves((args, kwargs)) if forbidden else ()
        hidden: _Hidden | None = next((one.__dict__[_HIDDEN] for one in leaves if isinstance(one, ScaledWeight)), None)
        if hidden is not None and not hidden.replaced():
            compiled = torch._guards.CompileContext.current_compile_id() is not None
            raise FsdpError(
                f"{hidden.tensor.name} is an fp8 parameter without values, and "
                f"{'torch.compile reads them' if compiled else f'{name} reads them'}: with fp8_matmul="
                f"{hidden.matmul.value!r} only an uncompiled F.linear can use it. Leave it out of MixedPrecision.fp8, "
                "or use fp8_matmul='emulate'",
                op="read",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


@dataclass(frozen=True)
class _Hidden:
    """What a ScaledWeight stands for. ``replaced``: what is read now is replaced by main weights (a state dict)."""

    tensor: QuantizedTensor
    matmul: Fp8Matmul
    replaced: Callable[[], bool]


def show_bytes_only(
    parameter: nn.Parameter, tensor: QuantizedTensor, matmul: Fp8Matmul, replaced: Callable[[], bool]
) -> None:
    """Make ``parameter`` a ScaledWeight."""
    parameter.__class__ = ScaledWeight
    parameter.__dict__[_HIDDEN] = _Hidden(tensor, matmul, replaced)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    hidden: _Hidden | None = weight.__dict__.get(_HIDDEN) if isinstance(weight, ScaledWeight) else None
    if hidden is None or any(isinstance(one, ScaledWeight) for one in (input, bias)):
        raise FsdpError(
            "F.linear has an fp8 parameter as input or bias; where its layers multiply bytes it is a weight", op="read"
        )
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
    output = _ScaledLinear.apply(input.reshape(-1, input.shape[-1]), weight, hidden.tensor, hidden.matmul)  # type: ignore[no-untyped-call]
    output = output.view(*input.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias  # type: ignore[no-any-return]


class _ScaledLinear(torch.autograd.Function):
    """(M, K) x (N, K) -> (M, N)."""

    @staticmethod
    def forward(ctx: Any, input_MK: Tensor, weight: Tensor, tensor: QuantizedTensor, matmul: Fp8Matmul) -> Tensor:
        ctx.tensor, ctx.matmul, ctx.dtype = tensor, matmul, input_MK.dtype
        ctx.save_for_backward(input_MK if ctx.needs_input_grad[1] else None)
        q_NK = tensor.q.view(FP8)
        return _multiply(input_MK, q_NK.t(), tensor.scale, FP8, rows=matmul is Fp8Matmul.scaled_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (input_MK,) = ctx.saved_tensors
        tensor, rows = ctx.tensor, ctx.matmul is Fp8Matmul.scaled_rows
        to_input = to_weight = None
        if ctx.needs_input_grad[0]:
            q_KN = tensor.transposed if tensor.transposed is not None else tensor.q.t().contiguous()
            narrow = FP8 if rows else torch.float8_e5m2
            to_input = _multiply(gradient_MN, q_KN.view(FP8).t(), tensor.scale, narrow, rows=rows)
        if ctx.needs_input_grad[1]:
            to_weight = gradient_MN.t().mm(input_MK)
        return to_input, to_weight, None, None


def _multiply(left_MK: Tensor, q_KN: Tensor, scale: Tensor, narrow: torch.dtype, *, rows: bool) -> Tensor:
    """``left @ (q * scale)`` in the dtype of ``left``; ``q_KN`` lies in columns."""
    if not left_MK.numel():
        return left_MK.new_zeros(left_MK.shape[0], q_KN.shape[1])
    left_MK = left_MK.contiguous()
    amax = torch.linalg.vector_norm(left_MK, math.inf, dim=1 if rows else None, keepdim=rows).to(torch.float32)
    largest = torch.finfo(narrow).max
    left_scale = scales_of(amax, largest)
    narrowed = (left_MK.to(torch.float32) / left_scale).clamp_(-largest, largest).to(narrow)
    if rows:
        scale = scale.expand(1, q_KN.shape[1]).contiguous()
    # By rows CUDA's kernel writes bfloat16 alone.
    out_dtype = torch.bfloat16 if rows and left_MK.is_cuda else left_MK.dtype
    output = torch._scaled_mm(narrowed, q_KN, scale_a=left_scale, scale_b=scale, out_dtype=out_dtype)
    return output.to(left_MK.dtype)


class Transposes:
    """Transposed copies of fp8 weights, of the units whose backward runs. [Note: a transposed copy for backward]

    Args:
        units: by name, the depth of each (units of one depth take turns) and its tensors.
    """

    def __init__(self, units: Mapping[str, tuple[int, Sequence[QuantizedTensor]]], device: torch.device) -> None:
        self._tensors = {name: tuple(tensors) for name, (_, tensors) in units.items() if tensors}
        self._depths = {name: units[name][0] for name in self._tensors}
        sizes: dict[int, int] = {}
        for name, depth in self._depths.items():
            sizes[depth] = max(sizes.get(depth, 0), _room(self._tensors[name]))
        self._regions = {depth: torch.empty(size, dtype=torch.uint8, device=device) for depth, size in sizes.items()}
        self._holders: dict[int, str] = {}
        self.made = 0
        self.dropped = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(region.nbytes for region in self._regions.values())

    @property
    def alive(self) -> tuple[str, ...]:
        """Units whose copies are there."""
        return tuple(self._holders.values())

    def use(self, unit: str, *, in_backward: bool) -> None:
        """``unit`` is gathered and is used now, by a backward or by a forward."""
        if in_backward:
            self.make(unit)
        elif self._holders:
            self.drop_all()

    def make(self, unit: str) -> None:
        """``unit``'s backward begins."""
        depth = self._depths.get(unit)
        if depth is None or self._holders.get(depth) == unit:
            return
        if depth in self._holders:
            self.drop(self._holders[depth])
        at = 0
        for tensor in self._tensors[unit]:
            view = self._regions[depth][at : at + tensor.q.numel()].view(tensor.q.shape[::-1])
            tensor.transposed = view.copy_(tensor.q.t())
            at += _rounded(tensor.q.numel())
        self._holders[depth] = unit
        self.made += 1

    def drop(self, unit: str) -> None:
        """``unit`` is freed."""
        depth = self._depths.get(unit)
        if depth is not None and self._holders.get(depth) == unit:
            del self._holders[depth]
            for tensor in self._tensors[unit]:
                tensor.transposed = None
            self.dropped += 1

    def drop_all(self) -> None:
        """A forward begins."""
        for unit in self.alive:
            self.drop(unit)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _STEP) * _STEP


def _room(tensors: Sequence[QuantizedTensor]) -> int:
    return sum(_rounded(math.prod(tensor.shape)) for tensor in tensors)


@functools.cache
def _cpu_takes_rows() -> bool:
    """Whether this torch's CPU multiplies with a scale for each row (2.11 does not)."""
    q, scale = torch.zeros(16, 16).to(FP8), torch.ones(16)
    try:
        torch._scaled_mm(q, q.t(), scale_a=scale[:, None], scale_b=scale[None], out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


def fault_of(parameter: nn.Parameter, device: torch.device, matmul: Fp8Matmul) -> str | None:
    """Why ``F.linear`` cannot multiply the bytes of ``parameter``."""
    shape = tuple(parameter.shape)
    if type(parameter) is not nn.Parameter:
        return f"is a {type(parameter).__name__}, and gets a class of its own"
    if len(shape) != 2:
        return f"has the shape {shape}, and torch._scaled_mm multiplies matrices"
    if device.type == "cuda" and any(size % 16 for size in shape):
        return f"has the shape {shape}, and on CUDA torch._scaled_mm takes multiples of 16"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return f"is on {torch.cuda.get_device_name(device)}, and torch._scaled_mm needs compute capability 8.9"
    if device.type == "cpu" and matmul is Fp8Matmul.scaled_rows and not _cpu_takes_rows():
        return f"is on a CPU, where torch._scaled_mm of torch {torch.__version__} takes one scale a tensor"
    return (
        None if device.type in ("cuda", "cpu") else f"is on {device.type}, where torch._scaled_mm is not known to run"
    )
