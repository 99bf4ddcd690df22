"""Additions of two dtypes, in place and without memory.

    buffers/gradients.py, gradient_sums.py --> add_into (this file)

Pure arithmetic on the tensors given; never allocates where ``scratch`` is given.
"""

from __future__ import annotations

from torch import Tensor


def add_into(target: Tensor, addend: Tensor, scratch: Tensor | None) -> None:
    """``target += addend`` in the wider dtype of the two, rounded once to ``target``'s.

    A CPU makes a whole copy in the wider dtype first; with ``scratch`` (1-D, of that dtype) it goes in parts as long
    as the scratch, which is made once. None where a kernel converts as it reads.
    """
    if target.dtype == addend.dtype or scratch is None:
        target.add_(addend)
        return
    narrow_target = target.dtype.itemsize < addend.dtype.itemsize
    target, addend = target.view(-1), addend.reshape(-1)
    for at in range(0, target.numel(), scratch.numel()):
        into, part = target[at : at + scratch.numel()], addend[at : at + scratch.numel()]
        wide = scratch[: into.numel()]
        if narrow_target:
            wide.copy_(into)
            wide.add_(part)
            into.copy_(wide)
        else:
            wide.copy_(part)
            into.add_(wide)
