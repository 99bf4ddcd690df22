"""What simpler models of the same text reach, in nats per byte: the lines that a loss is measured against.

    training documents --> unigram, bigram --.
    validation text --> zlib, lzma -----------+--> references (this file) --> demo.py --> loss_plot.py

The two count models are fitted on the training text and measured on the validation text; the two compressors see the
validation text only, whole, with nothing learnt before. numpy and the standard library.
"""

from __future__ import annotations

import lzma
import math
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Counts of a byte pair are shared out as if each byte had followed KAPPA times more by its overall frequency.
KAPPA = 8.0


def unigram(train: bytes, valid: bytes) -> float:
    """Mean -log p of the bytes of ``valid`` under the frequencies of ``train``, each byte counted once more."""
    return float(-np.log(_frequencies(train))[_bytes(valid)].mean())


def bigram(train: bytes, valid: bytes) -> float:
    """Mean -log p(byte | byte before) on ``valid``; pairs of ``train``, smoothed towards the unigram frequencies.

    Source: Dirichlet prior smoothing, Zhai and Lafferty 2004. The first byte is measured by its frequency alone.
    """
    frequencies = _frequencies(train)
    before, after = _bytes(train)[:-1].astype(np.int64), _bytes(train)[1:]
    pairs = np.bincount(before * 256 + after, minlength=65536).reshape(256, 256)
    p = (pairs + KAPPA * frequencies) / (pairs.sum(axis=1, keepdims=True) + KAPPA)
    ids = _bytes(valid)
    total = -math.log(frequencies[ids[0]]) - np.log(p[ids[:-1], ids[1:]]).sum()
    return float(total / len(ids))


def compressed(valid: bytes, size: int) -> float:
    """Nats per byte of a text that was compressed to ``size`` bytes."""
    return size * 8 * math.log(2) / len(valid)


def references(train: Sequence[bytes], valid: Sequence[bytes]) -> dict[str, float]:
    """The four lines of the demo.

    Args:
        train, valid: documents in file order; they are joined without separators.
    Returns:
        {"unigram", "bigram", "zlib", "lzma"}, nats per byte; zlib at level 9, lzma at preset 9.
    """
    train_text, valid_text = b"".join(train), b"".join(valid)
    return {
        "unigram": unigram(train_text, valid_text),
        "bigram": bigram(train_text, valid_text),
        "zlib": compressed(valid_text, len(zlib.compress(valid_text, 9))),
        "lzma": compressed(valid_text, len(lzma.compress(valid_text, preset=9))),
    }


def _bytes(text: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text, dtype=np.uint8)


def _frequencies(text: bytes) -> npt.NDArray[np.float64]:
    counts = np.bincount(_bytes(text), minlength=256) + 1.0
    return np.asarray(counts / counts.sum(), dtype=np.float64)
