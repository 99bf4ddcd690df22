"""Rotary positions in the rotate-half form of Llama.

    positions --> tables (this file), once per micro-batch --> rotate (this file), queries and keys of every layer

Tables are computed in float32 and then brought to the dtype of what they rotate, as transformers does.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sixfold.gpt.config.rope_scaling import CONTEXT
from sixfold.gpt.config.train_config import GPTConfig

Scaling = Mapping[str, float | str | bool]


def inverse_frequencies(config: GPTConfig, device: torch.device, *, sliding: bool = False) -> Tensor:
    """(rotated / 2,) float32: radians per position of each pair, ``rope_scaling`` applied; of layers that slide?"""
    size, local = config.rotated, sliding and config.rope_local_base_freq
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    plain = 1.0 / ((local or config.rope_theta) ** exponent)
    if local or not config.rope_scaling:
        return plain
    return _SCALED[str(config.rope_scaling["rope_type"])](plain, config, config.rope_scaling)


def magnitude(config: GPTConfig, *, sliding: bool = False) -> float:
    """What cosines and sines are multiplied by: 1 but for yarn (arXiv 2309.00071), as transformers computes it."""
    scaling = config.rope_scaling
    if scaling.get("rope_type") != "yarn" or (sliding and config.rope_local_base_freq):
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    factor = float(scaling["factor"])
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return yarn_mscale(factor, float(scaling["mscale"])) / yarn_mscale(factor, float(scaling["mscale_all_dim"]))
    return yarn_mscale(factor)


def score_factor(config: GPTConfig) -> float:
    """What scores are multiplied by beside 1 / root of head_dim: Gemma's, and DeepSeek-V3's of latent attention.

    Source: transformers' query_pre_attn_scalar, and its yarn_apply_mscale.
    """
    factor = math.sqrt(config.head_dim / (config.query_pre_attn_scalar or config.head_dim))
    if config.kv_lora_rank and "mscale_all_dim" in config.rope_scaling:
        factor *= yarn_mscale(float(config.rope_scaling["factor"]), float(config.rope_scaling["mscale_all_dim"])) ** 2
    return factor


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """yarn's correction of attention for rows ``factor`` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(plain: Tensor, config: GPTConfig, scaling: Scaling) -> Tensor:
    """Wavelengths above context / low_freq_factor are ``factor`` times as long, those below context / high_freq_factor
    stay, between it blends. Source: Llama 3.1, as transformers computes it."""
    values = {key: float(value) for key, value in scaling.items() if key != "rope_type"}
    context, low, high = values[CONTEXT], values["low_freq_factor"], values["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    blend = (context / wavelength - low) / (high - low)
    scaled = plain / values["factor"]
    between = (1 - blend) * scaled + blend * plain
    return torch.where(wavelength > context / low, scaled, torch.where(wavelength < context / high, plain, between))


def _linear(plain: Tensor, config: GPTConfig, scaling: Scaling) -> Tensor:
    """All wavelengths are ``factor`` times as long."""
    return plain / float(scaling["factor"])


def _yarn(plain: Tensor, config: GPTConfig, scaling: Scaling) -> Tensor:
    """Pairs that turn less than ``beta_slow`` times in the context are scaled, those that turn more than ``beta_fast``
    times stay, between it blends by the pair's number. Source: arXiv 2309.00071, as transformers computes it."""
    size = 2 * len(plain)

    def pair(turns: float) -> float:
        return size * math.log(float(scaling[CONTEXT]) / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair(float(scaling.get("beta_fast", 32))), pair(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float32, device=plain.device) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return plain / float(scaling["factor"]) * (1 - kept) + plain * kept


_SCALED: Mapping[str, Callable[[Tensor, GPTConfig, Scaling], Tensor]] = {
    "llama3": _llama3, "linear": _linear, "yarn": _yarn,
}  # fmt: skip


def tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for ``rotate``.

    Args:
        positions: (b, s) or (1, s), any integer dtype.
        frequencies: (head_dim / 2,) float32.
        magnitude: of both.
    Returns:
        Two tensors (b or 1, s, 1, head_dim) of ``dtype``; the first half of the sines is negated.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    return torch.cat((cos, cos), -1).to(dtype).unsqueeze(2), torch.cat((-sin, sin), -1).to(dtype).unsqueeze(2)


def neighbours_apart(x: Tensor) -> Tensor:
    """Elements (0, 1), (2, 3) ... of the last axis as ``rotate`` takes pairs: all first ones, then all second ones."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


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
