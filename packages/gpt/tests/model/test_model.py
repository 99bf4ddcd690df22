"""The model: names, stages, recomputation, what it refuses. Its values are compared in test_transformers.py."""

import pytest
import torch
from model_helpers import boundaries, small

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.attention import BLOCKS_LONGEST
from sixfold.gpt.model.decoder import GPTModel, TiedHead
from sixfold.gpt.parallel.stages import stage_layers

INPUTS = {
    "labels": torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(3)),
    "cu_seqlens": boundaries(2, 24, [5, 30]),
}
TOKENS = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(2))


def test_parameters_carry_the_canonical_names_and_shapes():
    found = {
        name: tuple(p.shape)
        for name, p in GPTModel(small(num_layers=1, qkv_bias=True, qk_norm=True)).named_parameters()
    }
    assert found == {
        "embedding.weight": (128, 32),
        "layers.0.attention_norm.weight": (32,),
        "layers.0.attention.q.weight": (32, 32),
        "layers.0.attention.q.bias": (32,),
        "layers.0.attention.k.weight": (16, 32),
        "layers.0.attention.k.bias": (16,),
        "layers.0.attention.v.weight": (16, 32),
        "layers.0.attention.v.bias": (16,),
        "layers.0.attention.out.weight": (32, 32),
        "layers.0.attention.q_norm.weight": (8,),
        "layers.0.attention.k_norm.weight": (8,),
        "layers.0.ffn_norm.weight": (32,),
        "layers.0.ffn.gate.weight": (48, 32),
        "layers.0.ffn.up.weight": (48, 32),
        "layers.0.ffn.down.weight": (32, 48),
        "norm.weight": (32,),
    }
    assert "head.weight" in dict(GPTModel(small(tie_embeddings=False)).named_parameters())


@pytest.mark.parametrize("fields", [{}, {"tie_embeddings": False}, {"qkv_bias": True, "qk_norm": True, "head_dim": 12}])
def test_num_parameters_counts_the_model_without_padding(fields):
    config = small(**fields)
    model = GPTModel(config, device="meta")
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    tables = 1 if config.tie_embeddings else 2
    assert config.num_parameters == sum(p.numel() for p in model.parameters()) - tables * padding


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.slow
def test_a_chain_of_stages_is_bitwise_the_whole_model(stages, tied):
    config = small(tie_embeddings=tied)
    whole = GPTModel(config)
    losses = whole(TOKENS, **INPUTS)
    losses.sum().backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    x, found = TOKENS, {}
    parts = [
        GPTModel(config, pre_process=s == 0, post_process=s == stages - 1, vp_stage=s, layers=layers)
        for s, layers in enumerate(stage_layers(config.num_layers, stages))
    ]
    for part in parts:
        x = part(x, **INPUTS)
    assert torch.equal(x, losses)
    x.sum().backward()
    for part in parts:
        for name, parameter in part.named_parameters():
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        # A tied embedding on two stages: autograd of the whole model adds its two uses in the other order.
        tolerance = 1e-6 if name == "embedding.weight" and tied else 0.0
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


def test_the_last_stage_holds_its_tied_copy_as_a_module_of_its_own():
    part = GPTModel(small(), pre_process=False, layers=range(2, 3))
    assert isinstance(part.embedding, TiedHead)
    assert torch.equal(part.embedding.weight, GPTModel(small()).embedding.weight)
    x = torch.randn(1, 2, 32)
    assert torch.equal(part.embedding(x), x @ part.embedding.weight.T)


def test_logits_are_cut_to_the_vocabulary_and_padding_never_moves():
    model = GPTModel(small())
    assert model(TOKENS).shape == (2, 24, 100)
    model(TOKENS, **INPUTS).sum().backward()
    assert not model.embedding.weight.grad[100:].any()
    assert model.embedding.weight.grad[:100].any()


def test_the_loss_of_a_token_is_that_of_its_logits_and_masked_ones_are_zero():
    model, mask = GPTModel(small()), torch.ones(2, 24)
    mask[0, 4:9] = 0
    losses = model(TOKENS, **INPUTS, loss_mask=mask)
    logits = model(TOKENS, cu_seqlens=INPUTS["cu_seqlens"])
    expected = -torch.log_softmax(logits, -1).gather(-1, INPUTS["labels"].unsqueeze(-1)).squeeze(-1) * mask
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert (losses == 0).equal(mask == 0)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("s", [24, BLOCKS_LONGEST + 8])
@pytest.mark.slow
def test_recomputation_leaves_every_bit_of_losses_and_gradients(mode, s):
    tokens = torch.randint(0, 100, (1, s), generator=torch.Generator().manual_seed(4))
    results = []
    for recompute in ("none", mode):
        model = GPTModel(small())
        model.recompute = recompute
        losses = model(tokens, labels=tokens, cu_seqlens=boundaries(1, s, [11]))
        losses.sum().backward()
        results.append([losses, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_bfloat16_copy_computes_in_bfloat16_and_stays_near():
    model = GPTModel(small())
    with torch.no_grad():
        reference = model(TOKENS, **INPUTS)
        losses = model.bfloat16()(TOKENS, **INPUTS)
    assert losses.dtype == torch.float32
    assert (losses - reference).abs().max() < 0.02


def test_losses_do_not_depend_on_the_other_rows_of_a_micro_batch():
    model = GPTModel(small())
    whole = model(TOKENS, **INPUTS)
    for row in range(2):
        alone = model(
            TOKENS[row : row + 1], labels=INPUTS["labels"][row : row + 1], cu_seqlens=boundaries(1, 24, [[5], [6]][row])
        )
        torch.testing.assert_close(alone[0], whole[row], rtol=1e-6, atol=1e-6)


def test_meta_leaves_no_storage_and_initialize_repeats_itself():
    assert all(p.is_meta for p in GPTModel(small(), device="meta").parameters())
    model = GPTModel(small())
    first = {name: p.clone() for name, p in model.named_parameters()}
    model.initialize(5)
    assert not torch.equal(model.embedding.weight, first["embedding.weight"])
    model.initialize(1234)
    assert all(torch.equal(p, first[name]) for name, p in model.named_parameters())


def test_sharded_state_dict_holds_the_live_weights_and_marks_the_tied_copy():
    model = GPTModel(small())
    state = model.sharded_state_dict()
    assert set(state) == {f"model.{name}" for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        entry = state[f"model.{name}"]
        assert entry.key == f"model.{name}"
        assert tuple(entry.global_shape) == tuple(parameter.shape)
        assert entry.data.data_ptr() == parameter.data_ptr()
        assert not any(entry.replica_id)
    last = GPTModel(small(), pre_process=False, layers=range(2, 3)).sharded_state_dict(prefix="")
    assert any(last["embedding.weight"].replica_id)
    assert not any(last["norm.weight"].replica_id)


def test_layers_outside_the_model_are_refused():
    with pytest.raises(ConfigError, match=r"layers are range\(2, 4\) and model.num_layers is 3"):
        GPTModel(small(), layers=range(2, 4))
