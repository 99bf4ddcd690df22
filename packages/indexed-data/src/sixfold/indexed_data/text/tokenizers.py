"""Tokenizers by name: the built-in bytes, a file or folder of a model, or your own.

"bytes" | FILE.json | FILE.model | FOLDER | MODULE:CALLABLE --> load_tokenizer (this file) --> parts.py, cli.py
"""

from __future__ import annotations

import ast
import importlib
import operator
import os
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.paths import local_path
from sixfold.indexed_data.text.tokenizer import Tokenizer
from sixfold.indexed_data.text.tokenizer_files import from_sentencepiece, from_tokenizer_file, from_transformers

BYTES_EOD = 256
SPECIAL_TOKENS = ("text", "ids")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(
    name: str, eod_token: str | None = None, *, special_tokens: str = "text", template: bool = False
) -> Tokenizer:
    """The tokenizer called ``name``.

    Args:
        name: ``bytes``, FILE.json, FILE.model, FOLDER or MODULE:CALLABLE. FILE.json is a Hugging Face tokenizer file.
            Its truncation, padding and dropout are switched off, since a document is stored whole. FILE.model is
            SentencePiece's. FOLDER is one that ``save_pretrained`` of transformers wrote. MODULE:CALLABLE is a
            function without arguments; the current folder is searched too. It returns an object with
            ``encode(text) -> ids``, ``vocab_size`` and optionally ``eod``, ``decode(ids)`` and
            ``encode_batch(texts)``, which gives what ``encode`` gives of each, and ``encode_chat(messages)``, which
            gives ids and a loss mask.
        eod_token: for a file or folder, the text of the token that ends a document. FILE.model and FOLDER have one
            of their own.
        special_tokens: for a .json file or a folder, how a text that spells a special token such as <|endoftext|> is
            stored: ``text``, as other text, or ``ids``, as the token.
        template: for a file or folder, whether to add what its template adds, such as a BOS token.
    Raises:
        IndexedDataError: there is no such tokenizer, or it lacks something.
    """
    name = local_path("tokenizer", name)
    of_model = name.endswith((".json", ".model")) or os.path.isdir(name)
    if eod_token is not None and not of_model:
        raise IndexedDataError(f"eod_token is {eod_token!r} with tokenizer {name}; it goes with a file or folder")
    if special_tokens not in SPECIAL_TOKENS:
        raise IndexedDataError(f"special_tokens is {special_tokens!r}; it is one of {', '.join(SPECIAL_TOKENS)}")
    if template and not of_model:
        raise IndexedDataError(f"template is given with tokenizer {name}; it goes with a file or folder")
    if name == "bytes":
        return Tokenizer("bytes", BYTES_EOD + 1, BYTES_EOD, _encode_bytes, _decode_bytes, may_spell_eod=False)
    if os.path.isdir(name):
        return from_transformers(name, eod_token, special_tokens == "text", template)
    if name.endswith(".model"):
        if special_tokens == "ids":
            raise IndexedDataError(f"special_tokens is 'ids' with {name}; a SentencePiece model makes none of text")
        return from_sentencepiece(name, eod_token, template)
    if name.endswith(".json"):
        return from_tokenizer_file(name, eod_token, special_tokens == "text", template)
    if ":" in name:
        return _from_factory(name)
    raise IndexedDataError(f"tokenizer is {name!r}; it is bytes, a FILE.json, FILE.model, FOLDER or MODULE:CALLABLE")


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


def _from_factory(name: str) -> Tokenizer:
    module_name, _, attribute = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
        made = getattr(module, attribute)()
    except Exception as error:  # whatever the user's code raises
        raise IndexedDataError(f"tokenizer {name}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(here)
    encode, eod = getattr(made, "encode", None), getattr(made, "eod", None)
    try:
        vocab_size = operator.index(getattr(made, "vocab_size", None))  # type: ignore[arg-type]
        eod = None if eod is None else operator.index(eod)
    except TypeError:
        vocab_size = 0
    if not callable(encode) or vocab_size < 1 or (eod is not None and not 0 <= eod < vocab_size):
        raise IndexedDataError(
            f"tokenizer {name} made a {type(made).__name__}; it needs encode(text), vocab_size >= 1, and an eod below "
            f"vocab_size if it has one. Its vocab_size is {getattr(made, 'vocab_size', None)!r} and its eod "
            f"{getattr(made, 'eod', None)!r}; added tokens count, as in len(tokenizer) of a Hugging Face tokenizer"
        )
    return Tokenizer(
        name,
        vocab_size,
        eod,
        encode,
        getattr(made, "decode", None),
        files=_source_files(module),
        encode_batch=getattr(made, "encode_batch", None),
        encode_chat=getattr(made, "encode_chat", None),
    )


def _source_files(module: ModuleType) -> tuple[str, ...]:
    """The file of ``module``, and of each module that it uses from its own package, or else from its own folder."""
    top = sys.modules[module.__name__.partition(".")[0]]
    package = hasattr(top, "__path__") and getattr(top, "__file__", None) is not None
    home = getattr(top if package else module, "__file__", None)
    if home is None:  # made at run time, or typed in: its probe tells
        return ()
    folder = os.path.dirname(os.path.abspath(home))
    found: set[str] = set()
    pending = [module]
    while pending:
        used = pending.pop()
        path = os.path.abspath(getattr(used, "__file__", None) or os.devnull)
        inside = path.startswith(folder + os.sep) if package else os.path.dirname(path) == folder
        if inside and path not in found:
            found.add(path)
            names = {_module_of(value) for value in vars(used).values()} | _imported(path, used.__package__)
            pending += [sys.modules[name] for name in names & sys.modules.keys()]
    return tuple(sorted(found))


def _imported(path: str, package: str | None) -> set[str]:
    """What the source at ``path`` imports, by the names it may have: a table or a number that it takes from a module
    does not tell where it is from."""
    from importlib.util import resolve_name  # only here: reading pairs should not load it

    found: set[str] = set()
    with suppress(OSError, SyntaxError, ValueError, ImportError):  # no source, or one that is not Python's
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), package)
                found.update((base, *(f"{base}.{alias.name}" for alias in node.names)))
    return found


def _module_of(value: Any) -> str:
    try:
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    except Exception:  # most values have none, and an object of anybody's may raise anything
        return ""
    return name if isinstance(name, str) else ""
