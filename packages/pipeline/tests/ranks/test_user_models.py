"""Models as users have them, cut into stages on several ranks, beside the same model in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ranktest import run_ranks
from sixfold.pipeline import (
    PipelineRunner,
    Stage,
    interleaved,
    one_f_one_b,
    stages_of_causal_lm,
    stages_of_sequential,
    zb_v,
)

RANKS_IMPORT = ("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2")
M, ROWS, LENGTH, WORDS = 4, 8, 6, 64


def model_of(name: str, dropout: float) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    torch.manual_seed(3)
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=dropout,
        )
        return transformers.LlamaForCausalLM(config).train()
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config).train()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets, and a mask that leaves out the first tokens of some rows."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[::3, :2] = 0
    return ids, ids.roll(-1, 1).masked_fill(mask == 0, -100), mask


def lm_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def parameters_of(model: Any, stages: list[Stage]) -> dict[str, Tensor]:
    """Gradients of a model's parameters by name, of those that these stages have."""
    mine = {id(p) for stage in stages for p in stage.parameters()}
    return {name: p.grad for name, p in model.named_parameters() if id(p) in mine}


def train(rank: int, ranks: int, name: str, dropout: float, chunks: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    model = model_of(name, dropout)
    program = interleaved(ranks, M, chunks) if chunks > 1 else one_f_one_b(ranks, M)
    stages = stages_of_causal_lm(model, program.stages)
    mine = [stages[index] for index in program.stages_of(rank)]
    runner = PipelineRunner(program, mine, dist.group.WORLD, lm_loss)
    ids, targets, mask = batch()
    torch.manual_seed(7 + rank)
    losses = runner.step(ids, targets, kwargs={"attention_mask": mask}).losses
    return parameters_of(model, mine), losses


@pytest.mark.parametrize(("name", "chunks"), [("llama", 1), ("llama", 2), ("gpt2", 1)])
@pytest.mark.slow
def test_a_hugging_face_model_in_stages_has_the_gradients_of_plain_torch(name, chunks):
    model = model_of(name, 0.0)
    ids, targets, mask = batch()
    expected = []
    for k in range(M):
        rows = slice(2 * k, 2 * k + 2)
        loss = lm_loss(model(ids[rows], attention_mask=mask[rows]).logits, targets[rows])
        (loss / M).backward()
        expected.append(loss.detach())
    found = run_ranks(train, 2, name, 0.0, chunks)
    torch.testing.assert_close(found[1][1], expected)
    ours = found[0][0] | found[1][0]
    plain = {n: p.grad for n, p in model.named_parameters()}
    assert set(ours) == set(plain)
    for key, gradient in plain.items():
        torch.testing.assert_close(ours[key], gradient, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.slow
def test_dropout_in_stages_draws_as_plain_torch_does_from_the_seed_of_each_rank(name):
    found = run_ranks(train, 2, name, 0.25, 1)
    model = model_of(name, 0.25)
    stages = stages_of_causal_lm(model, 2)
    ids, targets, mask = batch()
    values: list[Any] = list(ids.chunk(M))
    for index, stage in enumerate(stages):
        torch.manual_seed(7 + index)
        values = [stage.module(x, attention_mask=a) for x, a in zip(values, mask.chunk(M), strict=True)]
    losses = [lm_loss(x, y) for x, y in zip(values, targets.chunk(M), strict=True)]
    for loss in losses:
        (loss / M).backward()
    torch.testing.assert_close(found[1][1], [loss.detach() for loss in losses])
    both = stages[0].tied and set(stages[0].tied.values())
    for rank, stage in enumerate(stages):
        for key, gradient in parameters_of(model, [stage]).items():
            if not both or all(dict(model.named_parameters())[key] is not p for p in both):
                torch.testing.assert_close(found[rank][0][key], gradient)


def clipped(rank: int, ranks: int, norm_type: float) -> tuple[list[float], dict[str, Tensor]]:
    model = model_of("gpt2", 0.0)
    stages = [stages_of_causal_lm(model, ranks)[rank]]
    runner = PipelineRunner(one_f_one_b(ranks, M), stages, dist.group.WORLD, lm_loss)
    ids, targets, mask = batch()
    runner.step(ids, targets, kwargs={"attention_mask": mask})
    norms = [float(runner.clip_grad_norm_(limit, norm_type)) for limit in (100.0, 0.5)]
    return norms, parameters_of(model, stages)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.slow
def test_clipping_over_stages_and_ties_is_that_of_the_whole_model(norm_type):
    model = model_of("gpt2", 0.0)
    ids, targets, mask = batch()
    for k in range(M):
        rows = slice(2 * k, 2 * k + 2)
        (lm_loss(model(ids[rows], attention_mask=mask[rows]).logits, targets[rows]) / M).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type))
    found = run_ranks(clipped, 2, norm_type)
    assert found[0][0] == found[1][0] == [pytest.approx(norm, rel=1e-5)] * 2
    plain = {n: p.grad for n, p in model.named_parameters()}
    for _, ours in found:
        for key, gradient in ours.items():
            torch.testing.assert_close(gradient, plain[key])


