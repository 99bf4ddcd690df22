"""F, I and W of one module by hand, beside the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pipeline_helpers import gradients
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from sixfold.pipeline import Stage
from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

Run = Callable[[nn.Module, Any], Tensor]


def call(module: nn.Module, x: Any) -> Tensor:
    """The module's output."""
    return module(*x) if isinstance(x, tuple) else module(x)


def equal_bits(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    """Same tensors, bit for bit and in the same layout."""
    for a, b in zip(left, right, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
            continue
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return False
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            return False
    return True


def leaf(x: Any) -> Any:
    """A microbatch of its own graph, with gradients where ``x`` wants them."""
    if isinstance(x, tuple):
        return tuple(leaf(one) for one in x)
    y = x.detach().clone(memory_format=torch.preserve_format) if x._base is None else x.detach()
    return y.requires_grad_(x.requires_grad)


def seeded(output: Tensor, k: int) -> Tensor:
    """A gradient for ``output``, another for each microbatch."""
    generator = torch.Generator().manual_seed(100 + k)
    return torch.randn(output.shape, generator=generator).to(output.dtype)


def plain(module: nn.Module, xs: Sequence[Any], run: Run = call) -> list[Any]:
    """Autograd, one microbatch after another; returns the gradients of the inputs."""
    found = []
    for k, x in enumerate(xs):
        x = leaf(x)
        output = run(module, x)
        output.backward(seeded(output, k))
        found.append([one.grad for one in (x if isinstance(x, tuple) else (x,))])
    return found


def split(
    module: nn.Module, xs: Sequence[Any], order: str, run: Run = call, store: Any = None
) -> tuple[list[Any], int]:
    """F, I and W in ``order`` ("F0F1I0I1W0W1"); returns the gradients of the inputs, and how many waited for a W."""
    store = store or WeightGradientStore(Stage(module, 0))
    leaves, outputs, found, waited = {}, {}, {}, 0
    for action in (order[i : i + 2] for i in range(0, len(order), 2)):
        k = int(action[1])
        if action[0] == "F":
            leaves[k] = leaf(xs[k])
            outputs[k] = store.forward(k, run, (module, leaves[k]), {})
        elif action[0] == "I":
            output = outputs.pop(k)
            store.backward(k, (get_gradient_edge(output),), (seeded(output, k),))
            x = leaves.pop(k)
            found[k] = [one.grad for one in (x if isinstance(x, tuple) else (x,))]
        elif action[0] == "W":
            waited += len(store._slots[k].entries)
            store.backward_weight(k)
        else:
            x = leaf(xs[k])
            output = run(module, x)
            output.backward(seeded(output, k))
            found[k] = [one.grad for one in (x if isinstance(x, tuple) else (x,))]
    store.drop()
    return [found[k] for k in range(len(xs))], waited


ORDERS = ["F0F1F2I0W0I1W1I2W2", "F0I0F1I1F2I2W0W1W2", "F0F1F2I0I1W0I2W1W2", "F0I0W0B1F2I2W2"]


def same_bits(module: nn.Module, xs: Sequence[Any], run: Run = call, orders: Sequence[str] = ORDERS) -> list[int]:
    """Gradients of parameters and inputs are those of the plain loop; returns what waited, per order."""
    waited = []
    for order in orders:
        mine, oracle = copy.deepcopy(module), copy.deepcopy(module)
        expected = plain(oracle, xs, run)
        got, count = split(mine, xs, order, run)
        for a, b in zip(got, expected, strict=True):
            assert equal_bits(a, b), f"{order}: a gradient of an input differs"
        names = [name for name, _ in mine.named_parameters()]
        for name, a, b in zip(names, gradients(mine), gradients(oracle), strict=True):
            assert equal_bits([a], [b]), f"{order}: {name} differs"
        waited.append(count)
    return waited
