"""What a stage hands on is what it was when it was made, though a batch is filled again or a buffer is updated."""

import ctypes
import math
import time

import pytest
import torch
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, gpipe, one_f_one_b

BATCHES = 5
EDGES = (None, "groups", "one")


class HandsOn(nn.Module):
    """A layer beside which a mask goes on to the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x[:1]


class Notes(nn.Module):
    """Notes which values its second input had."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[float] = []

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        self.seen.append(mask[0, 0].item())
        return self.layer(hidden)


class Running(nn.Module):
    """Returns a tensor of its own, which each forward changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kind = kind
        self.register_buffer("mean", torch.zeros(2, 4))
        self.plain = torch.zeros(2, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(x)
        state = self.plain if self.kind == "attribute" else self.mean
        state.mul_(0.5).add_(hidden.detach(), alpha=0.5)
        return hidden, {"buffer": state, "attribute": state, "view": state[:], "detached": state.detach()}[self.kind]


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, state: Tensor) -> Tensor:
        return self.layer(hidden * state)


def loss_of(output: Tensor, target: object) -> Tensor:
    return output.square().mean()


def handing_on(rank, ranks, edges, train):
    torch.manual_seed(0)
    module = HandsOn() if rank == 0 else Notes()
    if rank == 0:
        module.requires_grad_(False)
    runner = PipelineRunner(
        one_f_one_b(2, 2), [Stage(module, rank)], torch.distributed.group.WORLD, loss_of, edges=edges, timeout_s=20
    )
    rows = torch.zeros(4, 4)
    for number in range(BATCHES):
        rows.fill_(number)
        if rank:
            time.sleep(0.02)
        (runner.step if train else runner.evaluate)(rows if rank == 0 else None)
    return [] if rank == 0 else module.seen


@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("train", [False, True], ids=["evaluate", "step"])
@pytest.mark.slow
def test_a_batch_that_is_filled_again_arrives_as_it_was(edges, train):
    assert run_ranks(handing_on, 2, edges, train)[1] == [float(b) for b in range(BATCHES) for _ in range(2)]


def two_modules(kind):
    torch.manual_seed(3)
    return Running(kind), Joins()


def rows_of(seed):
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(seed))


def running(rank, module, group, edges):
    runner = PipelineRunner(gpipe(2, 6), [Stage(module, rank)], group, loss_of, edges=edges, timeout_s=20)
    runner.step(rows_of(9) if rank == 0 else None)
    return [p.grad.clone() for p in module.parameters()]


def plainly(kind):
    first, last = two_modules(kind)
    for part in rows_of(9).chunk(6):
        hidden, state = first(part)
        (loss_of(last(hidden, state.clone()), None) / 6).backward()
    return [[p.grad for p in module.parameters()] for module in (first, last)]


def running_over_groups(rank, ranks, kind, edges):
    return running(rank, two_modules(kind)[rank], torch.distributed.group.WORLD, edges)


@pytest.mark.parametrize("kind", ["buffer", "attribute", "view", "detached"])
@pytest.mark.parametrize("edges", ["threads", None, "groups"])
@pytest.mark.slow
def test_a_stage_may_return_what_its_next_forward_changes(kind, edges):
    if edges == "threads":
        both = two_modules(kind)
        made = values_or_raise(on_threads(2, lambda t: running(t.rank, both[t.rank], t, None)))
    else:
        made = run_ranks(running_over_groups, 2, kind, edges)
    for here, there in zip(made, plainly(kind), strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["buffer", "attribute", "view", "detached"])
def test_stages_of_one_process_hand_on_what_was_made(kind):
    first, last = two_modules(kind)
    runner = PipelineRunner(gpipe(2, 6), [Stage(first, 0), Stage(last, 1)], None, loss_of)
    runner.step(rows_of(9))
    for module, there in zip((first, last), plainly(kind), strict=True):
        torch.testing.assert_close([p.grad for p in module.parameters()], there, rtol=0, atol=0)


class Returns(nn.Module):
    """Makes its output in one of the ways in which modules do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer, self.norm = way, nn.Linear(4, 4), nn.LayerNorm(4)
        self.kept: object = None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = WAYS[self.way](self, x)
        if self.way.startswith("kept"):
            self.kept = made[:1] if self.way == "kept view" else made
        return made


