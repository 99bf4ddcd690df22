"""Tokenizers by name, and the note that says which one made a pair."""

import json

import pytest

from sixfold.gpt.data.tokenizer import ByteTokenizer, check_identity, tokenizer_for, tokenizer_of
from sixfold.gpt.errors import ConfigError


def write_note(prefix, name="bytes", **identity):
    prefix.with_name(prefix.name + ".json").write_text(
        json.dumps({"name": name, "identity": identity or ByteTokenizer().unique_identifiers})
    )
    return str(prefix)


@pytest.mark.parametrize("text", ["", "plain", "Größe — 大", "\0\n\t", "😀" * 3])
def test_bytes_go_there_and_back(text):
    tokenizer = tokenizer_for("bytes")
    ids = tokenizer.encode(text)
    assert ids == list(text.encode()) and tokenizer.decode([*ids, tokenizer.eod]) == text


def test_broken_utf8_is_shown_as_the_replacement_character():
    assert ByteTokenizer().decode([0xC3, 65]) == "\ufffdA"


def test_a_missing_tokenizer_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json.*bytes"):
        tokenizer_for(str(tmp_path / "nowhere.json"))


def test_without_the_extra_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"pip install 'sixfold-gpt\[tokenizers\]'"):
        tokenizer_for(str(tmp_path / "t.json"))


@pytest.fixture
def word_file(tmp_path):
    library = pytest.importorskip("tokenizers", reason="needs tokenizers, an extra")
    words = library.Tokenizer(
        library.models.WordLevel({"<unk>": 0, "</s>": 1, "hello": 2, "world": 3}, unk_token="<unk>")
    )
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def test_a_tokenizer_file_is_known_by_its_content(word_file, tmp_path):
    tokenizer = tokenizer_for(str(word_file))
    assert (tokenizer.encode("hello world"), tokenizer.eod, tokenizer.vocab_size) == ([2, 3], 1, 4)
    assert tokenizer.decode([2, 3]) == "hello world"
    copy = tmp_path / "copy.json"
    copy.write_bytes(word_file.read_bytes())
    assert tokenizer_for(str(copy)).unique_identifiers == tokenizer.unique_identifiers


@pytest.mark.parametrize("text", ["{", '{"a": 1}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, text):
    pytest.importorskip("tokenizers", reason="needs tokenizers, an extra")
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=r"t\.json is not a tokenizer"):
        tokenizer_for(str(tmp_path / "t.json"))


def test_data_made_by_another_tokenizer_is_refused_naming_both(tmp_path):
    other = write_note(tmp_path / "words", "words.json", sha256="0" * 64)
    with pytest.raises(ConfigError) as error:
        check_identity([other], "bytes")
    assert all(part in str(error.value) for part in (other, "'words.json'", "'bytes'"))


def test_data_of_one_run_has_one_tokenizer(tmp_path):
    prefixes = [write_note(tmp_path / "a"), write_note(tmp_path / "b", "words.json", sha256="0" * 64)]
    with pytest.raises(ConfigError, match="all data of a run has one tokenizer"):
        check_identity(prefixes)


def test_pairs_without_a_note_are_taken_as_they_are(tmp_path):
    check_identity([str(tmp_path / "a"), write_note(tmp_path / "b")], "bytes")
    assert tokenizer_of([str(tmp_path / "a")]).eod == -1, "no id ends a document: the index says where"


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "bytes"}'])
def test_a_damaged_note_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json"):
        check_identity([str(tmp_path / "a")])
