"""A digest of a tensor's values: were they changed, and are they the same on all ranks?

    tensor --> tensor_digest (this file) --> parameter_access/, setup/start_values.py, state/load_full_state.py

Pure.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tensor_digest(tensor: Tensor) -> int:
    """64 bits of a tensor's values: a weighted sum of its bytes modulo 2**64. Reads the device (at wrap time only)."""
    flat = tensor.detach().reshape(-1).contiguous()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.dtype.itemsize]
    total = 0
    step = 1 << 22  # elements at a time: a digest must not double a large embedding
    for start in range(0, flat.numel(), step):
        words = flat[start : start + step].view(width).to(torch.int64)
        weights = torch.arange(start, start + words.numel(), dtype=torch.int64, device=flat.device)
        weights = (weights * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01) | 1  # odd: no bit of a word is lost
        total = (total + int((words * weights).sum())) & 0xFFFFFFFFFFFFFFFF
    return total - (1 << 64) if total >= 1 << 63 else total
