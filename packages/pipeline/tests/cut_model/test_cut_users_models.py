"""Models as their users have them, cut into stages beside transformers' own forward in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipeline_helpers import square_loss
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn
from torch.nn import functional

from sixfold.pipeline import (
    PipelineRunner,
    ScheduleError,
    Stage,
    interleaved,
    one_f_one_b,
    pipedream_2bw,
    stages_of_causal_lm,
    stages_of_sequential,
)

WORDS, LENGTH, M = 48, 10, 2
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "vocab_size": WORDS, "pad_token_id": 0}


def lm_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def check_cut(whole: nn.Module, model: Any, count: int, **kwargs: Tensor) -> None:
    """Losses and gradients of ``whole``, which ``model`` is (a part of), are a copy's in a plain loop."""
    plain = copy.deepcopy(whole)
    ids = torch.randint(1, WORDS, (2 * M, LENGTH), generator=torch.Generator().manual_seed(5))
    losses = []
    for k, x in enumerate(ids.chunk(M)):
        losses.append(lm_loss(plain(x, **{name: value.chunk(M)[k] for name, value in kwargs.items()}).logits, x))
        (losses[-1] / M).backward()
    runner = PipelineRunner(one_f_one_b(count, M), stages_of_causal_lm(model, count), None, lm_loss)
    found = runner.step(ids, ids, kwargs=kwargs).losses
    torch.testing.assert_close(torch.stack(found), torch.stack(losses).detach())
    for (key, ours), theirs in zip(whole.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), key
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("tied", [True, False])
def test_token_types_are_added_once_by_the_first_stage(tied):
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    torch.manual_seed(3)
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": WORDS, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    model = transformers.GPT2LMHeadModel(config).train()
    types = torch.randint(0, WORDS, (2 * M, LENGTH), generator=torch.Generator().manual_seed(7))
    check_cut(model, model, 3, token_type_ids=types)


def test_a_norm_that_lora_trains_too_is_cut_with_the_gradients_of_plain_torch():
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    peft = pytest.importorskip("peft", reason="needs peft, a peer that only tests use")
    torch.manual_seed(3)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).train()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False)
    model = peft.get_peft_model(llama, config)
    check_cut(model, model.get_base_model(), 2)
    assert model.get_base_model().model.norm.modules_to_save["default"].weight.grad is not None


def test_a_model_that_names_no_base_model_is_cut_with_its_own_gradients():
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    torch.manual_seed(3)
    experts = {"intermediate_size_mlp": 24, "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 4}
    # Every fourth layer sees all tokens and has no rotary embedding, by its place in the model.
    config = transformers.Llama4TextConfig(**SIZES, **experts)
    model = transformers.Llama4ForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert model.base_model is model
    check_cut(model, model, 3)


def lazy() -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(8))


def test_lazy_layers_are_refused_where_shapes_are_needed_until_the_model_has_run():
    wanted = r"weight gets its shape in its first forward \(a lazy layer\); run the model once on a batch"
    model, x = lazy(), torch.randn(4, 8)
    with pytest.raises(ScheduleError, match=f"the model: 0.{wanted}"):
        stages_of_sequential(model, 2)
    model(x)
    stages_of_sequential(model, 2)

    def runner(model: nn.Sequential) -> PipelineRunner:
        stages = [Stage(part, s, optimizer=torch.optim.SGD(part.parameters(), lr=0.1)) for s, part in enumerate(model)]
        return PipelineRunner(pipedream_2bw(2, M), stages, None, square_loss)

    with pytest.raises(ScheduleError, match=f"stage 0: {wanted}"):
        runner(lazy()).step(x, x)
    runner(model).step(x, x)

    head = nn.LazyLinear(8)
    with pytest.raises(ScheduleError, match=f"stage 1: {wanted}"):
        Stage(head, 1, tied={"weight": head.weight})
    head(x)
    Stage(head, 1, tied={"weight": head.weight})

    norm = nn.LazyBatchNorm1d()
    runner_of_norm = PipelineRunner(one_f_one_b(1, 1), [Stage(norm, 0)], None, square_loss)
    with pytest.raises(ScheduleError, match=f"stage 0: {wanted}"):
        runner_of_norm.evaluate(x, x)
    norm(x)
    with pytest.warns(UserWarning, match="buffers and plain attributes were put back"):
        runner_of_norm.evaluate(x, x)


