"""Tokenizers that users bring: BPE trained by the library tokenizers, with whatever end of a document it has."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sixfold.gpt import TrainConfig, train
from sixfold.gpt.commands import cli
from sixfold.gpt.commands import sample as sample_module
from sixfold.gpt.commands.sample import open_run, sample
from sixfold.gpt.data.cpython_corpus import topics
from sixfold.gpt.data.prepare import prepare
from sixfold.gpt.data.tokenizer import check_identity, tokenizer_for, tokenizer_of
from sixfold.gpt.errors import ConfigError
from sixfold.indexed_data import IndexedDataset

library = pytest.importorskip("tokenizers", reason="needs the extra tokenizers")


def byte_level(path, special, texts=None):
    """GPT-2's kind: byte-level BPE."""
    made = library.ByteLevelBPETokenizer()
    made.train_from_iterator(texts or TEXTS, vocab_size=400, special_tokens=special)
    made.save(str(path))
    return path


def metaspace(path, special, texts=None):
    """Llama's kind: a space is part of the word behind it, and the first one of a text is taken away again."""
    made = library.Tokenizer(library.models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = library.pre_tokenizers.Metaspace()
    made.decoder = library.decoders.Metaspace()
    made.train_from_iterator(
        texts or TEXTS, library.trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *special])
    )
    made.save(str(path))
    return path


TEXTS = [text.decode() for text in topics()[:12]]


