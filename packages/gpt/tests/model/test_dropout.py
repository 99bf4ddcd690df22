"""Bits of dropout: those of a written-out hash, the same at every cut, and of the statistics of coins."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from config_helpers import config_with, words_of

from sixfold.gpt import GPTModel
from sixfold.gpt.config.resume_rules import noted_changes, resume_changes
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.dropout import Dropout, dropped, kept, places_here, row_keys
from sixfold.gpt.parallel.axes import ALONE, Axis
from sixfold.gpt.parallel.sequence_parts import SequencePart

GOLDEN = 0x9E3779B97F4A7C15
SITES = range(5)


class Group:
    """What an axis of several ranks has; nothing here sends."""


def splitmix(state):
    """The generator as it is published, in Python's integers."""
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def expected_bit(seed, row, place, site, channel, share):
    key = int.from_bytes(hashlib.sha256(f"{seed}:dropout".encode()).digest()[:8], "little")
    for counter in (row, place, site):
        key = splitmix((key + (counter + 1) * GOLDEN) % 2**64)
    word = splitmix((key + (channel // 2 + 1) * GOLDEN) % 2**64)
    half = word >> 32 if channel % 2 else word % 2**32
    signed = half - 2**32 if half >= 2**31 else half
    return signed >= round(share * 2**32) - 2**31


def keys(rows=range(4), places=range(64), seed=1234):
    return row_keys(seed, torch.tensor(list(rows)), torch.tensor(list(places)))


@pytest.mark.parametrize("width", [1, 6, 7])
def test_a_bit_is_that_of_the_chain_of_published_hashes(width):
    rows, places = (0, 3, 10**12), (0, 1, 131071)
    for site, share in ((0, 0.1), (1, 0.5), (120, 0.9)):
        found = kept(keys(rows, places, seed=7), site, width, share)
        wanted = [[[expected_bit(7, r, p, site, c, share) for c in range(width)] for p in places] for r in rows]
        assert found.tolist() == wanted


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked(share):
    found = kept(keys(range(16)), 3, 512, share)
    rest = found.numel() * (1 - share)
    assert abs(float(found.sum()) - rest) < 5 * math.sqrt(rest * share)
    for axes in ((1, 2), (0, 2), (0, 1)):  # of each row, place and channel
        n = found.numel() // found.float().sum(axes).numel()
        assert (found.float().mean(axes) - (1 - share)).abs().max() < 6 * math.sqrt(share * (1 - share) / n)


@pytest.mark.parametrize("share", [1 - 2**-33, 1 - 2**-40, math.nextafter(1.0, 0.0)])
def test_the_largest_shares_keep_next_to_nothing(share):
    assert float(kept(keys(range(16)), 3, 512, share).float().mean()) < 1e-4


def test_coins_of_other_sites_seeds_rows_places_and_channels_know_nothing_of_each_other():
    first = kept(keys(), 1, 512, 0.5)
    others = [kept(keys(), site, 512, 0.5) for site in SITES if site != 1]
    others += [kept(keys(seed=1235), 1, 512, 0.5), kept(keys(range(4, 8)), 1, 512, 0.5)]
    others += [kept(keys(places=range(1, 65)), 1, 512, 0.5), first.roll(1, 2), first.roll(2, 2), first.roll(1, 1)]
    bound = 5 / math.sqrt(first.numel())
    for other in others:
        assert abs(float(((first * 2.0 - 1) * (other * 2.0 - 1)).mean())) < bound


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence", [True, False])
def test_ranks_have_the_places_of_their_parts_of_a_row(cp, tp, sequence):
    row = 32
    for c in range(cp):
        mine = [p for begin, end in SequencePart(c, cp).spans(row) for p in range(begin, end)]
        for t in range(tp):
            axes = replace(
                ALONE, cp=Axis(c, cp, Group() if cp > 1 else None), tp=Axis(t, tp, Group() if tp > 1 else None),
                sequence=sequence,
            )  # fmt: skip
            tokens = len(mine) // tp if sequence else len(mine)
            begin = t * tokens if sequence else 0
            found = [place for part in places_here(tokens, axes) for place in part]
            assert found == mine[begin : begin + tokens]


def test_what_is_left_is_scaled_and_the_gradient_goes_the_same_way():
    x = torch.randn(4, 64, 16, dtype=torch.float64, requires_grad=True)
    left = kept(keys(), 2, 16, 0.25)
    y = dropped(x, keys(), 2, 0.25)
    assert y.equal(torch.where(left, x * (1 / 0.75), 0.0))
    y.sum().backward()
    assert x.grad.equal(left.double() * (1 / 0.75)) and dropped(x, keys(), 2, 0.0) is x
    assert dropped(x.bfloat16(), keys(), 2, 0.25).dtype is torch.bfloat16


def test_a_model_drops_in_training_alone_and_needs_numbers_of_rows():
    config = config_with().model
    model = GPTModel(config)
    tokens, rows = torch.arange(64).view(2, 32), torch.tensor([5, 9])
    plain = model(tokens)
    model.dropout = Dropout(seed=1, hidden=0.2, embedding=0.1)
    with pytest.raises(ConfigError, match="row_numbers"):
        model(tokens)
    dropping = model(tokens, row_numbers=rows)
    assert dropping.equal(model(tokens, row_numbers=rows)) and not dropping.equal(plain)
    assert model(tokens[1:], row_numbers=rows[1:]).allclose(dropping[1:], atol=1e-6), "of its row alone"
    assert not model(tokens, row_numbers=rows + 1).allclose(dropping, atol=1e-3)
    assert model.eval()(tokens).equal(plain)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("train.hidden_dropout=1.0",), "train.hidden_dropout is 1.0"),
        (("train.attention_dropout=0.1",), "train.attention_dropout is 0.1; dropout of probabilities"),
        (
            ("train.embedding_dropout=0.1", "train.compile=true"),
            "train.embedding_dropout is 0.1 and train.compile true",
        ),
    ],
)
def test_what_does_not_go_is_refused_by_name(keys, says):
    with pytest.raises(ConfigError) as error:
        config_with(*keys)
    assert says in words_of(error)


def test_a_resume_may_change_it_and_says_so():
    resume_changes(config_with(), config_with("train.hidden_dropout=0.1"), step=2)
    assert noted_changes(config_with(), config_with("train.hidden_dropout=0.1")) == {"train.hidden_dropout": [0.0, 0.1]}
