"""Forty odd corpora: each is read as what it means, document by document, or is one typed error with file and line."""

import gzip
import json

import numpy as np
import pytest

from sixfold.indexed_data import IndexedDataError, IndexedDataset, build
from sixfold.indexed_data.text.build import BuildNote

ENDS = "Naïve façade, Привет мир, 你好，世界。 😀👩‍👩‍👧 e\u0301 \u2028 \x85 \t tab"
HUGE = "the quick brown fox " * 15_000  # 300 KB in one document, larger than the parts that the test cuts


def lines_of(*texts, **more):
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts).encode()


def utf8(text, ensure_ascii=False):
    return json.dumps({"text": text}, ensure_ascii=ensure_ascii).encode()


J = lines_of("one", "two")
# name: (file, bytes, options, documents or the words of the error)
CORPORA = {
    # extensions in all spellings
    **{
        f"named {name}": (name, J, {}, ["one", "two"])
        for name in (
            "a.jsonl", "a.JSONL", "a.ndjson", "a.NDJSON", "a.jsonlines", "a.json", "a.Json", "a.jsonl.1", "a.jsonl.00",
            "my.json.data.ndjson", ".jsonl",
        )
    },
    "named .jsonl.gz": ("a.jsonl.gz", gzip.compress(J), {}, ["one", "two"]),
    "named .JSONL.GZ": ("a.JSONL.GZ", gzip.compress(J), {}, ["one", "two"]),
    "named .jsonl.2.gz": ("a.jsonl.2.gz", gzip.compress(J), {}, ["one", "two"]),
    "lines of json in .txt": ("a.txt", J, {}, r"a\.txt: its first line is a JSON object.*format=\"jsonl\""),
    "lines of json without extension": ("part-00000", J, {}, r"part-00000: its first line is a JSON object"),
    "lines of json in .txt.gz": ("a.txt.gz", gzip.compress(J), {}, r"a\.txt\.gz: its first line is a JSON object"),
    "lines of json by date": ("a.jsonl-20261126", J, {"format": "jsonl"}, ["one", "two"]),
    "json that is text": ("a.txt", J, {"format": "text"}, [J.decode()]),
    "an object without a text": ("a.txt", b'{"id": 1}\n{"id": 2}\n', {}, ['{"id": 1}\n{"id": 2}\n']),
    "code that begins with a brace": ("a.txt", b'{ "a" }\n', {}, ['{ "a" }\n']),
    # encodings
    "a mark in jsonl": ("a.jsonl", b"\xef\xbb\xbf" + J, {}, ["one", "two"]),
    "a mark in text": ("a.txt", b"\xef\xbb\xbfone\n", {}, ["one\n"]),
    "a mark in lines": ("a.txt", b"\xef\xbb\xbfone\ntwo\n", {"text_documents": "line"}, ["one", "two"]),
    "a mark in paragraphs": ("a.txt", b"\xef\xbb\xbfone\n\ntwo\n", {"text_documents": "paragraph"}, ["one", "two"]),
    "a mark inside": ("a.txt", "one\ufefftwo".encode(), {}, ["one\ufefftwo"]),
    "a mark alone": ("a.txt", b"\xef\xbb\xbf", {}, []),
    "utf-16": ("a.txt", "one".encode("utf-16"), {}, r"a\.txt: is UTF-16 text"),
    "utf-16 without a mark": ("a.jsonl", J.decode().encode("utf-16-le"), {}, r"a\.jsonl: is UTF-16 text"),
    "utf-32": ("a.txt", "one".encode("utf-32"), {}, r"a\.txt: is UTF-16 text"),
    "latin-1": ("a.txt", "one\ncafé".encode("latin-1"), {}, r"a\.txt:2: not UTF-8: byte 0xe9 at column 4"),
    "latin-1 in jsonl": ("a.jsonl", J + '{"text": "é"}'.encode("latin-1"), {}, r"a\.jsonl:3: not UTF-8: byte 0xe9"),
    "a cut character": ("a.txt", "one é".encode()[:-1], {}, r"a\.txt:1: not UTF-8"),
    "surrogates as utf-8": ("a.txt", b"\xed\xa0\x80", {}, r"a\.txt:1: not UTF-8"),
    "half a pair": ("a.jsonl", J + b'{"text": "a\\ud83d"}\n', {}, r"a\.jsonl:3: .*half of a surrogate pair"),
    "a pair": ("a.jsonl", b'{"text": "a\\ud83d\\ude00"}\n', {}, ["a😀"]),
    "many scripts": ("a.jsonl", utf8(ENDS), {}, [ENDS]),
    "many scripts escaped": ("a.jsonl", utf8(ENDS, ensure_ascii=True), {}, [ENDS]),
    "a NUL in text": ("a.txt", b"one\0two three", {}, ["one\0two three"]),
    "a NUL in jsonl": ("a.jsonl", lines_of("one\0two"), {}, ["one\0two"]),
    "a NUL between lines of json": ("a.jsonl", J + b"\0\0\0\0\n", {}, r"a\.jsonl:3: not JSON"),
    # ends of lines
    "CRLF in jsonl": ("a.jsonl", J.replace(b"\n", b"\r\n"), {}, ["one", "two"]),
    "CRLF in lines": ("a.txt", b"one\r\ntwo\r\n\r\n", {"text_documents": "line"}, ["one", "two"]),
    "CRLF in paragraphs": ("a.txt", b"a\r\nb\r\n\r\nc\r\n", {"text_documents": "paragraph"}, ["a\r\nb", "c"]),
    "CRLF in a file": ("a.txt", b"one\r\ntwo\r\n", {}, ["one\r\ntwo\r\n"]),
    "CR in lines": ("a.txt", b"one\rtwo\r", {"text_documents": "line"}, r"a\.txt:1: the lines .* end in CR alone"),
    "CR in paragraphs": ("a.txt", b"one\r\rtwo", {"text_documents": "paragraph"}, r"a\.txt:1: the lines .* CR alone"),
    "CR in jsonl": ("a.jsonl", J.replace(b"\n", b"\r"), {}, r"a\.jsonl:1: not JSON: Extra data"),
    "CR inside a line": ("a.txt", b"1%\r2%\ntwo\n", {"text_documents": "line"}, ["1%\r2%", "two"]),
    "no end of the last line": ("a.jsonl", J.rstrip(), {}, ["one", "two"]),
    "other ends of lines in a text": ("a.jsonl", utf8("a\x0b\x0c\x1c\x85\u2028b"), {}, ["a\x0b\x0c\x1c\x85\u2028b"]),
    # empty things
    "an empty file": ("a.jsonl", b"", {}, []),
    "an empty text file": ("a.txt", b"", {}, []),
    "empty lines": ("a.jsonl", b"\n\n" + J + b"\n  \n\t\n", {}, ["one", "two"]),
    "empty documents": ("a.jsonl", lines_of("", "one", ""), {}, ["one"]),
    "spaces": ("a.jsonl", lines_of(" ", "\n"), {}, [" ", "\n"]),
    # json
    "a missing key": ("a.jsonl", J + b'{"content": "x"}\n', {}, r"a\.jsonl:3: no string at key 'text'"),
    "another key": ("a.jsonl", b'{"content": "x", "text": 5}\n', {"json_key": "content"}, ["x"]),
    "null": ("a.jsonl", b'{"text": null}\n', {}, r"a\.jsonl:1: no string at key"),
    "a list of texts": ("a.jsonl", b'{"text": ["x"]}\n', {}, r"a\.jsonl:1: no string at key"),
    "a list in one line": ("a.json", b'[{"text": "x"}]\n', {}, r"a\.json:1: a JSON list.*jq -c '\.\[\]'"),
    "a list over lines": ("a.json", b'[\n{"text": "x"}\n]\n', {}, r"a\.json:1: a JSON text over several lines.*jq -c"),
    "an object over lines": ("a.json", b'{\n"text": "x"\n}\n', {}, r"a\.json:1: a JSON text over several lines"),
    "deep json": ("a.jsonl", b'{"text": "x", "d": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", {}, r"a\.jsonl:1: not JSON"),
    "a long number": ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}\n", {}, r"a\.jsonl:1: not JSON"),
    "NaN": ("a.jsonl", b'{"text": "x", "n": NaN}\n', {}, ["x"]),
    "a key twice": ("a.jsonl", b'{"text": "x", "text": "y"}\n', {}, ["y"]),
    "columns of a Hugging Face data set": (
        "train-00000-of-00001.jsonl", lines_of("one", "two", meta={"a": [1]}, label=3), {}, ["one", "two"],
    ),
    # sizes
    "one huge document": ("a.jsonl", lines_of("small", HUGE, "last"), {"part_bytes": 100_000}, ["small", HUGE, "last"]),
    "one huge text": ("a.txt", HUGE.encode(), {"part_bytes": 100_000}, [HUGE]),
    "many small ones": ("a.jsonl", lines_of(*map(str, range(200))), {"part_bytes": 200}, [*map(str, range(200))]),
}  # fmt: skip


