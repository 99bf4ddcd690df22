"""Users of torch.distributed.pipelining: their stages, names, files and calls, beside torch's own schedules."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, TorchSchedule, program_of

M = 6  # no power of two: only the same sums, divided as torch divides them, have the same bits
# Name, stages per rank, whether the bits are torch's, and by which of torch's files it is run too.
NAMES = [
    ("1F1B", 1, True, ()),
    ("GPipe", 1, True, ()),
    ("Interleaved1F1B", 2, True, ("compute_comms",)),
    ("InterleavedZeroBubble", 2, True, ()),
    ("ZBVZeroBubble", 2, True, ("compute_only",)),
    ("DualPipeV", 2, True, ("compute_only",)),
    ("LoopedBFS", 2, False, ("compute_only",)),  # torch's name runs backwards in descending order, as its file says
]


def modules_of(program: Any, rank: int) -> dict[int, nn.Module]:
    """Those of this rank; equal in every call."""
    every = layers(program.stages)
    return {s: every[s] for s in program.stages_of(rank)}


def their_stages(modules: dict[int, nn.Module], stages: int) -> list[Any]:
    """As a user of torch makes them."""
    import torch.distributed.pipelining as peer

    return [
        peer.PipelineStage(module, s, stages, torch.device("cpu"), group=dist.group.WORLD)
        for s, module in modules.items()
    ]


def step_of(schedule: Any, program: Any, rank: int, x: Tensor, y: Tensor) -> tuple[list[Tensor], Any]:
    """A step as torch's users write it; losses and outputs."""
    losses: list[Tensor] = []
    first, last = rank in (program.placement[0],), rank == program.placement[-1]
    outputs = schedule.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
    return losses, outputs


def every_gradient(modules: dict[int, nn.Module]) -> list[Tensor | None]:
    return list(chain.from_iterable(gradients(module) for module in modules.values()))


