"""Two ranks that share one CUDA device, over gloo and host memory, and one rank of an NCCL group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, PipelineTimeout, Program, Stage, one_f_one_b, zb_v
from sixfold.pipeline.transport.process_groups import Outgoing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def over_gloo(source: int, destination: int) -> dist.ProcessGroup:
    """A group of the caller's, whose back end for CUDA is gloo."""
    return dist.group.WORLD


EDGES = {"host": "host", "given": over_gloo}


def runner_of(rank: int, program: Program, edges: Any, timeout_s: float = 60) -> tuple[PipelineRunner, list[Any]]:
    torch.cuda.set_device(0)
    modules = [module.to("cuda") for module in layers(program.stages)]
    stages = [Stage(modules[s], s) for s in program.stages_of(rank)]
    return PipelineRunner(program, stages, dist.group.WORLD, square_loss, timeout_s=timeout_s, edges=edges), modules


def train(rank: int, ranks: int, program: Program, edges: str) -> None:
    runner, modules = runner_of(rank, program, EDGES[edges])
    oracle, m = [module.to("cuda") for module in layers(program.stages)], program.microbatches
    for seed in range(3):
        x, y = (tensor.to("cuda") for tensor in batch(2 * m, seed))
        runner.step(x, y)
        runner.check()
        plain_loop(oracle, list(x.tensor_split(m)), list(y.tensor_split(m)))
    for stage in program.stages_of(rank):
        assert equal_bits(gradients(modules[stage]), gradients(oracle[stage]))


@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("program", [one_f_one_b(2, 6), zb_v(2, 6)], ids=lambda program: program.name)
def test_two_ranks_of_one_device_have_the_bits_of_the_plain_loop(program, edges):
    run_ranks(train, 2, program, edges)


def lose(rank: int, ranks: int) -> str:
    runner, modules = runner_of(rank, one_f_one_b(2, 4), "host", timeout_s=5)
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


@pytest.fixture
def nccl() -> Iterator[dist.ProcessGroup]:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("edges", [None, "one"])
def test_one_rank_of_an_nccl_group_has_the_bits_of_the_plain_loop(nccl, edges):
    program = zb_v(1, 4)
    ours, oracle = ([module.to("cuda") for module in layers(program.stages)] for _ in range(2))
    stages = [Stage(module, index) for index, module in enumerate(ours)]
    runner = PipelineRunner(program, stages, nccl, square_loss, timeout_s=60, edges=edges)
    for seed in range(2):
        x, y = (tensor.to("cuda") for tensor in batch(8, seed))
        runner.step(x, y)
        runner.check()
        plain_loop(oracle, list(x.tensor_split(4)), list(y.tensor_split(4)))
    assert all(equal_bits(gradients(a), gradients(b)) for a, b in zip(ours, oracle, strict=True))