def trained(kind):
    """A tokenizer of this kind that was trained here, and (end of a document, whether any text comes back)."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra sixfold-indexed-data[tokenizers]")
    models, trainers = tokenizers.models, tokenizers.trainers
    before, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    texts = ["one two three small last the quick brown fox " * 3, ENDS]
    special = ["<|endoftext|>", "<unk>", "<s>"]
    if kind == "bpe":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = before.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = before.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = before.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special)
    else:
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = before.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    made.train_from_iterator(texts, trainer)
    return made


@pytest.fixture(scope="module", params=["bytes", "bpe", "wordpiece", "unigram"])
def tokenizer(request, tmp_path_factory):
    """(options of build, encode or None, decode or None)"""
    if request.param == "bytes":
        return {}, lambda text: [*text.encode(), 256], lambda ids: bytes(ids[:-1]).decode()
    made = trained(request.param)
    path = str(tmp_path_factory.mktemp("tokenizers") / f"{request.param}.json")
    made.save(path)
    made.encode_special_tokens = True
    eod = made.token_to_id("<|endoftext|>")
    back = (lambda ids: made.decode(ids[:-1], skip_special_tokens=False)) if request.param == "bpe" else None
    return (
        {"tokenizer": path, "eod_token": "<|endoftext|>"},
        lambda text: [*made.encode(text, add_special_tokens=False).ids, eod],
        back,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.slow
def test_a_corpus_is_read_as_what_it_means_or_refused_with_its_place(tmp_path, monkeypatch, corpus, tokenizer):
    monkeypatch.chdir(tmp_path)
    name, content, options, expected = CORPORA[corpus]
    (tmp_path / name).write_bytes(content)
    named, encode, decode = tokenizer
    if isinstance(expected, str):
        with pytest.raises(IndexedDataError, match=expected):
            build([name], "out", **named, **options)
        assert sorted(path.name for path in tmp_path.iterdir()) == [name], "nothing is left of a build that is refused"
        return
    report = build([name], "out", **named, **options)
    assert report.documents == len(expected)
    with IndexedDataset("out") as pair:
        assert len(pair) == len(expected)
        for document, text in enumerate(expected):
            ids = pair[document].tolist()
            assert ids == encode(text)
            assert decode is None or decode(ids) == text


def test_a_metaspace_tokenizer_gives_words_with_their_spaces_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = trained("unigram")
    made.save("u.json")
    (tmp_path / "a.jsonl").write_bytes(lines_of("the quick brown fox", "one two"))
    build(["a.jsonl"], "out", tokenizer="u.json", eod_token="<|endoftext|>")
    with IndexedDataset("out") as pair:
        assert [made.decode(ids.tolist()) for ids in pair] == ["the quick brown fox", "one two"]


# ---- special tokens that a text spells


@pytest.fixture
def bpe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = trained("bpe")
    made.save("bpe.json")
    return made


SPELLS = "before <|endoftext|> after <s>"


def built(texts, **options):
    with open("a.jsonl", "wb") as file:
        file.write(lines_of(*texts))
    report = build(
        ["a.jsonl"], "out", overwrite=True, **({"tokenizer": "bpe.json", "eod_token": "<|endoftext|>"} | options)
    )
    with IndexedDataset("out") as pair:
        return [ids.tolist() for ids in pair], report.notes


def test_a_text_that_spells_the_end_of_a_document_does_not_end_it_and_that_is_told(bpe):
    with pytest.warns(BuildNote, match=r"1 documents spell a special token of bpe\.json.*special_tokens=\"ids\""):
        documents, notes = built([SPELLS, "plain"])
    eod = bpe.token_to_id("<|endoftext|>")
    assert [ids.count(eod) for ids in documents] == [1, 1] and documents[0][-1] == eod
    assert bpe.decode(documents[0][:-1], skip_special_tokens=False) == SPELLS and len(notes) == 1


def test_special_tokens_of_a_text_become_ids_where_that_is_asked_and_an_end_inside_is_told(bpe):
    with pytest.warns(BuildNote, match=r"1 documents contain the EOD of bpe\.json: readers end"):
        documents, _ = built([SPELLS, "over<|endoftext|>"], special_tokens="ids")
    eod = bpe.token_to_id("<|endoftext|>")
    assert documents[0] == [*bpe.encode(SPELLS, add_special_tokens=False).ids, eod]
    assert documents[1].count(eod) == 1, "a text that ends with it gets no second one"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.slow
def test_the_template_of_a_tokenizer_is_left_out_with_a_note_and_taken_where_that_is_asked(bpe, workers):
    from tokenizers.processors import TemplateProcessing

    bos = bpe.token_to_id("<s>")
    bpe.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    bpe.save("bpe.json")
    with pytest.warns(BuildNote, match=r"its template, which adds <s>, is left out; template=True"):
        plain, _ = built(["one", "two"])
    whole, notes = built(["one", "two"], template=True, workers=workers, part_bytes=10)
    assert [ids[1:] for ids in whole] == plain and {ids[0] for ids in whole} == {bos} and notes == ()
    with pytest.raises(IndexedDataError, match=r"template is given with tokenizer bytes"):
        build(["a.jsonl"], "b", template=True)
    with pytest.raises(IndexedDataError, match=r"special_tokens is 'id'; it is one of text, ids"):
        build(["a.jsonl"], "b", special_tokens="id")


def test_a_template_that_ends_documents_itself_ends_them_once(bpe):
    from tokenizers.processors import TemplateProcessing

    eod = bpe.token_to_id("<|endoftext|>")
    bpe.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", eod)])
    bpe.save("bpe.json")
    documents, _ = built(["one", "two"], template=True)
    assert [ids.count(eod) for ids in documents] == [1, 1]


def test_a_template_that_begins_with_the_end_is_told_as_the_template(bpe):
    """GPT-2's and OPT's begin of a text is the token that ends it."""
    from tokenizers.processors import TemplateProcessing

    eod = bpe.token_to_id("<|endoftext|>")
    bpe.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", eod)])
    bpe.save("bpe.json")
    with pytest.raises(IndexedDataError, match=r"adds it by its template.*leave the template out.*special_tokens="):
        built(["one", "two"], template=True)
    documents, _ = built(["one", "two"], template=True, special_tokens="ids")
    assert [(ids[0], ids.count(eod)) for ids in documents] == [(eod, 2)] * 2


def test_an_end_that_no_option_makes_text_is_refused_with_its_line_and_the_remedy_takes_it(tmp_path, monkeypatch):
    """The token is a word of the vocabulary and not marked as special, as some published tokenizers have it."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra sixfold-indexed-data[tokenizers]")
    monkeypatch.chdir(tmp_path)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<eod>": 2}, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save("words.json")
    options = {"tokenizer": "words.json", "eod_token": "<eod>"}
    with pytest.raises(IndexedDataError, match=r"a\.jsonl:2: .*makes its EOD, 2, of this text.*special_tokens=\"ids\""):
        built(["a b", "a <eod> b"], **options)
    assert built(["a b", "a <eod> b"], special_tokens="ids", **options)[0] == [[0, 1, 2], [0, 2, 1, 2]]
    documents, _ = built(["a b", "a <eod> b", "b"], on_error="skip", **options)
    assert documents == [[0, 1, 2], [1, 2]]


def test_a_build_by_numpy_ids_of_a_users_tokenizer_keeps_the_same_rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_numpy.py").write_text(
        "import numpy as np\nclass T:\n    vocab_size, eod = 128, 0\n"
        "    def encode(self, text): return np.frombuffer(text.encode(), np.uint8) % 97\n"
    )
    a = "".join(map(chr, range(98, 103)))
    with pytest.raises(IndexedDataError, match=r"a\.jsonl:2: .*makes its EOD, 0"):
        built([a, "xax"], tokenizer="mine_numpy:T", eod_token=None)
    documents, _ = built([a, "xxa"], tokenizer="mine_numpy:T", eod_token=None)
    assert documents == [[1, 2, 3, 4, 5, 0], [23, 23, 0]]
    assert np.array_equal(documents[0][:-1], [1, 2, 3, 4, 5])
