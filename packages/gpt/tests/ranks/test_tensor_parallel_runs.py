"""Tensor-parallel runs beside features that change their numbers: near the run of one process with the same."""

from __future__ import annotations

import pytest
from gpt_helpers import tiny_config
from run_helpers import losses, run_all

SHORT = ("train.steps=2", "model.num_layers=2")
FP8 = (*SHORT, "train.precision=fp8")
SPLIT = ("parallel.tp=2", "parallel.tp_overlap=true", "parallel.schedule=zb_h1")


@pytest.mark.slow
def test_fp8_and_chunks_under_split_backwards(tmp_path):
    alone, apart, plain, chunks = (
        tiny_config(tmp_path, *options, run=f"run{n}")
        for n, options in enumerate([FP8, (*FP8, "parallel.tp=2"), SHORT, (*SHORT, *SPLIT)])
    )
    run_all([(1, alone), (2, apart), (1, plain), (2, chunks)])
    assert losses(chunks) == pytest.approx(losses(plain), rel=1e-6)
    # A matrix in parts has a scale for each of them: other bytes stand for its weights.
    assert losses(apart) == pytest.approx(losses(alone), rel=1e-3)
    assert losses(apart) != losses(alone)
    assert losses(alone) != pytest.approx(losses(plain), rel=1e-6)
