"""Texts that are written with a cache are those that are written without, and cost a token's work for each token."""

import functools
import json
import random

import pytest
import torch
from hf_helpers import CASES, peer_and_import, write_folder
from model_helpers import scaled, small

from sixfold.gpt.commands import cli
from sixfold.gpt.commands import sample as sample_module
from sixfold.gpt.commands.next_logits import NextLogits, in_view
from sixfold.gpt.commands.sample import sample, sample_many, stream
from sixfold.gpt.data.tokenizer import ByteTokenizer
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.decoder import GPTModel


class Numbers:
    """A token is a number, the end of a document 99."""

    name, vocab_size, eod, pad = "numbers", 100, 99, 99

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return "".join(f"{one} " for one in ids)


@functools.cache
def sharp(**fields):
    """A model whose likeliest tokens are far from the next."""
    return scaled(GPTModel(small(vocab_size=257, **fields)).eval(), 8.0)


def read_by(model, monkeypatch):
    """Tokens of each call of the model, filled as it is called."""
    calls, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda x, *, cache=None: calls.append(x.numel()) or forward(x, cache=cache))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_without_a_cache_and_those_peer_and_import(case):
    pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    peer, model = peer_and_import(case)
    prompt, how = "7 1 44 20 3 62 8", {"tokens": 30, "temperature": 0, "context": 64}
    text = sample(model, Numbers(), prompt, **how)
    assert text == sample(model, Numbers(), prompt, **how, cache=False)
    ids = torch.tensor([Numbers().encode(prompt)])
    greedy = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": 99, "pad_token_id": 99}
    theirs = peer.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
    expected = theirs[0, ids.shape[1] :].tolist()
    assert Numbers().encode(text) == [one for one in expected if one != 99]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 5}], ids=["full", "sliding"])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("drop", [1, 7, 24])
@pytest.mark.parametrize("prompt", ["", "seven words that are longer than a context is"])
def test_a_text_longer_than_the_context_is_the_one_without_a_cache(fields, mask, drop, prompt):
    how = {"tokens": 60, "context": 24, "document_mask": mask, "drop": drop, "temperature": 0.8, "seed": 3}
    texts = [sample(sharp(**fields), ByteTokenizer(), prompt, cache=cache, **how) for cache in (True, False)]
    assert texts[0] == texts[1] != ""


def test_of_a_full_context_so_many_tokens_leave_at_once():
    row = list(range(10))
    assert [in_view(row[:n], 4) for n in (3, 4, 5, 6)] == [[0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    seen = [in_view(row[:n], 4, 3) for n in (4, 5, 6, 7, 8)]
    assert seen == [[0, 1, 2, 3], [3, 4], [3, 4, 5], [3, 4, 5, 6], [6, 7]]


def test_each_token_is_read_once_until_the_context_is_full(monkeypatch):
    model = sharp()
    calls = read_by(model, monkeypatch)
    sample(model, Numbers(), "1 2 3 4 5", tokens=20, top_k=0, temperature=2, context=100)
    assert calls == [5] + [1] * 19
    calls.clear()
    sample(model, Numbers(), "1 2 3 4 5", tokens=20, top_k=0, temperature=2, context=16)
    assert calls == [5] + [1] * 11 + [16] * 8, "behind that each token moves all others"
    calls.clear()
    sample(model, Numbers(), "1 2 3 4 5", tokens=40, top_k=0, temperature=2, context=16, drop=8)
    assert calls == ([5] + [1] * 11 + ([9] + [1] * 7) * 4)[:40]
    calls.clear()
    sample(model, Numbers(), "1 2 3", tokens=4, context=16, cache=False)
    assert calls == [3, 4, 5, 6]


def test_an_empty_prompt_reads_the_end_of_a_document_alone_and_then_begins_anew(monkeypatch):
    model = sharp()
    calls = read_by(model, monkeypatch)
    sample(model, Numbers(), tokens=4, top_k=0, temperature=2)
    assert calls == [1, 1, 1, 1]
    texts = [sample(model, ByteTokenizer(), tokens=30, temperature=0, cache=cache) for cache in (True, False)]
    assert texts[0] == texts[1]


PROMPTS = ["", "a", "The quick brown fox", "xyz " * 9, "The quick"]


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, False])
def test_prompts_of_a_batch_have_the_texts_that_each_has_alone(cache):
    for how in ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}, {"context": 16, "drop": 4}):
        how = {"tokens": 20, **how}
        alone = [sample(sharp(), ByteTokenizer(), prompt, **how) for prompt in PROMPTS]
        assert sample_many(sharp(), ByteTokenizer(), PROMPTS, cache=cache, **how) == alone
        assert len(set(alone)) > 1
    assert sample_many(sharp(), ByteTokenizer(), []) == []
    assert sample_many(sharp(), ByteTokenizer(), ["a", "b"], tokens=0) == ["", ""]


