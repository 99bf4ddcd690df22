"""Tokenizers by name, and the check that data and run mean the same one.

    data.tokenizer, PREFIX.json --> tokenizer_of (this file) --> blending (ids of document end), sample.py
                                `-> check_identity --> preflight

``bytes`` needs nothing; a Hugging Face ``tokenizer.json`` needs the extra ``tokenizers``. What made a pair is written
beside it, in PREFIX.json, by prepare.py. A pair without that file is taken as it is: where nothing else names a
tokenizer, no id is taken for the end of a document, and documents end where the pair's index says. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

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


class NoTokenizer:
    """Of pairs that nobody has named a tokenizer for: ids without text. No id ends a document: the index says where."""

    name = ""
    vocab_size = 0
    eod = -1
    pad = -1

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """What two equal tokenizers have in common and two different ones do not."""
        return {"class": "NoTokenizer"}

    def encode(self, text: str) -> NoReturn:
        """Refused: nothing says which ids a text has.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(NO_TOKENIZER)

    def decode(self, ids: Iterable[int]) -> NoReturn:
        """Refused: nothing says which text ids have.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(NO_TOKENIZER)


NO_TOKENIZER = (
    "nothing names the tokenizer of this run: data.tokenizer is empty and its pairs have no PREFIX.json; name it, "
    "as in `sixfold sample RUN --tokenizer tokenizer.json`"
)


class FileTokenizer:
    """A ``tokenizer.json`` as Hugging Face writes it.

    The end of a document is ``eod_token``; else the eos_token of a tokenizer_config.json beside it; else the first of
    ENDS that the vocabulary holds.

    Args:
        path: the file, or a folder that holds a tokenizer.json.
        eod_token: the text of the token that ends a document; "" looks for it.
    Attributes:
        template: a text begins as the file's template has it (a BOS), as it did in training.
    """

    template = False
    ENDS = (
        "<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "[SEP]", "[EOS]", "<EOS>", "<|eos|>",
        "<eod>", "<|eod|>", "<|eot_id|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )  # fmt: skip

    def __init__(self, path: str | Path, eod_token: str = "") -> None:
        self.path = _file_of(path)
        self.name = str(self.path)
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"tokenizer {str(path)!r} cannot be read ({why}); name 'bytes' or a tokenizer.json"
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
        # A file may say how a model's own inputs are cut and filled; a prompt is neither.
        self._library.no_truncation()
        self._library.no_padding()
        self._sha256 = _digest(text)
        ids = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1  # there may be gaps: not their number
        self.eod_token = self._end(eod_token, ids)
        self.eod = self.pad = int(ids[self.eod_token])

    def _end(self, wanted: str, ids: Mapping[str, int]) -> str:
        """The text of the token that ends a document."""
        special = [one.content for _, one in sorted(self._library.get_added_tokens_decoder().items()) if one.special]
        has = f"its special tokens are {', '.join(special[:20])}" if special else "it has no special tokens"
        if wanted:
            if wanted not in ids:
                raise ConfigError(f"{self.path} has no token {wanted!r} to end a document; {has}")
            return wanted
        for name in (_eos_beside(self.path), *self.ENDS):
            if name in ids:
                return name
        raise ConfigError(
            f"{self.path} has no end-of-document token by a usual name; {has}. Name the one that ends a document: "
            f"`sixfold prepare --eod-token NAME`, or data.eod_token in a configuration"
        )

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """The file's sha256, wherever it lies."""
        return {"class": "FileTokenizer", "sha256": self._sha256, "vocab_size": self.vocab_size, "eod": self.eod}

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens of the file's template where ``template`` says so, none after the text."""
        ids = list(self._library.encode(text, add_special_tokens=self.template).ids)
        while self.template and ids and ids[-1] == self.eod:
            ids.pop()
        return ids

    @property
    def lead(self) -> list[int]:
        """What the file's template puts before a text, as a BOS."""
        whole = self._library.encode("a", add_special_tokens=True)
        count = next((n for n, special in enumerate(whole.special_tokens_mask) if not special), 0)
        return list(whole.ids[:count])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return str(self._library.decode(list(ids)))


def _file_of(path: str | Path) -> Path:
    found = Path(path).resolve()
    return found / "tokenizer.json" if found.is_dir() else found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _eos_beside(path: Path) -> str:
    """The eos_token of a tokenizer_config.json beside a tokenizer.json; "" where there is none."""
    with suppress(OSError, ValueError):
        found = json.loads(path.with_name("tokenizer_config.json").read_bytes())
        token = found.get("eos_token") if isinstance(found, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else ""
    return ""


def tokenizer_for(name: str, eod_token: str = "") -> Tokenizer:
    """The tokenizer of that name: ``bytes`` or the path of a tokenizer.json, or of a folder that has one.

    Args:
        eod_token: of a tokenizer.json: the text of the token that ends a document; "" finds the usual ones.
    Raises:
        ConfigError: no such file, not a tokenizer, no such token, or the extra is not installed.
    """
    if name not in ("", "bytes"):
        return FileTokenizer(name, eod_token)
    if eod_token:
        raise ConfigError(
            f"the end of a document is given as {eod_token!r} and the tokenizer is 'bytes', whose documents end with "
            f"id 256; leave it out, or name a tokenizer.json"
        )
    return ByteTokenizer()


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


def _recorded(prefixes: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {prefix: found for prefix in prefixes if (found := recorded_identity(prefix)) is not None}


def tokenizer_of(prefixes: Sequence[str], name: str = "", eod_token: str = "") -> Tokenizer:
    """The tokenizer of a run: ``name`` if set, else what the first recorded PREFIX.json says, else `NoTokenizer`.

    Args:
        eod_token: as of `tokenizer_for`; "" takes that of the first PREFIX.json of the same file, if there is one.
    """
    recorded = list(_recorded(prefixes).values())
    if name:
        return tokenizer_for(name, eod_token or _recorded_end(recorded, name))
    if not recorded:
        return NoTokenizer()
    return tokenizer_for(recorded[0]["name"], eod_token or str(recorded[0].get("eod_token", "")))


def _recorded_end(recorded: Iterable[Mapping[str, Any]], name: str) -> str:
    """The token that ends a document where data was made by the very file ``name``; "" if none was."""
    named = [found for found in recorded if found.get("eod_token")]
    if not named or name == "bytes":
        return ""
    with suppress(OSError, UnicodeDecodeError):  # told when the tokenizer is opened
        digest = _digest(_file_of(name).read_text(encoding="utf-8"))
        return next((str(found["eod_token"]) for found in named if found["identity"].get("sha256") == digest), "")
    return ""


def check_identity(prefixes: Sequence[str], name: str = "", eod_token: str = "") -> None:
    """Refuse data that another tokenizer made than the one of the run. Pairs without PREFIX.json are not checked.

    Raises:
        ConfigError: names the pair, the tokenizer that made it and the one that the run would use.
    """
    recorded = _recorded(prefixes)
    if not recorded:
        return
    if name:
        said, wanted = f"data.tokenizer is {name!r}", tokenizer_of(prefixes, name, eod_token).unique_identifiers
    elif eod_token:
        said, wanted = f"data.eod_token is {eod_token!r}", tokenizer_of(prefixes, name, eod_token).unique_identifiers
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
