"""Rows of flex_attention's masks.

BlockMask of a batch --> rows of its microbatches (this file) --> from_torch
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

__all__ = ["block_mask_rows", "cut_block_mask"]

_FLEX = "torch.nn.attention.flex_attention"


def block_mask_rows(value: Any) -> int | None:
    """The rows of a BlockMask; None for anything else. Nothing is imported to find out."""
    flex = sys.modules.get(_FLEX)
    return int(value.kv_num_blocks.shape[0]) if flex is not None and isinstance(value, flex.BlockMask) else None


def cut_block_mask(mask: Any, sizes: Sequence[int]) -> list[Any]:
    """``mask`` as masks of so many rows each; one of a single row is for all rows, and goes to each as it is."""
    rows = mask.kv_num_blocks.shape[0]
    if rows == 1:
        return [mask] * len(sizes)
    parts, first = [], 0
    for size in sizes:
        part = copy(mask)
        for name, held in vars(mask).items():  # blocks by query and by key, partial and full
            if isinstance(held, Tensor) and held.dim() > 1 and held.shape[0] == rows:
                setattr(part, name, held[first : first + size])
        part.mask_mod = _behind(mask.mask_mod, torch.tensor(first, device=mask.kv_num_blocks.device))
        parts.append(part)
        first += size
    return parts


def _behind(mask_mod: Callable[..., Any], first: Tensor) -> Callable[..., Any]:
    """``mask_mod`` where row 0 is the batch's row ``first``: a tensor, of which torch.compile makes no constant."""

    def of_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b + first, h, q_idx, kv_idx)

    return of_rows
