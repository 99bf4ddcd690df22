"""Initial weights: values, slices, independence of layout."""

import hashlib
import math

import numpy as np
import pytest
import torch

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.model.decoder import GPTModel
from sixfold.gpt.model.initial_weights import BLOCK, initial_values, initializer
from sixfold.gpt.parallel.stages import stage_layers

CONFIG = GPTConfig(
    num_layers=5, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=100, qkv_bias=True, qk_norm=True
)


def philox_words(key, counter):
    """Four 64-bit words of Philox4x64-10 in plain integers, from the paper (Salmon et al. 2011)."""
    mask = 2**64 - 1
    c = [(counter >> (64 * i)) & mask for i in range(4)]
    k = [key & mask, key >> 64]
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(second >> 64) ^ c[1] ^ k[0], second & mask, (first >> 64) ^ c[3] ^ k[1], first & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


@pytest.mark.parametrize("index", [0, 1, 5, BLOCK // 2, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
def test_an_element_is_the_documented_function_of_seed_name_and_index(index):
    name, std = "layers.3.attention.q.weight", 0.02
    key = int.from_bytes(hashlib.sha256(f"7:{name}".encode()).digest()[:16], "little")
    block, place = divmod(index, BLOCK)

    def uniform(word):
        # numpy's generator counts before it draws: word 0 comes from counter 1.
        number = block * BLOCK + word
        return (philox_words(key, number // 4 + 1)[number % 4] >> 11) / 2**53

    pair = place % (BLOCK // 2)
    radius, angle = math.sqrt(-2 * math.log1p(-uniform(pair))), 2 * math.pi * uniform(BLOCK // 2 + pair)
    expected = std * radius * (math.cos(angle) if place < BLOCK // 2 else math.sin(angle))
    found = initial_values(7, name, (4 * BLOCK,), std, index, index + 1)
    assert found.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (0, 1), (5, 6), (BLOCK - 1, BLOCK + 1), (100, 3 * BLOCK + 9), (3 * BLOCK, 200 * 300)]
)
def test_a_slice_is_bitwise_the_slice_of_the_whole(start, stop):
    whole = initial_values(1, "head.weight", (200, 300), 0.02)
    assert whole.shape == (200, 300)
    torch.testing.assert_close(
        initial_values(1, "head.weight", (200, 300), 0.02, start, stop), whole.flatten()[start:stop], rtol=0, atol=0
    )


def test_threads_draw_the_same_bits():
    shape, before, drawn = (40, 16384), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            drawn.append(initial_values(1, "layers.0.ffn.up.weight", shape, 0.02, 77, 40 * 16384 - 5))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*drawn)


def test_values_are_normal_with_the_given_deviation():
    values = np.sort(initial_values(3, "a", (400, 500), 0.5).numpy().ravel().astype(np.float64) / 0.5)
    normal = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in values[::50]])
    empirical = np.arange(len(values))[::50] / len(values)
    # Kolmogorov-Smirnov at 2e5 samples: 1.95 / sqrt(n) is the 0.1 % line.
    assert np.abs(normal - empirical).max() < 1.95 / math.sqrt(len(values))


def test_names_and_seeds_give_unrelated_values():
    base = initial_values(1, "a", (1000,), 1.0)
    for other in (initial_values(2, "a", (1000,), 1.0), initial_values(1, "b", (1000,), 1.0)):
        assert abs(torch.corrcoef(torch.stack((base, other)))[0, 1]) < 0.15


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.slow
def test_a_stage_starts_with_the_weights_of_the_whole_model(stages, tied):
    config = GPTConfig(**{**CONFIG.__dict__, "tie_embeddings": tied})
    whole = GPTModel(config)
    whole.initialize(11)
    expected = dict(whole.named_parameters())
    seen = set()
    for stage, layers in enumerate(stage_layers(config.num_layers, stages)):
        part = GPTModel(config, pre_process=stage == 0, post_process=stage == stages - 1, layers=layers)
        part.initialize(11)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, expected[name]), name
            seen.add(name)
    assert seen == set(expected)


def test_deviations_norms_biases_and_padding_are_as_documented():
    model = GPTModel(GPTConfig(**{**CONFIG.__dict__, "tie_embeddings": False, "hidden_size": 64, "head_dim": 16}))
    parameters = dict(model.named_parameters())
    damped = 0.02 / math.sqrt(2 * CONFIG.num_layers)
    for name, parameter in parameters.items():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            rows = parameter[: CONFIG.vocab_size] if name in ("embedding.weight", "head.weight") else parameter
            expected = damped if name.endswith(("attention.out.weight", "ffn.down.weight")) else 0.02
            assert rows.std().item() == pytest.approx(expected, rel=0.06), name
    for name in ("embedding.weight", "head.weight"):
        assert parameters[name].shape[0] == 128
        assert not parameters[name][CONFIG.vocab_size :].any()


def test_modules_may_be_filled_one_by_one_in_any_order_and_dtype():
    expected = dict(GPTModel(CONFIG).named_parameters())
    model = GPTModel(CONFIG, device="meta")
    fill = initializer(CONFIG, 1234)
    for name, module in reversed(list(model.named_modules())):
        module.to_empty(device="cpu", recurse=False).to(torch.bfloat16)
        fill(name, module)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].bfloat16()), name
