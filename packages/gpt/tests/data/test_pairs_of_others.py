"""Pairs that `sixfold prepare` did not make: Megatron's own, and those of `sixfold-data build`."""

import json

import numpy as np
import pytest
from gpt_helpers import write_pair
from run_helpers import losses, train_rank

from sixfold.gpt import TrainConfig, global_batches
from sixfold.gpt.data.token_stream import preflight
from sixfold.gpt.data.tokenizer import NoTokenizer, tokenizer_of
from sixfold.gpt.errors import ConfigError
from sixfold.indexed_data import IndexedDatasetBuilder, build

START, VOCAB = 999, 1000  # the first id of each document, and of no other place

TOML = """
model = {{num_layers = 1, hidden_size = 16, num_attention_heads = 2, ffn_hidden_size = 32, vocab_size = {vocab}}}
data = {{blend = ["{prefix}"], seq_length = 24}}
train = {{steps = 6, global_batch_size = 4, micro_batch_size = 4}}
optimizer = {{lr = 1e-3}}
run = {{dir = "{prefix}-run", device = "cpu"}}
"""


def config_of(prefix, *overrides, vocab=VOCAB):
    return TrainConfig.from_text(TOML.format(prefix=prefix, vocab=vocab), overrides)


def documents():
    """Documents whose ordinary ids are often those that end a document elsewhere: 0, 2, 256, 50256 has no place."""
    rng = np.random.default_rng(0)
    return [np.append(START, rng.choice([0, 1, 2, 256, 255, 7], rng.integers(3, 40))) for _ in range(60)]


def by_megatron(prefix):
    megatron = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="needs megatron-core, a peer that only tests use"
    )
    torch = pytest.importorskip("torch", reason="needs torch")
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for ids in documents():
        builder.add_document(torch.from_numpy(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")


def by_our_builder(prefix):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for ids in documents():
            builder.add_document(ids.astype(np.uint16))


@pytest.mark.parametrize("write", [by_megatron, by_our_builder])
@pytest.mark.slow
def test_documents_of_a_pair_without_a_note_begin_where_its_index_says_and_nowhere_else(tmp_path, write):
    write(tmp_path / "p")
    config = config_of(tmp_path / "p")
    preflight(config)
    for batch in global_batches(config):
        row_starts = np.arange(0, batch.tokens.numel() + 1, batch.tokens.shape[1])
        begins = np.flatnonzero(batch.tokens.numpy().ravel() == START)
        assert batch.cu_seqlens.tolist() == np.union1d(row_starts, begins).tolist()
        assert batch.loss_mask.min() == 1


def test_a_pair_of_sixfold_data_build_has_the_rows_that_prepare_gives(tmp_path):
    from sixfold.gpt.data.prepare import prepare

    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(1, 40)))
    build([tmp_path / "a.jsonl"], tmp_path / "built")
    prepare([tmp_path / "a.jsonl"], tmp_path / "prepared")
    pairs = [
        global_batches(config_of(tmp_path / name, "data.names=['p']", vocab=257)) for name in ("built", "prepared")
    ]
    for ours, theirs in zip(*pairs, strict=True):
        for field in ("tokens", "labels", "loss_mask", "cu_seqlens"):
            assert np.array_equal(getattr(ours, field), getattr(theirs, field)), field


def trained(config):
    """The losses of a run, read from what it wrote."""
    step, loss, reason = train_rank(0, 1, config.to_toml())
    assert (step, reason) == (config.train.steps, "finished") and loss == losses(config)[-1]
    return losses(config)


@pytest.mark.slow
def test_a_pair_of_megatron_trains_as_the_same_documents_of_our_builder(tmp_path):
    by_megatron(tmp_path / "theirs"), by_our_builder(tmp_path / "ours")
    assert not list(tmp_path.glob("*.json"))
    same = ("data.names=['p']", "train.precision=fp32")  # the order of samples depends on names
    found = {name: trained(config_of(tmp_path / name, *same)) for name in ("theirs", "ours")}
    assert found["theirs"] == found["ours"]
    assert abs(found["ours"][0] - np.log(VOCAB)) < 0.5 and found["ours"][-1] < found["ours"][0]


@pytest.mark.slow
def test_a_pair_of_the_command_sixfold_data_build_trains_as_that_of_prepare(tmp_path):
    from sixfold.gpt.data.prepare import prepare
    from sixfold.indexed_data.cli import main

    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(1, 40)))
    assert not main(["build", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "built"), "--tokenizer", "bytes"])
    prepare([tmp_path / "a.jsonl"], tmp_path / "prepared")
    assert not (tmp_path / "built.json").exists() and (tmp_path / "prepared.json").exists()
    same = ("data.names=['p']", "train.precision=fp32", "optimizer.lr=3e-3")
    found = {name: trained(config_of(tmp_path / name, *same, vocab=257)) for name in ("built", "prepared")}
    assert found["built"] == found["prepared"] and found["built"][-1] < found["built"][0]


def test_a_mask_of_document_ends_needs_to_know_them_and_the_remedy_works(tmp_path):
    write_pair(tmp_path / "p", 20, 0)
    with pytest.raises(ConfigError, match=r"nothing says which id ends a document.*set data\.tokenizer"):
        preflight(config_of(tmp_path / "p", "data.eod_mask_loss=true"))
    named = config_of(tmp_path / "p", "data.eod_mask_loss=true", "data.tokenizer=bytes")
    preflight(named)
    batch = next(iter(global_batches(named)))
    assert np.array_equal(batch.loss_mask == 0, batch.tokens == 256)


def test_an_end_whose_tokenizer_nobody_names_is_refused(tmp_path):
    by_our_builder(tmp_path / "p")
    with pytest.raises(ConfigError, match=r"data\.eod_token is '</s>' and nothing names a tokenizer"):
        preflight(config_of(tmp_path / "p", "data.eod_token=</s>"))


def test_an_end_beyond_the_models_vocabulary_is_refused_before_a_rank_starts(tmp_path):
    prefix = write_pair(tmp_path / "p", 20, 0)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 256 and id 256 ends a document"):
        preflight(config_of(prefix, "data.tokenizer=bytes", vocab=256))
    preflight(config_of(prefix, "data.tokenizer=bytes", vocab=257))


def test_without_a_name_and_without_a_note_no_tokenizer_is_made_up(tmp_path):
    found = tokenizer_of([str(tmp_path / "a")])
    assert isinstance(found, NoTokenizer) and found.eod == -1
    for use in (lambda: found.encode("text"), lambda: found.decode([1])):
        with pytest.raises(ConfigError, match="nothing names the tokenizer of this run"):
            use()
