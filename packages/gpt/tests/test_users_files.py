"""No command writes over or removes a file that it did not make in this run, or that is not provably its own."""

import json

import pytest

from sixfold.gpt import cli
from sixfold.gpt import prepare as prepare_module
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.prepare import prepare
from sixfold.indexed_data import IndexedDataError


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("out", ["corpus", "./corpus", "sub/../corpus"])
@pytest.mark.parametrize("text", ['{"text": "hello"}\n{"text": "world"}\n', "not one object of JSON\n"])
def test_the_corpus_itself_is_never_written_over_nor_removed(tmp_path, monkeypatch, capsys, text, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "corpus.json").write_text(text)
    before = files_of(tmp_path)
    assert cli.main(["prepare", "corpus.json", "--out", out]) == 2
    assert files_of(tmp_path) == before
    said = capsys.readouterr().err
    assert "corpus.json" in said and "choose another --out" in said


def test_notes_that_have_the_name_of_the_pairs_note_stay(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "notes.json").write_text('{"dear": "diary"}')
    before = files_of(tmp_path)
    with pytest.raises(ConfigError, match=r"notes\.json"):
        prepare([tmp_path / "a.txt"], tmp_path / "notes")
    assert files_of(tmp_path) == before


def test_the_remedy_of_a_taken_name_works(tmp_path):
    (tmp_path / "corpus.json").write_text('{"text": "hello"}\n')
    with pytest.raises(ConfigError, match="choose another --out"):
        prepare([tmp_path / "corpus.json"], tmp_path / "corpus")
    assert prepare([tmp_path / "corpus.json"], tmp_path / "another").documents == 1


def test_a_note_that_a_killed_prepare_left_is_no_hindrance(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    prepare([tmp_path / "a.txt"], tmp_path / "p")
    for suffix in (".bin", ".idx"):  # killed before the pair appeared
        (tmp_path / f"p{suffix}").unlink()
    assert prepare([tmp_path / "a.txt"], tmp_path / "p").tokens == 6


def test_a_failed_prepare_leaves_the_note_that_was_there_before_it(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    prepare([tmp_path / "a.txt"], tmp_path / "p")
    note = (tmp_path / "p.json").read_bytes()
    for suffix in (".bin", ".idx"):
        (tmp_path / f"p{suffix}").unlink()
    (tmp_path / "bad.jsonl").write_text('{"body": 1}\n')
    with pytest.raises(IndexedDataError):
        prepare([tmp_path / "bad.jsonl"], tmp_path / "p")
    assert (tmp_path / "p.json").read_bytes() == note


def test_a_note_that_appears_while_prepare_looks_is_not_written_over(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("hello")
    real = prepare_module.recorded_identity

    def slow(prefix):
        found = real(prefix)
        (tmp_path / "p.json").write_text("another program's")
        return found

    monkeypatch.setattr(prepare_module, "recorded_identity", slow)
    with pytest.raises(ConfigError, match=r"p\.json"):
        prepare([tmp_path / "a.txt"], tmp_path / "p")
    assert files_of(tmp_path)["p.json"] == b"another program's"


def test_the_demos_corpus_takes_no_file_of_another(tmp_path):
    (tmp_path / "cp-valid.json").write_text(json.dumps({"dear": "diary"}))
    before = files_of(tmp_path)
    with pytest.raises(ConfigError, match=r"cp-valid\.json"):
        prepare_module.prepare_cpython(tmp_path / "cp", CORPUS)
    assert files_of(tmp_path) == before, "nothing of the three pairs was made either"


CORPUS = prepare_module.Corpus(train={"topics": [b"topic"], "docstrings": [b"text"]}, valid=[b"valid"], sha256="0" * 64)
