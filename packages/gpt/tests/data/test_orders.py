"""Runs in the orders that have an index, and runs whose blend changes: trained, cut, resumed."""

import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpt_helpers import plain_losses, tiny_config, write_pair

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset, GPTDatasetConfig
from sixfold.gpt import ConfigError, global_batches, train
from sixfold.gpt.data.token_stream import build_datasets, continue_data, preflight

CHANGES = "data.changes=[{{at = 16, weights = [0.0, 1.0]}}, {{at = 24, blend = ['{0}/wiki', '{0}/math']}}]"
RUNS = {
    "megatron": ("data.order=megatron", "data.cache_dir={0}/cache"),
    "megatron beside the data": ("data.order=megatron",),
    "apportioned": ("data.order=apportioned", "data.cache_dir={0}/cache"),
    "changes": (CHANGES,),
}


def config_of(folder, name, *overrides, run="run"):
    write_pair(folder / "math", 60, 3)
    return tiny_config(folder, *(one.format(folder) for one in RUNS[name]), *overrides, run=run)


def losses(config):
    text = (Path(config.run.dir) / "metrics.jsonl").read_text()
    return [entry["loss"] for entry in map(json.loads, text.splitlines()) if entry["kind"] == "step"]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
def test_a_run_is_resumed_bitwise_and_is_the_plain_loop(name, tmp_path):
    options = ("train.steps=4", "checkpoint.every=2", "eval.every=2", "eval.batches=1")
    whole, cut = (config_of(tmp_path, name, *options, run=run) for run in ("whole", "cut"))
    train(whole)
    shutil.copytree(
        Path(whole.run.dir) / "checkpoints" / "step-00000002", Path(cut.run.dir, "checkpoints/step-00000002")
    )
    shutil.copy(Path(whole.run.dir) / "config.toml", cut.run.dir)
    train(cut)
    assert losses(cut) == losses(whole)[2:]
    assert losses(whole) == pytest.approx(plain_losses(whole, 4), rel=1e-6)


def test_the_megatron_order_is_the_one_that_blending_builds(tmp_path):
    config = config_of(tmp_path, "megatron")
    made = GPTDatasetConfig(
        random_seed=1234, sequence_length=32, order="megatron", split="90,10,0", tokenizer=Toy(),
        blend=([str(tmp_path / "wiki"), str(tmp_path / "code")], [0.7, 0.3]), path_to_cache=str(tmp_path / "other"),
    )  # fmt: skip
    expected = BlendedMegatronDatasetBuilder(GPTDataset, [32, 64, 0], lambda: True, made).build()[0]
    found = np.concatenate([batch.tokens.numpy() for batch in global_batches(config)])
    assert np.array_equal(found, expected.get_batch(range(32))["tokens"])


class Toy:
    eod = 256
    unique_identifiers = {"class": "Toy"}  # noqa: RUF012


def test_a_change_says_which_datasets_are_read_from_there_on(tmp_path):
    train_data, _ = build_datasets(config_of(tmp_path, "changes"))
    dataset, _ = train_data.locate(range(40))
    assert train_data.names == ["wiki", "code", "math"]
    assert set(dataset[:16].tolist()) == {0, 1}
    assert set(dataset[16:24].tolist()) == {1}
    assert set(dataset[24:40].tolist()) == {0, 2}


def test_a_prefix_that_only_a_change_names_is_looked_at_before_the_run(tmp_path):
    config = config_of(tmp_path, "changes")
    (tmp_path / "math.idx").unlink()
    with pytest.raises(Exception, match=r"math\.idx"):
        preflight(config)


@pytest.mark.slow
def test_a_change_of_the_past_is_refused_when_the_run_is_resumed(tmp_path):
    train(config_of(tmp_path, "changes", "train.steps=3"))
    other = CHANGES.replace("weights = [0.0, 1.0]", "weights = [1.0, 1.0]")
    with pytest.raises(ConfigError, match=r"cannot change data\.changes"):
        train(tiny_config(tmp_path, "train.steps=4", other.format(tmp_path)))


