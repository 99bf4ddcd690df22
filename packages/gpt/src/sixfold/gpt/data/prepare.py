"""Text to token pairs, with the identity of the tokenizer beside them.

    txt, jsonl --> sixfold.indexed_data.build ---.
    cpython_corpus.py --> IndexedDatasetBuilder -+--> PREFIX.bin, PREFIX.idx, PREFIX.json   (this file)

PREFIX.json is written before the pair appears: a kill in between leaves a note without data, never data that claims
another tokenizer. No existing pair is replaced, and no file of that name that is not such a note. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sixfold.gpt.data.cpython_corpus import Corpus, cpython_corpus
from sixfold.gpt.data.tokenizer import FileTokenizer, Tokenizer, identity_path, recorded_identity, tokenizer_for
from sixfold.gpt.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """One pair that was written."""

    prefix: str
    documents: int
    tokens: int
    tokenizer: str = "bytes"  # in a few words, for [model] vocab_size

    def __str__(self) -> str:
        return f"{self.prefix}: {self.documents:,} documents, {self.tokens:,} tokens{_words(self.tokenizer)}"


def _words(tokenizer: str) -> str:
    return "" if tokenizer == "bytes" else f"; {tokenizer}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCorpus:
    """The demo's pairs: two datasets to blend, one to validate, and the sha256 of their text."""

    train: tuple[Prepared, ...]
    valid: Prepared
    sha256: str


def _refuse_taken(prefix: str) -> None:
    """Refuse to replace a pair, or a PREFIX.json that no prepare wrote: it may be the corpus."""
    for suffix in (".bin", ".idx"):
        if Path(prefix + suffix).exists():
            raise ConfigError(
                f"{prefix}{suffix} exists and prepare replaces nothing; choose another --out or remove the pair"
            )
    try:
        recorded_identity(prefix)
    except ConfigError as error:
        raise ConfigError(
            f"{identity_path(prefix)} exists and no prepare wrote it; the pair's own note would have that name: choose "
            f"another --out"
        ) from error


def _claim(prefix: str, tokenizer: Tokenizer, source: str) -> bool:
    """Make the pair's folder and write its PREFIX.json.

    Returns:
        Whether the note was made here; an equal one may be there, of a prepare that was killed.
    Raises:
        ConfigError: a pair, another file or the note of another tokenizer is there.
    """
    _refuse_taken(prefix)
    path = identity_path(prefix)
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {"name": tokenizer.name, "identity": tokenizer.unique_identifiers, "source": source}
    if isinstance(tokenizer, FileTokenizer):
        note["eod_token"] = tokenizer.eod_token
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(note, indent=2) + "\n")
        return True
    except FileExistsError:
        _refuse_taken(prefix)
        found = recorded_identity(prefix)
        if found is not None and found["identity"] == note["identity"]:
            return False
    raise ConfigError(
        f"{path} says that another tokenizer made {prefix}, which an earlier prepare has not finished; choose another "
        f"--out, or remove {path}"
    )


def prepare(
    inputs: Sequence[str | Path],
    out_prefix: str | Path,
    *,
    tokenizer: str = "bytes",
    eod_token: str = "",
    key: str = "text",
    documents: str = "file",
    template: bool = False,
    messages_key: str = "",
    special_tokens: str = "text",
    workers: int = 1,
) -> Prepared:
    """Tokenize text files into one pair of .bin and .idx files.

    Args:
        inputs: a ``.jsonl`` file is a document per line, its text under ``key``; any other file is one document.
        out_prefix: path of the pair without extension. Missing folders are made.
        tokenizer: ``bytes`` or the path of a tokenizer.json, or of a folder that has one.
        eod_token: the token of a tokenizer.json that ends a document; "" takes its eos_token or a usual name.
        documents: what is a document in a text file: the ``file``, a ``paragraph`` or a ``line``.
        template: also store what the tokenizer's template adds to a document, such as a BOS.
        messages_key: where a line of a ``.jsonl`` file has a conversation in place of a text. The chat template in the
            tokenizer's folder encodes it; PREFIX.mask says what the assistant says, and training counts that alone.
        special_tokens: how a text that spells a special token is stored: as "text", or as the token's "ids".
        workers: number of processes. The written bytes do not depend on it.
    Raises:
        ConfigError: no input, a missing input, an existing pair, an unknown tokenizer.
        IndexedDataError: a line that is not what ``key`` promises, disk full.
    """
    from sixfold.indexed_data import build

    if not inputs:
        raise ConfigError("prepare has no input; name text or jsonl files, or --cpython")
    for path in inputs:
        if not Path(path).is_file():
            raise ConfigError(f"input {path} is not a file; name text or jsonl files, or --cpython")
    found, prefix = tokenizer_for(tokenizer, eod_token), str(out_prefix)
    end = found.eod_token if isinstance(found, FileTokenizer) else None
    named = found.name
    if messages_key:
        if not isinstance(found, FileTokenizer):
            raise ConfigError(
                f"messages_key is {messages_key!r} and the tokenizer is bytes, which has no chat template; name the "
                f"folder of a model whose tokenizer has one"
            )
        named = str(found.path.parent)  # the folder, which has the chat template
    mine = _claim(prefix, found, f"{len(inputs)} files")
    try:
        report = build(
            [str(p) for p in inputs],
            prefix,
            tokenizer=named,
            eod_token=end,
            json_key=key,
            messages_key=messages_key or None,
            text_documents=documents,
            special_tokens=special_tokens,
            template=template,
            workers=workers,
        )
    except BaseException:
        if mine:
            identity_path(prefix).unlink(missing_ok=True)
        raise
    words = "bytes" if end is None else f"vocab_size {found.vocab_size}, documents end with {end} (id {found.eod})"
    return Prepared(prefix=prefix, documents=int(report.documents), tokens=int(report.tokens), tokenizer=words)


def _write(prefix: str, documents: Sequence[bytes], sha256: str) -> Prepared:
    from sixfold.indexed_data import IndexedDatasetBuilder

    tokenizer = tokenizer_for("bytes")
    _claim(prefix, tokenizer, f"CPython corpus {sha256}")
    tokens = 0
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for document in documents:
            ids = np.full(len(document) + 1, tokenizer.eod, dtype=np.uint16)
            ids[:-1] = np.frombuffer(document, dtype=np.uint8)
            builder.add_document(ids)
            tokens += len(ids)
    return Prepared(prefix=prefix, documents=len(documents), tokens=tokens)


def prepare_cpython(out_prefix: str | Path, corpus: Corpus | None = None) -> PreparedCorpus:
    """Write the demo corpus as byte tokens: PREFIX-topics and PREFIX-docstrings to train on, PREFIX-valid to measure.

    Args:
        corpus: an extracted corpus; by default this Python's own.
    """
    corpus = corpus or cpython_corpus()
    for name in (*corpus.train, "valid"):
        _refuse_taken(f"{out_prefix}-{name}")
    train = tuple(_write(f"{out_prefix}-{name}", documents, corpus.sha256) for name, documents in corpus.train.items())
    return PreparedCorpus(
        train=train, valid=_write(f"{out_prefix}-valid", corpus.valid, corpus.sha256), sha256=corpus.sha256
    )
