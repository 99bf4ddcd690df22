"""A run in this process: what it refuses, what it leaves behind, what it says of values that are not finite."""

import itertools
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from gpt_helpers import tiny_config
from torch import nn

from sixfold import dist_ckpt
from sixfold.gpt import ConfigError, TrainError, train
from sixfold.gpt.data.token_stream import build_datasets
from sixfold.gpt.machine.devices import peak_flops_of
from sixfold.gpt.observe.metrics import describe
from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder


def lines(config, kind):
    text = (Path(config.run.dir) / "metrics.jsonl").read_text()
    return [entry for entry in map(json.loads, text.splitlines()) if entry["kind"] == kind]


def test_a_refused_resume_leaves_the_run_folder_as_it_was(tmp_path):
    config = tiny_config(tmp_path, "train.steps=1")
    train(config)
    folder = Path(config.run.dir)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"cannot change train\.seed \(was 1234, is 5\)"):
        train(tiny_config(tmp_path, "train.steps=2", "train.seed=5"))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_run_goes_on_from_its_initial_weights(tmp_path):
    started = tiny_config(tmp_path, "train.steps=0", "checkpoint.save_initial=true", run="cut")
    train(started)
    resumed, whole = (tiny_config(tmp_path, "train.steps=2", run=run) for run in ("cut", "whole"))
    assert train(resumed).step == train(whole).step == 2
    assert [entry["step"] for entry in lines(resumed, "resume")] == [0]
    assert [e["loss"] for e in lines(resumed, "step")] == [e["loss"] for e in lines(whole, "step")]


@pytest.mark.slow
def test_sigterm_is_its_users_again_after_training(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    train(tiny_config(tmp_path, "train.steps=3"))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_alone_says_who_starts_the_other_ranks(tmp_path):
    with pytest.raises(ConfigError, match=r"is 2 ranks and this process is alone; `sixfold train`"):
        train(tiny_config(tmp_path, "parallel.pp=2"))


def test_evaluation_without_validation_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.every is 1 and data\.split '100,0,0' leaves no validation data"):
        train(tiny_config(tmp_path, "eval.every=1", 'data.split="100,0,0"'))


class Odd(nn.Module):
    """A decoder whose modules all give finite values; its losses, or its gradients alone, are not finite."""

    def __init__(self, spoil):
        super().__init__()
        self.embedding = nn.Embedding(257, 4)
        self.spoil = spoil

    def forward(self, x, **_):
        return self.spoil(self.embedding(x).sum(-1))


@pytest.mark.parametrize(
    ("spoil", "where", "what"),
    [
        (lambda x: x * torch.inf, "", "loss"),
        (lambda x: (x * 0).sqrt(), "embedding", "gradient"),  # the root of 0 is 0, its slope is not finite
    ],
    ids=["loss", "gradient"],
)
def test_values_that_are_not_finite_stop_before_the_optimizer_and_are_named(tmp_path, spoil, where, what):
    config = tiny_config(tmp_path, "checkpoint.save_initial=true")
    with pytest.raises(TrainError, match=rf"step 1, rank 0: .* The first value that is not finite is the {what}"):
        train(config, model_provider=lambda pre_process, post_process, vp_stage: Odd(spoil))
    [entry] = lines(config, "nonfinite")
    assert (entry["step"], entry["rank"], entry["where"], entry["what"]) == (1, 0, where, what)
    assert [entry["step"] for entry in lines(config, "save")] == [0]
    assert lines(config, "end")[0]["reason"] == "error"


@pytest.mark.slow
def test_background_saves_hold_the_values_of_their_step_and_the_last_is_there_at_the_end(tmp_path, monkeypatch):
    runs, waits, wait = {}, [], dist_ckpt.AsyncSave.wait

    def waiting(handle, *deadline):
        waits.append(deadline)
        wait(handle, *deadline)

    monkeypatch.setattr(dist_ckpt.AsyncSave, "wait", waiting)
    for mode in ("true", "false"):
        config = tiny_config(
            tmp_path, "checkpoint.every=1", "checkpoint.keep=9", f"checkpoint.background={mode}", run=mode
        )
        train(config)
        assert [entry["step"] for entry in lines(config, "save")] == [1, 2, 3, 4]
        root = Path(config.run.dir) / "checkpoints"
        runs[mode] = [dist_ckpt.load_plain_tensors(path) for _, path in dist_ckpt.retention.checkpoints(root)]
    assert len(runs["true"]) == len(runs["false"]) == 4
    assert waits == [()] * 3, "however long it takes: it ends of itself when it stands still"
    for background, plain in zip(runs["true"], runs["false"], strict=True):
        assert background.keys() == plain.keys()
        assert all(torch.equal(background[key], plain[key]) for key in plain)


SIZES = ("train.steps=2", "train.global_batch_size=80", "train.micro_batch_size=80")


@pytest.mark.slow
def test_the_start_line_says_the_order_and_how_often_each_dataset_is_read(tmp_path):
    config = tiny_config(tmp_path, *SIZES, "data.split='100,0,0'")
    train(config)
    [start] = lines(config, "start")
    assert start["order"] == "stateless"
    dataset, _ = build_datasets(config)[0].locate(range(160))
    for number, name in enumerate(("wiki", "code")):
        with IndexedDataset(tmp_path / name) as pair:
            tokens = int(pair.sequence_lengths.sum())
        assert start["epochs"][name] == pytest.approx(int((dataset == number).sum()) * 32 / tokens, rel=0.02)
    assert "stateless order" in describe(start) and f"wiki {start['epochs']['wiki']:.3g}" in describe(start)


VERSIONS = ("parallel.schedule=pipedream_2bw", "parallel.sharding=no_shard", "train.clip_grad=0")


@pytest.mark.parametrize("options", [(), VERSIONS], ids=["flushed", "versions"])
def test_a_batch_without_any_target_is_told_as_such(tmp_path, options):
    for name in ("wiki", "code"):
        with IndexedDatasetBuilder(tmp_path / f"{name}.bin", dtype=np.uint16) as builder:
            for _ in range(300):
                builder.add_document(np.full(3, 256, np.uint16))
    config = tiny_config(tmp_path, "data.eod_mask_loss=true", *options)
    with pytest.raises(TrainError, match=r"^step 1: no token of the global batch is a target; data\.eod_mask_loss"):
        train(config)
    assert not lines(config, "nonfinite")


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA GeForce RTX 4090", None)],
)
def test_the_peak_that_mfu_is_a_part_of_is_found_by_the_name_of_the_gpu(name, peak):
    assert peak_flops_of(name) == peak


@pytest.mark.slow
def test_the_speed_by_the_clock_counts_evaluations_and_saves(tmp_path, monkeypatch):
    """The oracle is the time in the lines themselves: tokens since the line before, over the seconds since."""
    import time

    from sixfold.gpt.training import loop

    evaluate = loop.evaluate

    def slow(*args):
        time.sleep(0.3)
        return evaluate(*args)

    monkeypatch.setattr(loop, "evaluate", slow)
    config = tiny_config(tmp_path, "model.num_layers=1", "train.steps=7", "eval.every=1", "log.every=2")
    train(config)
    steps = lines(config, "step")
    assert [entry["step"] for entry in steps] == [2, 4, 6, 7]
    for before, entry in itertools.pairwise(steps[1:]):
        by_clock = (entry["tokens"] - before["tokens"]) / (entry["time"] - before["time"])
        assert entry["wall_tokens_per_second"] == pytest.approx(by_clock, rel=0.2)
        assert entry["wall_tokens_per_second"] < entry["tokens_per_second"]
