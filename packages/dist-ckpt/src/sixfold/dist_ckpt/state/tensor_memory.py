"""Which tensors have memory that is their values, so that it may be copied byte by byte.

    caller's tensor --> this file --> those who take its address: writer.py, reader.py, relay.py, arena.py

A DTensor, a fake or a wrapped quantised tensor says that it is a contiguous CPU tensor. It has memory of its own
nowhere, or somewhere else. So copying from its address saves garbage, and copying to it is a crash. No files, no
ranks.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from sixfold.dist_ckpt.errors import ShardingError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor, on whatever device, is its values in row-major order."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_dtensor(leaf: object) -> bool:
    """Whether a leaf is a DTensor; never imports torch.distributed.tensor."""
    kind = type(leaf)  # an object of a user may answer to any name
    return hasattr(kind, "_local_tensor") and hasattr(kind, "placements") and hasattr(kind, "device_mesh")


def local_of(dtensor: DTensor) -> torch.Tensor:
    """The local tensor itself, the same object at each call, not the view that ``to_local`` makes."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which lives as long as any view of this."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", f"{tensor.device}, strides {tensor.stride()}"
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def check_readable(name: object, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose memory is not its values.

    Args:
        name: what the tensor is, for the error; made into text only then.
    Raises:
        ShardingError: a subclass that computes its values, a sparse, a quantised, a meta tensor.
    """
    kind = type(tensor)
    if kind not in PLAIN_TENSORS and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        remedy = "pass the local tensor (ShardedTensor.from_dtensor does for a DTensor) or a plain copy"
        if hasattr(tensor, "__tensor_flatten__") and not is_dtensor(tensor):
            inner = ", ".join(tensor.__tensor_flatten__()[0])
            remedy = f"pass what it wraps ({inner}) under names of its own, by a ShardedTensorFactory, or a plain copy"
        raise ShardingError(
            f"{name}: data is a {kind.__module__}.{kind.__qualname__}, which has no memory of its own; {remedy}"
        )
    if tensor.is_meta:
        raise ShardingError(
            f"{name}: data is on the meta device and holds no values; give it memory first, as "
            "module.to_empty(device=...) does. For a load a record may have data=None"
        )
    if tensor._is_zerotensor() or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        form = "a tensor of zeros without memory" if tensor._is_zerotensor() else tensor.layout
        form = "nested" if tensor.is_nested else form
        form = f"quantised {tensor.dtype}" if tensor.is_quantized else form
        raise ShardingError(
            f"{name}: data is {form} on {tensor.device}; it is dense and holds values. Save its dense parts instead"
        )
    if is_freed(tensor):
        raise ShardingError(
            f"{name}: the storage of data was freed: {tuple(tensor.shape)} elements and 0 bytes. Pass the tensor that "
            "holds the values, or give the storage its bytes again first (untyped_storage().resize_)"
        )


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a dense tensor has elements and a storage of no bytes, as FSDP leaves parameters: reading it crashes."""
    if tensor.is_nested or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False  # what dispatches its own calls keeps its values where it likes
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def has_values(tensor: torch.Tensor) -> bool:
    """Whether ``check_readable`` lets a tensor through."""
    try:
        check_readable("", tensor)
    except ShardingError:
        return False
    return True


def is_writable(tensor: torch.Tensor) -> bool:
    """Whether ``check_writable`` lets a tensor through, and autograd a change of it."""
    try:
        check_writable("", tensor)
    except ShardingError:
        return False
    return not tensor.is_inference()


def memory_of(tensor: torch.Tensor) -> Any:
    """What two tensors have in common if each element of one is that of the other; None without elements."""
    if tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def place_of(tensor: torch.Tensor) -> Any:
    """As ``memory_of``, and the same for a tensor and its transpose, which fill one memory in another order."""
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if tensor.numel() == 0 or reach != tensor.numel():
        return memory_of(tensor)
    return tensor.device, tensor.data_ptr(), tensor.numel(), tensor.dtype


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the values of two tensors begin at one place."""
    return has_values(one) and has_values(other) and one.data_ptr() == other.data_ptr() and one.numel() > 0


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors of one dtype hold the same bytes, NaN and -0.0 included."""
    flat = [t.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


def check_writable(name: object, tensor: torch.Tensor) -> None:
    """Refuse a tensor that values cannot be put into: as ``check_readable``, and one with two elements in one place.

    Raises:
        ShardingError: the elements of an expanded or overlapping view would overwrite each other.
    """
    check_readable(name, tensor)
    if tensor.is_contiguous():
        return
    reach = 0  # of all axes with a smaller stride
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                raise ShardingError(
                    f"{name}: data of shape {tuple(tensor.shape)} and strides {tensor.stride()} has several elements "
                    "in one place, so that a load cannot fill it; pass a tensor of its own, such as .clone()"
                )
            reach += (length - 1) * stride


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """float8 types have few kernels; float32 holds each of their values. Of packed ones the bytes are compared."""
    if not converts(tensor.dtype):
        return tensor.contiguous().view(_BYTES[tensor.dtype.itemsize])
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


_BYTES = {1: torch.uint8, 2: torch.int16}


@lru_cache(maxsize=64)
def converts(dtype: torch.dtype) -> bool:
    """Whether torch makes other numbers of those of a dtype: of packed ones, as float4_e2m1fn_x2, it makes none."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").to(torch.complex128)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True
