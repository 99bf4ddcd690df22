"""A z-loss and label smoothing in runs: they train otherwise, and at every layout alike."""

from __future__ import annotations

import pytest
from gpt_helpers import tiny_config
from run_helpers import losses, run_all

TERMS = ("train.steps=3", "train.z_loss=0.01", "train.label_smoothing=0.1")
LAYOUTS = {"tp 2": (2, ("parallel.tp=2",)), "pp 2": (2, ("parallel.pp=2",)), "dp 2": (2, ())}


@pytest.mark.slow
def test_layouts_train_alike_and_not_as_without(tmp_path):
    plain = tiny_config(tmp_path, "train.steps=3", run="plain")
    alone = tiny_config(tmp_path, *TERMS, run="alone")
    there = {name: tiny_config(tmp_path, *TERMS, *keys, run=name) for name, (_, keys) in LAYOUTS.items()}
    run_all([(1, plain), (1, alone), *((LAYOUTS[name][0], config) for name, config in there.items())])
    assert losses(alone)[0] == losses(plain)[0], "of the first step, before any update"
    assert losses(alone)[1:] != losses(plain)[1:]
    for name, config in there.items():
        assert losses(config) == pytest.approx(losses(alone), rel=1e-6), name
