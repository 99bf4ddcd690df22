"""Models that do something between embedding, layers and logits, in stages, beside transformers' own forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sixfold.pipeline import (
    PipelineRunner,
    ScheduleError,
    add_loss,
    one_f_one_b,
    stages_of_causal_lm,
    stages_of_sequential,
    zb_h1,
)

transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

WORDS, LENGTH, M = 48, 10, 2
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
# What each does that a Llama does not.
MODELS: dict[str, dict[str, Any]] = {
    # layer_types by a layer's place, a soft cap on the logits
    "Gemma2": {"sliding_window": 3, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
    # embeddings are scaled in front of the layers, logits behind the head
    "Granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0},
    # a norm in front of the layers, which return tuples
    "Bloom": {"n_layer": 4, "n_head": 2},
    # layers_block_type by a layer's place, a property that counts from num_hidden_layers
    "Bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
}
MORE: dict[str, dict[str, Any]] = {
    "Qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    "NanoChat": {"final_logit_softcapping": 2.0},
    "Cohere": {"logit_scale": 0.25},
    "Gemma": {},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False},
    # positions are embedded with keyword arguments
    "BioGpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    # num_hidden_layers, by which its layers are cut, counts each twice
    "LongcatFlash": {
        "num_layers": 4,
        "ffn_hidden_size": 24,
        "expert_ffn_hidden_size": 8,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 8,
    },
}


def model_of(name: str) -> Any:
    given = MODELS.get(name, MORE.get(name))
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "pad_token_id": 0} if name == "Bloom" else SIZES
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes | given))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.train()


def lm_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def check_cut(name: str, count: int) -> None:
    model = model_of(name)
    plain = copy.deepcopy(model)
    ids = torch.randint(1, WORDS, (2 * M, LENGTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[::2, :3] = 0
    expected = []
    for x, a in zip(ids.chunk(M), mask.chunk(M), strict=True):
        expected.append(plain(x, attention_mask=a).logits)
        (lm_loss(expected[-1], x) / M).backward()
    stages = stages_of_causal_lm(model, count)
    runner = PipelineRunner(one_f_one_b(count, M), stages, None, lm_loss)
    found = runner.step(ids, ids, kwargs={"attention_mask": mask}, keep_outputs=True).outputs
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach())
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_model_that_scales_norms_caps_or_tells_layers_apart_is_cut_with_its_own_logits_and_gradients(name):
    check_cut(name, 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS | MORE)
@pytest.mark.slow
def test_so_are_more_models_and_cuts(name, count):
    check_cut(name, count)


def test_a_model_whose_forward_was_set_on_it_is_refused_whose_stages_would_each_run_all_layers():
    model = model_of("Gemma2")
    model.model.forward = model.model.forward
    with pytest.raises(ScheduleError, match="which has a forward that was set on the object"):
        stages_of_causal_lm(model, 2)


def test_a_compiled_model_is_refused_and_its_own_model_is_cut_as_the_message_says():
    model = torch.compile(model_of("Gemma2"), backend="eager")
    with pytest.raises(ScheduleError, match="the model is compiled") as refused:
        stages_of_causal_lm(model, 2)
    assert "model._orig_mod" in str(refused.value)
    assert len(stages_of_causal_lm(model._orig_mod, 2)) == 2


def test_an_optimizer_of_the_models_parameters_is_refused_and_one_of_the_stages_trains_as_the_message_says():
    ids = torch.randint(1, WORDS, (4, 8), generator=torch.Generator().manual_seed(0))

    def train(of_stages):
        model = model_of("Gemma2")
        assert model.config.tie_word_embeddings, "the copy is what the optimizer lacks"
        stages = stages_of_causal_lm(model, 2)
        parameters = [p for stage in stages for p in stage.parameters()] if of_stages else model.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        runner = PipelineRunner(one_f_one_b(2, 2), stages, None, lm_loss)
        for _ in range(2):
            runner.step(ids, ids)
            optimizer.step()

    with pytest.raises(
        ScheduleError, match=r"give the optimizers the parameters of every stage \(stage\.parameters\(\)\)"
    ):
        train(of_stages=False)
    train(of_stages=True)


def test_a_parameter_that_no_stage_or_several_would_have_is_refused():
    model = model_of("Gemma2")
    model.model.register_parameter("memory", nn.Parameter(torch.zeros(16)))
    with pytest.raises(ScheduleError, match="parameters of its base_model's own: memory"):
        stages_of_causal_lm(model, 2)
    model = model_of("Gemma2")
    model.model.add_module("projection", nn.Linear(16, 16))
    with pytest.raises(ScheduleError, match="has a Linear after its layers"):
        stages_of_causal_lm(model, 2)


def mixture() -> Any:
    torch.manual_seed(3)
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).train()


def test_a_loss_of_all_layers_routers_is_refused_when_a_model_is_cut_and_when_it_is_asked_for_later():
    model = mixture()
    model.config.output_router_logits = True
    with pytest.raises(ScheduleError, match="MixtralForCausalLM with output_router_logits"):
        stages_of_causal_lm(model, 2)
    model.config.output_router_logits = False
    stages = stages_of_causal_lm(model, 2)
    ids = torch.randint(1, WORDS, (2 * M, LENGTH))
    runner = PipelineRunner(one_f_one_b(2, M), stages, None, lm_loss)
    with pytest.raises(ScheduleError, match="with output_router_logits"):
        runner.step(ids, ids, kwargs={"output_router_logits": True})
    model.config.output_router_logits = True
    with pytest.raises(ScheduleError, match="with output_router_logits"):
        PipelineRunner(one_f_one_b(2, M), stages, None, lm_loss).step(ids, ids)


def test_the_balance_of_each_layer_joins_by_add_loss_in_a_hook_as_the_error_says():
    def balance(logits: Tensor) -> Tensor:
        chances = logits.float().softmax(-1)
        chosen = functional.one_hot(chances.topk(2).indices, 4).float().mean((0, 1))
        return (chosen * chances.mean(0)).sum()

    model, ids = mixture(), torch.randint(1, WORDS, (2 * M, LENGTH), generator=torch.Generator().manual_seed(5))
    plain, routed = copy.deepcopy(model), []
    for layer in plain.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, made: routed.append(made[0]))
    for x in ids.chunk(M):
        loss = lm_loss(plain(x).logits, x)
        (loss / M + sum(balance(logits) for logits in routed) * 0.1 / M).backward()
        routed.clear()
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda _, __, made: (made[0], add_loss(made[1], balance(made[0]), weight=0.1 / M), made[2])
        )
    PipelineRunner(one_f_one_b(2, M), stages_of_causal_lm(model, 2), None, lm_loss).step(ids, ids)
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("program", [one_f_one_b(2, M), zb_h1(2, M)], ids=lambda program: program.name)
@pytest.mark.slow
def test_a_model_with_lora_is_cut_as_the_error_says_and_has_the_gradients_of_plain_torch(program):
    peft = pytest.importorskip("peft", reason="needs peft, a peer that only tests use")
    torch.manual_seed(3)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).train()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama, config)
    plain = copy.deepcopy(model)
    with pytest.raises(ScheduleError, match=r"give its get_base_model\(\)"):
        stages_of_causal_lm(model, 2)
    ids = torch.randint(1, WORDS, (2 * M, LENGTH), generator=torch.Generator().manual_seed(5))
    for x in ids.chunk(M):
        (lm_loss(plain(x).logits, x) / M).backward()
    PipelineRunner(program, stages_of_causal_lm(model.get_base_model(), 2), None, lm_loss).step(ids, ids)
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == ("lora" not in key), key
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, key=key: f"{key}: {text}")


class Residual(nn.Sequential):
    """Adds its input, which no stage has."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(nn.Sequential):
    """Does more than its layers in the call itself."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


def hooked() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def patched() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.forward = lambda x: x  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Residual(nn.Linear(4, 4), nn.Linear(4, 4)), "a forward of its own"),
        (Scaled(nn.Linear(4, 4), nn.Linear(4, 4)), "a Scaled that has a __call__ of its own"),
        (patched(), "a forward of its own"),
        (hooked(), "hooks of its own"),
    ],
)
def test_a_sequential_that_does_more_than_its_layers_is_refused_until_it_is_a_layer(model, what):
    with pytest.raises(ScheduleError, match=f"{what}, which no stage would run"):
        stages_of_sequential(model, 2)
    x = torch.randn(2, 4)
    stages = stages_of_sequential(nn.Sequential(model, nn.Linear(4, 4)), 2)
    assert torch.equal(stages[0].module(x), model(x))


def test_a_sequential_of_another_name_is_cut():
    class Mine(nn.Sequential):
        pass

    model, x = Mine(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    runner = PipelineRunner(one_f_one_b(2, 1), stages_of_sequential(model, 2), None, functional.mse_loss)
    assert torch.equal(runner.forward(x).outputs[0], model(x))


@pytest.mark.parametrize("how", ["model", "stages"])
def test_eval_and_train_of_a_model_or_of_its_stages_hold_for_what_it_does_beside_its_layers(how):
    torch.manual_seed(3)
    config = transformers.BioGptConfig(**SIZES, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)
    model = transformers.BioGptForCausalLM(config).train()
    for layer in model.base_model.layers:
        layer.dropout = 0.0
    plain = copy.deepcopy(model)
    ids = torch.randint(1, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    stages = stages_of_causal_lm(model, 2)
    runner = PipelineRunner(one_f_one_b(2, 1), stages, None, lm_loss)
    for mode in (False, True):
        for module in [model] if how == "model" else [stage.module for stage in stages]:
            module.train(mode)
        plain.train(mode)
        torch.manual_seed(7)
        found = runner.forward(ids).outputs[0]
        torch.manual_seed(7)
        torch.testing.assert_close(found, plain(ids, use_cache=False).logits.detach())


@pytest.mark.parametrize(("made", "wanted"), [("sdpa", "eager"), ("eager", "sdpa")])
def test_what_the_models_configuration_is_told_after_the_cut_holds_in_its_stages(made, wanted):
    sizes = SIZES | {"layer_types": ["sliding_attention", "full_attention"] * 2, "use_sliding_window": True}
    config = transformers.Qwen2Config(**sizes, sliding_window=3, attn_implementation=made)
    model = transformers.Qwen2ForCausalLM(config).eval()
    plain = copy.deepcopy(model)
    ids = torch.randint(1, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    runner = PipelineRunner(one_f_one_b(3, 1), stages_of_causal_lm(model, 3), None, lm_loss)
    for _ in range(2):
        torch.testing.assert_close(runner.forward(ids).outputs[0], plain(ids, use_cache=False).logits.detach())
        for it in (model, plain):
            it.set_attn_implementation(wanted)  # masks of one kind mean nothing to layers of the other


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_hook_in_front_of_the_model_is_refused_which_the_last_stage_alone_would_run(when):
    model = model_of("Gemma2")
    ids = torch.ones(M, LENGTH, dtype=torch.long)
    flipped = torch.arange(LENGTH).flip(0)[None]

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"position_ids": flipped}

    if when == "before":
        model.register_forward_pre_hook(hook, with_kwargs=True)
        with pytest.raises(ScheduleError, match="forward pre-hook"):
            stages_of_causal_lm(model, 2)
        return
    runner = PipelineRunner(one_f_one_b(2, M), stages_of_causal_lm(model, 2), None, lm_loss)
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(ScheduleError, match="forward pre-hook"):
        runner.forward(ids)
    expected = model(ids, use_cache=False).logits.detach()
    handle.remove()  # and, as the error says, what it made as kwargs
    runner = PipelineRunner(one_f_one_b(2, M), stages_of_causal_lm(model, 2), None, lm_loss)
    found = runner.forward(ids, kwargs={"position_ids": flipped.expand(M, -1)}).outputs
    torch.testing.assert_close(torch.cat(found), expected)


def test_a_stage_of_two_layers_knows_its_dtype_and_its_parameters_in_the_models_forward():
    # OpenAI-GPT casts the mask to the dtype of its first parameter; a stage between the ends has those of layers alone.
    sizes = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**sizes, **rates))
    ids = torch.randint(1, WORDS, (M, LENGTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    runner = PipelineRunner(one_f_one_b(4, M), stages_of_causal_lm(model, 4), None, lm_loss)
    found = runner.forward(ids, kwargs={"attention_mask": mask}).outputs
    torch.testing.assert_close(torch.cat(found), model(ids, attention_mask=mask).logits.detach())


@pytest.mark.parametrize("what", ["bias", "adapter"])
def test_what_a_tied_head_has_besides_its_weight_is_the_models_own(what):
    if what == "bias":
        model = transformers.PhiForCausalLM(transformers.PhiConfig(**SIZES, tie_word_embeddings=True))
        nn.init.normal_(model.lm_head.bias)
    else:
        peft = pytest.importorskip("peft", reason="needs peft, a peer that only tests use")
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
        adapters = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        model = peft.get_peft_model(llama, adapters).get_base_model()
    plain = copy.deepcopy(model)
    ids = torch.randint(1, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    lm_loss(plain(ids, use_cache=False).logits, ids).backward()
    PipelineRunner(one_f_one_b(2, 1), stages_of_causal_lm(model, 2), None, lm_loss).step(ids, ids)
    own = [name for name, p in model.lm_head.named_parameters() if p.requires_grad and "base_layer" not in name]
    assert len(own) == 2, own  # the weight and the bias; or the adapter's two
    for name in own:
        torch.testing.assert_close(
            model.lm_head.get_parameter(name).grad, plain.lm_head.get_parameter(name).grad, msg=name
        )


class Inside(nn.Linear):
    """Returns its output in a container, as layers of transformers' older models do."""

    def __init__(self, kind: type, sides: int) -> None:
        super().__init__(4, 4)
        self.kind, self.sides = kind, sides

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Any:
        first, *sides = x if isinstance(x, self.kind) else (x,)
        return self.kind([super().forward(first), *sides, *(first for _ in range(self.sides - len(sides)))])


