"""Float8 products by their definition, and a stand-in for torchao that has no more than the package calls.

An operand is scaled so that its largest magnitude is the largest number of its float8 type, rounded to that type, and
stands for what it is divided by the scale. Inputs and weights are float8_e4m3fn, gradients float8_e5m2.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from run_helpers import train_all
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def narrowed(t: Tensor, dtype: torch.dtype) -> Tensor:
    """What the float8 numbers for ``t`` stand for, in float64; the scale is float32, as a kernel takes it."""
    largest = torch.finfo(dtype).max
    scale = (largest / t.detach().abs().max().double().clamp(min=1e-12)).float()
    return (t.detach().float() * scale).clamp(-largest, largest).to(dtype).double() / scale.double()


def products(x: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a linear (out, in): its output for ``x`` (n, in), and for ``upstream`` (n, out) the gradients of both."""
    x8, w8, g8 = narrowed(x, E4M3), narrowed(weight, E4M3), narrowed(upstream, E5M2)
    return x8 @ w8.t(), g8 @ w8, g8.t() @ x8


class _ByDefinition(torch.autograd.Function):
    """As torchao it is given the weight's transposed view, and saves that for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turned: Tensor) -> Tensor:
        ctx.save_for_backward(x, turned)
        return (narrowed(x, E4M3) @ narrowed(turned, E4M3)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, turned = ctx.saved_tensors
        _, to_x, to_weight = products(x.flatten(0, -2), turned.t(), upstream.flatten(0, -2))
        return to_x.view(x.shape).to(x.dtype), to_weight.t().to(turned.dtype)


class LinearByDefinition(nn.Linear):
    """In the place of torchao's Float8Linear."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _ByDefinition.apply(input, self.weight.t())
        return out if self.bias is None else out + self.bias


def stand_in() -> dict[str, ModuleType]:
    """Modules for sys.modules."""

    def convert(module: nn.Module, *, config: Any) -> nn.Module:
        for child in module.modules():
            if type(child) is nn.Linear:
                child.__class__ = LinearByDefinition
        return module

    torchao, float8 = ModuleType("torchao"), ModuleType("torchao.float8")
    float8.Float8LinearConfig = lambda emulate: emulate  # type: ignore[attr-defined]
    float8.convert_to_float8_training = convert  # type: ignore[attr-defined]
    torchao.float8 = float8  # type: ignore[attr-defined]
    return {"torchao": torchao, "torchao.float8": float8}


def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is undone the stand-in is what the package imports, and a CPU may use it."""
    for name, module in stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("sixfold.gpt.training.loop.check_float8", lambda device: None)


def train_all_by_definition(rank: int, ranks: int, texts: list[str]) -> None:
    """One rank of several jobs with float8 products on a CPU."""
    with pytest.MonkeyPatch.context() as patched:
        put_in(patched)
        train_all(rank, ranks, texts)
