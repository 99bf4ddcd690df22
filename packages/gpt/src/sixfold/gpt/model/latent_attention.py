"""Multi-head latent attention (DeepSeek-V2 and V3): queries, keys and values of small latents, one rotated key for all.

    x --> q_a, kv_a --> latents, normed --> columns: q_b, kv_b --> heads, rotated --> rows.attend --> out
                                               (this file)

Over tp latents are computed of the rank's part of the sequence, and travel in place of hidden states: every rank has
the whole of q_a and kv_a, and its heads' part of q_b, kv_b and out. Values are narrower than keys. They are padded with
zeros to a head's width, so that every back end takes them, and what comes out is cut.

[Note: latents] A cache keeps latents and rotated keys, not the keys and values of heads. With k = W l a score is
q (W l) = (q W) l: so later queries are multiplied with W, not all latents that are kept. The latents are then one key
head that all queries read. They are the values too, and their weighted sum is multiplied with the values' part of kv_b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.model.norm import RMSNorm
from sixfold.gpt.model.rope import neighbours_apart, rotate, score_factor
from sixfold.gpt.parallel.axes import ALONE, Axes
from sixfold.gpt.parallel.tensor_parallel import columns, joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from sixfold.gpt.model.attention import Rows

_EPS = 1e-6  # of latents' norms, whatever model.norm_eps is: as transformers


class LatentAttention(nn.Module):
    """In place of a layer's ``Attention``; a tensor-parallel rank has neighbouring heads."""

    def __init__(self, config: GPTConfig, axes: Axes = ALONE, number: int = 0) -> None:
        super().__init__()
        self.config, self.axes, self.slides = config, axes, config.slides(number)
        self.number, self.scale = number, score_factor(config)
        heads = config.num_attention_heads // axes.tp.size
        latent, keys = config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim)
        if config.q_lora_rank:
            self.q_a = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False, device="meta")
            self.q_a_norm = RMSNorm(config.q_lora_rank, _EPS, device="meta")
            self.q_b = nn.Linear(config.q_lora_rank, heads * config.head_dim, bias=False, device="meta")
        else:
            self.q = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False, device="meta")
        self.kv_a = nn.Linear(config.hidden_size, latent + config.qk_rope_head_dim, bias=False, device="meta")
        self.kv_a_norm = RMSNorm(latent, _EPS, device="meta")
        self.kv_b = nn.Linear(latent, keys, bias=False, device="meta")
        self.out = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=False, device="meta")

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Hidden states as between blocks -> the same."""
        config, turned = self.config, self.config.qk_rope_head_dim
        rows = rows.of(sliding=self.slides)
        later = rows.cache is not None and rows.cache.length > 0
        latent, key = self.kv_a(x).split((config.kv_lora_rank, turned), -1)
        latent = self.kv_a_norm(latent)
        q, key, kv = self._products(x, latent, key, again=rows.recompute != "none", of_heads=not later)
        q, q_turned = _parts(q, config.qk_nope_head_dim, turned)
        q_turned, key = (self._rotated(t, rows) for t in (q_turned, key.unsqueeze(2)))
        if self.scale != 1:
            q, q_turned = q * self.scale, q_turned * self.scale
        if rows.cache is not None:
            (kept,) = rows.cache.extend(self.number, torch.cat((latent.unsqueeze(2), key), -1))
        if kv is None:
            return joined(self.out(self._of_latents(q, q_turned, kept, rows).flatten(2)), self.axes)
        k, v = _parts(kv, config.qk_nope_head_dim, config.v_head_dim)
        q = torch.cat((q, q_turned), -1)
        k = torch.cat((k, key.expand(*k.shape[:-1], turned)), -1)
        attended = rows.attend(q, k, F.pad(v, (0, config.head_dim - config.v_head_dim)))
        return joined(self.out(attended[..., : config.v_head_dim].flatten(2)), self.axes)

    def _products(
        self, x: Tensor, latent: Tensor, key: Tensor, *, again: bool, of_heads: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, the turned key that all heads share, and keys with values of heads if ``of_heads``.

        They are of all tokens of the rows: over tp the latents are gathered, together.
        """
        of_q, of_kv = self.config.q_lora_rank, self.config.kv_lora_rank
        latents = [self.q_a_norm(self.q_a(x))] if of_q else []
        together = torch.cat((*latents, latent, key), -1)
        products: dict[str, Callable[[Tensor], Tensor]] = {}  # their order is that in which gradients are added
        if of_heads:
            products["kv"] = lambda t: self.kv_b(t[..., of_q : of_q + of_kv])
        products["key"] = lambda t: t[..., of_q + of_kv :]
        if of_q:
            products["q"] = lambda t: self.q_b(t[..., :of_q])
        # As where it is recomputed: the latents that were gathered are small, and kept.
        found = dict(zip(products, columns(together, [*products.values()], self.axes, recomputed=True), strict=True))
        q = found["q"] if of_q else columns(x, (self.q,), self.axes, recomputed=again)[0]
        return q, found["key"], found.get("kv")

    def _of_latents(self, q: Tensor, q_turned: Tensor, kept: Tensor, rows: Rows) -> Tensor:
        """Attention to what a cache keeps, (b, n, 1, latent + turned) -> (b, s, heads, v_head_dim). [Note: latents]"""
        config = self.config
        # [lora] refuses latent attention, so no adapter lies beside the matrix.
        assert type(self.kv_b) is nn.Linear, f"kv_b is a {type(self.kv_b).__name__}, more than its matrix"
        of_head = self.kv_b.weight.unflatten(0, (-1, config.qk_nope_head_dim + config.v_head_dim))  # type: ignore[no-untyped-call]
        to_keys, to_values = of_head.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        q = torch.cat((torch.einsum("bshd,hdl->bshl", q, to_keys), q_turned), -1)
        return torch.einsum("bshl,hdl->bshd", rows.attend(q, kept, kept[..., : config.kv_lora_rank]), to_values)

    def _rotated(self, x: Tensor, rows: Rows) -> Tensor:
        return rotate(neighbours_apart(x) if self.config.rope_interleave else x.contiguous(), rows.cos, rows.sin)


def _parts(x: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    """(b, s, heads * (first + second)) -> (b, s, heads, first), (b, s, heads, second)."""
    one, other = torch.split(x.view(*x.shape[:-1], -1, first + second), [first, second], -1)
    return one, other
