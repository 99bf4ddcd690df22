"""Learning rate and batch size by update."""

import numpy as np
import pytest
import torch
from config_helpers import config_with

from sixfold.gpt.config.batch_schedule import batch_size
from sixfold.gpt.training.learning_rate import learning_rate


def rates(*overrides):
    config = config_with("optimizer.lr=0.5", "train.steps=40", *overrides)
    return np.array([learning_rate(config, step) for step in range(40)])


def test_warmup_climbs_in_equal_steps_and_the_first_update_counts():
    np.testing.assert_allclose(rates("schedule.warmup_steps=8")[:8], 0.5 * np.arange(1, 9) / 8, rtol=1e-15)


def test_cosine_is_torchs_annealing_after_warmup():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    peer = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32, eta_min=0.05)
    expected = []
    for _ in range(32):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        peer.step()
    np.testing.assert_allclose(rates("schedule.warmup_steps=8")[8:], expected, rtol=1e-12)


def test_wsd_holds_and_then_falls_in_equal_steps():
    found = rates("schedule.shape=wsd", "schedule.warmup_steps=4", "schedule.decay_steps=10", "schedule.min_lr_ratio=0")
    np.testing.assert_array_equal(found[4:31], 0.5)
    np.testing.assert_allclose(found[30:], np.linspace(0.5, 0.05, 10), rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "half"), [("cosine", 0.5), ("minus_sqrt", 1 - 0.5**0.5), ("exponential", 2**0.5 - 1), ("linear", 0.5)]
)
def test_wsd_falls_from_the_peak_to_its_least_rate_by_any_curve(kind, half):
    options = ("schedule.shape=wsd", "schedule.decay_steps=10", "schedule.min_lr_ratio=0.2", f"schedule.decay={kind}")
    found, config = rates(*options), config_with("optimizer.lr=0.5", "train.steps=40", *options)
    np.testing.assert_array_equal(found[:31], 0.5)
    assert (np.diff(found[30:]) < 0).all()
    assert found[35] == pytest.approx(0.5 * (0.2 + 0.8 * half), rel=1e-12)
    assert learning_rate(config, 40) == pytest.approx(0.1, rel=1e-12)


def test_constant_stays():
    np.testing.assert_array_equal(rates("schedule.shape=constant"), 0.5)


@pytest.mark.parametrize("overrides", [("schedule.warmup_steps=100",), ("schedule.warmup_steps=40",)])
def test_a_warmup_longer_than_the_run_is_all_warmup(overrides):
    warmup = int(overrides[0].partition("=")[2])
    np.testing.assert_allclose(rates(*overrides), 0.5 * np.arange(1, 41) / warmup, rtol=1e-15)


def test_a_run_that_was_made_longer_ends_at_its_least_rate():
    config = config_with("train.steps=40")
    assert learning_rate(config, 40) == learning_rate(config, 1000) == pytest.approx(1e-4)


def test_the_ramp_sets_the_batch_from_its_step_on():
    config = config_with("train.batch_ramp=[[2, 32], [5, 64]]")
    assert [batch_size(config, step) for step in range(7)] == [16, 16, 32, 32, 32, 64, 64]
