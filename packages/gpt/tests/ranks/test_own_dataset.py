"""examples/own_dataset.py at several layouts: the same samples, whoever reads them, and after a restart elsewhere."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from run_helpers import JOB_S, losses, world_of
from torch.distributed import PrefixStore

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.gpt import ConfigError, TrainConfig
from sixfold.gpt.training.loop import train_in

EXAMPLE = Path(__file__).parents[2] / "examples/own_dataset.py"


def sums(*limits: int) -> dict:
    spec = importlib.util.spec_from_file_location("own_dataset", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(zip(("small", "large"), map(module.Sums, limits), strict=True))


def jobs(rank: int, ranks: int, texts: list[str]) -> None:
    """One rank of several runs, one after the other."""
    for number, text in enumerate(texts):
        world = world_of(rank, ranks)
        world = replace(world, store=world.store and PrefixStore(f"job-{number}", world.store))
        train_in(TrainConfig.from_text(text), world, datasets=sums(5, 50))


def differing(rank: int, ranks: int, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        train_in(TrainConfig.from_text(text), world_of(rank, ranks), datasets=sums(5, 50 + rank))
    return str(error.value)


def config_of(tmp_path, run, *overrides):
    data = ('data.blend=["small", "large"]', "data.weights=[4, 1]", "data.split=98,2,0", "data.seq_length=16")
    return tiny_config(tmp_path, *data, "data.max_epochs=0", "schedule.shape=constant", *overrides, run=run)


@pytest.mark.slow
def test_a_dataset_of_ones_own_gives_every_layout_the_same_samples_before_and_after_a_resume(tmp_path):
    alone = config_of(tmp_path, "alone")
    jobs(0, 1, [alone.to_toml()])
    wide, deep = (config_of(tmp_path, run, f"parallel.{run}=2") for run in ("dp", "pp"))
    half = config_of(tmp_path, "both", "parallel.pp=2", "train.steps=2")
    rest = config_of(tmp_path, "both", "parallel.dp=2", "train.micro_batch_size=4")
    ranktest.run_ranks(jobs, 2, [one.to_toml() for one in (wide, deep, half, rest)], timeout=JOB_S)
    for config in (wide, deep, rest):
        assert losses(config) == pytest.approx(losses(alone), rel=1e-6)


@pytest.mark.slow
def test_ranks_that_were_given_other_datasets_are_refused_alike(tmp_path):
    config = config_of(tmp_path, "odd", "parallel.dp=2")
    for text in ranktest.run_ranks(differing, 2, config.to_toml(), timeout=JOB_S):
        assert "'items': 2500" in text and "'items': 2601" in text and "on rank 1" in text
