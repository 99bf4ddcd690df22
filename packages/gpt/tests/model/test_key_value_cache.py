"""Rows that are read piece by piece, against transformers and against the whole row, on every architecture."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hf_helpers import CASES, peer_and_import
from model_helpers import scaled, small

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.decoder import GPTModel
from sixfold.gpt.model.key_value_cache import KeyValueCache

pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

TOKENS = torch.randint(0, 100, (3, 40), generator=torch.Generator().manual_seed(0))
PIECES = [[40], [1] * 40, [13, *[1] * 9, 5, 1, 12], [2, 20, 18]]


def in_pieces(model, tokens, pieces, **cache):
    kept = KeyValueCache(model.config, tokens.shape[1], **cache)
    ends = itertools.accumulate(pieces)
    with torch.inference_mode():
        read = [model(tokens[:, end - size : end], cache=kept) for size, end in zip(pieces, ends, strict=True)]
    assert kept.length == tokens.shape[1]
    return torch.cat(read, 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_row_in_pieces_are_transformers_of_the_whole(case):
    peer, model = peer_and_import(case)
    with torch.inference_mode():
        expected = peer(TOKENS).logits
    assert expected.std() > 0.1
    for pieces in PIECES:
        torch.testing.assert_close(in_pieces(model, TOKENS, pieces), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_padded_row_of_a_batch_has_the_logits_that_it_has_alone(case):
    _, model = peer_and_import(case)
    starts = [0, 17, 3]
    for pieces in [[40], [20, *[1] * 20], [18, 15, 7]]:
        found = in_pieces(model, TOKENS, pieces, starts=starts)
        for row, start in enumerate(starts):
            alone = in_pieces(model, TOKENS[row : row + 1, start:], [40 - start])[0]
            torch.testing.assert_close(found[row, start:], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 7, 39, 40, 100])
@pytest.mark.parametrize("types", [(), ("full_attention", "sliding_attention", "sliding_attention")])
def test_a_layer_that_slides_keeps_twice_its_window_at_most(window, types):
    config = small(sliding_window=window, layer_types=types)
    model = scaled(GPTModel(config), 3.0)
    with torch.no_grad():
        whole = model(TOKENS)
    for pieces in PIECES:
        torch.testing.assert_close(in_pieces(model, TOKENS, pieces), whole, rtol=0, atol=1e-5)
    kept = KeyValueCache(config, 1000)
    with torch.inference_mode():
        for place in range(40):
            model(TOKENS[:, place : place + 1], cache=kept)
    rooms = [kept._layers[layer].kept[0].shape[2] for layer in range(3)]
    assert rooms == [2 * window if config.slides(layer) else 1000 for layer in range(3)]


def test_latents_are_what_latent_attention_keeps():
    _, model = peer_and_import("deepseek_v3")
    kept = KeyValueCache(model.config, 50)
    with torch.inference_mode():
        model(TOKENS, cache=kept)
    assert [one.shape for one in kept._layers[1].kept] == [(3, 1, 50, 12 + 4)], "kv_lora_rank + qk_rope_head_dim"


def test_bfloat16_in_pieces_is_as_near_to_float32_as_the_whole_row():
    model = GPTModel(small())
    with torch.inference_mode():
        exact = model(TOKENS)
    half = model.to(torch.bfloat16)
    with torch.inference_mode():
        whole = (half(TOKENS).float() - exact).abs().mean()
    pieces = (in_pieces(half, TOKENS, PIECES[2]).float() - exact).abs().mean()
    assert pieces < 1.2 * whole


def test_the_labels_of_a_piece_have_the_losses_of_the_whole_row():
    model, labels = GPTModel(small()), TOKENS.roll(-1, 1)
    kept = KeyValueCache(model.config, 40)
    with torch.inference_mode():
        first = model(TOKENS[:, :25], labels=labels[:, :25], cache=kept)
        then = model(TOKENS[:, 25:], labels=labels[:, 25:], cache=kept)
        torch.testing.assert_close(torch.cat((first, then), 1), model(TOKENS, labels=labels), rtol=0, atol=1e-5)


def test_what_a_cache_cannot_read_is_refused_and_leaves_it_as_it_was():
    model = GPTModel(small())
    kept = KeyValueCache(model.config, 10)
    with pytest.raises(ConfigError, match="no gradients"):
        model(TOKENS[:, :3], cache=kept)
    with torch.inference_mode():
        model(TOKENS[:, :8], cache=kept)
        with pytest.raises(ConfigError, match="of 10 tokens has 8 and gets 3"):
            model(TOKENS[:, 8:11], cache=kept)
        with pytest.raises(ConfigError, match="of 3 rows gets 2"):
            model(TOKENS[:2, 8:9], cache=kept)
        with pytest.raises(ConfigError, match="leave out position_ids"):
            model(TOKENS[:, 8:9], position_ids=torch.full((3, 1), 8), cache=kept)
        with pytest.raises(ConfigError, match="of 2 rows gets 3"):
            model(TOKENS[:, :3], cache=KeyValueCache(model.config, 10, starts=[0, 1]))
        with pytest.raises(ConfigError, match=r"parallel\.cp is 2"):
            kept.check_piece(3, 1, SimpleNamespace(cp=SimpleNamespace(size=2), sharded_sequence=False), others=False)
        found = model(TOKENS[:, 8:10], cache=kept)
        torch.testing.assert_close(found, model(TOKENS[:, :10])[:, 8:], rtol=0, atol=1e-5)