def write_corpus(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("kind", [byte_level, metaspace])
@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
@pytest.mark.slow
def test_prepare_ends_each_document_with_the_tokenizers_usual_end(tmp_path, capsys, kind, end):
    made = library.Tokenizer.from_file(str(kind(tmp_path / "tokenizer.json", ["<pad>", end])))
    write_corpus(tmp_path / "a.jsonl")
    words = [str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json"), "--out", str(tmp_path / "p")]
    assert cli.main(["prepare", *words]) == 0
    assert f"vocab_size 400, documents end with {end} (id {made.token_to_id(end)})" in capsys.readouterr().out
    with IndexedDataset(str(tmp_path / "p")) as dataset:
        found = [ids.tolist() for ids in dataset]
    assert found == [[*made.encode(text, add_special_tokens=False).ids, made.token_to_id(end)] for text in TEXTS]
    check_identity([str(tmp_path / "p")], str(tmp_path / "tokenizer.json"))


def test_a_text_that_spells_a_special_token_is_noted_in_one_line_whose_remedy_prepare_has(tmp_path, capsys):
    byte_level(tmp_path / "tokenizer.json", ["<|endoftext|>", "<|mark|>"])
    write_corpus(tmp_path / "a.jsonl", ["one <|mark|> two"])
    words = ["prepare", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert cli.main([*words, "--out", str(tmp_path / "text")]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("sixfold: 1 documents spell a special token of ") and "--special-tokens ids" in line
    assert cli.main([*words, "--out", str(tmp_path / "ids"), "--special-tokens", "ids"]) == 0
    assert not capsys.readouterr().err
    for name, times in (("text", 0), ("ids", 1)):
        with IndexedDataset(str(tmp_path / name)) as dataset:
            assert dataset[0].tolist().count(1) == times


def test_a_tokenizer_config_beside_it_says_which_of_several_ends_is_meant(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json", ["<|endoftext|>", "<|im_end|>", "<|stop|>"])
    assert tokenizer_for(str(path)).eod == 0
    for token in ("<|stop|>", {"content": "<|stop|>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert tokenizer_for(str(path)).eod == 2
        assert tokenizer_for(str(tmp_path)).eod == 2, "a folder that holds the file"
    for text in ("{", "[]", '{"eos_token": null}', '{"eos_token": "<gone>"}'):
        (tmp_path / "tokenizer_config.json").write_text(text)
        assert tokenizer_for(str(path)).eod == 0


def test_an_end_without_a_usual_name_is_refused_and_the_remedy_works(tmp_path, capsys):
    path = byte_level(tmp_path / "tokenizer.json", ["<halt>", "<pad>"])
    write_corpus(tmp_path / "a.jsonl")
    words = ["prepare", str(tmp_path / "a.jsonl"), "--tokenizer", str(path), "--out", str(tmp_path / "p")]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "its special tokens are <halt>, <pad>" in said and "prepare --eod-token NAME" in said
    assert not (tmp_path / "p.json").exists()
    assert cli.main([*words, "--eod-token", "<pda>"]) == 2
    assert "no token '<pda>'" in capsys.readouterr().err
    assert cli.main([*words, "--eod-token", "<halt>"]) == 0
    with IndexedDataset(str(tmp_path / "p")) as dataset:
        assert {int(ids[-1]) for ids in dataset} == {0}
    # The note carries the token on, also to a copy of the file that a configuration names.
    copy = tmp_path / "copy.json"
    copy.write_bytes(path.read_bytes())
    for name in ("", str(path), str(copy)):
        assert tokenizer_of([str(tmp_path / "p")], name).eod == 0
        check_identity([str(tmp_path / "p")], name)
    with pytest.raises(ConfigError, match=r"data at .* was made by"):
        check_identity([str(tmp_path / "p")], str(copy), "<pad>")


def test_an_end_of_bytes_cannot_be_named(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match="'bytes', whose documents end with id 256"):
        prepare([tmp_path / "a.txt"], tmp_path / "p", eod_token="</s>")


def test_a_prompt_is_neither_cut_nor_filled_whatever_the_file_says(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json", ["</s>", "<pad>"])
    made = library.Tokenizer.from_file(str(path))
    whole = made.encode(TEXTS[0]).ids
    made.enable_truncation(8)
    made.enable_padding(pad_id=1, pad_token="<pad>", length=4096)
    made.save(str(path))
    assert tokenizer_for(str(path)).encode(TEXTS[0]) == whole


class Next(torch.nn.Module):
    """Each id is followed by one id, for certain."""

    def __init__(self, size, chain):
        super().__init__()
        scores = torch.full((size, size), -20.0)
        for before, after in itertools.pairwise(chain):
            scores[before, after] = 20.0
        self.scores, self.config = torch.nn.Parameter(scores), SimpleNamespace(vocab_size=size)

    def forward(self, x):
        return self.scores[x]


@pytest.mark.parametrize("kind", [byte_level, metaspace])
def test_a_sample_has_the_spaces_of_its_text(tmp_path, kind):
    tokenizer = tokenizer_for(str(kind(tmp_path / "t.json", ["</s>"], ["the quick brown fox jumps"] * 9)))
    ids = tokenizer.encode("the quick brown fox jumps")
    assert len(set(ids)) == len(ids), "or no chain of single ids"
    model = Next(tokenizer.vocab_size, [*ids, tokenizer.eod])
    assert "the quick brown" + sample(model, tokenizer, "the quick brown") == "the quick brown fox jumps"
    start = Next(tokenizer.vocab_size, [tokenizer.eod, *ids, tokenizer.eod])
    assert sample(start, tokenizer) == "the quick brown fox jumps"


def test_ids_above_a_gap_are_part_of_the_vocabulary(tmp_path):
    words = library.Tokenizer(library.models.WordLevel({"a": 0, "</s>": 1, "far": 9}, unk_token="a"))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "t.json"))
    assert tokenizer_for(str(tmp_path / "t.json")).vocab_size == 10
    write_corpus(tmp_path / "a.jsonl", ["a far a"])
    assert np.array_equal(
        pair_ids(prepare([tmp_path / "a.jsonl"], tmp_path / "p", tokenizer=str(tmp_path / "t.json"))), [0, 9, 0, 1]
    )


def pair_ids(prepared):
    with IndexedDataset(prepared.prefix) as dataset:
        return np.concatenate(list(dataset))


def with_bos(path):
    """Llama 3's kind: a template puts a BOS before a text."""
    byte_level(path, ["<|endoftext|>", "<s>"])
    made = library.Tokenizer.from_file(str(path))
    made.post_processor = library.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(path))
    return made


def tiny(folder, *overrides):
    path = folder / "tiny.toml"
    path.write_text(
        f"""
        model = {{num_layers = 1, hidden_size = 32, num_attention_heads = 4, ffn_hidden_size = 64, vocab_size = 400}}
        data = {{blend = ["{folder}/p"], seq_length = 32}}
        train = {{steps = 1, global_batch_size = 2, micro_batch_size = 2, precision = "fp32"}}
        optimizer = {{lr = 1e-3}}
        checkpoint = {{background = false}}
        run = {{dir = "{folder}/run", device = "cpu"}}
        """
    )
    return TrainConfig.from_toml(path, overrides)


@pytest.mark.parametrize("template", [True, False])
def test_a_prompt_of_a_run_begins_as_the_documents_of_its_data_do(tmp_path, monkeypatch, capsys, template):
    made = with_bos(tmp_path / "tokenizer.json")
    words = [str(write_corpus(tmp_path / "a.jsonl")), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert cli.main(["prepare", *words, "--out", str(tmp_path / "p"), *["--template"] * template]) == 0
    assert ("its template, which adds <s>, is left out" in capsys.readouterr().err) != template
    with IndexedDataset(str(tmp_path / "p")) as dataset:
        assert dataset[0].tolist() == [*made.encode(TEXTS[0], add_special_tokens=template).ids, 0]
    train(tiny(tmp_path, f"data.document_mask={template}"))
    opened = open_run(tmp_path / "run")
    tokenizer = opened.tokenizer
    monkeypatch.setattr(sample_module, "stream", lambda *_, **draws: draws)
    assert sample_module.stream_run(tmp_path / "run") == {"context": 32, "document_mask": template}
    assert tokenizer.encode("The if") == made.encode("The if", add_special_tokens=template).ids
    assert tokenizer.encode("") == [1] * template
    for suffix in (".bin", ".idx"):
        (tmp_path / f"p{suffix}").unlink()
    assert open_run(tmp_path / "run").tokenizer.eod == 0, "a run whose data is gone is sampled all the same"


def test_a_masked_run_goes_on_with_its_tokenizer_in_another_place_and_not_with_another_end(tmp_path):
    path = byte_level(tmp_path / "tokenizer.json", ["<|endoftext|>", "</s>"])
    prepare([write_corpus(tmp_path / "a.jsonl")], tmp_path / "p", tokenizer=str(path))
    masked = ("data.eod_mask_loss=true", "schedule.shape=constant")
    train(tiny(tmp_path, *masked, f"data.tokenizer={path}"))
    moved = (tmp_path / "elsewhere").mkdir() or path.rename(tmp_path / "elsewhere/words.json")
    assert train(tiny(tmp_path, *masked, f"data.tokenizer={moved}", "train.steps=2")).step == 2
    (tmp_path / "p.json").unlink()  # which would refuse another end by itself
    with pytest.raises(ConfigError, match=r"cannot change data\.eod_token \(was '', is '</s>'\)"):
        train(tiny(tmp_path, *masked, f"data.tokenizer={moved}", "data.eod_token=</s>", "train.steps=3"))