WAYS = {
    "linear": lambda m, x: m.layer(x),
    "three dimensions": lambda m, x: m.layer(x.view(2, 1, 4)),
    "residual": lambda m, x: x + m.layer(x),
    "tanh": lambda m, x: torch.tanh(m.layer(x)),
    "relu in place": lambda m, x: torch.relu_(m.layer(x)),
    "norm": lambda m, x: m.norm(m.layer(x)),
    "tuple": lambda m, x: (m.layer(x), x * 2),
    "parameter": lambda m, x: m.layer.weight,
    "input": lambda m, x: x,
    "kept": lambda m, x: m.layer(x),
    "kept view": lambda m, x: m.layer(x),
    "kept tuple": lambda m, x: (m.layer(x), x + 1),
    "transposed weight": lambda m, x: m.layer.weight.t(),
}
FRESH = ["linear", "three dimensions", "residual", "tanh", "relu in place", "norm", "tuple"]
HELD = ["parameter", "input", "kept", "kept view", "kept tuple", "transposed weight"]


@pytest.mark.parametrize("train", [False, True], ids=["evaluate", "step"])
@pytest.mark.parametrize(("way", "copied"), [(way, False) for way in FRESH] + [(way, True) for way in HELD])
def test_only_what_somebody_else_can_reach_is_copied(way, copied, train):
    made, came = [], []
    first = Returns(way)
    first.register_forward_hook(lambda *args: made.append([t.data_ptr() for t in as_list(args[-1])]))
    last = nn.Linear(4, 4)
    last.forward = lambda *values: (
        came.append([v.data_ptr() for v in values]),
        nn.functional.linear(values[0], last.weight),
    )[1]
    runner = PipelineRunner(gpipe(2, 1), [Stage(first, 0), Stage(last, 1)], None, loss_of)
    (runner.step if train else runner.evaluate)(torch.randn(2, 4))
    assert (came[0] != made[0]) is copied


def as_list(value):
    return [value] if isinstance(value, Tensor) else list(value)


class Total(nn.Module):
    """Adds to what it returned before."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, output: Tensor, _: object) -> Tensor:
        self.total += output.detach().sum()
        return self.total


def test_losses_and_outputs_are_those_of_their_microbatch():
    first, last = two_modules("buffer")
    last.layer = nn.Identity()
    last.forward = lambda hidden, state: last.__dict__.setdefault("sum", torch.zeros(2, 4)).add_(state)
    runner = PipelineRunner(gpipe(2, 3), [Stage(first, 0), Stage(last, 1)], None, Total())
    rows = rows_of(9)[:6]
    result = runner.evaluate(rows, keep_outputs=True)
    first, _ = two_modules("buffer")
    sums, outputs, losses = torch.zeros(2, 4), [], []
    for part in rows.chunk(3):
        sums = sums + first(part)[1].detach()
        outputs.append(sums)
        losses.append((losses[-1] if losses else 0) + sums.sum())
    torch.testing.assert_close(result.outputs, outputs)
    torch.testing.assert_close(result.losses, losses)


def in_debug_memory(rank, ranks, edges):
    """Where the last stage's input lay, read behind the step by its address."""
    layer, lay = nn.Linear(4, 4), []
    layer.register_forward_pre_hook(lambda _, args: lay.append(args[0].data_ptr()))
    options = {"edges": edges, "debug_memory": True, "timeout_s": 20}
    runner = PipelineRunner(gpipe(2, 1), [Stage(layer, rank)], torch.distributed.group.WORLD, loss_of, **options)
    runner.step(torch.ones(2, 4) if rank == 0 else None)
    runner.check()
    return list((ctypes.c_float * 8).from_address(lay[-1])) if rank else None


@pytest.mark.parametrize("edges", [None, "groups", "host", "one"])
@pytest.mark.slow
def test_with_debug_memory_what_was_received_and_is_free_is_nan(edges):
    assert all(map(math.isnan, run_ranks(in_debug_memory, 2, edges)[1]))


def test_debug_memory_is_true_or_false():
    with pytest.raises(ScheduleError, match="debug_memory is 'yes'; it is True or False"):
        PipelineRunner(gpipe(1, 1), [Stage(nn.Linear(1, 1), 0)], None, loss_of, debug_memory="yes")
