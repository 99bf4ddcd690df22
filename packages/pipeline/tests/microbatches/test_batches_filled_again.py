"""Programs whose batches overlap: what the caller gave a step is the runner's until the microbatches are done."""

import pytest
import torch
from pipeline_helpers import square_loss
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, Stage, pipedream, pipedream_2bw

np = pytest.importorskip("numpy", reason="needs numpy, which users of torch mostly have")


class Scaled(nn.Module):
    """A layer whose output is multiplied by a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, by: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * by


def trained(program, rows, *, again):
    """Weights behind four steps; ``again``: the caller fills one batch again and again."""
    torch.manual_seed(5)
    modules = [Scaled(), Scaled()]
    stages = [Stage(m, i, optimizer=torch.optim.SGD(m.parameters(), lr=0.1)) for i, m in enumerate(modules)]
    runner = PipelineRunner(program, stages, None, square_loss)
    mine = [np.zeros(shape, np.float32) for shape in ((rows, 4), (rows, 4), (rows, 4))]
    draw = np.random.default_rng(0)
    for _ in range(4):
        for array in mine:
            array[:] = draw.normal(size=array.shape)
        x, y, by = (torch.from_numpy(array) if again else torch.from_numpy(array.copy()) for array in mine)
        runner.step(x, y, kwargs=[{"by": by[k : k + 1]} for k in range(rows)])
    mine[0].fill(100), mine[2].fill(100)
    runner.drain()
    return [p.detach().clone() for m in modules for p in m.parameters()]


@pytest.mark.parametrize(("program", "rows"), [(pipedream(2, 6), 1), (pipedream_2bw(2, 2), 2)])
def test_a_batch_may_be_filled_again_while_its_backwards_are_in_flight(program, rows):
    theirs = trained(program, rows, again=False)
    torch.testing.assert_close(trained(program, rows, again=True), theirs, rtol=0, atol=0)