class First(nn.Module):
    def forward(self, x: tuple[Tensor, ...]) -> Tensor:
        return x[0] + sum(x[1:])


@pytest.mark.parametrize("sides", [0, 1])
@pytest.mark.parametrize("kind", [tuple, list])
def test_layers_of_a_sequential_that_hand_on_a_tuple_or_a_list_do_so_from_stage_to_stage(kind, sides):
    torch.manual_seed(3)
    model = nn.Sequential(Inside(kind, sides), Inside(kind, sides), First())
    plain, x = copy.deepcopy(model), torch.randn(4, 4)
    expected = plain(x)
    expected.square().mean().backward()
    runner = PipelineRunner(one_f_one_b(3, 2), stages_of_sequential(model, 3), None, lambda y, _: y.square().mean())
    found = torch.cat(runner.step(x, keep_outputs=True).outputs)
    torch.testing.assert_close(found, expected.detach())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_sequential_whose_last_layer_returns_a_tuple_of_one_gives_it_to_the_loss():
    model = nn.Sequential(nn.Linear(4, 4), Inside(tuple, 0))
    runner = PipelineRunner(one_f_one_b(2, 1), stages_of_sequential(model, 2), None, lambda y, _: y[0].sum())
    x = torch.randn(3, 4)
    assert runner.step(x).losses[0].item() == pytest.approx(model(x)[0].sum().item())


@pytest.mark.slow
def test_layers_that_are_rescaled_by_their_place_in_eval_mode_have_the_models_logits():
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 8}
    torch.manual_seed(3)
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, context_length=32, rescale_every=2))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    plain, ids = copy.deepcopy(model).train(), torch.arange(LENGTH)[None]
    model.eval()
    stages = stages_of_causal_lm(model, 2)
    found = PipelineRunner(one_f_one_b(2, 1), stages, None, lm_loss).forward(ids).outputs[0]
    torch.testing.assert_close(found, plain(ids, use_cache=False).logits.detach())  # no dropout
    model(ids)
    with pytest.raises(ScheduleError, match="has layers rescaled for evaluation"):
        stages_of_causal_lm(model, 2)
    model.train()(ids, use_cache=False)  # as the error says
    found = PipelineRunner(one_f_one_b(2, 1), stages_of_causal_lm(model, 2), None, lm_loss).forward(ids).outputs[0]
    torch.testing.assert_close(found, plain(ids, use_cache=False).logits.detach())
