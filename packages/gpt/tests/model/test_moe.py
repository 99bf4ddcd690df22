"""A mixture of experts in one process: against its definition token by token, and whatever runs it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from moe_helpers import plain_mixture, tiny_experts
from torch import Tensor

from sixfold.gpt import GPTModel
from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.model import grouped_experts
from sixfold.gpt.model.attention import plan_rows
from sixfold.gpt.model.moe import MixtureOfExperts, extremes, take_loads, top
from sixfold.gpt.parallel.expert_dispatch import TokenOrder

KINDS = {
    "plain": {},
    "one of all": {"experts_per_token": 1, "norm_topk_prob": False},
    "all of them": {"experts_per_token": 6, "router_aux_loss": 0.5},
    "weights as they are": {"norm_topk_prob": False, "router_aux_loss": 0.0},
    "shared": {"shared_ffn_hidden_size": 20},
    "shared behind a gate": {"shared_ffn_hidden_size": 20, "shared_expert_gate": True},
}


def layer_of(config: GPTConfig, scale: float = 8.0) -> MixtureOfExperts:
    """The first layer's mixture; weights are ``scale`` times as large, so that routes and gradients differ."""
    layer = GPTModel(config, layers=range(1), pre_process=False, post_process=False).layers["0"]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(scale)
    return layer.ffn


def hidden(seed: int = 1, b: int = 2, s: int = 9) -> Tensor:
    return torch.randn(b, s, 16, generator=torch.Generator().manual_seed(seed))


