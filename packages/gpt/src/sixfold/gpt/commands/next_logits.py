"""Logits of the next token of rows that grow, of which a model reads only what is new.

    rows of ids --> NextLogits (this file) --> GPTModel with a KeyValueCache --> (rows, vocabulary) --> sample.py, eval

Who calls it hands over whole rows. If each is a row of the call before and what came behind it, the rest is read;
else all is read anew: rows that moved because the context is full, or other rows.
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
    """The end of ``ids`` that fits into ``context``; so many that ``drop`` divides their number are left out."""
    over = max(0, len(ids) - context)
    return list(ids[-(-over // drop) * drop :])


class Growing(Protocol):
    """A text that is being written; one that has ended still grows by a token at each draw, as its batch does."""

    ended: bool

    def view(self) -> list[int]: ...

    def draw(self, logits: Tensor) -> object: ...


def write_all(texts: Sequence[Growing], read: NextLogits, tokens: int) -> None:
    """Draw at most ``tokens`` for each text, of one batch, which goes on without those that have ended."""
    batch = list(texts)
    for _ in range(tokens):
        if 2 * sum(text.ended for text in batch) >= len(batch):  # the others are read anew, and go on alone
            batch = [text for text in batch if not text.ended]
        if not batch:
            break
        for text, logits in zip(batch, read([text.view() for text in batch]).cpu(), strict=True):
            text.draw(logits)


class NextLogits:
    """Call it with rows, their lengths may differ.

    Args:
        tokens: most tokens of a row.
        cache: read what is new alone, where ``model`` can: a decoder of the caller's own reads whole rows, one by one.
    """

    def __init__(self, model: GPTModel, tokens: int, *, cache: bool = True) -> None:
        self.model, self.tokens = model, tokens
        self.device = next(model.parameters()).device
        self.cached = cache and "cache" in inspect.signature(model.forward).parameters
        self._cache: KeyValueCache | None = None
        self._rows: list[list[int]] = []

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(rows, vocabulary): of the token that follows each row."""
        if not self.cached:
            return torch.cat([self.model(torch.tensor([row], device=self.device))[:, -1] for row in rows])
        before, self._rows = self._rows, []  # nothing is known of a cache when the model fails
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
    """What came behind each row, as much of each; None: they are other rows."""
    if len(before) != len(rows):
        return None
    new = [row[len(old) :] for old, row in zip(before, rows, strict=True)]
    same = all(list(row[: len(old)]) == old for old, row in zip(before, rows, strict=True))
    return new if same and len(new[0]) and {len(one) for one in new} == {len(new[0])} else None
