"""A loss that a stage makes itself, beside the sum of all losses in plain torch."""

from __future__ import annotations

import pytest
import torch
from pipeline_helpers import batch, gradients, layers, square_loss
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, add_loss, one_f_one_b, stages_of_causal_lm, zb_h1
from sixfold.pipeline.passes import recompute


class Balanced(nn.Module):
    """A layer with a loss of its own."""

    def __init__(self, layer: nn.Module, weight: float) -> None:
        super().__init__()
        self.layer, self.weight = layer, weight
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        loss = hidden.square().mean()
        self.losses.append(loss)
        return add_loss(hidden, loss, weight=self.weight)


@pytest.mark.parametrize(
    "program", [one_f_one_b(2, 4), zb_h1(2, 4), recompute(one_f_one_b(2, 4), microbatches=4)], ids=lambda p: p.name
)
def test_a_loss_of_a_stages_own_joins_the_gradients(program):
    ours = layers(2)
    plain = [Balanced(module, 0.0) for module in layers(2)]
    stages = [Stage(Balanced(module, 0.3 / 4), i) for i, module in enumerate(ours)]
    PipelineRunner(program, stages, loss_fn=square_loss).step(*batch(8))
    x, y = batch(8)
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        loss = square_loss(plain[1](plain[0](part)), target)
        (loss + 0.3 * sum(module.losses.pop() for module in plain)).div(4).backward()
    for module, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(gradients(module), gradients(other.layer))


def test_what_is_no_loss_or_no_model_of_that_form_is_refused():
    with pytest.raises(ScheduleError, match=r"add_loss has a loss of shape \(3,\)"):
        add_loss(torch.ones(2), torch.ones(3))
    with pytest.raises(ScheduleError, match="the model is a Linear; stages_of_causal_lm takes"):
        stages_of_causal_lm(nn.Linear(1, 1), 2)
