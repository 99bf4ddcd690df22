"""What is set on a model after it was cut holds in its stages, or the next step refuses it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_helpers import on_threads
from torch import Tensor, nn

from sixfold.pipeline import (
    PipelineRunner,
    ScheduleError,
    Stage,
    gpipe,
    stages_of_causal_lm,
    stages_of_sequential,
    zb_h1,
)

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

    class Gains(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        """Reads attributes that it has not from the start."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            made = super().forward(*args, **kwargs)
            made.logits = made.logits * getattr(self, "gain", 1.0)
            return made

    torch.manual_seed(3)
    return Gains(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()


def mean(output: Tensor, _: Any) -> Tensor:
    return output.float().mean()


def gained(model: Any) -> None:
    model.gain = 3.0


def doubled(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)  # type: ignore[method-assign]


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, __, made: 2 * made)
    module.register_forward_pre_hook(lambda _, given: (given[0] + 1,))


def compiled(module: nn.Module) -> None:
    module.compile(backend="eager")


FOLLOWED: list[tuple[str, Callable[[Any], object]]] = [
    ("an attribute that the forward reads", gained),
    ("hooks of the head", lambda model: hooked(model.lm_head)),
    ("a forward of the embedding", lambda model: doubled(model.model.embed_tokens)),
    ("a forward of the norm", lambda model: doubled(model.model.norm)),
    ("a forward of a layer's part", lambda model: doubled(model.model.layers[2].mlp)),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.slow
def test_what_is_set_after_the_cut_holds_in_its_stages_until_it_is_removed(tied):
    ids = torch.arange(32).view(4, 8)
    for what, change in FOLLOWED:
        model = llama(tied)
        runner = PipelineRunner(gpipe(2, 2), stages_of_causal_lm(model, 2), None, mean)
        before = torch.cat(runner.forward(ids).outputs)
        change(model)
        found = torch.cat(runner.forward(ids).outputs)
        torch.testing.assert_close(found, model(ids, use_cache=False).logits.detach(), msg=what)
        assert not torch.allclose(found, before), what
        if change is gained:
            del model.gain
            torch.testing.assert_close(torch.cat(runner.forward(ids).outputs), before)


def other_class(model: Any) -> None:
    model.__class__ = type("Other", (type(model),), {})


REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (compiled, r"with a compile\(\) of its own"),
    (lambda model: compiled(model.model), r"with a compile\(\) of its own"),
    (other_class, "and the class Other was set on it"),
    (lambda model: other_class(model.model), "and the class Other was set on its base_model"),
    (lambda model: model.add_module("value", nn.Linear(2, 2)), "whose value was replaced or added"),
    (
        lambda model: model.model.register_parameter("prompt", nn.Parameter(torch.ones(2))),
        "whose prompt was replaced or",
    ),
]


