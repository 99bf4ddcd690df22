"""F, I and W as CUDA graphs give the bits of the same kernels started one by one."""

from __future__ import annotations

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, square_loss

from sixfold.pipeline import PipelineRunner, Stage, one_f_one_b, zb_h1, zb_v

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("program", [one_f_one_b(2, 4), zb_h1(2, 4), zb_v(2, 4)], ids=lambda p: p.name)
def test_gradients_over_steps_have_the_bits_of_the_runner_without_graphs(program):
    found = []
    for graphed in (True, False):
        modules = [module.to("cuda") for module in layers(program.stages)]
        stages = [Stage(module, i, cuda_graphs=graphed) for i, module in enumerate(modules)]
        runner = PipelineRunner(program, stages, loss_fn=square_loss)
        losses = []
        for step in range(6):
            x, y = (tensor.to("cuda") for tensor in batch(8, seed=step))
            losses.append(torch.stack(runner.step(x, y).losses))
        found.append((modules, losses))
    (ours, first), (theirs, second) = found
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for mine, other in zip(ours, theirs, strict=True):
        assert equal_bits(gradients(mine), gradients(other))


def test_a_step_of_replays_allocates_what_leaves_the_graphs_and_no_more():
    [module] = [module.to("cuda") for module in layers(1)]
    runner = PipelineRunner(zb_h1(1, 2), [Stage(module, 0, cuda_graphs=True)], loss_fn=square_loss)
    x, y = (tensor.to("cuda") for tensor in batch(8))
    for _ in range(5):
        runner.step(x, y)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    runner.step(x, y)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
