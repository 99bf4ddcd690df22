"""Dropout whose bits are a function of what is dropped, and of nothing that a layout decides.

    train.seed, row of the order, place in the row --> row_keys --> kept --> dropped (this file)
                     decoder.py, once per micro-batch ----^           `-- for each layer and site in it

[Note: what a bit is of] Whether a channel of a token is kept depends on the seed, the number of the token's row in the
order of the run, the token's place in that row, the layer, the site in it, and the channel. The number of a row says
its step too: no other step reads it. So a bit is the same on any rank, in any microbatch, when a layer is computed
again, and after a resume. Nothing is drawn from a generator, so there is no state to save.

[Note: the hash] A chain of SplitMix64 (Steele, Lea and Flood 2014): each key is the finalizer of the key before plus a
counter times the golden gamma, in 64-bit integers that wrap around. The words of a token at a site are the stream of
the generator whose state is its key; a word is two channels of 32 bits. Integers alone, so CPU and GPU agree.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from sixfold.gpt.parallel.axes import Axes
from sixfold.gpt.parallel.sequence_parts import SequencePart

EMBEDDING = 0  # the first site; each layer has two
_GAMMA, _MIX = -0x61C8864680B583EB, (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # 9E37..., BF58..., 94D0..., signed


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """What is set to 0 while a model trains, by ``train.seed``; the rest is divided by the share that is kept.

    Attributes:
        hidden: share of what attention and the feed-forward part add to hidden states.
        embedding: share of embedded tokens.
    """

    seed: int = 0
    hidden: float = 0.0
    embedding: float = 0.0

    @property
    def is_on(self) -> bool:
        """Something is dropped."""
        return self.hidden > 0 or self.embedding > 0


NONE = Dropout()


def after_attention(layer: int) -> int:
    """The site behind attention of a layer, by its global number."""
    return 2 * layer + 1


def after_feed_forward(layer: int) -> int:
    """The site behind the feed-forward part of a layer."""
    return 2 * layer + 2


@dataclass(frozen=True, slots=True)
class TokenKeys:
    """What layers need to drop hidden states.

    Attributes:
        keys_BS: (b, s) int64, of the tokens of a micro-batch that this rank has.
        hidden: share of hidden states that is dropped.
    """

    keys_BS: Tensor
    hidden: float


def row_keys(seed: int, rows_B: Tensor, places_S: Tensor) -> Tensor:
    """(B, S) int64: the key of each token, of its row's number in the order and its place in the row."""
    first = int.from_bytes(hashlib.sha256(f"{seed}:dropout".encode()).digest()[:8], "little", signed=True)
    rows = _finalized((rows_B + 1) * _GAMMA + first)
    return _finalized(rows.unsqueeze(1) + (places_S + 1) * _GAMMA)


def places_here(tokens: int, axes: Axes) -> list[range]:
    """Where in their rows the ``tokens`` of each row lie that this rank has between two blocks."""
    parts = axes.tp.size if axes.sharded_sequence else 1
    spans = SequencePart(axes.cp.rank, axes.cp.size).spans(tokens * parts * axes.cp.size)
    begin = axes.tp.rank * tokens if parts > 1 else 0
    found, at = [], 0
    for first, last in spans:
        low, high = max(begin, at), min(begin + tokens, at + last - first)
        if low < high:
            found.append(range(first + low - at, first + high - at))
        at += last - first
    return found


def token_keys(dropout: Dropout, rows_B: Tensor, x: Tensor, axes: Axes) -> TokenKeys:
    """Keys of the tokens of ``x``: hidden states (b, s, hidden), or (b, s / tp, hidden) with sequence parallelism."""
    places = [torch.arange(one.start, one.stop, device=x.device) for one in places_here(x.shape[1], axes)]
    together = places[0] if len(places) == 1 else torch.cat(places)
    return TokenKeys(row_keys(dropout.seed, rows_B.to(x.device), together), dropout.hidden)


def kept(keys_BS: Tensor, site: int, width: int, share: float) -> Tensor:
    """(B, S, width) bool: which channels stay where ``share`` of them is dropped."""
    states = _finalized(keys_BS + _wrapped((site + 1) * _GAMMA))
    words = (width + 1) // 2
    counters = torch.arange(1, words + 1, device=keys_BS.device) * _GAMMA
    halves = _finalized(states.unsqueeze(-1) + counters).view(torch.int32)
    # A half is uniform in [-2**31, 2**31): the lowest ``share`` of these numbers is dropped.
    return halves[..., :width] >= min(round(share * 2**32) - 2**31, 2**31 - 1)


def dropped(x: Tensor, keys_BS: Tensor, site: int, share: float) -> Tensor:
    """``x`` (b, s, hidden) with ``share`` of its elements 0, and the others divided by 1 - share."""
    if share == 0:
        return x
    return torch.where(kept(keys_BS, site, x.shape[-1], share), x * (1.0 / (1.0 - share)), 0.0)


def _finalized(z: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place of ``z``, a tensor of this file. Shifts are of unsigned words."""
    z ^= (z >> 30) & ((1 << 34) - 1)
    z *= _MIX[0]
    z ^= (z >> 27) & ((1 << 37) - 1)
    z *= _MIX[1]
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


def _wrapped(word: int) -> int:
    """``word`` modulo 2**64, signed as tensors hold it."""
    return (word + 2**63) % 2**64 - 2**63
