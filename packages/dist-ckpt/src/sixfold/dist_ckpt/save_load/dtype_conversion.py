"""Stored values into a tensor of another dtype or device, in parts; "exact" refuses a value that does not survive.

    stored values, the caller's tensor, dtype_policy --> copy_values (this file) <-- reader.py, loading.py

What the policy forbids whatever the values are, ``mismatch`` of plans/plan.py has refused before.
"""

from __future__ import annotations

import torch

from sixfold.dist_ckpt.errors import MismatchError
from sixfold.dist_ckpt.geometry.box import cuts
from sixfold.dist_ckpt.state.tensor_memory import comparable

PART_BYTES = 1 << 22  # of a tensor that is converted or goes to a device: the copies between take a few of these


def copy_values(key: str, source: torch.Tensor, target: torch.Tensor, dtype_policy: str) -> None:
    """Copy, in parts where dtype or device differ.

    Raises:
        MismatchError: a value does not survive the conversion, and ``dtype_policy`` is "exact".
    """
    if target.dtype == source.dtype and target.is_cpu:
        target.copy_(source)
        return
    for cut in cuts(source.shape, PART_BYTES // max(source.element_size(), target.element_size())):
        if target.dtype != source.dtype and dtype_policy == "exact":
            _check_exact(key, source[cut], target.dtype)
        target[cut].copy_(source[cut])


def _check_exact(key: str, source: torch.Tensor, dtype: torch.dtype) -> None:
    """-0.0 is 0.0 where the asked dtype has no other, and a NaN is any NaN."""
    there = source.to(dtype)
    back, values = comparable(there.to(source.dtype)), comparable(source)
    if values.is_complex():  # a NaN in one part says nothing of the other
        back, values = torch.view_as_real(back), torch.view_as_real(values)
    lost = (back != values) & ~((back != back) & (values != values))
    if source.dtype.is_complex:
        lost = lost.any(-1)
    for numbers, integers in ((source, there), (there, source)):
        if (outside := _outside(numbers, integers.dtype)) is not None:
            lost |= outside
    if bool(lost.any()):
        first = source[tuple(torch.nonzero(lost)[0].tolist())].item()
        raise MismatchError(
            f"{key}: asked for {dtype}, stored is {source.dtype}, and the value {first} does not survive the way "
            "there and back; ask for the stored dtype, or pass dtype_policy='cast'"
        )


def _outside(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Which numbers are none of an integer dtype: some come back from it all the same, as they have wrapped around."""
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or numbers.dtype is torch.bool:
        return None
    if numbers.is_floating_point() or numbers.is_complex():  # another imaginary part does not come back
        limits, wide = torch.iinfo(dtype), (numbers.real if numbers.is_complex() else numbers).double()
        return (wide < limits.min) | (wide >= float(limits.max) + 1)
    return numbers < 0 if numbers.dtype.is_signed and not dtype.is_signed else None
