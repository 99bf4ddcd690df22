"""A layer whose class, whose operator or whose calls somebody patched runs as it is patched, and autograd makes its
gradient.

The oracle is the same patched module in a plain backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from split_helpers import same_bits
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sixfold.pipeline import PipelineRunner, Stage, zb_h1


@contextlib.contextmanager
def replaced(holder: Any, name: str, other: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, other(before))
    try:
        yield
    finally:
        setattr(holder, name, before)


def half_again(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs) * 1.5


class HalfAgain(TorchFunctionMode):
    """All that a linear or an embedding gives, and twice their weights where these are parameters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (F.linear, F.embedding):
            return func(*args, **(kwargs or {}))
        args = [2 * one if isinstance(one, nn.Parameter) else one for one in args]
        return func(*args, **(kwargs or {})) * 1.5


PATCHES = {
    "nn.Linear.forward": lambda: replaced(nn.Linear, "forward", half_again),
    "nn.Embedding.forward": lambda: replaced(nn.Embedding, "forward", half_again),
    "F.linear": lambda: replaced(F, "linear", half_again),
    "F.embedding": lambda: replaced(F, "embedding", half_again),
    "torch.embedding": lambda: replaced(torch, "embedding", half_again),
    "a TorchFunctionMode": HalfAgain,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))


def ids() -> list[Tensor]:
    return [torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(k)) for k in range(3)]


@pytest.mark.parametrize("what", PATCHES)
def test_what_is_patched_runs_with_the_gradients_of_a_plain_backward(what):
    def run(module: nn.Module, x: Tensor) -> Tensor:
        with PATCHES[what]():
            return module(x)

    same_bits(model(), ids(), run)


def test_a_runner_tells_that_nothing_waited_for_w():
    stages = [Stage(nn.Linear(4, 4), i) for i in range(2)]
    runner = PipelineRunner(zb_h1(2, 4), stages, None, F.mse_loss)
    with replaced(F, "linear", half_again), pytest.warns(UserWarning, match="W makes the gradients of 0% of stage 0"):
        runner.step(torch.randn(8, 4), torch.randn(8, 4))
    assert runner.deferred == {0: 0.0, 1: 0.0}


@pytest.mark.parametrize("what", PATCHES)
def test_a_patch_that_holds_in_a_part_of_one_forward_keeps_the_bits(what):
    """A layer that is used twice has one gradient from autograd, and one that would have waited."""

    def run(module: nn.Module, x: Tensor) -> Tensor:
        embedding, linear, _, last = module
        plain = linear(embedding(x))
        with PATCHES[what]():
            patched = linear(embedding(x))
        return last(plain + linear(patched))

    same_bits(model(), ids(), run)


def test_a_patched_forward_gets_all_of_its_arguments():
    def scaled(forward: Any) -> Any:
        return lambda self, input, scale=1.0, *, shift=0.0: forward(self, input) * scale + shift

    def run(module: nn.Module, x: Tensor) -> Tensor:
        with replaced(nn.Linear, "forward", scaled), replaced(nn.Embedding, "forward", scaled):
            return module[1](module[0](x, 3.0, shift=0.5), 2.0, shift=1.0)

    same_bits(model(), ids(), run)


def test_a_mode_between_two_microbatches_changes_those_alone():
    def run(module: nn.Module, x: Tensor) -> Tensor:
        with HalfAgain() if x[0] == ids()[1][0] else contextlib.nullcontext():
            return module(x)

    assert len({int(x[0]) for x in ids()}) == 3, "the second is told from the others by its first number"
    same_bits(model(), ids(), run)


def test_a_default_device_takes_nothing_from_w():
    def run(module: nn.Module, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            return module(x)

    assert same_bits(model(), ids(), run) == same_bits(model(), ids())