def sequential() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def train_sequential(rank: int, ranks: int) -> dict[str, Tensor]:
    model = sequential()
    stages = [stages_of_sequential(model, ranks)[rank]]
    runner = PipelineRunner(one_f_one_b(ranks, 4), stages, dist.group.WORLD, functional.mse_loss)
    x = torch.arange(64.0).reshape(8, 8) / 64
    runner.step(x, 1 - x)
    return parameters_of(model, stages)


def test_a_sequential_is_cut_into_stages():
    model, x = sequential(), torch.arange(64.0).reshape(8, 8) / 64
    for part in x.chunk(4):
        (functional.mse_loss(model(part), 1 - part) / 4).backward()
    first, second = run_ranks(train_sequential, 2)
    assert first and second
    for key, gradient in (first | second).items():
        assert torch.equal(gradient, dict(model.named_parameters())[key].grad)
    assert set(first | second) == {n for n, _ in model.named_parameters()}


def test_a_layer_that_stands_several_times_in_a_sequential_runs_as_often():
    act, (model, x) = nn.ReLU(), (sequential(), torch.arange(64.0).reshape(8, 8) / 64)
    model[1] = model[3] = act
    for stages in (1, 2, 3):
        runner = PipelineRunner(one_f_one_b(stages, 2), stages_of_sequential(model, stages), None, functional.mse_loss)
        assert torch.equal(torch.cat(runner.forward(x).outputs), model(x))


class Shares(nn.Module):
    """Words, layers of which two are one, and an output of the words' own weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        words, twice, head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)
        head.weight = words.weight
        self.all = nn.Sequential(words, twice, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), twice, head)


def train_shared(rank: int, ranks: int) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    model = Shares()
    program = zb_v(ranks, M)
    stages = stages_of_sequential(model.all, program.stages)
    mine = [stages[index] for index in program.stages_of(rank)]
    runner = PipelineRunner(program, mine, dist.group.WORLD, lm_loss)
    ids, targets, _ = batch()
    runner.step(ids, targets)
    norm = float(runner.clip_grad_norm_(100.0))
    found = parameters_of(model, mine)
    torch.optim.SGD(dict.fromkeys(p for stage in mine for p in stage.parameters()), lr=0.5).step()
    return found, norm, {n: p.detach() for n, p in model.named_parameters() if n in found}


def test_parameters_that_layers_of_a_sequential_share_have_one_gradient_on_all_ranks():
    model = Shares()
    ids, targets, _ = batch()
    for x, y in zip(ids.chunk(M), targets.chunk(M), strict=True):
        (lm_loss(model.all(x), y) / M).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 100.0))
    plain = {n: p.grad for n, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    after = dict(model.named_parameters())
    found = run_ranks(train_shared, 2)
    assert {n for ours, _, _ in found for n in ours} == set(plain)
    for ours, total, values in found:
        assert total == pytest.approx(norm, rel=1e-5)
        for key, gradient in ours.items():
            torch.testing.assert_close(gradient, plain[key], msg=lambda text, key=key: f"{key}: {text}")
            torch.testing.assert_close(values[key], after[key].detach())


def train_repeated(rank: int, ranks: int) -> dict[str, Tensor]:
    model = repeated()
    stages = [stages_of_causal_lm(model, ranks)[rank]]
    runner = PipelineRunner(one_f_one_b(ranks, M), stages, dist.group.WORLD, lm_loss)
    ids, targets, mask = batch()
    runner.step(ids, targets, kwargs={"attention_mask": mask})
    return parameters_of(model, stages)


def repeated() -> Any:
    """A model whose last layer is its first again."""
    model = model_of("llama", 0.0)
    model.model.layers[-1] = model.model.layers[0]
    return model


def test_a_layer_that_a_language_model_runs_twice_has_one_gradient_on_both_ranks():
    model = repeated()
    ids, targets, mask = batch()
    for k in range(M):
        rows = slice(2 * k, 2 * k + 2)
        (lm_loss(model(ids[rows], attention_mask=mask[rows], use_cache=False).logits, targets[rows]) / M).backward()
    plain = {n: p.grad for n, p in model.named_parameters()}
    found = run_ranks(train_repeated, 2)
    assert {n for ours in found for n in ours} == set(plain)
    for ours in found:
        for key, gradient in ours.items():
            torch.testing.assert_close(gradient, plain[key], msg=lambda text, key=key: f"{key}: {text}")
