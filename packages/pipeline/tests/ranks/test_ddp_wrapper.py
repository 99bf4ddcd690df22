"""What lies on a DistributedDataParallel itself, or is put there later, is refused by name: its module runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_helpers import square_loss
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, one_f_one_b

M = 4
WIDTH = 4


class Doubling(DistributedDataParallel):
    """A subclass of a user's."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH)))


def patched(ddp: Any) -> None:
    inside = ddp.forward
    ddp.forward = lambda x: 2 * inside(x)


def hooked(ddp: Any) -> None:
    ddp.register_comm_hook(None, lambda state, bucket: bucket.get_future())


def stepping(ddp: Any) -> None:
    ddp.module[0].weight._in_backward_optimizers = [None]  # as torch's _apply_optimizer_in_backward marks it


LATER: list[tuple[Callable[[Any], object], str]] = [
    (lambda ddp: ddp.register_forward_hook(lambda *_: None), "with a forward hook of its own"),
    (lambda ddp: ddp.register_forward_pre_hook(lambda *_: None), "with a forward pre-hook of its own"),
    (lambda ddp: ddp.register_full_backward_hook(lambda *_: None), "with a backward hook of its own"),
    (lambda ddp: ddp.register_full_backward_pre_hook(lambda *_: None), "with a backward pre-hook of its own"),
    (patched, "with a forward of its own"),
    (lambda ddp: ddp.compile(backend="eager"), r"with a compile\(\) of its own"),
    (hooked, "with a communication hook"),
    (stepping, "with an optimizer that steps in the backward"),
    (lambda ddp: ddp.module.append(nn.Embedding(2, 2, sparse=True)), "with sparse gradients"),
    (lambda ddp: ddp.module.append(wrapped()), "holds a DistributedDataParallel, which reduces"),
    (lambda ddp: replicate(ddp.module[0]), r"holds a DDPLinear, made by replicate\(\), which reduces"),
]


def check_wrapper(rank: int, ranks: int) -> None:
    x = torch.randn(2 * M, WIDTH)
    for change, words in LATER:
        ddp = wrapped()
        runner = PipelineRunner(one_f_one_b(1, M), Stage(ddp, 0), None, square_loss, timeout_s=20)
        runner.step(x, x)
        change(ddp)
        for call, given in ((Stage, (ddp, 0)), (runner.step, (x, x)), (runner.evaluate, (x, x))):
            with pytest.raises(ScheduleError, match=f"stage 0 .*{words}"):
                call(*given)
    with pytest.raises(ScheduleError, match="stage 0 is a Doubling with a forward of its own, which does not run"):
        Stage(Doubling(nn.Linear(WIDTH, WIDTH)), 0)
    ddp = wrapped()
    runner = PipelineRunner(one_f_one_b(1, M), Stage(ddp, 0), None, square_loss, timeout_s=20)
    ddp.module = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ScheduleError, match="stage 0 is a DistributedDataParallel whose module was replaced"):
        runner.step(x, x)


def check_replicate(rank: int, ranks: int) -> None:
    """The one with a reducer is refused, also in a submodule and behind the making; the sharding one is right."""
    x = torch.randn(2 * M, WIDTH)
    for whole in (True, False):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        runner = PipelineRunner(one_f_one_b(1, M), Stage(module, 0), None, square_loss, timeout_s=20)
        replicate(module if whole else module[0])
        kind = "DDPSequential" if whole else "DDPLinear"
        for call, given in ((Stage, (module, 0)), (runner.step, (x, x))):
            with pytest.raises(ScheduleError, match=rf"stage 0 holds a {kind}, made by replicate\(\), which reduces"):
                call(*given)
    torch.manual_seed(0)
    theirs, ours = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    replicate_by_shards(ours, mesh=init_device_mesh("cpu", (ranks,)))
    rows = [torch.randn(2 * M, WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    PipelineRunner(one_f_one_b(1, M), Stage(ours, 0), None, square_loss).step(rows[rank], rows[rank] + 1)
    (sum(square_loss(theirs(a), a + 1) for a in rows) / ranks).backward()
    assert torch.allclose(ours.weight.grad.full_tensor(), theirs.weight.grad, atol=1e-6)


def check_both(rank: int, ranks: int) -> None:
    check_wrapper(rank, ranks)
    check_replicate(rank, ranks)


@pytest.mark.slow
def test_what_lies_on_the_wrapper_or_reduces_by_itself_is_refused_when_a_stage_is_made_and_in_each_step():
    run_ranks(check_both, 2)
