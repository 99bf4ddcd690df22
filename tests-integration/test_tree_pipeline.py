"""``grad_sum="tree"`` of fsdp under pipeline's runner: each schedule, in one process and on 2 x 2 ranks, one oracle.

plain (all stages in a row, torch alone) --> weights after three steps --> sharded stages that a program drives
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer
from sixfold.pipeline import PipelineRunner, Stage
from sixfold.pipeline.schedules.catalogue import by_name, registered

WIDTH, GLOBAL, STEPS = 9, 8, 3
FLUSHED = sorted(one.name for one in registered() if one.flushed)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stage_of(number: int) -> nn.Module:
    return nn.Sequential(Block(2 * number), Block(2 * number + 1))


def inputs(step: int, g: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + g))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain(stages: int) -> dict[str, Tensor]:
    """Microbatches one by one, added in pairs and pairs of pairs."""
    net = nn.ModuleDict({str(s): stage_of(s) for s in range(stages)})
    optimizer = make_adamw(net.parameters())
    for step in range(STEPS):
        leaves = []
        for g in range(GLOBAL):
            net.zero_grad()
            x = inputs(step, g)
            for stage in net.values():
                x = stage(x)
            loss_fn(x, inputs(step + 50, g)).backward()
            leaves.append([p.grad.clone() for p in net.parameters()])
        while len(leaves) > 1:
            pairs = zip(leaves[::2], leaves[1::2], strict=True)
            leaves = [[a + b for a, b in zip(left, right, strict=True)] for left, right in pairs]
        for p, total in zip(net.parameters(), leaves[0], strict=True):
            p.grad = total / GLOBAL
        optimizer.step()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def sharded(rank: int, ranks: int, name: str, replicas: int, strategy: str) -> dict[str, Tensor]:
    """``replicas`` data-parallel ranks of each of two pipeline ranks; on one rank all stages are here."""
    pp, dp, here, me = None, None, 0, 0
    if ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, replicas), mesh_dim_names=("pp", "dp"))
        pp, dp = mesh["pp"].get_group(), mesh["dp"].get_group()
        here, me = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    schedule = by_name(name)
    chunks = schedule.chunks or 2
    options = {"chunks": 2} if "chunks" in schedule.arguments else {"waves": 1} if "waves" in schedule.arguments else {}
    program = schedule.make(ranks=2, microbatches=GLOBAL // replicas, **options)
    mine = list(program.stages_of(here)) if pp is not None else list(range(program.stages))
    assert program.stages == 2 * chunks
    container = nn.ModuleDict({str(s): stage_of(s) for s in mine})
    model = FullyShardedDataParallel(
        container,
        process_group=dp,
        strategy=strategy,
        fsdp_unit_modules=[Block],
        grad_divisor=float(GLOBAL),
        mixed_precision=MixedPrecision(grad_sum="tree"),
    )
    optimizer = fully_shard_optimizer(make_adamw(container.parameters()), model)
    handles = {s: model.stage_handle(container[str(s)], fused=not schedule.split) for s in mine}
    stages = [Stage(container[str(s)], s, data_parallel=handle) for s, handle in handles.items()]
    runner = PipelineRunner(program, stages, pp, loss_fn, scale="sum")
    for step in range(STEPS):
        numbers = range(me, GLOBAL, replicas)
        runner.step([inputs(step, g) for g in numbers], [inputs(step + 50, g) for g in numbers])
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


def check(name: str, found: list[dict[str, Tensor]]) -> None:
    expected, seen = plain(2 * (by_name(name).chunks or 2)), set()
    for weights in found:
        seen |= set(weights)
        assert [one for one, value in weights.items() if not torch.equal(value, expected[one])] == [], name
    assert seen == set(expected)


@pytest.mark.parametrize("name", FLUSHED)
@pytest.mark.slow
def test_stages_in_one_process_have_the_bits_of_plain_torch(name):
    check(name, run_ranks(sharded, 1, name, 1, "optim_grads_params"))


@pytest.mark.parametrize("name", FLUSHED)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@pytest.mark.slow
def test_two_stages_by_two_replicas_have_the_bits_of_plain_torch(name, strategy):
    check(name, run_ranks(sharded, 4, name, 2, strategy))


def test_two_stages_on_two_ranks_have_the_bits_of_plain_torch():
    check("zb_h1", run_ranks(sharded, 2, "zb_h1", 1, "optim_grads"))
