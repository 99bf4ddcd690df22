"""A rank without the batch hears how many rows it has, and refuses keyword arguments as the other ranks do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_helpers import Report, report
from pipeline_helpers import batch, square_loss
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, one_f_one_b

M, ROWS = 4, 8


@dataclass
class Packed:
    mask: Tensor


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return self.layer(x)


def argument(kind: str) -> Any:
    numpy = pytest.importorskip("numpy", reason="needs numpy, whose arrays users pass")
    return {
        "array": numpy.zeros(ROWS),
        "record": Packed(torch.zeros(ROWS, 2)),
        "other rows": torch.zeros(M, 2),
        "other array": numpy.zeros(5),
        "tensor": torch.zeros(ROWS, 2),
    }[kind]


def alone(rank: int, ranks: int, kind: str, options: dict[str, Any]) -> list[Report]:
    """Rank 1 alone has the argument, and no rank has more of the batch than it needs."""
    runner = PipelineRunner(one_f_one_b(ranks, M), Stage(Masked(), rank), dist.group.WORLD, square_loss, **options)
    found = []
    for rows in (ROWS // 2, ROWS):  # the batch changes, and what was told changes with it
        x, y = batch(rows)
        inputs, targets = x if rank == 0 else None, y if rank == ranks - 1 else None
        given = {"mask": argument(kind)} if rank == 1 and rows == ROWS else None
        found.append(report(lambda i=inputs, t=targets, g=given: runner.step(i, t, kwargs=g)))  # type: ignore[misc]
    return found


@pytest.mark.parametrize("options", [{}, {"edges": "groups"}], ids=["shared", "groups"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("array", f"kwargs['mask'] is a ndarray of {ROWS} rows, which are not cut"),
        ("record", f"kwargs['mask'] is a Packed that holds a tensor or array of {ROWS} rows"),
        ("other rows", f"kwargs['mask'] has {M} rows, the batch {ROWS}"),
        ("other array", None),
        ("tensor", None),
    ],
)
@pytest.mark.slow
def test_a_rank_without_the_batch_refuses_what_has_its_rows_and_all_ranks_say_so(kind, words, options):
    for first, second in run_ranks(alone, 3, kind, options):
        assert first[0] == "none", first
        if words is None:
            assert second[0] == "none", second
        else:
            assert second[0] == "ScheduleError" and words in second[1] and second[2] < 10.0, second


@pytest.mark.parametrize("kind", ["array", "record"])
def test_what_has_the_rows_of_a_list_of_microbatches_is_refused(kind):
    x, y = batch(ROWS)
    runner = PipelineRunner(one_f_one_b(2, M), [Stage(Masked(), s) for s in range(2)], None, square_loss)
    with pytest.raises(ScheduleError, match=rf"kwargs\['mask'\] is a .* of {ROWS} rows, which are not cut"):
        runner.step(list(x.chunk(M)), list(y.chunk(M)), kwargs={"mask": argument(kind)})
