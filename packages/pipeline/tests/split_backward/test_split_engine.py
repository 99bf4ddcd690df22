"""W adds to ``.grad`` by itself where nobody looks on, and through autograd where somebody does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_helpers import ORDERS, equal_bits, plain, split
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from sixfold.pipeline import Stage
from sixfold.pipeline.split_backward import weight_gradients as stores
from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

N = 3


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4, bias=False))


XS = [torch.tensor([[k, 2, 3], [1, k, 5]]) for k in range(N)]


@pytest.fixture
def delivered(monkeypatch) -> list[int]:
    """How many parameters each call of autograd's engine got, in W."""
    calls: list[int] = []
    backward = stores._backward

    def counted(roots: tuple[Any, ...], *args: Any, **options: Any) -> Any:
        calls.append(len(roots))
        return backward(roots, *args, **options)

    monkeypatch.setattr(stores, "_backward", counted)
    return calls


def both(watch: Any = None, before: Any = None) -> tuple[nn.Module, nn.Module]:
    """A model after a split backward, and one after plain ones, each behind one without anybody who looks."""
    mine, oracle = model(), model()
    store = WeightGradientStore(Stage(mine, 0))
    for module in (mine, oracle):
        for parameter in module.parameters():
            parameter.grad = None if before is None else before(parameter)
    keep = [] if watch is None else [watch(mine, "split"), watch(oracle, "plain")]
    split(mine, XS, ORDERS[0], store=store)
    plain(oracle, XS)
    del keep
    return mine, oracle


def same(mine: nn.Module, oracle: nn.Module) -> bool:
    return equal_bits([p.grad for p in mine.parameters()], [p.grad for p in oracle.parameters()])


@pytest.mark.parametrize(
    "before", [None, torch.ones_like, lambda p: torch.ones(p.shape[::-1]).t()], ids=["none", "there", "strided"]
)
def test_without_hooks_autograd_is_not_asked(delivered, before):
    assert same(*both(before=before))
    assert not delivered


def test_a_first_gradient_is_the_parameters_alone_and_the_next_is_added_to_it():
    mine, _ = both()
    memory = {p.grad.untyped_storage().data_ptr() for p in mine.parameters()}
    assert len(memory) == len(list(mine.parameters())) and all(p.grad.is_contiguous() for p in mine.parameters())
    kept = [p.grad for p in mine.parameters()]
    split(mine, XS, ORDERS[1], store=WeightGradientStore(Stage(mine, 0)))
    assert all(p.grad is g for p, g in zip(mine.parameters(), kept, strict=True))


@pytest.mark.parametrize("kind", ["node", "node before", "parameter", "accumulated"])
def test_who_looks_on_is_told_as_often_and_of_the_same(delivered, kind):
    seen: dict[str, list[Tensor]] = {"split": [], "plain": []}

    def watch(module: nn.Module, name: str) -> Any:
        weight = module[1].weight
        node = get_gradient_edge(weight).node  # as Megatron finds it, through a view
        assert node is weight.expand_as(weight).grad_fn.next_functions[0][0]
        if kind == "node":
            node.register_hook(lambda *_: seen[name].append(weight.grad.clone()))
        elif kind == "node before":
            node.register_prehook(lambda gradients: seen[name].append(gradients[0].clone()))
        elif kind == "parameter":
            weight.register_hook(lambda gradient: seen[name].append(gradient.clone()))
        else:
            weight.register_post_accumulate_grad_hook(lambda p: seen[name].append(p.grad.clone()))
        return node

    assert same(*both(watch))
    assert len(seen["plain"]) == N and equal_bits(seen["split"], seen["plain"])
    assert delivered == [1] * N or kind == "parameter"  # that layer is not deferred: I makes its gradient


def test_a_gradient_that_has_a_graph_and_a_parameter_in_other_order_are_autograds(delivered):
    def watch(module: nn.Module, _: str) -> None:
        module[1].weight.grad = torch.ones(6, 5, requires_grad=True) * 2

    mine, oracle = both(watch)
    assert equal_bits([p.grad.detach() for p in mine.parameters()], [p.grad.detach() for p in oracle.parameters()])
    assert delivered[0] == 1


@pytest.mark.parametrize("views", [False, True])
def test_parameters_that_share_a_gradient_add_to_it_one_after_another(monkeypatch, views):
    def fused(there: list[Tensor], arriving: list[Tensor]) -> None:
        """As a GPU's one kernel may: it reads all before it writes any."""
        for before, total in zip(there, [a + b for a, b in zip(there, arriving, strict=True)], strict=True):
            before.copy_(total)

    monkeypatch.setattr(torch, "_foreach_add_", fused)
    torch.manual_seed(5)
    mine, oracle = (nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))) for _ in range(2))
    oracle.load_state_dict(mine.state_dict())
    xs = [torch.randn(2, 3, 4) for _ in range(N)]
    for module in (mine, oracle):
        shared = torch.ones(4, 4)
        for layer in module:
            layer.weight.grad = shared.view(4, 4) if views else shared
    split(mine, xs, ORDERS[0], store=WeightGradientStore(Stage(mine, 0)))
    plain(oracle, xs)
    assert (mine[0].weight.grad is mine[1].weight.grad) is not views and same(mine, oracle)


def test_gradients_that_are_there_are_added_to_in_one_call_per_microbatch(monkeypatch):
    calls: list[int] = []
    together = torch._foreach_add_

    def counted(there: list[Tensor], arriving: list[Tensor]) -> None:
        calls.append(len(there))
        together(there, arriving)

    monkeypatch.setattr(torch, "_foreach_add_", counted)
    mine, oracle = both(before=torch.ones_like)
    assert same(mine, oracle)
    assert calls == [len(list(mine.parameters()))] * N
