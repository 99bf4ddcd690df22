"""Reference lines against models written out in plain Python."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from sixfold.gpt.commands.reference_losses import KAPPA, bigram, references, unigram


def plain_unigram(train):
    counts = Counter(train)
    return {b: (counts[b] + 1) / (len(train) + 256) for b in range(256)}


def test_unigram_is_the_mean_surprise_under_training_frequencies():
    train, valid = b"abracadabra" * 7, b"cadabraz"
    p = plain_unigram(train)
    assert unigram(train, valid) == pytest.approx(-sum(math.log(p[b]) for b in valid) / len(valid), rel=1e-12)


def test_bigram_is_the_mean_surprise_after_the_byte_before():
    train, valid = b"abracadabra" * 7, b"cadabraz"
    p, pairs = plain_unigram(train), Counter(itertools.pairwise(train))
    total = -math.log(p[valid[0]])
    for a, b in itertools.pairwise(valid):
        follows = sum(n for (x, _), n in pairs.items() if x == a)
        total -= math.log((pairs[a, b] + KAPPA * p[b]) / (follows + KAPPA))
    assert bigram(train, valid) == pytest.approx(total / len(valid), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_noise_over_16_bytes_costs_log_16_by_every_model_and_compressor(seed):
    rng = np.random.default_rng(seed)
    train, valid = (rng.integers(64, 80, n, dtype=np.uint8).tobytes() for n in (200_000, 50_000))
    found = references([train], [valid])
    assert list(found) == ["unigram", "bigram", "zlib", "lzma"]
    for name, value in found.items():
        assert math.log(16) * 0.999 < value < math.log(16) * 1.25, name


def test_text_that_repeats_is_cheaper_the_more_a_model_sees():
    text = [b"the quick brown fox jumps over the lazy dog. "] * 200
    found = references(text, text)
    assert found["lzma"] < found["bigram"] < found["unigram"]