def train_and_keep_own_parameters(transport, model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Three steps of AdamW; the trained parameters of this rank under the names of the whole model."""
    program = interleaved(2, M, chunks=2)
    stages = stages_of_causal_lm(model[transport.rank], program.stages, check=False)
    mine = [stages[index] for index in program.stages_of(transport.rank)]
    optimizer = torch.optim.AdamW([p for stage in mine for p in stage.parameters()], lr=1e-2)
    runner = PipelineRunner(program, mine, transport, lm_loss)
    for _ in range(3):
        runner.step(ids, ids)
        optimizer.step()
        optimizer.zero_grad()
    own = {id(p) for stage in mine for p in stage.parameters()}
    return {name: p.detach() for name, p in model[transport.rank].named_parameters() if id(p) in own}


def test_the_ranks_parts_by_the_models_names_are_the_checkpoint_of_a_tied_model_trained_whole():
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    torch.manual_seed(3)
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)).train()
    ids = torch.randint(1, WORDS, (2 * M, LENGTH), generator=torch.Generator().manual_seed(5))
    models = [copy.deepcopy(whole) for _ in range(2)]
    first, second = values_or_raise(on_threads(2, train_and_keep_own_parameters, models, ids))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for _ in range(3):
        for x in ids.chunk(M):
            (lm_loss(whole(x).logits, x) / M).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not set(first) & set(second)
    torch.testing.assert_close({**first, **second}, dict(whole.named_parameters()), atol=1e-5, rtol=1e-4)


class Moving(nn.Module):
    """Keeps a mean of what it saw in another tensor each time, beside a table that it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("table", torch.linspace(0.0, 1.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return x + self.table


def with_a_layer_twice(layer: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8), layer)


def trained(model: nn.Sequential, ranks: Any = None) -> None:
    """Two steps of its stages, one of which is another rank's perhaps."""
    program = one_f_one_b(2, M)
    stages = stages_of_sequential(model, 2)
    mine = stages if ranks is None else [stages[i] for i in program.stages_of(ranks.rank)]
    runner = PipelineRunner(program, mine, ranks, square_loss, timeout_s=20)
    for seed in (1, 2):
        x = torch.randn(4 * M, 8, generator=torch.Generator().manual_seed(seed))
        runner.step(x, x)


@pytest.mark.parametrize("where", ["one process", "threads"])
@pytest.mark.parametrize(
    ("layer", "name"),
    [(nn.BatchNorm1d(8), "running_mean"), (nn.Sequential(Moving()), "0.seen")],
    ids=["a batch norm", "a mean of its own"],
)
def test_statistics_of_a_layer_on_two_stages_are_refused_until_each_has_its_own_or_they_rest(layer, name, where):
    def run(model: nn.Sequential) -> None:
        if where == "one process":
            trained(model)
        else:
            values_or_raise(on_threads(2, lambda ranks: trained(copy.deepcopy(model), ranks)))

    model = with_a_layer_twice(copy.deepcopy(layer))
    with pytest.raises(ScheduleError, match=rf"the forward changes 1\.{name}, a buffer of a layer that several stages"):
        run(model)
    model = with_a_layer_twice(copy.deepcopy(layer))
    model[1].eval()
    run(model)
    model = with_a_layer_twice(copy.deepcopy(layer))
    model[3] = copy.deepcopy(model[1])
    run(model)


def test_a_layer_on_two_stages_whose_statistics_rest_at_first_is_refused_when_they_move():
    model = with_a_layer_twice(nn.BatchNorm1d(8))
    model[1].eval()
    runner = PipelineRunner(one_f_one_b(2, M), stages_of_sequential(model, 2), None, square_loss)
    x = torch.randn(4 * M, 8)
    runner.step(x, x)
    model.train()
    with pytest.raises(ScheduleError, match=r"the forward changes 1\.running_mean"):
        runner.step(x, x)


def test_a_layer_on_two_stages_with_tables_alone_has_the_gradients_of_plain_torch():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.tensor([0.5, float("nan"), float("inf")]))
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(x) * self.table[0]

    model = with_a_layer_twice(Table())
    plain = copy.deepcopy(model)
    trained(model)
    for seed in (1, 2):
        x = torch.randn(4 * M, 8, generator=torch.Generator().manual_seed(seed))
        for part in x.chunk(M):
            (square_loss(plain(part), part) / M).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
