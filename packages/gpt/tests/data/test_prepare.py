"""Text files and the demo corpus to token pairs."""

import json

import numpy as np
import pytest

from sixfold.gpt.data.cpython_corpus import Corpus
from sixfold.gpt.data.prepare import prepare, prepare_cpython
from sixfold.gpt.data.tokenizer import check_identity
from sixfold.gpt.errors import ConfigError
from sixfold.indexed_data import IndexedDataError, IndexedDataset


def documents(prefix):
    with IndexedDataset(str(prefix)) as dataset:
        return [bytes(ids[:-1].tolist()) for ids in dataset if ids[-1] == 256]


def test_a_text_file_is_a_document_and_a_jsonl_line_is_one(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"body": "three"}\n\n{"body": "vier ä"}\n')
    done = prepare([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "out" / "p", key="body")
    assert documents(tmp_path / "out" / "p") == [b"one\ntwo\n", b"three", "vier ä".encode()]
    assert (done.documents, done.tokens) == (3, 8 + 5 + 7 + 3)
    check_identity([done.prefix], "bytes")


def test_the_number_of_workers_does_not_change_a_byte(tmp_path):
    text = "\n".join(json.dumps({"text": "word " * (i % 7)}) for i in range(40))
    (tmp_path / "a.jsonl").write_text(text)
    for workers in (1, 2):
        prepare([tmp_path / "a.jsonl"], tmp_path / f"w{workers}", workers=workers)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"w1{suffix}").read_bytes() == (tmp_path / f"w2{suffix}").read_bytes()


def test_a_pair_is_never_replaced(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    prepare([tmp_path / "a.txt"], tmp_path / "p")
    before = (tmp_path / "p.bin").read_bytes()
    with pytest.raises(ConfigError, match=r"p\.bin exists"):
        prepare([tmp_path / "a.txt"], tmp_path / "p")
    assert (tmp_path / "p.bin").read_bytes() == before


@pytest.mark.parametrize(("inputs", "says"), [([], "no input"), (["nowhere.txt"], r"nowhere\.txt is not a file")])
def test_missing_input_is_named_and_nothing_is_written(tmp_path, inputs, says):
    with pytest.raises(ConfigError, match=says):
        prepare(inputs, tmp_path / "out" / "p")
    assert not (tmp_path / "out").exists()


def test_a_bad_line_is_named_and_leaves_no_note(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"body": 1}\n')
    with pytest.raises(IndexedDataError, match=r"a\.jsonl:2"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "p")
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["a.jsonl"]


def test_the_corpus_becomes_three_pairs_whose_documents_end_with_256(tmp_path):
    train = {"topics": [b"a topic"], "docstrings": [b"one", "zwö".encode()]}
    found = prepare_cpython(tmp_path / "cp", Corpus(train=train, valid=[b"kept"], sha256="5" * 64))
    assert [pair.prefix.rpartition("/")[2] for pair in found.train] == ["cp-topics", "cp-docstrings"]
    for prefix, wanted in ((tmp_path / f"cp-{k}", v) for k, v in (train | {"valid": [b"kept"]}).items()):
        assert documents(prefix) == wanted
        with IndexedDataset(str(prefix)) as dataset:
            assert dataset.dtype == np.uint16
    assert (found.valid.documents, found.valid.tokens) == (1, 5)
    assert "5" * 64 in (tmp_path / "cp-valid.json").read_text()
