"""Tokenizers by name: the built-in bytes, a Hugging Face file, or your own.

"bytes" | FILE.json | MODULE:CALLABLE --> load_tokenizer (this file) --> parts.py, cli.py
"""

from __future__ import annotations

import ast
import importlib
import operator
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.paths import local_path

BYTES_EOD = 256
SPECIAL_TOKENS = ("text", "ids")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """What the builder needs of a tokenizer."""

    name: str
    vocab_size: int
    eod: int | None  # the id that ends a document, if there is one
    encode: Callable[[str], Any]  # text -> list or array of ids
    decode: Callable[[list[int]], str] | None  # ids below vocab_size -> text
    files: tuple[str, ...] = ()  # what it is made of, besides this package
    library: str = ""  # name and version of what encodes, besides its files
    notes: tuple[str, ...] = ()  # what was changed when it was loaded, for the user to know
    special_texts: tuple[str, ...] = ()  # how its special tokens are written
    may_spell_eod: bool = True  # whether some text could give the EOD


def load_tokenizer(
    name: str, eod_token: str | None = None, *, special_tokens: str = "text", template: bool = False
) -> Tokenizer:
    """The tokenizer called ``name``.

    Args:
        name: ``bytes``, FILE.json or MODULE:CALLABLE. FILE.json is a Hugging Face tokenizer file. Its truncation,
            padding and dropout are switched off, since a document is stored whole. MODULE:CALLABLE is a function
            without arguments; the current folder is searched too. It returns an object with ``encode(text) -> ids``,
            ``vocab_size`` and optionally ``eod`` and ``decode(ids)``.
        eod_token: for a .json file, the text of the token that ends a document.
        special_tokens: for a .json file, how a text that spells a special token such as <|endoftext|> is stored:
            ``text``, as other text, or ``ids``, as the token.
        template: for a .json file, whether to add what the file's template adds, such as a BOS token.
    Raises:
        IndexedDataError: there is no such tokenizer, or it lacks something.
    """
    name = local_path("tokenizer", name)
    if eod_token is not None and not name.endswith(".json"):
        raise IndexedDataError(f"eod_token is {eod_token!r} with tokenizer {name}; it goes with a FILE.json")
    if special_tokens not in SPECIAL_TOKENS:
        raise IndexedDataError(f"special_tokens is {special_tokens!r}; it is one of {', '.join(SPECIAL_TOKENS)}")
    if template and not name.endswith(".json"):
        raise IndexedDataError(f"template is given with tokenizer {name}; it goes with a FILE.json")
    if name == "bytes":
        return Tokenizer("bytes", BYTES_EOD + 1, BYTES_EOD, _encode_bytes, _decode_bytes, may_spell_eod=False)
    if name.endswith(".json"):
        return _from_file(name, eod_token, special_tokens, template)
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


def _from_file(path: str, eod_token: str | None, special_tokens: str, template: bool) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise IndexedDataError(
            f"tokenizer {path} needs the tokenizers package: pip install 'sixfold-indexed-data[tokenizers]'"
        ) from error
    if not os.path.isfile(path):  # a pipe would wait for its writer
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
    if special_tokens == "text":
        if not hasattr(loaded, "encode_special_tokens"):
            raise IndexedDataError(
                f"tokenizers {tokenizers.__version__} always takes special tokens out of text; install 0.15 or later, "
                'or pass special_tokens="ids"'
            )
        loaded.encode_special_tokens = True
    changed = [f"{what} is switched off: documents are stored whole" for what in _made_whole(loaded)]
    if not template and loaded.num_special_tokens_to_add(False):
        added = ", ".join(loaded.encode("").tokens)
        changed.append(f"its template, which adds {added}, is left out; template=True (--template) takes it")
    highest = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)  # there may be gaps: not their number
    return Tokenizer(
        path,
        highest + 1,
        eod,
        lambda text: loaded.encode(text, add_special_tokens=template).ids,
        lambda ids: str(loaded.decode(ids, skip_special_tokens=False)),
        files=(path,),
        library=f"tokenizers {tokenizers.__version__}",
        notes=tuple(f"{path}: {what}" for what in changed),
        special_texts=tuple(str(token) for token in loaded.get_added_tokens_decoder().values() if token.special),
    )


def _made_whole(loaded: Any) -> list[str]:
    """Switch off what cuts, fills or varies the ids of a document; the names of what was on."""
    found = []
    if loaded.truncation is not None:
        found.append(f"truncation to {loaded.truncation['max_length']} tokens")
        loaded.no_truncation()
    if loaded.padding is not None:
        found.append(f"padding with {loaded.padding['pad_token']}")
        loaded.no_padding()
    if dropout := getattr(loaded.model, "dropout", None):
        found.append(f"dropout of {dropout:g}")
        loaded.model.dropout = None
    return found


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
    return Tokenizer(name, vocab_size, eod, encode, getattr(made, "decode", None), files=_source_files(module))


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
