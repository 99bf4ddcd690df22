"""Tied parameters over process groups: a chain of three holders, of which one is far from the next."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_helpers import Report, report
from pipeline_helpers import Shared, batch, equal_bits, layers, square_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, gpipe, one_f_one_b, zb_v

TIED = (0, 2, 5)  # on ranks 0, 2 and 0 of the V


def modules() -> list[nn.Module]:
    """Six stages, three of them with the factor."""
    return [Shared(layer, 1.0 + s) if s in TIED else layer for s, layer in enumerate(layers(6))]


def add_up(rank: int, ranks: int) -> None:
    """Two steps with an evaluation between, beside copies that keep their own totals."""
    program, ours, oracle = zb_v(3, 4), modules(), modules()
    stages = [Stage(ours[s], s, tied={"f": ours[s].factor} if s in TIED else None) for s in program.stages_of(rank)]
    runner = PipelineRunner(program, stages, dist.group.WORLD, square_loss, timeout_s=20)
    copies = [oracle[s].factor for s in TIED]
    for copy in copies[1:]:
        copy.data.copy_(copies[0].data)
    wanted = None
    for seed in (1, 2):
        x, y = batch(8, seed)
        runner.step(x, y)
        runner.evaluate(x, y)
        for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            for module in oracle:
                a = module(a)
            (square_loss(a, b) / 4).backward()
        total = copies[0].grad + copies[1].grad + copies[2].grad
        wanted = total if wanted is None else wanted + total
        for copy in copies:
            copy.grad = None
    for s in set(TIED) & set(program.stages_of(rank)):
        assert torch.equal(ours[s].factor.data, copies[0].data)
        assert equal_bits([ours[s].factor.grad], [wanted])


@pytest.mark.slow
def test_every_holder_on_every_rank_gets_the_sum():
    run_ranks(add_up, 3)


def differ(rank: int, ranks: int) -> str:
    """Copies of two shapes."""
    module = nn.Linear(8, 8 + rank, bias=False)
    try:
        stage = Stage(module, rank, tied={"w": module.weight})
        PipelineRunner(gpipe(2, 1), [stage], dist.group.WORLD, square_loss)
    except ScheduleError as error:
        return str(error)
    return "made"


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mixes = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mixes(self.table(x)))


def tied_model() -> tuple[Embeds, nn.Sequential]:
    torch.manual_seed(0)
    first, last = Embeds(), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11, bias=False))
    last[2].weight.data.copy_(first.table.weight.data)
    return first, last


def tokens(replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(replica)
    return torch.randint(0, 11, (8, 5), generator=generator), torch.randint(0, 11, (8, 5), generator=generator)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tied_replicas(rank: int, ranks: int) -> None:
    """A tied table on two stages, each replicated: gradients of two steps, beside plain torch over all rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    first, last = tied_model()
    module, table = ((first, first.table.weight), (last, last[2].weight))[pp]
    stage = Stage(DistributedDataParallel(module, process_group=mesh["dp"].get_group()), pp, tied={"table": table})
    runner = PipelineRunner(one_f_one_b(2, 4), stage, mesh["pp"].get_group(), token_loss, timeout_s=30)
    x, targets = tokens(dp)
    whole = tied_model()
    whole[1][2].weight = whole[0].table.weight
    for _ in range(2):
        runner.step(x if pp == 0 else None, targets if pp == 1 else None)
        for replica in range(2):
            inputs, wanted = tokens(replica)
            (token_loss(whole[1](whole[0](inputs)), wanted) / 2).backward()
    for found, expected in zip(module.parameters(), whole[pp].parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.slow
def test_tied_copies_on_replicated_stages_have_the_gradient_of_the_whole_model():
    run_ranks(tied_replicas, 4)


def unsynced(rank: int, ranks: int, within: tuple[bool, ...]) -> Report:
    """A step of tied replicas, some of whose stages are within no_sync()."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    first, last = tied_model()
    module, table = ((first, first.table.weight), (last, last[2].weight))[pp]
    ddp = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    group = mesh["pp"].get_group()
    runner = PipelineRunner(one_f_one_b(2, 4), Stage(ddp, pp, tied={"table": table}), group, token_loss, timeout_s=30)
    x, targets = tokens(dp)
    with ddp.no_sync() if within[pp] else nullcontext():
        runner.evaluate(x, targets)  # which makes no gradients
        told = report(lambda: runner.step(x, targets))
    assert all(parameter.grad is None for parameter in module.parameters()), "a refused step leaves no gradients"
    return told


@pytest.mark.parametrize("within", [(True, True), (True, False), (False, True)])
@pytest.mark.slow
def test_tied_replicas_within_no_sync_are_refused_on_every_rank(within):
    words = f"stage {within.index(True)} is within no_sync(), and the averages of its tied parameters are summed over"
    for rank, (kind, text, took) in enumerate(run_ranks(unsynced, 4, within)):
        either = words if within != (True, True) else "is within no_sync(), and the averages of its tied parameters"
        assert kind == "ScheduleError" and either in text and took < 10.0, (rank, kind, text, took)


def alone(rank: int, ranks: int, names: tuple[str | None, ...], data_parallel: bool) -> Report:
    """A runner whose tied stages do not fit each other, or one of which has an object that owns its gradients."""
    module, name = nn.Linear(8, 8, bias=False), names[rank]
    owner: Any = object() if data_parallel and rank else None
    return report(
        lambda: PipelineRunner(
            gpipe(2, 1),
            Stage(module, rank, tied=None if name is None else {name: module.weight}, data_parallel=owner),
            dist.group.WORLD,
            square_loss,
            timeout_s=60.0,
        )
    )


@pytest.mark.parametrize(
    ("names", "data_parallel", "words"),
    [
        (("words", "word"), False, "tied['word'] is on stage 1 alone"),
        ((None, "words"), False, "tied['words'] is on stage 1 alone"),
        (("words", "words"), True, "stage 1 has tied parameters and data_parallel"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_tied_on_one_rank_is_told_to_all_at_once(names, data_parallel, words):
    for kind, text, took in run_ranks(alone, 2, names, data_parallel):
        assert kind == "ScheduleError" and words in text and took < 10.0, (kind, text, took)


def test_copies_of_two_shapes_are_refused_on_every_rank():
    words = "tied['w'] is torch.float32 [8, 8] on stage 0 and torch.float32 [9, 8] on stage 1"
    told = run_ranks(differ, 2)
    assert all(each.startswith(words) for each in told), told