def beside_torch(rank: int, ranks: int, folder: str) -> None:
    """Every schedule by name, and by the files that torch writes of it."""
    from torch.distributed.pipelining import schedules as peer

    x, y = batch(2 * M)
    for name, chunks, same, files in NAMES:
        program = program_of(name, ranks, M, chunks)
        theirs = modules_of(program, rank)
        stages = their_stages(theirs, program.stages)
        schedule = peer.get_schedule_class(name)(stages if chunks > 1 else stages[0], M, square_loss)
        wanted, joint = step_of(schedule, program, rank, x, y)
        given = [(name, same)]
        for form in files:
            given.append((f"{folder}/{name}.{form}.{rank}.csv", True))
            schedule._dump_csv(given[-1][0], format=form)
        for how, equal in given:
            modules = modules_of(program, rank)
            ours = TorchSchedule(how, their_stages(modules, program.stages), M, square_loss, timeout_s=20)
            losses, outputs = step_of(ours, program, rank, x, y)
            assert len(losses) == len(wanted) and (outputs is None) == (joint is None), how
            assert all(any(torch.equal(loss, other) for other in wanted) for loss in losses), how
            assert outputs is None or (torch.equal(outputs, joint) and not outputs.requires_grad), how
            if equal:
                assert equal_bits(every_gradient(modules), every_gradient(theirs)), how
            for a, b in zip(every_gradient(modules), every_gradient(theirs), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_names_files_stages_and_steps_of_torch_give_its_losses_outputs_and_gradients(tmp_path):
    pytest.importorskip("numpy", reason="PyTorch's stages send each other their shapes as objects, which needs it")
    run_ranks(beside_torch, 2, str(tmp_path), timeout=100)


class Scaled(nn.Module):
    """A layer with an argument of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, *, factor: Tensor, shift: float = 0.0) -> Tensor:
        return self.module(x) * factor + shift


def weighted_loss(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return weight * square_loss(output, target)


def as_called(rank: int, ranks: int) -> None:
    """Keyword arguments, arguments of the loss, no division, accumulation, evaluation; the plain loop beside."""
    x, y = batch(2 * M)
    factor = torch.linspace(0.5, 1.5, 2 * M)[:, None]
    oracle, mine = layers(ranks), layers(ranks)[rank]
    schedule = TorchSchedule(
        "1f1b", Stage(Scaled(mine), rank), M, weighted_loss, group=dist.group.WORLD, num_stages=ranks, timeout_s=20
    )
    last = rank == ranks - 1

    def run(call: Any, **more: Any) -> tuple[list[Tensor], Any]:
        losses: list[Tensor] = [torch.zeros(())]
        ends = {"target": y, "losses": losses, **more} if last else {}
        return losses, call(*([x] if rank == 0 else []), factor=factor, shift=0.25, **ends)

    for f, a, b in zip(factor.tensor_split(M), x.tensor_split(M), y.tensor_split(M), strict=True):
        for module in oracle:
            a = module(a) * f + 0.25
        weighted_loss(a, b, 3.0).backward()
    for parameter in oracle[rank].parameters():
        parameter.grad.div_(M)
    losses, outputs = run(schedule.step, loss_kwargs={"weight": 3.0})
    assert equal_bits(gradients(mine), gradients(oracle[rank]))
    run(schedule.step, loss_kwargs={"weight": 3.0})  # adds the same once more
    assert equal_bits(gradients(mine), [2 * gradient for gradient in gradients(oracle[rank])])
    before = [gradient.clone() for gradient in gradients(mine)]
    evaluated, again = run(schedule.eval)
    assert equal_bits(gradients(mine), before)
    if last:
        assert torch.equal(outputs, again) and outputs.shape == (2 * M, x.shape[1])
        torch.testing.assert_close(torch.stack(evaluated) * 3, torch.stack(losses))
    undivided = TorchSchedule(
        "gpipe", Stage(Scaled(mine), rank), M, scale_grads=False, group=dist.group.WORLD, num_stages=ranks,
        loss_fn=weighted_loss, timeout_s=20,
    )  # fmt: skip
    mine.zero_grad()
    assert run(undivided.step, loss_kwargs={"weight": 3.0}, return_outputs=False)[1] is None
    torch.testing.assert_close(gradients(mine), [M * gradient for gradient in gradients(oracle[rank])])
    forwards = TorchSchedule(
        "1F1B", Stage(Scaled(mine), rank), M, group=dist.group.WORLD, num_stages=ranks, timeout_s=20
    )
    outputs = forwards.step(*([x] if rank == 0 else []), factor=factor, shift=0.25)
    assert torch.equal(outputs, again) if last else outputs is None


def test_steps_take_what_torchs_take():
    run_ranks(as_called, 2)


def refusals(rank: int, ranks: int) -> None:
    """What cannot be meant."""
    import torch.distributed.pipelining as peer

    module, group = layers(1)[0], dist.group.WORLD
    plain = peer.PipelineStage(module, rank, ranks, torch.device("cpu"))
    built = peer.PipelineStage(module, rank, ranks, torch.device("cpu"), group=group, dw_builder=lambda: lambda: None)
    for stages, more, words in (
        (plain, {}, r"group of the stages is \[None\]; give them one, or group="),
        (Stage(module, rank), {"group": group}, "num_stages of the stages is"),
        (Stage(module, rank), {"group": group, "num_stages": 3}, "num_stages is 3, which 2 ranks do not divide"),
        (built, {}, f"stage {rank} has a dw_builder"),
        (module, {"group": group, "num_stages": 2}, "a Sequential is no PipelineStage"),
    ):
        with pytest.raises(ScheduleError, match=words):
            TorchSchedule("1F1B", stages, M, square_loss, **more)
    schedule = TorchSchedule("1F1B", plain, M, square_loss, group=group, timeout_s=5)
    assert isinstance(schedule.runner, PipelineRunner)
    with pytest.raises(ScheduleError, match=r"args\[0\] has 7 rows for 6 microbatches; each counts equally"):
        schedule.step(batch(7)[0])


UNEVEN = "0F0,0F1,0B0,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1\n"


def unevenly_placed(rank: int, ranks: int, folder: str) -> None:
    """Three stages on two ranks, which no name gives."""
    file = f"{folder}/uneven.{rank}.csv"
    with open(file, "w") as opened:
        opened.write(UNEVEN)
    x, y = batch(4)
    oracle = layers(3)
    plain_loop(oracle, list(x.tensor_split(2)), list(y.tensor_split(2)))
    mine = {s: layers(3)[s] for s in ((0,), (1, 2))[rank]}
    schedule = TorchSchedule(file, their_stages(mine, 3), 2, square_loss, timeout_s=20)
    step_of(schedule, schedule.program, rank, x, y)
    for s, module in mine.items():
        assert equal_bits(gradients(module), gradients(oracle[s]))


def test_a_file_may_place_stages_as_it_likes(tmp_path):
    run_ranks(unevenly_placed, 2, str(tmp_path))


def test_stages_that_cannot_be_run_are_refused_by_name():
    run_ranks(refusals, 2)


def replicated(rank: int, ranks: int) -> None:
    """Two pipelines of two ranks, each stage in DDP over its two replicas; each pipeline has its own batch."""
    import torch.distributed.pipelining as peer

    pipelines, replicas = ([dist.new_group(members) for members in groups] for groups in (PIPELINES, REPLICAS))
    mine, stage = rank // 2, rank % 2
    x, y = batch(2 * M, seed=2 + mine)
    made = []
    for _ in range(2):
        module = DistributedDataParallel(layers(2)[stage], process_group=replicas[stage])
        made.append(peer.PipelineStage(module, stage, 2, torch.device("cpu"), group=pipelines[mine]))
    program = program_of("1F1B", 2, M)
    wanted, joint = step_of(peer.Schedule1F1B(made[0], M, square_loss), program, stage, x, y)
    losses, outputs = step_of(TorchSchedule("1F1B", made[1], M, square_loss, timeout_s=20), program, stage, x, y)
    assert all(torch.equal(a, b) for a, b in zip(losses, wanted, strict=True))
    assert outputs is None or torch.equal(outputs, joint)
    theirs, ours = (gradients(each.submod) for each in made)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    everyone = [torch.empty_like(ours[0]) for _ in range(2)]
    dist.all_gather(everyone, ours[0], group=replicas[stage])
    assert torch.equal(*everyone)


PIPELINES, REPLICAS = ([0, 1], [2, 3]), ([0, 2], [1, 3])


@pytest.mark.slow
def test_stages_in_ddp_are_reduced_as_torch_reduces_them():
    pytest.importorskip("numpy", reason="PyTorch's stages send each other their shapes as objects, which needs it")
    run_ranks(replicated, 4)
