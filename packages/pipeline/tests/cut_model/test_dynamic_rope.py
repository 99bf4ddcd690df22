"""Rotary embeddings that move with the rows they see: each stage has the frequencies that the model has in its loop.

The oracle is the model's own loop over the same microbatches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thread_helpers import on_threads, values_or_raise
from torch import Tensor

from sixfold.pipeline import (
    PipelineRunner,
    Program,
    gpipe,
    interleaved,
    one_f_one_b,
    passes,
    stages_of_causal_lm,
    zb_v,
)

LENGTHS = (20, 40, 24, 12)  # beyond max_position_embeddings, further beyond, back, below


def llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            rope_parameters=rope,
        )
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)  # so that attention reads positions
    return model


def rows() -> list[Tensor]:
    return [torch.randint(0, 48, (2, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loop(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    losses = []
    for ids in rows():
        value = loss(model(ids, use_cache=False).logits, ids)
        (value / len(LENGTHS)).backward()
        losses.append(value.detach())
    return losses, [p.grad for p in model.parameters()]


def recomputed(ranks: int, microbatches: int) -> Program:
    return passes.recompute(one_f_one_b(ranks, microbatches))


@pytest.mark.parametrize("make", [one_f_one_b, gpipe, interleaved, zb_v, recomputed])
def test_losses_and_gradients_are_those_of_the_models_own_loop(make: Callable[[int, int], Program]):
    program = make(2, len(LENGTHS))
    model = llama()
    losses, gradients = loop(copy.deepcopy(model))
    runner = PipelineRunner(program, stages_of_causal_lm(model, program.stages), None, loss)
    got = runner.step(rows(), rows()).losses
    assert torch.allclose(torch.stack(got), torch.stack(losses), rtol=1e-12)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-14)


def test_ranks_that_are_threads_of_one_process_do_not_share_frequencies():
    program = interleaved(2, len(LENGTHS))
    model = llama()
    losses, _ = loop(copy.deepcopy(model))
    stages = stages_of_causal_lm(model, program.stages)

    def run(group: Any) -> list[Tensor]:
        mine = [stages[i] for i in program.stages_of(group.rank)]
        given = (rows() if group.rank == 0 else None), (rows() if group.rank == 1 else None)
        return PipelineRunner(program, mine, group, loss, dynamic_shapes=True).step(*given).losses

    got = values_or_raise(on_threads(2, run))[1]
    assert torch.allclose(torch.stack(got), torch.stack(losses), rtol=1e-12)


def scaled(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.5


def other_frequencies(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq * 0.5, persistent=False)


@pytest.mark.parametrize("change", [scaled, other_frequencies])
def test_what_is_set_on_the_models_rotary_embedding_later_holds_in_the_stages(change: Callable[[Any], None]):
    model = llama().eval()
    ids = rows()[-1]
    before = model(ids, use_cache=False).logits
    runner = PipelineRunner(gpipe(2, 1), stages_of_causal_lm(model, 2), None, loss)
    change(model)
    expected = model(ids, use_cache=False).logits
    assert not torch.equal(before, expected)
    assert torch.equal(runner.forward([ids]).outputs[0], expected)
