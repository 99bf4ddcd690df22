"""A pipeline on one CUDA device gives the plain loop's gradients."""

from __future__ import annotations

import time

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss

from sixfold.pipeline import Costs, Kind, PipelineRunner, Stage, gpipe, interleaved, one_f_one_b, zb_v
from sixfold.pipeline.program.action import WORK

MAKERS = (Kind.F, Kind.B, Kind.I)

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


def test_times_of_actions_are_the_devices_in_order_and_within_the_step():
    program = zb_v(2, 4)
    modules = [torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to("cuda") for _ in range(4)]
    stages = [Stage(module, index) for index, module in enumerate(modules)]
    runner = PipelineRunner(program, stages, loss_fn=square_loss, profile=True)
    x, y = torch.randn(4096, 1024, device="cuda"), torch.randn(4096, 1024, device="cuda")
    runner.step(x, y)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    timeline = runner.gather_timeline(runner.step(x, y))
    took = time.perf_counter() - begin
    work = [event for event in timeline.events if event[1].kind in WORK]
    assert sorted(str(action) for _, action, *_ in work) == sorted(str(action) for _, _, action in program.entries())
    assert timeline.makespan <= took
    made = {(a.kind is Kind.F, a.stage, a.microbatch): end for _, a, _, end in work if a.kind in MAKERS}
    for _, action, start, _ in work:
        before = action.stage + (-1 if action.kind is Kind.F else 1)
        if action.kind in MAKERS and 0 <= before < 4:
            assert start >= made[action.kind is Kind.F, before, action.microbatch] - 1e-5
    assert min(Costs.fit(timeline, assume=Costs.per_rank(program)).forward) > 1e-5  # four products of 1024^3
