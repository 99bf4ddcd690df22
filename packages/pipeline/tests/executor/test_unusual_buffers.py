"""Sparse and nested buffers (the adjacency of a graph, rows of several lengths) in all that looks at buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_helpers import equal_bits, gradients
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, Stage, one_f_one_b, passes

WIDTH = 6
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": torch.clone,
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
    "jagged": lambda dense: torch.nested.nested_tensor([dense[0, :2], dense[1, :4]], layout=torch.jagged),
    "nested": lambda dense: torch.nested.nested_tensor([dense[0, :2], dense[1, :4]]),
}


def adjacency() -> Tensor:
    return torch.randint(1, 3, (WIDTH, WIDTH), generator=torch.Generator().manual_seed(0)).float().triu()


def values_of(buffer: Tensor) -> list[Tensor]:
    """The oracle's look: dense."""
    return list(buffer.unbind()) if buffer.is_nested else [buffer.to_dense()]


class Holds(nn.Module):
    """Adds what its buffer holds, and changes that then."""

    table: Tensor

    def __init__(self, kind: str, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how
        self.register_buffer("table", KINDS[kind](adjacency()))

    def forward(self, x: Tensor) -> Tensor:
        held = sum(part.sum() for part in values_of(self.table))
        y = self.layer(x) * held
        if self.how == "in place":
            self.table.mul_(0.5)
        elif self.how == "another":
            self.table = self.table * 0.5
        return y


def modules(kind: str, how: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Holds(kind, how) for _ in range(2)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def step(parts: list[nn.Module], program: Any, **options: Any) -> list[Tensor]:
    runner = PipelineRunner(program, [Stage(m, i, **options) for i, m in enumerate(parts)], None, F.mse_loss)
    return runner.step(*batch()).losses


HOW = ["read", "in place", "another"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:evaluate ran", "ignore:.*[Ss]parse", "ignore:.*nested")
def test_an_evaluation_in_training_mode_leaves_them_as_they_were(kind, how):
    parts = modules(kind, how)
    runner = PipelineRunner(one_f_one_b(2, 2), [Stage(m, i) for i, m in enumerate(parts)], None, F.mse_loss)
    first = runner.evaluate(*batch()).losses
    for part in parts:
        assert all(map(torch.equal, values_of(part.table), values_of(KINDS[kind](adjacency()))))
    assert all(map(torch.equal, runner.evaluate(*batch()).losses, first))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", ["checkpoint", "recompute"])
@pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*nested")
def test_a_second_forward_begins_with_what_the_first_began_with(kind, how, again):
    plain, twice = modules(kind, how), modules(kind, how)
    losses = step(plain, one_f_one_b(2, 2))
    program = passes.recompute(one_f_one_b(2, 2)) if again == "recompute" else one_f_one_b(2, 2)
    assert all(map(torch.equal, step(twice, program, checkpoint=again == "checkpoint"), losses))
    for ours, theirs in zip(twice, plain, strict=True):
        assert equal_bits(gradients(ours), gradients(theirs))
        assert all(map(torch.equal, values_of(ours.table), values_of(theirs.table)))


@pytest.mark.parametrize("again", ["checkpoint", "evaluate"])
def test_a_buffer_on_meta_that_nobody_reads_is_no_reason_to_fail(again):
    parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    for part in parts:
        part.register_buffer("unused", torch.empty(3, device="meta"))
    stages = [Stage(part, i, checkpoint=again == "checkpoint") for i, part in enumerate(parts)]
    runner = PipelineRunner(one_f_one_b(2, 2), stages, None, F.mse_loss)
    assert len((runner.step if again == "checkpoint" else runner.evaluate)(*batch()).losses) == 2
