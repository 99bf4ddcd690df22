"""Logits of the next token of growing rows, of which the model reads only the new tokens.

    rows of ids --> NextLogits (this file) --> GPTModel with a KeyValueCache --> (rows, vocabulary) --> sample.py, eval

A caller hands over whole rows. If each row is one of the call before with more tokens behind it, only these are read.
Else all is read anew: the rows have moved because the context is full, or they are others.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sixfold.gpt.model.key_value_cache import KeyValueCache

if TYPE_CHECKING:
    from sixfold.gpt.model.decoder import GPTModel


def in_view(ids: Sequence[int], context: int, drop: int = 1) -> list[int]:
    """The end of ``ids`` that fits into ``context``, without the oldest ones, ``drop`` at a time."""
    over = max(0, len(ids) - context)
    return list(ids[-(-over // drop) * drop :])


class Growing(Protocol):
    """A text that is being written. One that has ended still grows by a token at each draw, as its batch does."""

    ended: bool

    def view(self) -> list[int]:
        """The ids that the model sees."""

    def draw(self, logits: Tensor) -> object:
        """Take the next token."""


def write_all(texts: Sequence[Growing], read: NextLogits, tokens: int) -> None:
    """Draw at most ``tokens`` for each text, in one batch; those that have ended leave it when they are half of it."""
    batch = list(texts)
    for _ in range(tokens):
        if 2 * sum(text.ended for text in batch) >= len(batch):  # the others are read anew, and go on alone
            batch = [text for text in batch if not text.ended]
        if not batch:
            break
        for text, logits in zip(batch, read([text.view() for text in batch]).cpu(), strict=True):
            text.draw(logits)


class NextLogits:
    """Call it with rows of ids, whose lengths may differ.

    Args:
        tokens: most tokens of a row.
        cache: read new tokens alone, if ``model`` takes ``cache=``; without it each row is read whole, by itself.
    """

    def __init__(self, model: GPTModel, tokens: int, *, cache: bool = True) -> None:
        self.model, self.tokens = model, tokens
        self.device = next(model.parameters()).device
        self.cached = cache and "cache" in inspect.signature(model.forward).parameters
        self._cache: KeyValueCache | None = None
        self._rows: list[list[int]] = []

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(rows, vocabulary): logits of the token that follows each row."""
        if not self.cached:
            return torch.cat([self.model(torch.tensor([row], device=self.device))[:, -1] for row in rows])
        before, self._rows = self._rows, []  # if the model fails, nobody knows what the cache has
        new = _behind(before, rows)
        if new is None or self._cache is None:
            longest = max(map(len, rows))
            starts = [longest - len(row) for row in rows]
            self._cache = KeyValueCache(self.model.config, self.tokens, starts)
            new = [[0] * start + list(row) for start, row in zip(starts, rows, strict=True)]
        logits: Tensor = self.model(torch.tensor(new, device=self.device), cache=self._cache)[:, -1]
        self._rows = [list(row) for row in rows]
        return logits


def _behind(before: Sequence[list[int]], rows: Sequence[Sequence[int]]) -> list[Sequence[int]] | None:
    """The new tokens behind each row, equally many; None: they are other rows, or have grown unevenly or not at all."""
    if len(before) != len(rows):
        return None
    new = [row[len(old) :] for old, row in zip(before, rows, strict=True)]
    same = all(list(row[: len(old)]) == old for old, row in zip(before, rows, strict=True))
    return new if same and len(new[0]) and {len(one) for one in new} == {len(new[0])} else None
