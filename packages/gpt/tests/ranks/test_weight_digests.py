"""Digests of a run's weights: of what its checkpoints hold, at every layout, and again where a run goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import lines, run, run_all

from sixfold import dist_ckpt
from sixfold.dist_ckpt import retention
from sixfold.gpt import ConfigError
from sixfold.gpt.commands.cli import main
from sixfold.gpt.config.train_config import RunConfig
from sixfold.gpt.observe.digest_file import read_digests
from sixfold.gpt.observe.tensor_digest import DigestSums, run_digest, tensor_digest

EXPERTS = ("model.num_experts=4", "model.moe_ffn_hidden_size=32", "model.dense_layers=1")
LAYOUTS = {
    "alone": (1, ()),
    "alone_experts": (1, EXPERTS),
    "no_shard": (2, ("parallel.sharding=no_shard",)),
    "optim": (2, ("parallel.sharding=optim",)),
    "optim_grads": (2, ("parallel.sharding=optim_grads",)),
    "optim_grads_params": (2, ("parallel.sharding=optim_grads_params",)),
    "hybrid": (4, ("parallel.dp=4", "parallel.dp_replicate=2")),
    "pp": (2, ("parallel.pp=2",)),
    "pp_dp": (4, ("parallel.pp=2", "parallel.dp=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2")),
    "tp": (2, ("parallel.tp=2",)),
    "tp_dp": (4, ("parallel.tp=2", "parallel.dp=2")),
    "cp": (2, ("parallel.cp=2",)),
    "ep": (2, (*EXPERTS, "parallel.ep=2", "parallel.sharding=optim")),
    "ep_tp": (4, (*EXPERTS, "parallel.ep=2", "parallel.tp=2", "parallel.dp=2")),
}
ALL = ("log.digest_every=1", "checkpoint.every=1", "checkpoint.keep=9", "checkpoint.save_initial=true")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digests")
    found = {}
    for name, (ranks, overrides) in LAYOUTS.items():
        config = tiny_config(folder, "train.steps=2", "train.micro_batch_size=1", *ALL, *overrides)
        found[name] = ranks, replace(config, run=RunConfig(dir=str(folder / name), device="cpu", timeout_seconds=120.0))
    run_all(found.values())
    return {name: config for name, (_, config) in found.items()}


def digests_of_a_checkpoint(config, step):
    """Of its whole tensors."""
    sums, found = DigestSums(torch.device("cpu")), {}
    saved = dist_ckpt.load_plain_tensors(retention.step_path(Path(config.run.dir) / "checkpoints", step))
    for key in sorted(key for key in saved if key.startswith("model.")):
        name, value = key.removeprefix("model."), saved[key]
        found[name] = tensor_digest(name, "float32", value.shape, sums.of(value, 0).tolist())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_digests_are_those_of_the_tensors_in_the_checkpoint_of_the_same_step(runs, layout):
    config = runs[layout]
    found = {line.step: line.tensors for line in read_digests(Path(config.run.dir) / "digests.jsonl")}
    assert found == {step: digests_of_a_checkpoint(config, step) for step in (0, 1, 2)}
    told = {line["step"]: line["digest"] for line in lines(config, "digest")}
    assert told == {step: run_digest(list(tensors.values())) for step, tensors in found.items()}
    assert len(set(told.values())) == 3, "a step changes weights"


@pytest.mark.slow
def test_initial_weights_have_one_digest_at_every_layout(runs):
    first = {name: lines(config, "digest")[0]["digest"] for name, config in runs.items()}
    experts = {name for name in LAYOUTS if EXPERTS[0] in LAYOUTS[name][1]}
    assert len({first[name] for name in experts}) == 1
    assert len({first[name] for name in LAYOUTS.keys() - experts}) == 1


TREES = {
    "dp1": (1, ()),
    "dp2": (2, ("parallel.sharding=optim_grads",)),
    "dp4": (4, ("parallel.dp=4", "parallel.dp_replicate=2")),
    "pp2": (2, ("parallel.pp=2",)),
}


@pytest.mark.parametrize("grad_sum", ["tree", "fsdp's default"])
@pytest.mark.slow
def test_with_a_tree_all_layouts_have_the_digests_of_one_rank_and_by_default_they_have_not(tmp_path, grad_sum, capsys):
    runs, tree = {}, grad_sum == "tree"
    for name, (ranks, overrides) in TREES.items():
        sums = ("parallel.grad_sum=tree",) if tree else ("fsdp.grad_sum=backend",)
        config = tiny_config(
            tmp_path, "train.steps=3", "train.micro_batch_size=1", "log.digest_every=1", *sums, *overrides
        )
        runs[name] = ranks, replace(config, run=RunConfig(dir=str(tmp_path / name), device="cpu"))
    run_all(runs.values())
    told = {name: [line["digest"] for line in lines(config, "digest")] for name, (_, config) in runs.items()}
    assert (told["dp2"] == told["dp1"], told["dp4"] == told["dp1"]) == (tree, tree)
    assert not tree or told["pp2"] == told["dp1"]
    status = main(["verify-run", str(tmp_path / "dp1"), str(tmp_path / "dp4"), "--json"])
    found = json.loads(capsys.readouterr().out)
    weights = [one["step"] for one in found["firsts"] if one["what"] == "weights"]
    assert weights == ([] if tree else [1]), found["verdict"]
    assert tree or (status == 1 and "in another order" in found["verdict"])


@pytest.mark.slow
def test_a_run_that_goes_on_at_another_layout_begins_with_the_digest_it_had(tmp_path):
    config = tiny_config(tmp_path, "train.steps=2", "log.digest_every=2", "checkpoint.every=2")
    run(config, 1)
    more = tiny_config(tmp_path, "train.steps=3", "log.digest_every=2", "parallel.sharding=optim_grads")
    run(more, 2)
    told = [(line["step"], line["digest"]) for line in lines(config, "digest")]
    assert [step for step, _ in told] == [0, 2, 2, 3], "the first, each second, that of the resume, and the last"
    assert told[1] == told[2] and told[2][1] != told[3][1]
    found = read_digests(Path(config.run.dir) / "digests.jsonl")
    assert [one.step for one in found] == [0, 2, 2, 3] and found[1].tensors == found[2].tensors


def test_without_the_key_there_is_no_file_and_no_line(tmp_path):
    config = tiny_config(tmp_path, "train.steps=1")
    run(config, 1)
    assert not lines(config, "digest") and not (Path(config.run.dir) / "digests.jsonl").exists()


def test_schedules_whose_stages_are_at_different_batches_have_no_digests(tmp_path):
    with pytest.raises(ConfigError, match=r"log.digest_every is 1 .*pipedream_2bw.*log.digest_every = 0 works"):
        tiny_config(
            tmp_path, "parallel.schedule=pipedream_2bw", "parallel.pp=2", "parallel.sharding=no_shard",
            "train.clip_grad=0", "model.tie_embeddings=false", "log.digest_every=1",
        )  # fmt: skip