def run(layer: MixtureOfExperts, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Outputs, and gradients of the input and of each parameter."""
    x = x.clone().requires_grad_()
    rows = plan_rows(layer.config, x.detach(), position_ids=None, cu_seqlens=None)
    out = layer(x, rows)
    out.backward(upstream)
    return out.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}


def plainly(config: GPTConfig, layer: MixtureOfExperts, x: Tensor, upstream: Tensor) -> tuple[Any, ...]:
    """The same by the definition, in float64."""
    weights = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x = x.double().requires_grad_()
    out, balance = plain_mixture(config, weights, x.flatten(0, 1))
    (out.view(x.shape) * upstream.double()).sum().add(balance).backward()
    return out.detach().view(x.shape), x.grad, {name: w.grad for name, w in weights.items()}


def alike(found: tuple[Any, ...], expected: tuple[Any, ...], rtol: float = 1e-5) -> None:
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=rtol * float(other.abs().max()))
    assert set(found[2]) == set(expected[2])
    for name, gradient in expected[2].items():
        wanted = torch.zeros_like(found[2][name], dtype=torch.float64) if gradient is None else gradient
        atol = rtol * float(wanted.abs().max())
        torch.testing.assert_close(
            found[2][name].double(), wanted, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_all_gradients_are_those_of_the_definition(kind):
    config = tiny_experts(**KINDS[kind])
    layer, x, upstream = layer_of(config), hidden(), hidden(2)
    alike(run(layer, x, upstream), plainly(config, layer, x, upstream))


def test_an_expert_without_tokens_has_zero_gradients_and_one_with_all_drops_none():
    config = tiny_experts(experts_per_token=1, router_aux_loss=0.1)
    layer, x, upstream = layer_of(config), hidden().abs(), hidden(2)
    with torch.no_grad():
        layer.router.weight.zero_()[3] = 0.1
    found = run(layer, x, upstream)
    alike(found, plainly(config, layer, x, upstream))
    for part in ("gate", "up", "down"):
        of_expert = found[2][f"experts.{part}.weight"].flatten(1).abs().amax(1)
        assert of_expert[3] > 0
        assert (of_expert[[0, 1, 2, 4, 5]] == 0).all()
    assert layer.load.take().tolist() == [0, 0, 0, 18, 0, 0]


def test_of_equal_probabilities_the_lower_number_is_chosen():
    assert top(torch.tensor([[0.2, 0.3, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]]), 3).tolist() == [[1, 2, 0], [0, 1, 2]]


def test_rows_lie_by_expert_and_then_by_token():
    order = TokenOrder.of(torch.tensor([[2, 0], [0, 3], [2, 3]]), 5)
    assert order.counts.tolist() == [2, 0, 2, 2, 0]
    assert order.token.tolist() == [0, 1, 0, 2, 1, 2]
    assert order.row.tolist() == [[2, 0], [1, 4], [3, 5]]


def test_the_router_computes_in_float32_whatever_the_layers_dtype():
    config = tiny_experts()
    layer, x, upstream = layer_of(config).bfloat16(), hidden().bfloat16(), hidden(2).bfloat16()
    exact = copy.deepcopy(layer).float()
    found, wanted = run(layer, x, upstream), run(exact, x.float(), upstream.float())
    # A router in bfloat16 would send some of 18 tokens elsewhere, and be off by much more than roundings.
    torch.testing.assert_close(found[0].float(), wanted[0], rtol=0.05, atol=0.02 * float(wanted[0].abs().max()))
    assert found[0].dtype == found[1].dtype == found[2]["router.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputing_changes_no_bit_and_counts_no_token_twice(recompute):
    config = tiny_experts(dense_layers=1)
    model = GPTModel(config)
    tokens = torch.arange(24).view(2, 12)

    def step(how: str) -> tuple[list[Tensor], Tensor]:
        model.recompute = how
        model.zero_grad()
        model(tokens, labels=tokens.roll(-1)).sum().backward()
        return [p.grad for p in model.parameters()], take_loads(model, config, torch.device("cpu"))

    gradients, loads = step(recompute)
    plain, _ = step("none")
    assert all(torch.equal(one, other) for one, other in zip(gradients, plain, strict=True))
    assert loads.shape == (1, 6)
    assert loads.sum() == 24 * 2
    assert take_loads(model, config, torch.device("cpu")).sum() == 0


def test_an_evaluation_is_not_counted_and_needs_no_graph():
    config = tiny_experts()
    model = GPTModel(config)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        quiet = model(tokens, labels=tokens)
    assert take_loads(model, config, torch.device("cpu")).sum() == 0
    assert torch.equal(model(tokens, labels=tokens).detach(), quiet)


@pytest.mark.parametrize(("recompute", "kept"), [("none", 2), ("full", 0)])
def test_recomputed_layers_keep_nothing_of_their_experts(recompute, kept, monkeypatch):
    config = tiny_experts()
    model = GPTModel(config)
    model.recompute = recompute
    made: list[weakref.ref[Tensor]] = []
    run_experts = grouped_experts._hidden_and_out

    def watched(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        found = run_experts(*arguments)
        made.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(grouped_experts, "_hidden_and_out", watched)
    loss = model(torch.arange(24).view(2, 12), labels=torch.arange(24).view(2, 12)).sum()
    assert sum(one() is not None for one in made) == kept
    loss.backward()
    assert not any(one() is not None for one in made)


def test_load_is_told_relative_to_an_equal_share():
    config = tiny_experts(num_layers=3, dense_layers=1, num_experts=4)
    assert extremes([1, 1, 1, 1, 0, 8, 4, 4], config) == {1: (1.0, 1.0), 2: (0.0, 2.0)}
    assert extremes([0] * 8, config) == {}


def test_the_grouped_products_are_those_of_one_expert_after_another(monkeypatch):
    # torch computes its grouped product on a CPU too, slowly: what CUDA is asked for.
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped product")
    counts, generator = [3, 0, 5, 1, 0], torch.Generator().manual_seed(0)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    rows, weight = torch.randn(9, 16, generator=generator), torch.randn(5, 24, 16, generator=generator)
    upstream = torch.randn(9, 24, generator=generator)
    plain, asked = grouped_experts.Segments(ends), grouped_experts.Segments(ends)
    expected = plain.product(rows, weight), plain.transposed(upstream, weight), plain.outer(upstream, rows)
    monkeypatch.setattr(grouped_experts, "grouped", lambda rows, weight: True)
    rows, weight, upstream = rows.bfloat16(), weight.bfloat16(), upstream.bfloat16()
    found = asked.product(rows, weight), asked.transposed(upstream, weight), asked.outer(upstream, rows)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.1)
    assert (found[2][[1, 4]] == 0).all()


def test_products_are_grouped_in_bfloat16_on_cuda_alone_and_where_rows_are_aligned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    class OnCuda:
        device, dtype = torch.device("cuda"), torch.bfloat16

        def __init__(self, *shape: int) -> None:
            self.shape = shape

        def __len__(self) -> int:
            return self.shape[0]

    assert grouped_experts.grouped(OnCuda(9, 16), OnCuda(5, 24, 16))
    assert not grouped_experts.grouped(OnCuda(9, 16), OnCuda(5, 20, 16)), "20 values are no multiple of 16 bytes"
    assert not grouped_experts.grouped(OnCuda(0, 16), OnCuda(5, 24, 16))
    assert not grouped_experts.grouped(torch.zeros(9, 16).bfloat16(), torch.zeros(5, 24, 16).bfloat16())


@pytest.mark.parametrize(("out", "into", "is_grouped"), [(24, 16, True), (20, 16, False), (24, 12, False)])
def test_gradients_of_weights_are_grouped_whatever_the_number_of_rows(monkeypatch, out, into, is_grouped):
    asked = []

    class OnCuda(Tensor):
        """Of the CPU, and says that it is not."""

        device = torch.device("cuda")

    def grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        asked.append((left.shape, right.shape))
        return torch.zeros(len(offs), left.shape[0], right.shape[1])

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm, raising=False)
    left, right = (torch.zeros(9, size, dtype=torch.bfloat16).as_subclass(OnCuda) for size in (out, into))
    segments = grouped_experts.Segments(torch.tensor([3, 3, 9], dtype=torch.int32))
    assert segments.outer(left, right).shape == (3, out, into)
    assert asked == ([((out, 9), (9, into))] if is_grouped else [])
