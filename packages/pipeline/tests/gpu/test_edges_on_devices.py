"""Edges over NCCL between two devices: bits, fixed receive buffers, and a message that never comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, PipelineTimeout, Stage, one_f_one_b, zb_v
from sixfold.pipeline.transport.process_groups import Outgoing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def runner_of(rank: int, program: Any, **options: Any) -> tuple[PipelineRunner, list[Any]]:
    torch.cuda.set_device(rank)
    modules = [module.to("cuda") for module in layers(program.stages)]
    stages = [Stage(modules[s], s) for s in program.stages_of(rank)]
    return PipelineRunner(program, stages, dist.group.WORLD, square_loss, **options), modules


def train(rank: int, ranks: int, program: Any, options: dict[str, Any]) -> None:
    runner, modules = runner_of(rank, program, timeout_s=60, **options)
    oracle, m = [module.to("cuda") for module in layers(program.stages)], program.microbatches
    made = []
    for seed in range(5):
        x, y = (tensor.to("cuda") for tensor in batch(2 * m, seed))
        runner.step(x, y)
        runner.check()
        made.append(sum(end.ring.made for end in runner._links[rank]._incoming.values()))
        plain_loop(oracle, list(x.tensor_split(m)), list(y.tensor_split(m)))
    for stage in program.stages_of(rank):
        assert equal_bits(gradients(modules[stage]), gradients(oracle[stage]))
    assert made[2:] == [made[2]] * 3


@pytest.mark.parametrize(
    "options", [{}, {"edges": "one"}, {"dynamic_shapes": "announced"}, {"overlap": "streams"}], ids=str
)
@pytest.mark.parametrize("program", [one_f_one_b(2, 6), zb_v(2, 6)], ids=lambda program: program.name)
def test_the_bits_of_the_plain_loop(program, options):
    run_ranks(train, 2, program, options)


def lose(rank: int, ranks: int) -> str:
    runner, modules = runner_of(rank, one_f_one_b(2, 4), timeout_s=5)
    runner.step(*(tensor.to("cuda") for tensor in batch(8)))
    runner.check()
    if rank == 1:
        send = Outgoing.send
        Outgoing.send = lambda self, tensors, tag, action: str(action) == "1SEND_B3" or send(self, tensors, tag, action)
    before = [parameter.clone() for parameter in modules[rank].parameters()]
    try:
        runner.step(*(tensor.to("cuda") for tensor in batch(8)))
        runner.check()
        torch.optim.SGD(modules[rank].parameters(), lr=1.0).step()
    except PipelineTimeout as error:
        assert equal_bits(before, list(modules[rank].parameters()))
        return str(error)
    return ""


def test_a_message_that_never_comes_is_told_before_the_optimizer():
    assert "0RECV_B3 for rank 1" in run_ranks(lose, 2)[0]
