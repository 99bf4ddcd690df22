"""A cut of a causal model is compared with the model, and refused where it is another or has become another."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, one_f_one_b, stages_of_causal_lm

transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

WORDS, LENGTH = 48, 10
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
Llama, Base = transformers.LlamaForCausalLM, transformers.LlamaModel


def llama(kind: type = Llama, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(3)
    model = kind(transformers.LlamaConfig(**SIZES | more))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).train()


def ids() -> Tensor:
    return torch.randint(1, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def lm_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def runner_of(stages: list[Stage]) -> PipelineRunner:
    return PipelineRunner(one_f_one_b(len(stages), 1), stages, None, lm_loss)


class ScaledEmbeddings(Llama):  # type: ignore[misc, valid-type]
    """Changes arguments in front of the model's forward."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = 2 * self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


class WrongPositions(Llama):  # type: ignore[misc, valid-type]
    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, position_ids=torch.arange(8).flip(0)[None], **kwargs)


class NoMask(Llama):  # type: ignore[misc, valid-type]
    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Between(Base):  # type: ignore[misc, valid-type]
    """Does something between two layers."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, use_cache: Any = None, **kwargs: Any) -> Any:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary_emb(hidden, positions)
        for at, layer in enumerate(self.layers):
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
            hidden = hidden * self.factor if at == self.place else hidden
        return transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def between(place: int, factor: float = 0.5) -> Any:
    model = llama()
    base = Between(model.config).to(torch.float32)
    base.load_state_dict(model.model.state_dict())
    base.place, base.factor = place, factor
    model.model = base
    return model.train()


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (lambda: llama(ScaledEmbeddings), "before the first layer"),
        (lambda: llama(WrongPositions), "in layer 0, of stage 0"),
        (lambda: llama(NoMask), "in layer 0, of stage 0"),
        (lambda: between(1), "between stages 0 and 1"),
        (lambda: between(2), "between layers 2 and 3, of stage 1"),
    ],
    ids=["embeddings", "positions", "mask", "border", "inside"],
)
def test_a_model_that_does_what_no_stage_runs_is_refused_at_the_cut_which_names_the_place(model, where):
    made = model()
    with pytest.raises(ScheduleError, match=rf"stages of a {type(made).__name__} give .* differ first {where}"):
        stages_of_causal_lm(made, 2)
    assert len(stages_of_causal_lm(made, 2, check=False)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tenth_more_between_two_layers_is_no_rounding(dtype):
    made = between(1, 1.1).to(dtype)
    with pytest.raises(ScheduleError, match="between stages 0 and 1"):
        stages_of_causal_lm(made, 2)


def test_weights_of_eight_bits_allow_no_more_than_what_is_computed_with():
    made = between(1, 1.1)
    made.model.layers[0].mlp.kept = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ScheduleError, match="between stages 0 and 1"):
        stages_of_causal_lm(made, 2)


def test_logits_that_a_subclass_scales_are_the_last_stages():
    class Scaled(Llama):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            made = super().forward(*args, **kwargs)
            made.logits = made.logits * 3
            return made

    model = llama(Scaled).eval()
    found = runner_of(stages_of_causal_lm(model, 2)).forward(ids()).outputs[0]
    torch.testing.assert_close(found, model(ids(), use_cache=False).logits.detach())


class Restless(nn.Module):
    """A norm that moves a buffer, counts, notes and draws from every generator, in eval mode too."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.count, self.notes, self.own = norm, 0, [], torch.Generator()
        self.register_buffer("moved", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.moved += 1
        self.count += 1
        self.notes.append(random.random())
        self.seen = x.shape
        torch.rand(1), torch.rand(1, generator=self.own)
        return self.norm(x)


def test_a_cut_leaves_modes_buffers_attributes_gradients_and_random_numbers_as_they_were():
    model = llama()
    layer = model.model.layers[1]
    layer.input_layernorm = restless = Restless(layer.input_layernorm)
    batch = nn.BatchNorm1d(4)
    layer.unused = batch
    layer.mlp.eval()
    torch.manual_seed(7)
    random.seed(7)
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), restless.own.get_state()
    values = copy.deepcopy(model.state_dict())
    stages = stages_of_causal_lm(model, 2)
    assert modes == [module.training for module in model.modules()]
    assert all(stage.module.training for stage in stages if stage.module is not None)
    assert torch.equal(states[0], torch.get_rng_state()), "torch's generator"
    assert states[1] == random.getstate(), "Python's generator"
    assert torch.equal(states[2], restless.own.get_state()), "a module's generator"
    assert (restless.count, restless.notes, hasattr(restless, "seen")) == (0, [], False)
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_draws_in_eval_mode_is_cut_though_stages_draw_in_another_order():
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    model = llama()
    model.model.rotary_emb.noise = Noisy()
    plain = type(model.model.rotary_emb).forward
    rotary = model.model.rotary_emb
    rotary.forward = lambda *args, **more: tuple(rotary.noise(part) for part in plain(rotary, *args, **more))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(stages_of_causal_lm(model, 2)) == 2


