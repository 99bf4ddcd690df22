"""A layer of experts, forward and backward, on one core, beside transformers' and a dense layer of the same work.

    python -m pytest packages/gpt/benchmarks/bench_moe.py --benchmark-only

Scale: 1,024 tokens of 256, 16 experts of 128, 2 of a token, float32. The floor is a dense feed-forward part as wide as
the experts that one token passes: the same products, nothing sorted or moved.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.model.decoder import Block

CONFIG = GPTConfig(
    num_layers=1, hidden_size=256, num_attention_heads=4, ffn_hidden_size=256, vocab_size=257, num_experts=16,
    experts_per_token=2, moe_ffn_hidden_size=128, router_aux_loss=0.0,
)  # fmt: skip
X = torch.randn(4, 256, 256, generator=torch.Generator().manual_seed(1))


class _NoRows:
    recompute = "none"


def ours() -> tuple[nn.Module, Callable[[torch.Tensor], Any]]:
    layer = Block(CONFIG).ffn.to_empty(device="cpu")
    return layer, lambda x: layer(x, _NoRows())


def floor() -> tuple[nn.Module, Callable[[torch.Tensor], Any]]:
    dense = GPTConfig(num_layers=1, hidden_size=256, num_attention_heads=4, ffn_hidden_size=256, vocab_size=257)
    layer = Block(dense).ffn.to_empty(device="cpu")
    return layer, lambda x: layer(x, _NoRows())


def peer() -> tuple[nn.Module, Callable[[torch.Tensor], Any]]:
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=256, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True,
        experts_implementation="eager",
    )  # fmt: skip
    layer = modeling.Qwen3MoeSparseMoeBlock(config)
    return layer, layer


@pytest.mark.parametrize("who", [ours, peer, floor], ids=lambda one: one.__name__)
def test_forward_and_backward(benchmark, who):
    layer, run = who()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)

    def step() -> None:
        layer.zero_grad()
        out = run(X.clone().requires_grad_())
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    benchmark.extra_info.update(tokens=X.shape[0] * X.shape[1])
    benchmark.pedantic(step, rounds=20, warmup_rounds=3)
