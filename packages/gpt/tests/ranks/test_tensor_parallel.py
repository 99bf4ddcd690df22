"""Layers over two tensor-parallel ranks: the whole model's losses, logits and gradients; what backward keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_helpers import boundaries, small

from ranktest import run_ranks
from sixfold.gpt.axes import Axes, Axis
from sixfold.gpt.cuts import summed_over_tp
from sixfold.gpt.model import GPTModel

TOKENS = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(2))
LABELS = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(3))
MASK = (torch.arange(48).view(2, 24) % 7 != 0).float()
PACKED = boundaries(2, 24, [5, 30])
# Vocabulary of 100 on 128 rows: the second rank has padding; of 60: nothing but padding.
MODELS = {
    "tied, grouped queries": small(num_layers=2),
    "untied, biases, q and k norms": small(num_layers=2, tie_embeddings=False, qkv_bias=True, qk_norm=True),
    "untied, the last rank has padding only": small(num_layers=1, tie_embeddings=False, vocab_size=60),
}


def axes(rank: int, ranks: int, sequence: bool) -> Axes:
    return Axes(tp=Axis(rank, ranks, dist.group.WORLD), sequence=sequence)


def trained(model: GPTModel, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    vocab = model.config.vocab_size
    losses = model(TOKENS % vocab, labels=LABELS % vocab, loss_mask=MASK, **inputs)
    losses.sum().backward()
    return losses.detach(), {name: p.grad for name, p in model.named_parameters()}


def all_models(rank: int, ranks: int) -> dict[tuple[str, bool], Any]:
    found = {}
    for sequence in (True, False):
        for name, config in MODELS.items():
            model = GPTModel(config, axes=axes(rank, ranks, sequence))
            with torch.no_grad():
                logits = model(TOKENS % config.vocab_size, cu_seqlens=PACKED)
            found[name, sequence] = (*trained(model, cu_seqlens=PACKED), logits, model.cuts)
    return found


@pytest.fixture(scope="module")
def of_two() -> list[dict[tuple[str, bool], Any]]:
    return run_ranks(all_models, 2)


def whole_gradient(parts: list[Any], name: str, sequence: bool) -> torch.Tensor:
    """The canonical gradient of ``name`` of the ranks' parts."""
    gradients = [part[1][name] for part in parts]
    cut = parts[0][3].of(name)
    if cut:
        return torch.cat(gradients, next(iter(cut)))
    if summed_over_tp(name, sequence=sequence):
        return sum(gradients[1:], gradients[0])
    assert all(torch.equal(one, gradients[0]) for one in gradients)
    return gradients[0]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_logits_and_every_gradient_are_the_whole_models(of_two, kind, sequence):
    model = GPTModel(MODELS[kind])
    losses, gradients = trained(model, cu_seqlens=PACKED)
    logits = model(TOKENS % model.config.vocab_size, cu_seqlens=PACKED).detach()
    parts = [rank[kind, sequence] for rank in of_two]
    for part in parts:
        torch.testing.assert_close(part[0], losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(part[2], logits, rtol=1e-6, atol=1e-6 * float(logits.abs().max()))
        assert (part[0] == 0).equal(MASK == 0)
    assert set(parts[0][1]) == set(gradients)
    for name, gradient in gradients.items():
        found = whole_gradient(parts, name, sequence)
        assert (found - gradient).norm() <= 1e-6 * gradient.norm(), name