def test_what_cannot_run_is_cut_all_the_same():
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(stages_of_causal_lm(llama(), 2)) == 2

    class Wanting(Llama):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, segments: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    with pytest.warns(UserWarning, match=r"stages of a Wanting were not compared.*segments"):
        assert len(stages_of_causal_lm(llama(Wanting), 2)) == 2


def test_stages_that_fail_where_the_model_does_not_are_refused_at_the_cut():
    class Asking(Llama):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids.clone(), **kwargs)

    with pytest.raises(ScheduleError, match=r"stages of a Asking fail where the model does not.*clone"):
        stages_of_causal_lm(llama(Asking), 2)


# ---- what changes behind the cut


def resized(model: Any) -> None:
    model.resize_token_embeddings(WORDS + 2, mean_resizing=False)


def headed(model: Any) -> None:
    model.lm_head = nn.Linear(16, WORDS, bias=False)


def renormed(model: Any) -> None:
    model.model.norm = nn.LayerNorm(16)


def relayered(model: Any) -> None:
    model.model.layers[3] = copy.deepcopy(model.model.layers[3])


def shortened(model: Any) -> None:
    model.model.layers = model.model.layers[:2]


def adapted(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="needs peft, a peer that only tests use")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (resized, "lm_head"),
        (headed, "lm_head"),
        (renormed, "norm"),
        (relayered, "layer 3"),
        (shortened, "layers"),
        (adapted, "lm_head"),
    ],
)
@pytest.mark.slow
def test_a_part_that_is_replaced_behind_the_cut_is_refused_by_the_next_step_until_the_model_is_cut_again(change, what):
    model = llama()
    runner = runner_of(stages_of_causal_lm(model, 2))
    runner.step(ids(), ids())
    change(model)
    with pytest.raises(ScheduleError, match=rf"a LlamaForCausalLM, whose {what} was replaced .*cut the model again"):
        runner.step(ids(), ids())
    model.zero_grad()
    model.eval()
    found = runner_of(stages_of_causal_lm(model, 2)).forward(ids()).outputs[0]  # as the error says
    torch.testing.assert_close(found, model(ids(), use_cache=False).logits.detach())


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("verb", ["step", "evaluate"])
def test_a_forward_that_is_set_behind_the_cut_is_refused_until_it_is_removed(base, verb):
    model = llama()
    runner = runner_of(stages_of_causal_lm(model, 2))
    call = getattr(runner, verb)
    call(ids(), ids())
    held, where = (model.model, "its base_model") if base else (model, "it")
    forward = held.forward
    held.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    for _ in range(2):
        with pytest.raises(ScheduleError, match=f"a LlamaForCausalLM, and a forward was set on {where}, which the"):
            call(ids(), ids())
    del held.forward
    call(ids(), ids())


