"""Sums of losses on three grids: the rounded fraction, whatever the order and the parts."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

from sixfold.gpt.data.exact_losses import from_grids, on_grids, sum_on_grids
from sixfold.gpt.data.loss_by_dataset import SampleLosses, mean_by_dataset, sums_by_dataset

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(20))
def test_float32_losses_have_the_exact_sum_in_any_order_and_parts(seed):
    draw = random.Random(seed)
    losses = torch.tensor([draw.uniform(0.1, 10) * 2.0 ** draw.randint(-30, 24) for _ in range(draw.randint(1, 300))])
    exact = float(sum(map(Fraction, losses.tolist())))
    for _ in range(5):
        shuffled = losses[torch.randperm(len(losses), generator=torch.Generator().manual_seed(draw.randint(0, 10**6)))]
        ranks = shuffled.split(draw.randint(1, 60))
        total = sum(sum_on_grids(one.unbind(), CPU) for one in ranks)
        assert from_grids(total.tolist()) == exact


def test_a_plain_sum_of_such_losses_depends_on_parts():
    losses = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert len({sum(float(part.sum()) for part in losses.split(size)) for size in (1, 3, 7, 200)}) > 1


def test_negative_and_very_small_losses_are_off_by_half_a_step_at_most():
    losses = torch.tensor([-3.7, 2.0**-40, -(2.0**-80), 0.0], dtype=torch.float64)
    found = on_grids(losses).sum(0)
    assert (found - losses).abs().max() <= 2.0**-57


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_infinity_and_nan_come_out(special):
    found = from_grids(sum_on_grids([torch.tensor(1.5), torch.tensor(special)], CPU).tolist())
    assert found == special or (math.isnan(found) and math.isnan(special))
    both = sum_on_grids([torch.tensor(math.inf), torch.tensor(-math.inf)], CPU)
    assert math.isnan(from_grids(both.tolist()))


def test_no_loss_is_zero():
    assert from_grids(sum_on_grids([], CPU).tolist()) == 0.0


def test_losses_by_dataset_do_not_depend_on_who_has_which_sample():
    draw = torch.Generator().manual_seed(0)
    nats = torch.rand(96, generator=draw, dtype=torch.float64) * torch.logspace(-3, 4, 96, dtype=torch.float64)
    datasets, targets = torch.randint(0, 3, (96,), generator=draw), torch.full((96,), 7.0, dtype=torch.float64)
    found = []
    for size in (1, 5, 16, 96):
        parts = zip(datasets.split(size), targets.split(size), nats.split(size), strict=True)
        ranks = [sums_by_dataset([SampleLosses(dataset=d, targets=t, nats=n)], 4, CPU) for d, t, n in parts]
        found.append(mean_by_dataset(sum(ranks).tolist()))
    assert found == [found[0]] * 4 and set(found[0]) == {0, 1, 2}
    for number, mean in found[0].items():
        mine = nats[datasets == number]
        assert mean == pytest.approx(float(mine.sum()) / (7.0 * len(mine)), rel=1e-14)
