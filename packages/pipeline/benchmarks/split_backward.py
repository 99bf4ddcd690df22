"""Host cost of a split backward: I + W beside one backward, and beside torch's own split.

    python benchmarks/split_backward.py [--layers 16] [--width 32] [--rounds 40]

One process, one thread, layers so small that the host is what takes time: CPU time of the process, medians over
rounds in which all sides take turns on models of their own with equal weights. Equal work: each round is one
microbatch whose loss is the sum of its output; gradients of all parameters and of the input are made and accumulated
into gradients that are there. F is outside of all figures but its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from sixfold.pipeline import Stage
from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore


class Layer(nn.Module):
    """A transformer layer before its norms, as one writes it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same."""
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(self.norm_1(x)).split(c, 2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


Times = dict[str, list[float]]


def timed(times: Times, name: str, call: Callable[[], Any]) -> Any:
    """Result of ``call``, its CPU time under ``name``."""
    begin = time.process_time()
    result = call()
    times.setdefault(name, []).append(time.process_time() - begin)
    return result


def plain(model: nn.Module, x: Tensor, g: Tensor, times: Times) -> None:
    """Autograd: also what B runs."""
    y = timed(times, "F plain", lambda: model(x))
    timed(times, "plain autograd", lambda: torch.autograd.backward(y, g))


class Ours:
    """I and W through the store."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._store = WeightGradientStore(Stage(model, 0))

    def __call__(self, x: Tensor, g: Tensor, times: Times) -> None:
        """One microbatch."""
        y = timed(times, "F deferring", lambda: self._store.forward(0, self._model, (x,), {}))
        timed(times, "I", lambda: self._store.backward(0, (get_gradient_edge(y),), (g,)))
        timed(times, "W", lambda: self._store.backward_weight(0))
        times.setdefault("I + W", []).append(times["I"][-1] + times["W"][-1])


def torchs(model: nn.Module, x: Tensor, g: Tensor, times: Times) -> None:
    """torch.distributed.pipelining's functions, as its stage calls them."""
    y = model(x)
    _, groups = timed(times, "torch I", lambda: stage_backward_input([y], [g], [x], iter(model.parameters())))
    timed(times, "torch W", lambda: stage_backward_weight(iter(model.parameters()), groups))
    times.setdefault("torch I + W", []).append(times["torch I"][-1] + times["torch W"][-1])


def measure(layers: int, width: int, rounds: int) -> dict[str, float]:
    """Medians in milliseconds, and their ratios to plain autograd's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width, 4) for _ in range(layers)))
    models = [model, copy.deepcopy(model), copy.deepcopy(model)]
    sides = [
        lambda x, g, times: plain(models[0], x, g, times),
        Ours(models[1]),
        lambda x, g, times: torchs(models[2], x, g, times),
    ]
    times: Times = {}
    for number in range(rounds + 3):
        if number == 3:  # the first go through probation, lazy loading and first gradients
            times.clear()
        for turn in range(len(sides)):
            x, g = torch.randn(2, 8, width, requires_grad=True), torch.randn(2, 8, width)
            sides[(number + turn) % len(sides)](x, g, times)
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    base = medians["plain autograd"]
    ratios = {
        "I + W over plain autograd": medians["I + W"] / base,
        "torch's I + W over plain autograd": medians["torch I + W"] / base,
        "F deferring over F plain": medians["F deferring"] / medians["F plain"],
        "F, I and W over F and B": (medians["F deferring"] + medians["I + W"]) / (medians["F plain"] + base),
    }
    return {name: round(value, 3) for name, value in {**medians, **ratios}.items()}


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.layers, arguments.width, arguments.rounds)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:36} {value:9.3f}" + (" ms" if "over" not in name else ""))


if __name__ == "__main__":
    main()
