"""Sampling and whole-text scores, against models whose probabilities are known."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sixfold.gpt.commands.sample import next_token, sample, stream
from sixfold.gpt.commands.score import boundaries, nats_per_byte, windows
from sixfold.gpt.data.tokenizer import ByteTokenizer
from sixfold.gpt.errors import ConfigError


class Table(torch.nn.Module):
    """Next-token scores that depend on the last token only; notes what it was shown."""

    def __init__(self, scores):
        super().__init__()
        self.scores = torch.nn.Parameter(torch.as_tensor(scores))
        self.config = SimpleNamespace(vocab_size=len(scores))
        self.seen, self.cuts = [], []

    def forward(self, x, *, position_ids=None, cu_seqlens=None, labels=None):
        self.seen.append(x.clone())
        self.cuts.append(None if cu_seqlens is None else cu_seqlens.tolist())
        logits = self.scores[x]
        if labels is None:
            return logits
        return -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0].float()


def alphabet():
    """a follows the start, each letter the one before, the end follows z."""
    scores = torch.full((257, 257), -20.0)
    scores[256, ord("a")] = 20.0
    scores[range(97, 122), range(98, 123)] = 20.0
    scores[ord("z"), 256] = 20.0
    return Table(scores)


def test_an_empty_prompt_is_the_start_of_a_document_and_the_text_ends_with_it():
    assert sample(alphabet(), ByteTokenizer(), tokens=100) == "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("mask", "seen"), [(True, [[256], [97], [97, 98]]), (False, [[256], [256, 97], [256, 97, 98]])]
)
def test_the_end_that_begins_a_text_goes_with_the_first_draw_where_documents_were_read_by_themselves(mask, seen):
    model = alphabet()
    assert sample(model, ByteTokenizer(), tokens=3, document_mask=mask) == "abc"
    assert [x[0].tolist() for x in model.seen] == seen


def test_the_prompt_is_gone_on_from_and_not_repeated():
    assert sample(alphabet(), ByteTokenizer(), "xyzab", tokens=3, temperature=0) == "cde"


def test_the_model_sees_at_most_the_context():
    model = alphabet()
    sample(model, ByteTokenizer(), "abc", tokens=5, context=4)
    assert [x.tolist() for x in model.seen][-1] == [[ord(c) for c in "defg"]]


def test_a_seed_gives_the_same_text_and_another_seed_another():
    model = Table(torch.zeros(257, 257))
    texts = [sample(model, ByteTokenizer(), tokens=40, seed=seed, top_k=0) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_draws_follow_the_tempered_distribution_of_the_top_k():
    logits, generator = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3])), torch.Generator().manual_seed(0)
    drawn = np.bincount([next_token(logits, 0.5, 3, generator) for _ in range(4000)], minlength=4) / 4000
    squares = np.array([0.0, 0.16, 0.04, 0.09])
    assert drawn == pytest.approx(squares / squares.sum(), abs=0.03)
    assert next_token(logits, 0.0, 0, generator) == 1


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"temperature": -0.1}, {"temperature": math.nan}, {"top_k": -1}])
def test_a_value_outside_its_range_is_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        sample(alphabet(), ByteTokenizer(), **wrong)


def test_a_prompt_that_the_model_has_no_ids_for_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is 100"):
        sample(Table(torch.zeros(100, 100)), ByteTokenizer(), "hello")


@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 100, 101])
def test_windows_predict_every_id_but_the_first_once(length):
    ids = np.arange(length, dtype=np.uint16)
    pairs = [(i, o) for x, y in windows(ids, 4) for i, o in zip(x.ravel().tolist(), y.ravel().tolist(), strict=True)]
    assert pairs == [(i, i + 1) for i in range(length - 1)]


def test_boundaries_are_row_starts_and_places_after_an_end():
    rows = np.array([[1, 256, 2, 3], [4, 5, 6, 256], [256, 7, 8, 9]])
    assert boundaries(rows, 256).tolist() == [0, 2, 4, 8, 9, 12]


@pytest.mark.parametrize("document_mask", [True, False])
def test_the_score_is_the_sum_of_surprises_over_the_bytes(document_mask):
    rng = np.random.default_rng(0)
    model = Table(torch.from_numpy(rng.normal(size=(257, 257))))
    ids = rng.integers(0, 257, 77)
    ids[[20, 40, 76]] = 256
    p = model.scores.detach().log_softmax(-1)
    total = -sum(float(p[a, b]) for a, b in itertools.pairwise(ids))
    found = nats_per_byte(model, ids, seq_length=8, eod=256, document_mask=document_mask)
    assert found == pytest.approx(total / int((ids != 256).sum()), rel=1e-6)
    assert (model.cuts[0] is not None) == document_mask
    thirds = [nats_per_byte(model, ids, seq_length=8, eod=256, share=(k, 3)) for k in range(3)]
    assert sum(thirds) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(("top_p", "allowed"), [(1.0, {0, 1, 2, 3}), (0.8, {0, 1}), (0.81, {0, 1, 2}), (1e-9, {0})])
def test_top_p_draws_from_the_fewest_likeliest_tokens_that_reach_it(top_p, allowed):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()  # 0.5 + 0.3 is below 0.8 in no digit: both are enough
    generator = torch.Generator().manual_seed(1)
    drawn = {next_token(logits, 1.0, 0, generator, top_p=top_p) for _ in range(400)}
    assert drawn == allowed


def test_top_p_is_of_what_temperature_and_top_k_leave():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    generator = torch.Generator().manual_seed(1)
    drawn = {next_token(logits, 1.0, 2, generator, top_p=0.5) for _ in range(200)}
    assert drawn == {0}, "of two left, the first has 4 of 7"


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.1, math.nan])
def test_a_top_p_outside_its_range_is_refused(top_p):
    with pytest.raises(ConfigError, match="top_p is "):
        sample(alphabet(), ByteTokenizer(), top_p=top_p)


def test_the_pieces_of_a_stream_are_whole_characters_and_make_the_sample():
    euro = "a€z".encode()
    scores = torch.full((257, 257), -20.0)
    for before, after in itertools.pairwise([256, *euro, 256]):
        scores[before, after] = 20.0
    pieces = list(stream(Table(scores), ByteTokenizer(), temperature=0))
    assert pieces == ["a", "€", "z"]
    assert list(stream(Table(scores), ByteTokenizer(), tokens=2, temperature=0)) == ["a", "\ufffd"], "cut by tokens"
