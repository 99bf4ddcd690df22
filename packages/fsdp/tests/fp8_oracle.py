"""What fp8 parameters are, written once more from the definition, with nothing of sixfold.

tests --> quantized, seen, narrowed (this file)
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def is_fp8(name: str) -> bool:
    """Matrices of the blocks."""
    return name.startswith("blocks.") and name.endswith(("up.weight", "down.weight"))


def quantized(main: Tensor) -> tuple[Tensor, Tensor]:
    """(q as float8_e4m3fn, scale) of a whole fp32 tensor."""
    amax = main.detach().abs().amax()
    scale = torch.ones(()) if float(amax) == 0.0 else amax / torch.tensor(448.0)
    return torch.minimum(torch.maximum(main.detach() / scale, torch.tensor(-448.0)), torch.tensor(448.0)).to(
        torch.float8_e4m3fn
    ), scale


def seen(name: str, main: Tensor) -> Tensor:
    """The weight that layers see, in fp32."""
    if not is_fp8(name):
        return main
    q, scale = quantized(main)
    return q.to(torch.float32) * scale


def narrowed(x: Tensor, dtype: torch.dtype, rows: bool) -> Tensor:
    """What is multiplied of an activation or gradient (M, K), in float64."""
    x = x.float()
    amax = x.abs().amax(dim=1, keepdim=True) if rows else x.abs().amax()
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / torch.tensor(LARGEST[dtype]))
    return (x / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).double() * scale.double()
