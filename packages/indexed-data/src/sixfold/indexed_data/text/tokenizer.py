"""What the builder needs of a tokenizer.

tokenizers.py, tokenizer_files.py --> Tokenizer (this file) --> parts.py, fingerprints.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Messages(list[dict[str, Any]]):
    """The messages of a conversation, and the tools that it may call, which a template writes too."""

    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """One way to turn text into ids, whoever made it."""

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
    # messages, and tools=... if there are any -> ids, and whether each counts in the loss
    encode_chat: Callable[..., tuple[Any, Any]] | None = None
    encode_batch: Callable[[list[str]], list[Any]] | None = None  # the same ids of several texts, if that is faster
