"""Tokenizers by name, and the check that data and run mean the same one.

    data.tokenizer, PREFIX.json --> tokenizer_of (this file) --> blending (ids of document end), sample.py
                                `-> check_identity --> preflight

``bytes`` needs nothing; a Hugging Face ``tokenizer.json`` needs the extra ``tokenizers``. What made a pair is written
beside it, in PREFIX.json, by prepare.py; a pair without that file is taken as it is. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from sixfold.gpt.errors import ConfigError


class Tokenizer(Protocol):
    """What the package asks of a tokenizer; ``eod`` ends a document, ``pad`` fills what is masked."""

    name: str
    vocab_size: int
    eod: int
    pad: int

    @property
    def unique_identifiers(self) -> dict[str, Any]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255, 256 is the end of a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    pad = 256

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """What two equal tokenizers have in common and two different ones do not."""
        return {"class": "ByteTokenizer", "vocab_size": self.vocab_size, "eod": self.eod}

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of ``text``, without an end of document."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``. Ends of documents and padding are left out; broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class FileTokenizer:
    """A ``tokenizer.json`` as Hugging Face writes it.

    The end of a document is the first of ENDS that the vocabulary holds.
    """

    ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "[SEP]")

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        self.name = str(self.path)
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"tokenizer {str(path)!r} cannot be read ({error.strerror}); name 'bytes' or a tokenizer.json"
            ) from error
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise ConfigError(
                f"tokenizer {str(path)!r} needs the library tokenizers: pip install 'sixfold-gpt[tokenizers]'"
            ) from error
        try:
            self._library = Library.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} is not a tokenizer.json: {error}") from error
        self._sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.vocab_size = int(self._library.get_vocab_size())
        found = [i for i in map(self._library.token_to_id, self.ENDS) if i is not None]
        if not found:
            raise ConfigError(f"{path} has no end-of-document token; one of {', '.join(self.ENDS)} must be in it")
        self.eod = self.pad = int(found[0])

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """The file's sha256, wherever it lies."""
        return {"class": "FileTokenizer", "sha256": self._sha256, "vocab_size": self.vocab_size, "eod": self.eod}

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without special tokens."""
        return list(self._library.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return str(self._library.decode(list(ids)))


def tokenizer_for(name: str) -> Tokenizer:
    """The tokenizer of that name: ``bytes`` or the path of a tokenizer.json.

    Raises:
        ConfigError: no such file, not a tokenizer, or the extra is not installed.
    """
    return ByteTokenizer() if name in ("", "bytes") else FileTokenizer(name)


def identity_path(prefix: str | Path) -> Path:
    """Where prepare.py says what made the pair at ``prefix``."""
    return Path(f"{prefix}.json")


def recorded_identity(prefix: str | Path) -> dict[str, Any] | None:
    """PREFIX.json, or None where there is none: ``{"name": ..., "identity": {...}}``.

    Raises:
        ConfigError: the file is there but is not what prepare.py writes.
    """
    path = identity_path(prefix)
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}); it names the tokenizer of the pair: prepare the data again"
        ) from error
    if not (isinstance(found, dict) and isinstance(found.get("name"), str) and isinstance(found.get("identity"), dict)):
        raise ConfigError(f"{path} lacks 'name' and 'identity', which say what made the pair: prepare the data again")
    return found


def tokenizer_of(prefixes: Sequence[str], name: str = "") -> Tokenizer:
    """The tokenizer of a run: ``name`` if set, else what the first recorded PREFIX.json says, else ``bytes``."""
    if name:
        return tokenizer_for(name)
    recorded = [found for found in map(recorded_identity, prefixes) if found is not None]
    return tokenizer_for(recorded[0]["name"] if recorded else "bytes")


def check_identity(prefixes: Sequence[str], name: str = "") -> None:
    """Refuse data that another tokenizer made than the one of the run. Pairs without PREFIX.json are not checked.

    Raises:
        ConfigError: names the pair, the tokenizer that made it and the one that the run would use.
    """
    recorded = {prefix: found for prefix in prefixes if (found := recorded_identity(prefix)) is not None}
    if not recorded:
        return
    if name:
        said, wanted = f"data.tokenizer is {name!r}", tokenizer_for(name).unique_identifiers
    else:
        first = next(iter(recorded))
        said, wanted = f"{first} was made by {recorded[first]['name']!r}", recorded[first]["identity"]
    for prefix, found in recorded.items():
        if found["identity"] != wanted:
            raise ConfigError(
                f"data at {prefix} was made by tokenizer {found['name']!r} {_short(found['identity'])}, but {said} "
                f"{_short(wanted)}; all data of a run has one tokenizer"
            )


def _short(identity: dict[str, Any]) -> str:
    return "(" + ", ".join(f"{k} {str(v)[:12]}" for k, v in identity.items() if k != "class") + ")"
