"""An input that W makes once more: the bits of one backward, and nothing of it held between I and W."""

from __future__ import annotations

import weakref
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


def test_what_is_no_tensor_or_no_function_is_refused():
    for arguments in ((1.0, lambda: None), (torch.zeros(2), None)):
        with pytest.raises(ScheduleError, match="made_again takes a tensor and a function"):
            made_again(*arguments)