def test_an_index_without_weights_that_is_too_short_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match=r"once, and 8000 are asked; give data\.weights"):
        train(config_of(tmp_path, "megatron", "data.weights=[]", "train.steps=1000"))


@pytest.mark.slow
def test_a_run_shuffled_in_blocks_goes_on_in_blocks_and_is_else_refused_by_the_key(tmp_path):
    write_pair(tmp_path / "wiki", 2_500, 1)  # of 2,048 in a part the shuffles differ
    whole, cut, other, more = (
        tiny_config(tmp_path, f"data.document_shuffle={kind}", f"train.steps={steps}", run=run)
        for kind, steps, run in (("block", 3, "whole"), ("block", 2, "cut"), ("auto", 3, "cut"), ("block", 3, "cut"))
    )
    train(cut)
    with pytest.raises(ConfigError, match=r"is 'auto'.* wiki .*data\.document_shuffle = 'block' goes on"):
        train(other)
    train(more)
    train(whole)
    assert losses(more) == losses(whole)


@pytest.mark.parametrize(
    ("then", "now", "remedy"),
    [("0.1.0", "auto", "block"), ("0.1.0", "global", "block"), ("auto", "block", "auto"), ("global", "block", "auto")],
)
def test_documents_shuffled_in_another_way_are_refused_by_the_key_that_goes_on(then, now, remedy, tmp_path):
    write_pair(tmp_path / "wiki", 2_500, 1)
    was, config = (
        tiny_config(tmp_path, f"data.document_shuffle={kind.replace('0.1.0', 'block')}") for kind in (then, now)
    )
    state = build_datasets(was)[0].state_dict(16)
    for dataset in state["datasets"].values() if then == "0.1.0" else ():
        del dataset["document_shuffle"]
    with pytest.raises(ConfigError, match=rf"is '{now}'.* wiki .*data\.document_shuffle = '{remedy}' goes on"):
        continue_data(build_datasets(config)[0], state, config)
    config = replace(config, data=replace(config.data, document_shuffle=remedy))
    if then != "0.1.0":
        continue_data(build_datasets(config)[0], state, config)


@pytest.mark.parametrize(("limit", "told"), [(4, True), (50, False), (0, False)])
def test_a_dataset_that_is_read_more_often_than_max_epochs_is_told_of(limit, told, tmp_path):
    config = tiny_config(tmp_path, "train.steps=300", f"data.max_epochs={limit}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_data, _ = build_datasets(config)
        train_data.get_batch(range(2399, 2400))
    assert any("read more often than" in str(one.message) for one in caught) == told


def test_an_evaluation_that_reads_a_sample_twice_is_told_of_and_the_remedy_reads_none_twice(tmp_path):
    def told(batches):
        config = tiny_config(tmp_path, "eval.every=2", f"eval.batches={batches}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build_datasets(config)
        return [str(one.message) for one in caught if "an evaluation" in str(one.message)]

    (message,) = told(500)
    remedy = int(re.search(r"eval\.batches = (\d+) reads it once", message)[1])
    assert 1 <= remedy < 500
    assert told(remedy) == []
    assert told(remedy + 1) != []


def test_a_validation_part_below_one_batch_is_told_of_with_a_remedy_that_helps(tmp_path):
    config = tiny_config(tmp_path, "eval.every=2", "eval.batches=1", "train.global_batch_size=4096")
    with pytest.warns(UserWarning, match=r"an evaluation .*one batch is more than it has: give data\.valid more"):
        build_datasets(config)


@pytest.mark.slow
def test_data_that_changed_under_a_resumed_index_is_refused(tmp_path):
    config = config_of(tmp_path, "apportioned", "checkpoint.every=2", "train.steps=4")
    train(config)
    for folder in sorted((Path(config.run.dir) / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder)
    write_pair(tmp_path / "code", 90, 7)
    with pytest.raises(BlendingError, match=r"datasets\.1\..* was 1.. and is"):
        train(config)
