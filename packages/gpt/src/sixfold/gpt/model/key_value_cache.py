"""What attention keeps of tokens that a model has read, so that the next token costs one token's work.

    new keys, values --> KeyValueCache.extend (this file) --> those of all that is seen --> attend (this file)

A model reads rows piece by piece. The first piece goes through the back ends of attention.py. Later ones, of a token
each as a rule, attend to what is kept by two matrix products. Nothing is kept twice: ``extend`` gives views.

[Note: rows of several lengths] They are padded on the left, and the padding is a document of its own: no query sees it,
and positions count from where a row's tokens start. So a row in a batch is what it is alone.

[Note: kept of a window] A layer that slides keeps twice its window at most. When that is full, the keys that later
queries see are moved to its front. So keys are moved once in a window of tokens, not at each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.parallel.axes import Axes


class KeyValueCache:
    """Keys and values of rows that ``GPTModel`` reads piece by piece: give it to each call of the model.

    Args:
        config: of the model.
        tokens: most tokens of a row, padding included; memory is taken when the first piece is read.
        starts: where the tokens of each row start, behind its padding; None: at 0. [Note: rows of several lengths]
    Attributes:
        length: tokens of a row that were read.
    """

    def __init__(self, config: GPTConfig, tokens: int, starts: Sequence[int] | None = None) -> None:
        self.config, self.tokens, self.length = config, tokens, 0
        self.starts = list(starts) if starts is not None and any(starts) else None
        self._layers: dict[int, _Layer] = {}
        self._starts_B1: Tensor | None = None

    def check_piece(self, b: int, s: int, axes: Axes, *, others: bool) -> None:
        """Refuse a piece of ``b`` rows of ``s`` tokens that cannot be read with this cache.

        Args:
            others: positions or documents are given beside it.
        Raises:
            ConfigError: why, and what works.
        """
        if torch.is_grad_enabled():
            raise ConfigError("a key-value cache has no gradients; call the model under torch.inference_mode()")
        if axes.cp.size > 1 or axes.sharded_sequence:
            raise ConfigError(
                f"a key-value cache takes whole rows, and parallel.cp is {axes.cp.size}, tensor_parallel sequences are "
                f"{'cut' if axes.sharded_sequence else 'whole'}; load the model with cp 1 and without them"
            )
        if others:
            raise ConfigError("a key-value cache counts positions itself; leave out position_ids and cu_seqlens")
        if self.length + s > self.tokens:
            raise ConfigError(
                f"a key-value cache of {self.tokens} tokens has {self.length} and gets {s}; make a larger one"
            )
        rows = next((layer.rows for layer in self._layers.values()), b if self.starts is None else len(self.starts))
        if rows != b:
            raise ConfigError(f"a key-value cache of {rows} rows gets {b}; make one for each batch")

    def boundaries(self, b: int, s: int) -> Tensor | None:
        """cu_seqlens of the first piece; None: each row is one document."""
        if self.starts is None:
            return None
        ends = {row * s + start for row, start in enumerate(self.starts)} | {row * s for row in range(b + 1)}
        return torch.tensor(sorted(ends), dtype=torch.int32)

    def positions(self, s: int, device: torch.device) -> Tensor:
        """(b or 1, s): of the next piece."""
        places = torch.arange(self.length, self.length + s, device=device).unsqueeze(0)
        return places if self.starts is None else places - self._starts_on(device)

    def extend(self, layer: int, *new: Tensor) -> Sequence[Tensor]:
        """Keep the ``new`` tensors of a layer, (b, s, heads, any width) each.

        Returns:
            All that queries of the piece see, or more: (b, n, heads, width) each; the last s are ``new``.
        """
        if (found := self._layers.get(layer)) is None:
            window = self.config.sliding_window if self.config.slides(layer) else 0
            found = self._layers[layer] = _Layer(new, self.tokens, window)
        return found.extend(new)

    def attend(self, *, sliding: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Attention of a later piece: q (b, s, heads, d), k (b, n, key heads, d), v (b, n, key heads, any width)."""
        config, starts = self.config, self.starts
        window = config.sliding_window if sliding else 0
        scale, cap = 1.0 / math.sqrt(config.head_dim), config.attn_logit_softcapping

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            b, s, heads, d = q.shape
            if window:  # no query of the piece sees an earlier one
                k, v = k[:, 1 - s - window :], v[:, 1 - s - window :]
            n, groups = k.shape[1:3]
            queries = q.transpose(1, 2).reshape(b, groups, -1, d)  # heads that share a key head, one after the other
            scores = (queries @ k.permute(0, 2, 3, 1)).float() * scale
            if cap:
                scores = (scores / cap).tanh_() * cap
            if s > 1 or starts is not None:
                unseen = self._unseen(s, n, window, q.device).unsqueeze(1)
                repeats = heads // groups
                scores = scores.view(b, groups, repeats, s, n).masked_fill(unseen.unsqueeze(1), -math.inf).flatten(2, 3)
            seen = torch.softmax(scores, -1).to(v.dtype) @ v.transpose(1, 2)
            return seen.view(b, heads, s, -1).transpose(1, 2)

        return attend

    def _unseen(self, s: int, n: int, window: int, device: torch.device) -> Tensor:
        """(b or 1, s, n) bool: which of the last n keys a query of the piece does not see."""
        end = self.length + s
        queries = torch.arange(self.length, end, device=device).unsqueeze(1)
        keys = torch.arange(end - n, end, device=device).unsqueeze(0)
        unseen = (keys > queries).unsqueeze(0)
        if window:
            unseen = unseen | (keys <= queries - window)
        return unseen if self.starts is None else unseen | (keys.unsqueeze(0) < self._starts_on(device).unsqueeze(-1))

    def _starts_on(self, device: torch.device) -> Tensor:
        """(b, 1): ``starts`` as a tensor, brought to the device once."""
        if self._starts_B1 is None:
            self._starts_B1 = torch.tensor(self.starts, device=device).unsqueeze(1)
        return self._starts_B1


class _Layer:
    """What one layer keeps: tensors (b, heads, room, width), of which the first ``end`` places are taken."""

    def __init__(self, new: Sequence[Tensor], tokens: int, window: int) -> None:
        self.rows, self.window, self.end = len(new[0]), window, 0
        room = min(tokens, 2 * window) if window else tokens
        self.kept = [one.new_empty(one.shape[0], one.shape[2], room, one.shape[3]) for one in new]

    def extend(self, new: Sequence[Tensor]) -> Sequence[Tensor]:
        first, begin, end = self.end == 0, self.end, self.end + new[0].shape[1]
        pieces = [one.transpose(1, 2) for one in new]
        if end <= self.kept[0].shape[2]:
            for kept, piece in zip(self.kept, pieces, strict=True):
                kept[:, :, begin:end] = piece
            self.end = end
            return new if first else [kept[:, :, :end].transpose(1, 2) for kept in self.kept]
        # [Note: kept of a window]
        seen = [torch.cat((kept[:, :, max(0, begin - self.window + 1) : begin], piece), 2)
                for kept, piece in zip(self.kept, pieces, strict=True)]  # fmt: skip
        self.end = min(self.window - 1, seen[0].shape[2])
        for kept, one in zip(self.kept, seen, strict=True):
            kept[:, :, : self.end] = one[:, :, one.shape[2] - self.end :]
        return [one.transpose(1, 2) for one in seen]
