"""Two ranks share the building of an order's index, and train as one process does."""

import json
from pathlib import Path

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import JOB_S

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.gpt import TrainConfig, train
from sixfold.gpt.launch import World
from sixfold.gpt.loop import train_in


def train_rank(rank, ranks, text):
    from sixfold.blending import indices

    built, build = [], indices.build_indices
    indices.build_indices = lambda *arguments: built.append(1) or build(*arguments)
    world = World(rank=rank, size=ranks, local_rank=rank, store=ranktest.store(), device=torch.device("cpu"))
    train_in(TrainConfig.from_text(text), world)
    return len(built)


def losses(config):
    text = (Path(config.run.dir) / "metrics.jsonl").read_text()
    return [entry["loss"] for entry in map(json.loads, text.splitlines()) if entry["kind"] == "step"]


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_an_index_is_built_in_shares_and_read_by_all(order, tmp_path):
    options = (f"data.order={order}", "train.steps=2")
    config = tiny_config(tmp_path, *options, f"data.cache_dir={tmp_path}/shared", run="shared")
    built = ranktest.run_ranks(train_rank, 2, config.to_toml(), timeout=JOB_S)
    assert sum(built) == 4, "two datasets in two parts"
    assert min(built) >= 1
    alone = tiny_config(tmp_path, *options, f"data.cache_dir={tmp_path}/alone", run="alone")
    train(alone)
    assert losses(config) == pytest.approx(losses(alone), rel=1e-6)