def test_what_is_set_on_the_model_and_its_base_behind_the_cut_holds_in_its_stages():
    model = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, sliding_window=3, final_logit_softcapping=2.0)
    ).eval()
    runner = runner_of(stages_of_causal_lm(model, 2))
    config = copy.deepcopy(model.config)
    config.final_logit_softcapping = 0.5
    config.sliding_window = 5
    model.config = model.model.config = config
    found = runner.forward(ids()).outputs[0]
    torch.testing.assert_close(found, model(ids(), use_cache=False).logits.detach())
    assert found.abs().max() <= 0.5
    made = between(0)
    made.model.factor = 1.0
    runner = runner_of(stages_of_causal_lm(made.eval(), 2))
    made.model.factor = 3.0
    assert not torch.equal(runner.forward(ids()).outputs[0], made(ids()).logits)  # each stage has a layer 0
    made.model.factor = 1.0
    torch.testing.assert_close(runner.forward(ids()).outputs[0], made(ids()).logits.detach())


def test_stages_live_without_the_model_and_as_copies_of_their_own():
    model = llama().eval()
    expected = model(ids(), use_cache=False).logits.detach()
    stages = stages_of_causal_lm(model, 2)
    modules = [copy.deepcopy(stage.module) for stage in stages]
    model.model.layers[0] = nn.Identity()
    del model
    gc.collect()
    for kept in (modules, [stage.module for stage in stages]):
        runner = runner_of([Stage(module, at) for at, module in enumerate(kept)])
        torch.testing.assert_close(runner.forward(ids()).outputs[0], expected)


def test_layers_that_training_leaves_out_by_chance_are_refused_until_it_leaves_out_none():
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    model = transformers.BioGptForCausalLM(transformers.BioGptConfig(**sizes, intermediate_size=24, layerdrop=0.5))
    with pytest.raises(ScheduleError, match=r"a BioGptForCausalLM with layerdrop=0\.5"):
        stages_of_causal_lm(model, 2)
    model.base_model.layerdrop = 0.0  # as the error says
    runner = runner_of(stages_of_causal_lm(model.train(), 2))
    runner.step(ids(), ids())
    model.base_model.layerdrop = 0.5
    with pytest.raises(ScheduleError, match=r"with layerdrop=0\.5"):
        runner.step(ids(), ids())


def test_a_model_that_changes_its_embeddings_in_place_is_cut_with_its_own_logits_and_gradients():
    sizes = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2, "dff": 24}
    torch.manual_seed(3)
    config = transformers.CTRLConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, tie_word_embeddings=False)
    model = transformers.CTRLLMHeadModel(config).train()
    plain = copy.deepcopy(model)
    lm_loss(plain(ids(), use_cache=False).logits, ids()).backward()
    runner = runner_of(stages_of_causal_lm(model, 3))
    found = runner.step(ids(), ids(), keep_outputs=True).outputs[0]
    torch.testing.assert_close(found, plain(ids(), use_cache=False).logits.detach())
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, key=key: f"{key}: {text}")


def test_states_of_stages_are_saved_in_one_under_their_stages_places_as_the_readme_says():
    model, other = llama().eval(), llama().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    saved = {}
    for stage in stages_of_causal_lm(model, 2):
        saved |= {f"{stage.index}.{name}": value for name, value in stage.module.state_dict().items()}
    for stage in stages_of_causal_lm(other, 2):
        mine = {
            name.removeprefix(f"{stage.index}."): v for name, v in saved.items() if name.startswith(f"{stage.index}.")
        }
        stage.module.load_state_dict(mine)
    assert len(saved) == len(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_whose_layers_get_the_embeddings_too_is_refused_where_rounding_hides_it_in_the_logits(dtype):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": WORDS}
    kinds = ["mamba", "hybrid", "mamba", "hybrid"]
    config = transformers.ZambaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=4, n_mamba_heads=2, layers_block_type=kinds
    )
    torch.manual_seed(3)
    model = transformers.ZambaForCausalLM(config).to(dtype)
    with pytest.raises(ScheduleError, match=r"call layer [23] with other arguments.*: argument 1 is .* apart"):
        stages_of_causal_lm(model, 2)
