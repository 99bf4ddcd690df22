"""Two ranks share the building of an order's index, train as one process does, and have one copy of the data."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from gpt_helpers import plain_losses, tiny_config, write_pair
from run_helpers import JOB_S

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.blending import BlendingError
from sixfold.gpt import TrainConfig, TrainError, train
from sixfold.gpt.launch.rendezvous import World
from sixfold.gpt.training.loop import train_in


def train_rank(rank, ranks, text):
    from sixfold.blending.cache import indices

    built, build = [], indices.build_indices
    indices.build_indices = lambda *arguments: built.append(1) or build(*arguments)
    world = World(rank=rank, size=ranks, local_rank=rank, store=ranktest.store(), device=torch.device("cpu"))
    train_in(TrainConfig.from_text(text), world)
    return len(built)


def losses(config):
    text = (Path(config.run.dir) / "metrics.jsonl").read_text()
    return [entry["loss"] for entry in map(json.loads, text.splitlines()) if entry["kind"] == "step"]


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
@pytest.mark.slow
def test_an_index_is_built_in_shares_and_read_by_all(order, tmp_path):
    options = (f"data.order={order}", "train.steps=2")
    config = tiny_config(tmp_path, *options, f"data.cache_dir={tmp_path}/shared", run="shared")
    built = ranktest.run_ranks(train_rank, 2, config.to_toml(), timeout=JOB_S)
    assert sum(built) == 4, "two datasets in two parts"
    assert min(built) >= 1
    alone = tiny_config(tmp_path, *options, f"data.cache_dir={tmp_path}/alone", run="alone")
    train(alone)
    assert losses(config) == pytest.approx(losses(alone), rel=1e-6)


def step_losses(rank, ranks, text):
    world = World(rank=rank, size=ranks, local_rank=rank, store=ranktest.store(), device=torch.device("cpu"))
    train_in(TrainConfig.from_text(text), world)


@pytest.mark.slow
def test_packed_documents_train_alike_at_two_layouts_and_over_a_resume(tmp_path):
    options = (
        "data.packing=best_fit",
        "data.deal=permuted",
        "data.blend_unit=tokens",
        "train.steps=4",
        "checkpoint.every=2",
        "eval.every=2",
    )
    alone = tiny_config(tmp_path, *options, f"data.cache_dir={tmp_path}/cache", run="alone")
    train(alone)
    assert list((tmp_path / "cache").glob("*-PackedRows-train-rows.npy")), "the counts are kept"
    for layout in ("dp", "pp"):
        config = tiny_config(tmp_path, *options, f"parallel.{layout}=2", run=layout)
        ranktest.run_ranks(step_losses, 2, config.to_toml(), timeout=JOB_S)
        assert losses(config) == pytest.approx(losses(alone), rel=1e-6)
    assert losses(alone) == pytest.approx(plain_losses(alone, 4), rel=1e-6)
    cut = tiny_config(tmp_path, *options, run="cut")
    shutil.copytree(Path(alone.run.dir, "checkpoints/step-00000002"), Path(cut.run.dir, "checkpoints/step-00000002"))
    shutil.copy(Path(alone.run.dir) / "config.toml", cut.run.dir)
    train(cut)
    assert losses(cut) == losses(alone)[2:]


def test_a_run_that_dealt_in_turn_goes_on_so_and_a_new_one_permutes(tmp_path):
    more = ("train.steps=4", "checkpoint.every=2")
    in_turn = tiny_config(tmp_path, *more, "data.deal=in_turn", run="in-turn")
    new = tiny_config(tmp_path, *more, run="new")
    permuted = tiny_config(tmp_path, *more, "data.deal=permuted", run="permuted")
    for config in (in_turn, new, permuted):
        train(config)
    assert losses(new) == losses(permuted) != losses(in_turn), "rounded otherwise: sums go another way"
    assert TrainConfig.from_text(Path(new.run.dir, "config.toml").read_text()).data.deal == "permuted"
    shutil.rmtree(Path(in_turn.run.dir, "checkpoints/step-00000004"))
    whole = losses(in_turn)
    train(tiny_config(tmp_path, *more, run="in-turn"))
    assert losses(in_turn)[4:] == whole[2:]
    assert TrainConfig.from_text(Path(in_turn.run.dir, "config.toml").read_text()).data.deal == "in_turn"


def rank_of_another_node(rank, ranks, text, folders):
    """The error of a rank whose node has data of its own behind the same prefix."""
    os.chdir(folders[rank])
    world = World(rank=rank, size=ranks, local_rank=rank, store=ranktest.store(), device=torch.device("cpu"))
    with pytest.raises(BlendingError) as error:
        train_in(TrainConfig.from_text(text), world)
    return str(error.value)


@pytest.mark.parametrize("layout", ["dp", "pp"])
@pytest.mark.slow
def test_ranks_with_other_copies_of_the_data_are_refused_alike_in_the_order_without_an_index(layout, tmp_path):
    folders = [tmp_path / "node-0", tmp_path / "node-1"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        write_pair(folder / "wiki", 120, seed)
    options = ('data.blend=["wiki"]', "data.weights=[]", f"parallel.{layout}=2", "run.timeout_seconds=20")
    config = tiny_config(tmp_path, *options)
    found = ranktest.run_ranks(rank_of_another_node, 2, config.to_toml(), folders, timeout=JOB_S)
    assert found[0] == found[1], "one error on both"
    assert found[0].startswith("the data of wiki differs between ranks: rank 0 has "), found[0]


def rank_whose_peer_is_gone(rank, ranks, text):
    from sixfold.gpt.data import token_stream as data

    if rank == 1:
        data.build_datasets = lambda *_: os._exit(0)
    world = World(rank=rank, size=ranks, local_rank=rank, store=ranktest.store(), device=torch.device("cpu"))
    with pytest.raises(TrainError) as error:
        train_in(TrainConfig.from_text(text), world)
    Path(TrainConfig.from_text(text).run.dir, "told").write_text(str(error.value))


@pytest.mark.slow
def test_a_rank_that_is_lost_while_the_data_is_opened_is_no_fault_of_the_data(tmp_path):
    config = tiny_config(tmp_path, "parallel.dp=2", "run.timeout_seconds=20")
    with pytest.raises(ranktest.RankFailed):
        ranktest.run_ranks(rank_whose_peer_is_gone, 2, config.to_toml(), timeout=JOB_S)
    told = (Path(config.run.dir) / "told").read_text()
    assert told.startswith("the opening of the data by all ranks: another rank died or did not answer in time")