class Countdown(torch.nn.Module):
    """Likeliest after n is n - 1, after 0 the end of a document."""

    def __init__(self):
        super().__init__()
        self.config, self.scores = small(), torch.nn.Parameter(torch.eye(100).roll(-1, 1))
        self.rows = []

    def forward(self, x, *, cache=None):
        self.rows.append(len(x))
        return self.scores[x]


def test_a_batch_goes_on_without_the_texts_that_have_ended():
    model, prompts = Countdown(), ["2", "3", "9", "12"]
    texts = sample_many(model, Numbers(), prompts, temperature=0, tokens=30)
    assert texts == ["".join(f"{n} " for n in reversed(range(int(first)))) for first in prompts]
    assert model.rows == [4] * 4 + [2] * 6 + [1] * 3, "and is read anew when half of it has ended"


def test_rows_that_are_others_than_before_are_read_anew():
    model = sharp()
    read, anew = NextLogits(model, 20), NextLogits(model, 20, cache=False)
    rows = [[[1, 2]], [[1, 2, 3]], [[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5]], [[1, 9, 3, 4, 5, 6]]]
    rows += [[[1], [2, 3]], [[1, 4], [2, 3, 5]], [[1, 4, 6], [2, 3, 5, 7, 8]], [[2]]]
    for one in rows:
        torch.testing.assert_close(read(one), anew(one), rtol=0, atol=1e-5)


def test_a_call_that_failed_is_no_part_of_what_was_read(monkeypatch):
    model = sharp()
    read, anew = NextLogits(model, 20), NextLogits(model, 20, cache=False)
    read([[1, 2, 3]])
    with monkeypatch.context() as patched:
        patched.setattr(model.layers["2"], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            read([[1, 2, 3, 4]])
    torch.testing.assert_close(read([[1, 2, 3, 4]]), anew([[1, 2, 3, 4]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("decoder", ["ByteLevel", "Metaspace"])
def test_the_pieces_of_a_long_text_are_the_decoded_whole(tmp_path, monkeypatch, decoder):
    library = pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    from sixfold.gpt.data.tokenizer import tokenizer_for

    words = ["naïve café", "日本語 テキスト", "plain words  and   spaces\n\n", "🙂🙃 mixed"]
    made = library.Tokenizer(library.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = getattr(library.pre_tokenizers, decoder)()
    made.decoder = getattr(library.decoders, decoder)()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet() if decoder == "ByteLevel" else []
    kind = library.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(words, kind)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_for(str(tmp_path / "tokenizer.json"))
    model, prompt = GPTModel(small(vocab_size=tokenizer.vocab_size)), tokenizer.encode("plain")
    rng = random.Random(1)
    ids = [rng.choice([one for one in range(tokenizer.vocab_size) if one != tokenizer.eod]) for _ in range(500)]
    draws = iter(ids)
    monkeypatch.setattr(sample_module, "next_token", lambda *_, **__: next(draws))
    pieces = list(stream(model, tokenizer, "plain", tokens=500, context=32, drop=16))
    assert "".join(pieces) == tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]
    assert len(pieces) > 100


def test_what_is_decoded_of_a_long_text_does_not_grow(monkeypatch):
    lengths, decode = [], Numbers.decode
    monkeypatch.setattr(Numbers, "decode", lambda self, ids: lengths.append(len(ids)) or decode(self, ids))
    text = sample(counting_up(), Numbers(), "5", tokens=600, temperature=0)
    assert len(text.split()) == 600 and max(lengths) <= 128


def counting_up():
    """98 follows 97, and 0 follows 98."""
    model = Countdown()
    with torch.no_grad():
        model.scores.copy_(torch.eye(100).roll(1, 1))
        model.scores[98] = 0
        model.scores[98, 0] = 1
    return model


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"drop": 0}, "drop is 0; it is >= 1"), ({"drop": 9, "context": 8}, "drop is 9 and the context 8")],
)
def test_a_drop_outside_its_range_is_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        sample(sharp(), ByteTokenizer(), **wrong)


def test_the_command_takes_several_prompts(tmp_path, capsys):
    pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    write_folder(tmp_path / "hf", "llama", vocab_size=257)
    assert cli.main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    words = ["sample", str(tmp_path / "run"), "--tokenizer", "bytes", "--tokens", "9", "--top-k", "1", "--drop", "4"]
    capsys.readouterr()
    for prompts in (["ab", "c"], ["c"], []):
        given = [word for prompt in prompts for word in ("--prompt", prompt)]
        assert cli.main([*words, *given, "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["prompt"] for line in lines] == (prompts or [""])
        assert cli.main([*words, *given]) == 0
        assert capsys.readouterr().out == "".join(f"{line['prompt']}{line['text']}\n" for line in lines)
        assert all(line["text"] for line in lines)
