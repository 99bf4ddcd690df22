"""Overlaps on two streams of one CUDA device: the bits of one stream, and parts that run at one time."""

from __future__ import annotations

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss

from sixfold.pipeline import PipelineRunner, Stage, dualpipe_v
from sixfold.pipeline.passes import split_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("program", [dualpipe_v(2, 8), split_backward(dualpipe_v(2, 8))], ids=["B", "I and W"])
def test_gradients_have_the_bits_of_the_plain_loop(program):
    ours, oracle = ([module.to("cuda") for module in layers(program.stages)] for _ in range(2))
    x, y = (tensor.to("cuda") for tensor in batch(16))
    stages = [Stage(module, index) for index, module in enumerate(ours)]
    runner = PipelineRunner(program, stages, loss_fn=square_loss, overlap="streams")
    for _ in range(3):
        runner.step(x, y)
        plain_loop(oracle, list(x.tensor_split(8)), list(y.tensor_split(8)))
    assert all(equal_bits(gradients(a), gradients(b)) for a, b in zip(ours, oracle, strict=True))


def test_both_parts_of_an_overlap_run_at_one_time():
    program = dualpipe_v(1, 8)
    # A product of 2048 x 1024 x 1024 outlasts its launch, so that the second part is there while the first one runs.
    modules = [torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16))).to("cuda") for _ in range(2)]
    stages = [Stage(module, index) for index, module in enumerate(modules)]
    runner = PipelineRunner(program, stages, loss_fn=square_loss, overlap="streams", profile=True)
    x, y = (torch.randn(8 * 2048, 1024, device="cuda") for _ in range(2))
    runner.step(x, y)
    timeline = runner.gather_timeline(runner.step(x, y))
    times = {str(action): (begin, end) for _, action, begin, end in timeline.events}
    pairs = [tuple(map(str, entry.parts)) for entry in program.ranks[0] if entry.parts]
    together = [min(times[a][1], times[b][1]) - max(times[a][0], times[b][0]) for a, b in pairs]
    assert max(together) > 0
