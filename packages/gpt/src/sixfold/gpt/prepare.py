"""Text to token pairs, with the identity of the tokenizer beside them.

    txt, jsonl --> sixfold.indexed_data.build --.
    corpus.py --> IndexedDatasetBuilder ---------+--> PREFIX.bin, PREFIX.idx, PREFIX.json   (this file)

PREFIX.json is written before the pair appears: a kill in between leaves a note without data, never data that claims
another tokenizer. An existing pair is never replaced. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sixfold.gpt.corpus import Corpus, cpython_corpus
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.tokenizer import Tokenizer, identity_path, tokenizer_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """One pair that was written."""

    prefix: str
    documents: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.prefix}: {self.documents:,} documents, {self.tokens:,} tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedCorpus:
    """The demo's pairs: two datasets to blend, one to validate, and the sha256 of their text."""

    train: tuple[Prepared, ...]
    valid: Prepared
    sha256: str


def _claim(prefix: str, tokenizer: Tokenizer, source: str) -> None:
    """Refuse to replace a pair, make its folder and write its PREFIX.json."""
    for suffix in (".bin", ".idx"):
        if Path(prefix + suffix).exists():
            raise ConfigError(
                f"{prefix}{suffix} exists and prepare replaces nothing; choose another --out or remove the pair"
            )
    path = identity_path(prefix)
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {"name": tokenizer.name, "identity": tokenizer.unique_identifiers, "source": source}
    path.write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def prepare(
    inputs: Sequence[str | Path],
    out_prefix: str | Path,
    *,
    tokenizer: str = "bytes",
    key: str = "text",
    workers: int = 1,
) -> Prepared:
    """Tokenize text files into one pair.

    Args:
        inputs: a ``.jsonl`` file is a document per line, its text under ``key``; any other file is one document.
        out_prefix: path of the pair without extension; folders are made.
        tokenizer: ``bytes`` or the path of a tokenizer.json.
        workers: processes; the bytes written do not depend on it.
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
    found, prefix = tokenizer_for(tokenizer), str(out_prefix)
    _claim(prefix, found, f"{len(inputs)} files")
    try:
        report = build(
            [str(p) for p in inputs], prefix, tokenizer=found.name, json_key=key, workers=workers, append_eod=True
        )
    except BaseException:
        identity_path(prefix).unlink(missing_ok=True)
        raise
    return Prepared(prefix=prefix, documents=int(report.documents), tokens=int(report.tokens))


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
    train = tuple(_write(f"{out_prefix}-{name}", documents, corpus.sha256) for name, documents in corpus.train.items())
    return PreparedCorpus(
        train=train, valid=_write(f"{out_prefix}-valid", corpus.valid, corpus.sha256), sha256=corpus.sha256
    )
