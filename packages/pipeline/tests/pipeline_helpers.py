"""Small models and the plain loop: the oracle of the executor's tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


def layers(stages: int, seed: int = 1) -> list[nn.Module]:
    """One small module per stage, equal in every process."""
    generator = torch.Generator().manual_seed(seed)
    modules = []
    for _ in range(stages):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        modules.append(module)
    return modules


def batch(rows: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Inputs and targets of ``rows`` rows, equal in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference."""
    return ((output - target) ** 2).mean()


def plain_loop(modules: list[nn.Module], inputs: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """One process, one microbatch after another: accumulates gradients and returns the losses."""
    losses = []
    for hidden, target in zip(inputs, targets, strict=True):
        for module in modules:
            hidden = module(hidden)
        loss = square_loss(hidden, target)
        (loss / len(inputs)).backward()
        losses.append(loss.detach())
    return losses


def gradients(module: nn.Module) -> list[Tensor | None]:
    """Gradients of a module's parameters, in order."""
    return [parameter.grad for parameter in module.parameters()]


def equal_bits(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    """Same tensors, bit for bit (so that 0.0 and -0.0 differ), None equal to None."""
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None and not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return False
    return True


class Shared(nn.Module):
    """A layer, and a factor that other stages have too."""

    def __init__(self, layer: nn.Module, value: float) -> None:
        super().__init__()
        self.layer = layer
        self.factor = nn.Parameter(torch.full((8,), value))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor
