"""Tokenizers of models, as their own libraries encode: SentencePiece, folders of transformers, and batches of any."""

import json
import os

import pytest

from sixfold.indexed_data import IndexedDataError, IndexedDataset, build
from sixfold.indexed_data.text.build import BuildNote

TEXTS = [f"Verse {i} of a thousand: the cat's {'very ' * (i % 9)}old hat, {i * i}." for i in range(1, 200)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


@pytest.fixture
def model(folder):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra sixfold-indexed-data[sentencepiece]")
    with open("m.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=file, vocab_size=90, byte_fallback=False, minloglevel=2,
            user_defined_symbols=["<sep>"], character_coverage=1.0,
        )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file="m.model")


def stored(prefix="out"):
    return [ids.tolist() for ids in IndexedDataset(prefix)]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sentencepiece_model_gives_its_own_ids_and_its_own_end(model, workers):
    report = build(["a.jsonl"], "out", tokenizer="m.model", workers=workers, part_bytes=4000)
    assert stored() == [[*model.encode(text), model.eos_id()] for text in TEXTS]
    assert report.dtype == "uint16"
    build(["a.jsonl"], "out", tokenizer="m.model", template=True, eod_token="<sep>", overwrite=True)
    assert stored() == [[model.bos_id(), *model.encode(text), model.piece_to_id("<sep>")] for text in TEXTS]


def test_what_a_sentencepiece_model_does_not_have_is_refused(model, folder):
    with pytest.raises(IndexedDataError, match=r"m\.model: has no token '<end>'"):
        build(["a.jsonl"], "out", tokenizer="m.model", eod_token="<end>")
    with pytest.raises(IndexedDataError, match=r"special_tokens is 'ids' with m\.model"):
        build(["a.jsonl"], "out", tokenizer="m.model", special_tokens="ids")
    (folder / "text.model").write_text("no model")
    with pytest.raises(IndexedDataError, match=r"text\.model: not a SentencePiece model"):
        build(["a.jsonl"], "out", tokenizer="text.model")
    with pytest.raises(IndexedDataError, match=r"none\.model: no such tokenizer file"):
        build(["a.jsonl"], "out", tokenizer="none.model")


def test_a_text_that_spells_the_end_of_a_model_does_not_end_there(model, folder):
    (folder / "b.txt").write_text("cat </s> hat <sep> dog")
    build(["b.txt"], "out", tokenizer="m.model")
    assert stored()[0].count(model.eos_id()) == 1  # at its end
    with pytest.raises(IndexedDataError, match=r"b\.txt:1: .*makes its EOD"):
        build(["b.txt"], "out2", tokenizer="m.model", eod_token="<sep>")


@pytest.fixture
def saved(folder):
    """A folder as save_pretrained of a fast tokenizer writes it, with a template that adds a BOS."""
    transformers = pytest.importorskip("transformers", reason="needs the extra sixfold-indexed-data[transformers]")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra sixfold-indexed-data[tokenizers]")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", model_max_length=16, truncation_side="left"
    )
    made.save_pretrained("saved")
    (folder / "saved" / "model.safetensors").write_bytes(b"weights")
    return made


def test_a_folder_of_transformers_gives_its_own_ids_whole_and_its_own_end(saved):
    with pytest.warns(BuildNote, match=r"its template, which adds <s>, is left out"):
        build(["a.jsonl"], "out", tokenizer="saved")
    plain = [saved(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert stored() == [[*ids, 1] for ids in plain]
    assert max(map(len, plain)) > 16
    build(["a.jsonl"], "out", tokenizer="saved", template=True, overwrite=True)
    assert stored() == [[*saved(text)["input_ids"], 1] for text in TEXTS]
    assert stored()[0][0] == 0


def test_special_tokens_in_a_text_are_text_to_a_folder_too(saved, folder):
    (folder / "b.txt").write_text("cat </s> hat")
    with pytest.warns(BuildNote):
        build(["b.txt"], "out", tokenizer="saved")
    assert stored() == [[*saved("cat </s> hat", add_special_tokens=False, split_special_tokens=True)["input_ids"], 1]]
    assert stored()[0].count(1) == 1
    with pytest.warns(BuildNote, match="contain the EOD"):
        build(["b.txt"], "out", tokenizer="saved", special_tokens="ids", overwrite=True)
    assert stored()[0].count(1) == 2


def test_a_folder_that_is_none_of_a_tokenizer_is_refused(folder):
    os.mkdir("empty")
    pytest.importorskip("transformers", reason="needs the extra sixfold-indexed-data[transformers]")
    with pytest.raises(IndexedDataError, match=r"^empty: has no tokenizer_config\.json"):
        build(["a.jsonl"], "out", tokenizer="empty")
    (folder / "empty" / "tokenizer_config.json").write_text("{")
    with pytest.raises(IndexedDataError, match=r"^empty: transformers cannot load it"):
        build(["a.jsonl"], "out", tokenizer="empty")


# ---- batches

OWN = """
class Own:
    vocab_size, eod = 300, 299
    batches = 0

    def encode(self, text):
        if "Verse 77 " in text:
            raise RuntimeError("no sevens")
        return list(text.encode())

    def encode_batch(self, texts):
        {batch}


def make():
    return Own()
"""


def test_a_tokenizer_that_fails_in_a_batch_names_the_line(folder):
    (folder / "own_a.py").write_text(OWN.format(batch="return [self.encode(text) for text in texts]"))
    with pytest.raises(IndexedDataError, match=r"a\.jsonl:77: tokenizer own_a:make failed: RuntimeError: no sevens"):
        build(["a.jsonl"], "out", tokenizer="own_a:make")


def test_a_batch_that_encodes_otherwise_than_one_text_is_refused(folder):
    (folder / "own_b.py").write_text(OWN.format(batch="return [list(text.encode())[1:] for text in texts]"))
    with pytest.raises(IndexedDataError, match=r"own_b:make: encode_batch gives other ids than encode"):
        build(["a.jsonl"], "out", tokenizer="own_b:make")


def test_a_batch_of_another_number_of_texts_is_encoded_text_by_text(folder):
    (folder / "own_c.py").write_text(OWN.format(batch="return [list(text.encode()) for text in texts[:1]]"))
    (folder / "b.txt").write_text("one\ntwo\nthree\n")
    build(["b.txt"], "out", tokenizer="own_c:make", text_documents="line")
    assert stored() == [[*text.encode(), 299] for text in ("one", "two", "three")]


def test_a_bad_line_before_a_failing_text_is_the_one_that_is_told(folder):
    (folder / "own_d.py").write_text(OWN.format(batch="return [self.encode(text) for text in texts]"))
    lines = (folder / "a.jsonl").read_text().splitlines()
    (folder / "b.jsonl").write_text("\n".join([*lines[:70], "{", *lines[70:]]))
    with pytest.raises(IndexedDataError, match=r"b\.jsonl:71: not JSON"):
        build(["b.jsonl"], "out", tokenizer="own_d:make")
    (folder / "c.jsonl").write_text("\n".join([*lines[:80], "{", *lines[80:]]))
    with pytest.raises(IndexedDataError, match=r"c\.jsonl:77: tokenizer"):
        build(["c.jsonl"], "out", tokenizer="own_d:make")
