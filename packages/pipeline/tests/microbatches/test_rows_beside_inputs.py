"""Targets and keyword arguments are cut as the inputs are, or refused: no microbatch meets rows of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, one_f_one_b

M, ROWS, WIDTH = 4, 8, 4
UNEVEN = [1, 3, 2, 2]


class Weighted(nn.Module):
    """Takes rows of any number without an error, as code that broadcasts or reduces does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weights: Any = None, flag: Any = None) -> Tensor:
        return self.layer(x) if weights is None else self.layer(x) * weights.mean()


def rows(number: int = ROWS) -> Tensor:
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(number))


def modules(number: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Weighted() for _ in range(number)]


def step(inputs: Any, targets: Any, kwargs: Any = None) -> list[Tensor]:
    runner = PipelineRunner(one_f_one_b(2, M), [Stage(m, i) for i, m in enumerate(modules(2))], None, F.mse_loss)
    return runner.step(inputs, targets, kwargs=kwargs).losses


def step_on_ranks(inputs: Any, targets: Any, kwargs: Any = None, keywords_on: int = 1) -> list[Tensor]:
    """Rank 0 has the inputs, rank 2 the targets; one of the three has keyword arguments."""
    made = modules(3)

    def run(group: Any) -> list[Tensor]:
        rank = group.rank
        runner = PipelineRunner(one_f_one_b(3, M), Stage(made[rank], rank), group, F.mse_loss, timeout_s=30.0)
        given = inputs if rank == 0 else None, targets if rank == 2 else None
        return runner.step(*given, kwargs=kwargs if rank == keywords_on else None).losses

    return values_or_raise(on_threads(3, run))[2]


UNEQUAL = r"kwargs\['weights'\] has 8 rows to be cut evenly, .* unequal rows; give a list of 4 dicts"


def test_one_dict_beside_a_list_of_unequal_microbatches_is_refused():
    parts = list(rows().split(UNEVEN))
    with pytest.raises(ScheduleError, match=UNEQUAL):
        step(parts, parts, {"weights": torch.rand(ROWS)})


@pytest.mark.parametrize("rank", range(3))
def test_every_rank_refuses_one_dict_beside_a_list_of_unequal_microbatches(rank):
    parts = list(rows().split(UNEVEN))
    with pytest.raises(ScheduleError, match=UNEQUAL):
        step_on_ranks(parts, parts, {"weights": torch.rand(ROWS)}, rank)


@pytest.mark.parametrize("rank", [None, 1, 2])
def test_one_dict_beside_a_list_has_the_rows_of_the_list(rank):
    parts, table = list(rows().chunk(M)), {"weights": torch.rand(M)}
    with pytest.raises(ScheduleError, match=r"kwargs\['weights'\] has 4 rows, the batch 8; a dict is cut as the batch"):
        step(parts, parts, table) if rank is None else step_on_ranks(parts, parts, table, rank)


def test_one_dict_beside_a_list_of_equal_microbatches_is_cut_as_they_are():
    weights, parts = torch.rand(ROWS), list(rows().chunk(M))
    first, second = modules(2)
    expected = [F.mse_loss(second(first(x, w), w), x) for x, w in zip(parts, weights.chunk(M), strict=True)]
    assert torch.equal(torch.stack(step(parts, parts, {"weights": weights})), torch.stack(expected))
    middle = step_on_ranks(parts, parts, {"weights": weights})
    assert torch.equal(torch.stack(middle), torch.stack(step_on_ranks(rows(), rows(), {"weights": weights})))


def test_a_dict_without_rows_goes_beside_any_list():
    parts = list(rows().split(UNEVEN))
    assert torch.equal(torch.stack(step(parts, parts, {"flag": True})), torch.stack(step(parts, parts)))
    assert len(step_on_ranks(parts, parts, {"flag": True})) == M


@pytest.mark.parametrize("on_ranks", [False, True])
@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (rows(), rows(4), "targets has 4 rows, the inputs 8; targets have as many"),
        (rows(), (rows(12), rows(12)), "targets has 12 rows, the inputs 8; targets have as many"),
        (list(rows().chunk(M)), {"y": rows(12)}, "targets has 12 rows, the inputs 8; targets have as many"),
        (list(rows().split(UNEVEN)), rows(), "targets has 8 rows to be cut evenly, .* unequal rows; give a list of 4"),
    ],
)
def test_targets_that_belong_to_other_rows_are_refused(inputs, targets, words, on_ranks):
    with pytest.raises(ScheduleError, match=words):
        (step_on_ranks if on_ranks else step)(inputs, targets)


@pytest.mark.parametrize("on_ranks", [False, True])
def test_labels_may_have_several_rows_for_each_of_the_inputs(on_ranks):
    labels = torch.arange(ROWS * 3) % WIDTH

    class Tokens(nn.Module):
        def forward(self, logits: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(logits.repeat_interleave(3, 0), y)

    made = modules(2)
    expected = [Tokens()(made[1](made[0](x)), y) for x, y in zip(rows().chunk(M), labels.chunk(M), strict=True)]

    def run(group: Any) -> list[Tensor]:
        stages = [Stage(m, i) for i, m in enumerate(made) if group is None or group.rank == i]
        return PipelineRunner(one_f_one_b(2, M), stages, group, Tokens()).step(rows(), labels).losses

    got = values_or_raise(on_threads(2, run))[1] if on_ranks else run(None)
    assert torch.equal(torch.stack(got), torch.stack(expected).detach())
