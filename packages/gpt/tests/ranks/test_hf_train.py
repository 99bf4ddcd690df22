"""A published model as the start of a run: transformers' own loss at the first step, at a layout of four ranks."""

from __future__ import annotations

import json

import pytest
import torch
from gpt_helpers import tiny_config
from hf_helpers import Peak, edit_json, write_folder
from run_helpers import JOB_S, lines, losses, run, world_of

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.gpt import ConfigError, TrainConfig, global_batches
from sixfold.gpt.checkpoints import training_state
from sixfold.gpt.commands.sample import open_run
from sixfold.gpt.huggingface.convert import export_model, import_model
from sixfold.gpt.training.loop import train_in

pytest.importorskip("safetensors", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
RANKS_IMPORT = ("transformers.models.auto.modeling_auto", "safetensors.torch")

# Large enough that what a load holds whatever the model, some 6 MB of mapped files, is told from a copy of it.
SIZES = {"vocab_size": 257, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}


def config_of(tmp_path, *overrides, run="run"):
    """The tiny run with the [model] that the import wrote, and with packed documents."""
    config = tiny_config(tmp_path, "train.steps=1", *overrides, run=run).to_toml()
    model = (tmp_path / "imported/config.toml").read_text()
    return TrainConfig.from_text(model + config[config.index("[data]") :])


def loss_of(peer, config):
    """Nats per target of the first batch, each document read alone by transformers."""
    batch = next(global_batches(config))
    tokens, labels, mask = (getattr(batch, name).flatten() for name in ("tokens", "labels", "loss_mask"))
    total = 0.0
    with torch.no_grad():
        for begin, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            logits = peer(tokens[None, begin:end]).logits[0]
            nats = torch.nn.functional.cross_entropy(logits, labels[begin:end], reduction="none")
            total += float((nats * mask[begin:end]).sum())
    return total / float(mask.sum())


def held_by_the_load(rank: int, ranks: int, text: str) -> int:
    """Train; the most memory that loading the weights took beyond what the rank had: its shards are there already."""
    found, load = [], training_state.load_weights

    def watched(*args):
        with Peak() as peak:
            load(*args)
        found.append(peak.most)

    training_state.load_weights = watched
    try:
        train_in(TrainConfig.from_text(text), world_of(rank, ranks))
    finally:
        training_state.load_weights = load
    return found[0]


@pytest.mark.slow
def test_an_import_trains_at_pp2_dp2_from_the_loss_of_transformers_and_no_rank_holds_the_model(tmp_path):
    write_folder(tmp_path / "hf", "qwen3_tied_scaling", dtype=torch.bfloat16, shard="1MB", **SIZES)
    # Read anew: .float() of a bf16 model would keep RoPE's frequencies rounded.
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    import_model(tmp_path / "hf", tmp_path / "imported")
    config = config_of(
        tmp_path,
        "parallel.pp=2",
        "parallel.dp=2",
        f"checkpoint.init_from={tmp_path / 'imported'}",
        "checkpoint.every=9",
    )
    held = ranktest.run_ranks(held_by_the_load, 4, config.to_toml(), timeout=JOB_S)
    assert losses(config) == pytest.approx([loss_of(peer, config)], rel=1e-6)
    model = 4 * config.model.num_parameters
    print(f"each rank held {held} bytes beside its shards, of {model}")
    assert max(held) < model / 3, f"ranks took {held} bytes beside their shards to load a model of {model}"


@pytest.mark.slow
def test_a_run_in_the_imported_folder_goes_on_from_step_0_and_keeps_its_model(tmp_path):
    peer = write_folder(tmp_path / "hf", "llama", vocab_size=257)
    import_model(tmp_path / "hf", tmp_path / "imported")
    config, other = (config_of(tmp_path, run=run) for run in ("imported", "other"))
    run(config, 1)
    assert losses(config) == pytest.approx([loss_of(peer, config)], rel=1e-6)
    assert lines(config, "resume")[0]["step"] == 0
    import_model(tmp_path / "hf", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"model\.rope_theta \(was 10000\.0, is 5\.0\)"):
        run(TrainConfig.from_text(other.to_toml(), ["model.rope_theta=5"]), 1)


@pytest.mark.parametrize(("name", "ends"), [("imported", [256, 7]), ("new", 256), ("other", 7)])
@pytest.mark.slow
def test_a_trained_import_is_exported_with_what_its_config_and_folder_said(tmp_path, name, ends):
    """The run's documents end with 256; where the import's do not, its ids are of another tokenizer."""
    write_folder(tmp_path / "hf", "llama", vocab_size=257)
    ids = {"bos_token_id": 3, "eos_token_id": ends, "pad_token_id": 5}
    edit_json(tmp_path / "hf/config.json", lambda raw: raw.update(ids))
    (tmp_path / "hf/tokenizer_config.json").write_text('{"it is": "kept"}')
    import_model(tmp_path / "hf", tmp_path / "imported")
    source = [] if name == "imported" else [f"checkpoint.init_from={tmp_path / 'imported'}"]
    text = config_of(tmp_path, "schedule.shape=constant", run=name).to_toml()
    for steps in (1, 2):  # the second goes on from a checkpoint of the first
        run(TrainConfig.from_text(text, [f"train.steps={steps}", *source]), 1)
    export_model(tmp_path / name, tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["max_position_embeddings"] == 256
    kept = ids if name != "other" else {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    assert {key: written[key] for key in ids} == kept
    assert (tmp_path / "out/tokenizer_config.json").exists() == (name == "imported")


def test_init_from_says_what_its_model_has_otherwise(tmp_path, capfd):
    write_folder(tmp_path / "hf", "llama", vocab_size=257)
    import_model(tmp_path / "hf", tmp_path / "imported")
    config = config_of(tmp_path, f"checkpoint.init_from={tmp_path / 'imported'}")
    run(TrainConfig.from_text(config.to_toml(), ["model.rope_theta=5"]), 1)
    assert "init_from is of another model.rope_theta (was 10000.0, is 5.0)" in capfd.readouterr().err


def test_an_imported_model_writes_with_the_tokenizer_that_came_with_it(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    write_folder(tmp_path / "hf", "llama")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        import_model(tmp_path / "hf", tmp_path / "without")
        open_run(tmp_path / "without")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 7}, unk_token="a"))
    made.save(str(tmp_path / "hf/tokenizer.json"))
    import_model(tmp_path / "hf", tmp_path / "imported")
    opened = open_run(tmp_path / "imported")
    assert (opened.model.config.vocab_size, opened.context, opened.tokenizer.eod) == (100, 256, 7)
    assert not opened.document_mask, "what others trained keeps the end of the document before in view"


def test_an_imported_model_reads_a_prompt_as_transformers_does_with_what_its_tokenizer_puts_before_it(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    write_folder(tmp_path / "hf", "llama")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<s>": 5, "</s>": 7}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    for template in ("<s> $A", "<s> $A </s>"):
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 5), ("</s>", 7)]
        )
        made.save(str(tmp_path / "hf/tokenizer.json"))
        import_model(tmp_path / "hf", tmp_path / template.replace(" ", ""))
        tokenizer = open_run(tmp_path / template.replace(" ", "")).tokenizer
        assert tokenizer.encode("b a") == [5, 1, 0] and tokenizer.encode("") == [5]
        assert tokenizer.decode([5, 1, 0]) == "b a"
