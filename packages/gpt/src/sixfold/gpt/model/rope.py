"""Rotary positions in the rotate-half form of Llama.

    positions --> tables (this file), once per micro-batch --> rotate (this file), queries and keys of every layer

Tables are computed in float32 and then brought to the dtype of what they rotate, as transformers does.
"""

import math
from typing import Any

import torch
from torch import Tensor

from sixfold.gpt.config.train_config import GPTConfig


def inverse_frequencies(config: GPTConfig, device: torch.device) -> Tensor:
    """(head_dim / 2,) float32: radians per position of each pair, ``rope_scaling`` of type llama3 applied.

    llama3 divides the frequencies of wavelengths longer than context / low_freq_factor by ``factor``, leaves those
    shorter than context / high_freq_factor and blends between. Source: Llama 3.1, as transformers computes it.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponent)
    if not config.rope_scaling:
        return plain
    values = {key: float(value) for key, value in config.rope_scaling.items() if key != "rope_type"}
    context, low, high = (
        values["original_max_position_embeddings"],
        values["low_freq_factor"],
        values["high_freq_factor"],
    )
    wavelength = 2 * math.pi / plain
    blend = (context / wavelength - low) / (high - low)
    scaled = plain / values["factor"]
    between = (1 - blend) * scaled + blend * plain
    return torch.where(wavelength > context / low, scaled, torch.where(wavelength < context / high, plain, between))


def tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for ``rotate``.

    Args:
        positions: (b, s) or (1, s), any integer dtype.
        frequencies: (head_dim / 2,) float32.
    Returns:
        Two tensors (b or 1, s, 1, head_dim) of ``dtype``; the first half of the sines is negated.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype).unsqueeze(2), torch.cat((-sin, sin), -1).to(dtype).unsqueeze(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (b, s, heads, head_dim) by the tables: pairs are element i and i + head_dim / 2."""
    rotated: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """x cos + swap(x) sin; the gradient is the same with -sin, so nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (g,) = gradients
        return torch.addcmul(g * cos, g.roll(g.shape[-1] // 2, -1), sin, value=-1), None, None