class Wrapped(nn.Module):
    """As peft puts an adapter around a head."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x)


REFUSED += [(lambda model: setattr(model, "lm_head", Wrapped(model.lm_head)), "whose lm_head was replaced or added")]
OF_A_COPY: list[tuple[Callable[[Any], object], str]] = [
    (lambda model: doubled(model.lm_head), "a forward was set on its tied output embedding"),
    (lambda model: compiled(model.lm_head), r"a Linear with a compile\(\) of its own"),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.slow
def test_what_stages_cannot_run_is_refused_by_the_next_call(tied):
    ids = torch.arange(32).view(4, 8)
    for change, words in REFUSED + (OF_A_COPY if tied else []):
        model = llama(tied)
        runner = PipelineRunner(gpipe(2, 2), stages_of_causal_lm(model, 2), None, mean)
        runner.forward(ids)
        change(model)
        for call in (runner.step, runner.evaluate):
            with pytest.raises(ScheduleError, match=words):
                call(ids, ids)
    if tied:  # which a copy of the head would not run
        doubled((model := llama(tied)).lm_head)
        with pytest.raises(ScheduleError, match="a forward was set on its tied output embedding, which the stages of"):
            stages_of_causal_lm(model, 2)
    model = llama(tied)
    compiled(model)
    with pytest.raises(ScheduleError, match=r"with a compile\(\) of its own.*compile the layers"):
        stages_of_causal_lm(model, 2)
    model._compiled_call_impl = None  # as the error says
    stages_of_causal_lm(model, 2)


CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lambda model: model.append(nn.Linear(8, 8)), "whose layers were replaced, added or deleted"),
    (lambda model: model.__setitem__(1, nn.Linear(8, 8)), "whose layers were replaced, added or deleted"),
    (lambda model: model.__delitem__(3), "whose layers were replaced, added or deleted"),
    (doubled, "and a forward, a hook or a class was set on it"),
    (hooked, "and a forward, a hook or a class was set on it"),
    (compiled, r"with a compile\(\) of its own"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_an_nn_sequential_that_changes_after_the_cut_is_refused_by_the_next_call(change, words):
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.randn(4, 8)
    stages = stages_of_sequential(model, 2)
    runner, apart = (PipelineRunner(gpipe(2, 2), each, None, mean) for each in (stages, copy.deepcopy(stages)))
    runner.step(x, x)
    doubled(model[2])  # of a layer it holds
    torch.testing.assert_close(torch.cat(runner.forward(x).outputs), model(x).detach())
    change(model)
    with pytest.raises(ScheduleError, match=words):
        runner.step(x, x)
    apart.step(x, x)  # copies of stages are their own


def ties_later(make: Callable[[], Any], tie: Callable[[Any], object], cut: Any, x: Tensor, runner_first: bool) -> Any:
    """Two ranks, each with a model of its own, as processes have it; what their steps after ``tie`` raise."""

    def rank(transport: Any) -> None:
        torch.manual_seed(5)
        model = make()
        stage = cut(model, 2)[transport.rank]
        if not runner_first:
            tie(model)
        runner = PipelineRunner(gpipe(2, 2), [stage], transport, mean, timeout_s=20)
        if runner_first:
            runner.step(x, x)
            tie(model)
        runner.step(x, x)

    return on_threads(2, rank)


def squares() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def as_configured(model: Any) -> None:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def norm_shared(model: Any) -> None:
    model.model.layers[3].input_layernorm = model.model.layers[0].input_layernorm


LATER: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = [
    (squares, lambda model: setattr(model[3], "weight", model[0].weight), stages_of_sequential),
    (lambda: llama(False), lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight), stages_of_causal_lm),
    (lambda: llama(False), as_configured, stages_of_causal_lm),
    (lambda: llama(True), norm_shared, stages_of_causal_lm),
]


@pytest.mark.parametrize("runner_first", [True, False])
@pytest.mark.parametrize(("make", "tie", "cut"), LATER, ids=["sequential", "head", "configured", "norms"])
def test_weights_of_two_stages_that_are_tied_after_the_cut_are_refused_on_both_ranks(make, tie, cut, runner_first):
    if cut is stages_of_causal_lm:
        pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")  # before threads
    x = torch.randn(4, 8) if cut is stages_of_sequential else torch.arange(32).view(4, 8)
    for error in ties_later(make, tie, cut, x, runner_first):
        assert isinstance(error, ScheduleError)
        assert "is a parameter of another stage too and not in stage.tied" in str(error)
        assert "tie weights before the cut, or cut the model again" in str(error)


def test_weights_of_one_stage_may_be_tied_after_the_cut():
    def tie(model: nn.Sequential) -> None:
        model[1].weight, model[3].weight = model[0].weight, model[2].weight

    assert ties_later(squares, tie, stages_of_sequential, torch.randn(4, 8), True) == [None, None]
    layer = nn.Linear(8, 8)
    twice = lambda: nn.Sequential(layer, nn.Linear(8, 8), nn.Linear(8, 8), layer)  # noqa: E731
    stages = stages_of_sequential(model := twice(), 2)
    PipelineRunner(gpipe(2, 2), stages, None, mean).step(torch.randn(4, 8))
    untied = [Stage(stage.module, stage.index) for stage in stages]
    with pytest.raises(ScheduleError, match=r"0.weight is a parameter of another stage.*takes tied=stage.tied"):
        PipelineRunner(gpipe(2, 2), untied, None, mean).step(torch.randn(4, 8))
    del model


def test_weights_that_were_tied_before_the_cut_may_be_tied_again():
    pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")  # before threads
    ids = torch.arange(32).view(4, 8)
    assert ties_later(lambda: llama(True), lambda m: m.tie_weights(), stages_of_causal_lm, ids, True) == [None, None]


def groups(first: tuple[int, int], second: tuple[int, int]) -> Callable[[], nn.Sequential]:
    """Six layers on three stages, of which two pairs are tied before the cut."""

    def make() -> nn.Sequential:
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
        for one, other in (first, second):
            model[other].weight = model[one].weight
        return model

    return make


def merge(model: nn.Sequential, layers: tuple[int, ...]) -> None:
    for at in layers:
        model[at].weight = model[0].weight


@pytest.mark.parametrize("second", [(3, 4), (1, 4)], ids=["stages 1 and 2", "stages 0 and 2"])
def test_two_groups_that_are_merged_after_the_cut_are_refused_on_all_ranks(second):
    x = torch.randn(6, 8)

    def rank(transport: Any) -> None:
        torch.manual_seed(5)
        model = groups((0, 2), second)()  # stages 0 and 1
        runner = PipelineRunner(gpipe(3, 2), [stages_of_sequential(model, 3)[transport.rank]], transport, mean)
        runner.step(x, x)
        merge(model, second)
        runner.step(x, x)

    errors = on_threads(3, rank)
    assert all(isinstance(error, ScheduleError) for error in errors), errors
    assert all("and to further ones after it" in str(error) for error in errors), errors


def test_two_groups_of_the_same_stages_may_be_merged_after_the_cut():
    """Their sums are of the same stages; so they stay those of one process."""
    x = torch.randn(6, 8)

    def made() -> nn.Sequential:
        torch.manual_seed(5)
        return groups((0, 2), (1, 3))()

    plain = made()
    merge(plain, (1, 3))
    for rows in x.chunk(2):
        (mean(plain(rows), rows) / 2).backward()
    model = made()
    stages = stages_of_sequential(model, 3)
    merge(model, (1, 3))
    PipelineRunner(gpipe(3, 2), stages, None, mean).step(x, x)
    assert torch.allclose(model[0].weight.grad, plain[0].weight.grad, rtol=1e-5)


def gradients_of(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """By plain torch: two microbatches one behind the other."""
    model.zero_grad()
    for x in ids.chunk(2):
        (mean(model(x, use_cache=False).logits, None) / 2).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check_gradients(program: Any, change: Callable[[Any], object], *, tied: bool = True) -> None:
    """``change`` is made between two steps."""
    model, ids = llama(tied), torch.arange(32).view(4, 8)
    stages = stages_of_causal_lm(model, 2)
    runner = PipelineRunner(program, stages, None, mean)
    runner.step(ids, ids)
    change(model)
    for stage in stages:
        for parameter in stage.parameters():
            parameter.grad = None
    runner.step(ids, ids)
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    copied = stages[-1].tied.get("embedding") if tied else None
    if copied is not None and copied.grad is not None:
        torch.testing.assert_close(copied.grad, ours["model.embed_tokens.weight"])
    for stage in stages:
        stage.module.zero_grad()
    expected = gradients_of(model, ids)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def backward_hooks(model: Any) -> None:
    model.lm_head.register_full_backward_hook(lambda _, gradients, __: (2 * gradients[0],))
    model.lm_head.register_full_backward_pre_hook(lambda _, gradients: (3 * gradients[0],))
    model.model.norm.register_full_backward_hook(lambda _, gradients, __: (0.5 * gradients[0],))


def hooks_with_keywords(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda _, x, kwargs: ((x[0] + 1,), kwargs), with_kwargs=True)
    model.lm_head.register_forward_hook(lambda _, x, kwargs, made: made + len(kwargs) + x[0].mean(), with_kwargs=True)


@pytest.mark.parametrize("program", [gpipe(2, 2), zb_h1(2, 2)], ids=["B", "I and W"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("change", [backward_hooks, hooks_with_keywords])
def test_hooks_of_any_sort_that_are_set_after_the_cut_have_the_gradients_of_plain_torch(change, tied, program):
    check_gradients(program, change, tied=tied)


def with_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 32))


def with_adapter(model: Any) -> None:
    """As a LoRA by hand does it: parameters on the head, and a hook that reads them."""
    head = model.lm_head
    head.down, head.up = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(32, 2))
    head.register_buffer("scale", torch.tensor(0.5))
    head.register_forward_hook(lambda m, x, made: made + x[0] @ m.down.T @ m.up.T * m.scale)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("change", [with_bias, with_adapter])
def test_parameters_that_a_head_is_given_after_the_cut_have_the_gradients_of_plain_torch(change, tied):
    check_gradients(gpipe(2, 2), change, tied=tied)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("change", "given"), [(with_bias, {"bias"}), (with_adapter, {"down", "up"})])
def test_parameters_that_a_head_is_given_after_the_cut_are_among_those_of_its_stage(change, given, tied):
    model, ids = llama(tied), torch.arange(32).view(4, 8)
    stages = stages_of_causal_lm(model, 2)
    change(model)
    found = set(stages[1].parameters())  # before a forward has looked at the model
    assert {name for name, p in model.lm_head.named_parameters() if p in found} == given | set(
        [] if tied else ["weight"]
    )
    assert stages[1].module.head.weight in found
    runner, expected = PipelineRunner(gpipe(2, 2), stages, None, mean), gradients_of(model, ids)
    runner.step(ids, ids)
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in expected.values()]))
    torch.testing.assert_close(runner.clip_grad_norm_(1e9), norm)


def freeze(model: Any) -> None:
    model.lm_head.weight.requires_grad_(False)


def tied_anew(model: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()


@pytest.mark.parametrize(
    "change", [lambda m: m.double(), lambda m: m.bfloat16(), lambda m: m.resize_token_embeddings(40)]
)
def test_a_model_with_a_tied_head_that_is_cast_or_resized_is_cut_again_as_the_errors_of_both_calls_say(change):
    model, ids = llama(True), torch.arange(32).view(4, 8)
    runner = PipelineRunner(gpipe(2, 2), stages := stages_of_causal_lm(model, 2), None, mean)
    change(model)
    for call in (lambda: runner.step(ids, ids), lambda: PipelineRunner(gpipe(2, 2), stages, None, mean)):
        with pytest.raises(ScheduleError, match=r"cut the model again.* and make a new optimizer and runner"):
            call()
    losses = PipelineRunner(gpipe(2, 2), stages_of_causal_lm(model, 2), None, mean).step(ids, ids).losses
    expected = [mean(model(x, use_cache=False).logits, None).detach() for x in ids.chunk(2)]
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize("change", [freeze, lambda model: model.tie_weights(), tied_anew])
def test_a_tied_weight_that_is_frozen_or_tied_again_after_the_cut_has_the_gradients_of_plain_torch(change):
    check_gradients(gpipe(2, 2), change)


def test_a_tied_weight_that_is_frozen_and_trained_by_turns_is_so_in_both_stages():
    model, ids = llama(True), torch.arange(32).view(4, 8)
    stages = stages_of_causal_lm(model, 2)
    freeze(model)  # before the runner is made
    runner = PipelineRunner(gpipe(2, 2), stages, None, mean)
    for trained in (False, True, False):
        model.lm_head.weight.requires_grad_(trained)
        runner.step(ids, ids)
        for stage in stages:
            assert (stage.tied["embedding"].grad is not None) == trained
            stage.module.zero_grad()
    for parameter in stages[1].parameters():  # the caller's own word about the stage holds
        parameter.requires_grad_()
    with pytest.raises(ScheduleError, match=r"tied\['embedding'\]: the copies on stages 0 and 1 are not both trained"):
        runner.step(ids, ids)


def new_weight(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.ones(32, 16))


def reparametrized(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", nn.Softplus())


def weight_norm(model: Any) -> None:
    nn.utils.weight_norm(model.lm_head)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (new_weight, "whose tied output embedding's weight was replaced or added after stages_of_causal_lm"),
        (weight_norm, "whose tied output embedding's weight was replaced or added after stages_of_causal_lm"),
        (reparametrized, "and the class ParametrizedLinear was set on its tied output embedding"),
        (lambda model: model.lm_head.add_module("lora", nn.Linear(16, 2)), "whose lora was replaced or added"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_tied_head_that_gets_another_weight_after_the_cut_is_refused_by_the_next_step(change, words):
    model, ids = llama(True), torch.arange(32).view(4, 8)
    runner = PipelineRunner(gpipe(2, 2), stages_of_causal_lm(model, 2), None, mean)
    runner.step(ids, ids)
    change(model)
    with pytest.raises(ScheduleError, match=words):
        runner.step(ids, ids)
