"""A pipeline on one CUDA device gives the plain loop's gradients."""

from __future__ import annotations

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss

from sixfold.pipeline import PipelineRunner, Stage, gpipe, interleaved, one_f_one_b

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("program", [gpipe(2, 4), one_f_one_b(3, 4), interleaved(2, 4, 2)], ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_bits_of_the_plain_loop(program, dtype):
    modules = [module.to("cuda", dtype) for module in layers(program.stages)]
    oracle = [module.to("cuda", dtype) for module in layers(program.stages)]
    inputs, targets = (tensor.to("cuda", dtype) for tensor in batch(16))
    runner = PipelineRunner(program, [Stage(m, i) for i, m in enumerate(modules)], loss_fn=square_loss)
    losses = runner.step(inputs, targets).losses
    expected = plain_loop(oracle, list(inputs.tensor_split(4)), list(targets.tensor_split(4)))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    for ours, theirs in zip(modules, oracle, strict=True):
        assert equal_bits(gradients(ours), gradients(theirs))
