"""Tokenizers by name: the built-in bytes, a Hugging Face file, or anybody's own.

"bytes" | FILE.json | MODULE:CALLABLE --> load_tokenizer (this file) --> parts.py, cli.py
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sixfold.indexed_data.errors import IndexedDataError

BYTES_EOD = 256
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """What the builder needs of a tokenizer."""

    name: str
    vocab_size: int
    eod: int | None  # the id that ends a document, if there is one
    encode: Callable[[str], Any]  # text -> list or array of ids
    decode: Callable[[list[int]], str] | None  # ids below vocab_size -> text


def load_tokenizer(name: str, eod_token: str | None = None) -> Tokenizer:
    """The tokenizer called ``name``.

    Args:
        name: ``bytes``; the path of a Hugging Face tokenizer file, ending in .json; or ``MODULE:CALLABLE``, a factory
            without arguments, looked for in the current folder too, that returns an object with
            ``encode(text) -> ids``, ``vocab_size`` and optionally ``eod`` and ``decode(ids)``.
        eod_token: for a .json file, the text of the token that ends a document.
    Raises:
        IndexedDataError: there is no such tokenizer, or it lacks something.
    """
    if eod_token is not None and not name.endswith(".json"):
        raise IndexedDataError(f"eod_token is {eod_token!r} with tokenizer {name}; it goes with a FILE.json")
    if name == "bytes":
        return Tokenizer("bytes", BYTES_EOD + 1, BYTES_EOD, _encode_bytes, _decode_bytes)
    if name.endswith(".json"):
        return _from_file(name, eod_token)
    if ":" in name:
        return _from_factory(name)
    raise IndexedDataError(f"tokenizer is {name!r}; it is bytes, a FILE.json or MODULE:CALLABLE")


def decode_ids(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    """The text of ``ids``: EOD left out, an id outside the vocabulary as U+FFFD; None if there is no ``decode``."""
    if tokenizer.decode is None:
        return None
    pieces: list[str] = []
    known: list[int] = []
    for i in [i for i in ids if i != tokenizer.eod]:
        if 0 <= i < tokenizer.vocab_size:
            known.append(i)
            continue
        pieces += [_decoded(tokenizer, known), REPLACEMENT]
        known = []
    return "".join([*pieces, _decoded(tokenizer, known)])


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    assert tokenizer.decode is not None, f"{tokenizer.name} was found to decode"
    try:
        return str(tokenizer.decode(ids))
    except Exception as error:  # whatever the user's code raises
        raise IndexedDataError(f"tokenizer {tokenizer.name} failed: {type(error).__name__}: {error}") from error


def _encode_bytes(text: str) -> Any:
    return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16) if text else np.empty(0, np.uint16)


def _decode_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def _from_file(path: str, eod_token: str | None) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise IndexedDataError(
            f"tokenizer {path} needs the tokenizers package: pip install 'sixfold-indexed-data[tokenizers]'"
        ) from error
    if not os.path.exists(path):
        raise IndexedDataError(f"{path}: no such tokenizer file")
    try:
        loaded = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise IndexedDataError(f"{path}: not a Hugging Face tokenizer file: {error}") from error
    eod = None
    if eod_token is not None:
        eod = loaded.token_to_id(eod_token)
        if eod is None:
            raise IndexedDataError(f"{path}: has no token {eod_token!r}; eod_token names one of its tokens")
    highest = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)  # there may be gaps: not their number
    return Tokenizer(
        path,
        highest + 1,
        eod,
        lambda text: loaded.encode(text, add_special_tokens=False).ids,
        lambda ids: str(loaded.decode(ids, skip_special_tokens=False)),
    )


def _from_factory(name: str) -> Tokenizer:
    module_name, _, attribute = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        made = getattr(importlib.import_module(module_name), attribute)()
    except Exception as error:  # whatever the user's code raises
        raise IndexedDataError(f"tokenizer {name}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(here)
    encode, vocab_size = getattr(made, "encode", None), getattr(made, "vocab_size", None)
    if not callable(encode) or not isinstance(vocab_size, int):
        raise IndexedDataError(f"tokenizer {name} made a {type(made).__name__}; it needs encode(text) and vocab_size")
    return Tokenizer(name, vocab_size, getattr(made, "eod", None), encode, getattr(made, "decode", None))
