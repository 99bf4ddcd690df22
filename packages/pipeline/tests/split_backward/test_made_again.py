"""An input that W makes once more: the bits of one backward, and nothing of it held between I and W."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_helpers import same_bits, split
from torch import Tensor, nn

from sixfold.pipeline import ScheduleError, made_again


class Twofold(nn.Module):
    """Linears of an input that is its own part twice over, as a gathered one is of several."""

    def __init__(self, seen: list[Any] | None = None) -> None:
        super().__init__()
        self.before, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 5, bias=False)
        self.seen = seen

    def whole(self, part: Tensor) -> Tensor:
        made = torch.cat([part, part], 1)
        if self.seen is not None:
            self.seen.append(weakref.ref(made.untyped_storage()))
        return made

    def forward(self, x: Tensor) -> Tensor:
        part = self.before(x)
        kept = part.detach()

        def promise() -> Any:
            return lambda: self.whole(kept)

        whole = made_again(self.whole(part), promise)
        return torch.cat([self.a(whole), self.b(whole)], -1)


@pytest.mark.parametrize("rows", [3, 0])
def test_gradients_have_the_bits_of_one_backward(rows):
    torch.manual_seed(3)
    xs = [torch.randn(2, rows, 6, generator=torch.Generator().manual_seed(k)).requires_grad_() for k in range(3)]
    assert same_bits(Twofold(), xs)[0] == 3 * 3


def test_between_i_and_w_nothing_of_it_is_held():
    torch.manual_seed(3)
    seen: list[Any] = []
    alive: list[int] = []
    model = Twofold(seen)

    def run(module: nn.Module, x: Tensor) -> Tensor:
        alive.append(sum(one() is not None for one in seen))
        return module(x)

    xs = [torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    split(model, xs, "F0I0F1I1F2W0I2W1W2", run)
    assert alive == [0, 0, 0], "each F comes behind the I of the one before"
    assert len(seen) == 3 * (1 + 2), "made in F, and in W for each of two layers"


class Changed(nn.Module):
    """A linear that reads what became of a marked tensor."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(6, 4), change

    def forward(self, x: Tensor) -> Tensor:
        kept = x.detach()
        marked = made_again(x * 2, lambda: lambda: kept * 2)
        self.change(marked)
        return self.linear(marked)


@pytest.mark.parametrize("change", [lambda w: w.mul_(3), lambda w: w[0].zero_()], ids=["itself", "by a view"])
@pytest.mark.parametrize("grad", [True, False])
def test_what_is_changed_in_place_before_the_linear_is_held_as_it_became(change, grad):
    torch.manual_seed(3)
    xs = [torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(k)).requires_grad_(grad) for k in range(3)]
    assert same_bits(Changed(change), xs)[0] == 3


@pytest.mark.parametrize("grad", [True, False])
def test_what_nobody_reads_is_not_made(grad):
    called: list[str] = []

    def run(module: nn.Module, x: Tensor) -> Tensor:
        kept = x.detach()

        def promise() -> Any:
            called.append("promise")
            return lambda: called.append("make") or kept * 2

        return module(made_again(x * 2, promise))

    linear, xs = frozen_weight(grad)
    assert same_bits(linear, xs, run)[0] == 3, "the bias waits"
    assert called == []


@pytest.mark.parametrize("grad", [True, False])
def test_an_input_that_nobody_reads_is_not_held(grad):
    seen: list[Any] = []
    alive: list[int] = []

    def run(module: nn.Module, x: Tensor) -> Tensor:
        alive.append(sum(one() is not None for one in seen))
        made = x * 2
        seen.append(weakref.ref(made.untyped_storage()))
        return module(made)

    split(*frozen_weight(grad), "F0F1F2I0I1I2W0W1W2", run)
    assert alive == [0, 0, 0], "as autograd, which holds it for the weight alone"


def frozen_weight(grad: bool) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(3)
    linear = nn.Linear(6, 4)
    linear.weight.requires_grad_(False)
    return linear, [torch.randn(2, 3, 6).requires_grad_(grad) for _ in range(3)]


def test_in_inference_it_is_the_input():
    with torch.inference_mode():
        x = torch.ones(2, 6)
        assert made_again(x, lambda: lambda: x) is x
        assert nn.Linear(6, 4)(x).shape == (2, 4)


def test_what_is_no_tensor_or_no_function_is_refused():
    for arguments in ((1.0, lambda: None), (torch.zeros(2), None)):
        with pytest.raises(ScheduleError, match="made_again takes a tensor and a function"):
            made_again(*arguments)
