"""The peer: transformers' Llama, Qwen2 and Qwen3 in one process, float32."""

import functools

import pytest
import torch
from model_helpers import boundaries, small

from sixfold.gpt.config.train_config import OptimizerConfig
from sixfold.gpt.engine.optimizer import build_optimizer
from sixfold.gpt.model.decoder import GPTModel

pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

NAMES = {
    "attention_norm": "input_layernorm", "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj", "attention.out": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES = {
    "llama": {"tie_embeddings": False},
    "llama_tied": {"rope_theta": 500.0},
    "llama_rope_scaling": {"rope_scaling": LLAMA3},
    "qwen2": {"qkv_bias": True, "tie_embeddings": False},
    "qwen3": {"qk_norm": True, "head_dim": 12},
}


def peer_name(name):
    """layers.3.attention.q.weight -> model.layers.3.self_attn.q_proj.weight."""
    head, _, leaf = name.rpartition(".")
    if head == "embedding":
        return f"model.embed_tokens.{leaf}"
    if head == "head":
        return f"lm_head.{leaf}"
    if head == "norm":
        return f"model.norm.{leaf}"
    _, layer, part = head.split(".", 2)
    return f"model.layers.{layer}.{NAMES[part]}.{leaf}"


def peer_of(model):
    """The transformers model of the same weights; its vocabulary is the unpadded one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = model.config
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    rope = {"rope_theta": config.rope_theta, "rope_type": "default", **config.rope_scaling}
    peer_config = AutoConfig.for_model(
        kind, vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups, head_dim=config.head_dim, rms_norm_eps=config.norm_eps,
        rope_parameters=rope, tie_word_embeddings=config.tie_embeddings, max_position_embeddings=256,
    )  # fmt: skip
    peer = AutoModelForCausalLM.from_config(peer_config)
    state = {}
    for name, parameter in model.named_parameters():
        cut = config.vocab_size if name in ("embedding.weight", "head.weight") else None
        state[peer_name(name)] = parameter.detach()[:cut].clone()
    missing = peer.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= ({"lm_head.weight"} if config.tie_embeddings else set())
    return peer


@functools.cache
def pair(case):
    """Our model and the peer's, with weights large enough to matter."""
    model = GPTModel(small(**CASES[case]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    return model, peer_of(model)


TOKENS = torch.randint(0, 100, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_peers(case):
    model, peer = pair(case)
    with torch.no_grad():
        expected = peer(TOKENS).logits
        assert expected.abs().max() > 0.3
        torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_packed_document_has_the_logits_of_the_peer_reading_it_alone(case):
    model, peer = pair(case)
    cu = boundaries(2, 40, [1, 13, 52, 79])
    with torch.no_grad():
        packed = model(TOKENS, cu_seqlens=cu).flatten(0, 1)
        for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            alone = peer(TOKENS.flatten()[None, begin:end]).logits[0]
            torch.testing.assert_close(packed[begin:end], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_peers(case):
    model, peer = pair(case)
    labels = TOKENS.roll(-1, 1)
    model.zero_grad()
    peer.zero_grad()
    model(TOKENS, labels=labels).sum().backward()
    torch.nn.functional.cross_entropy(peer(TOKENS).logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    theirs = dict(peer.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs[peer_name(name)].grad
        found = parameter.grad[: len(expected)]
        assert (found - expected).abs().max() < 2e-5 * expected.abs().max().clamp(min=1), name


@pytest.mark.slow
def test_twenty_adamw_steps_stay_with_the_peer_and_torchs_optimizer():
    model = GPTModel(small(tie_embeddings=False))
    peer = peer_of(model)
    settings = OptimizerConfig(lr=3e-3, weight_decay=0.1)
    ours = build_optimizer(settings, model.named_parameters())
    decay = [p for p in peer.parameters() if p.dim() >= 2]
    rest = [p for p in peer.parameters() if p.dim() < 2]
    theirs = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=3e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        # Few ids, so that twenty steps learn something.
        tokens = torch.randint(0, 100, (4, 33), generator=generator) % 7
        x, y = tokens[:, :-1], tokens[:, 1:]
        loss = model(x, labels=y).mean()
        reference = torch.nn.functional.cross_entropy(peer(x).logits.flatten(0, 1), y.flatten())
        assert abs(loss.item() - reference.item()) < 2e-6 * reference.item(), f"step {step}"
        for optimizer, value in ((ours, loss), (theirs, reference)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    assert reference.item() < 2.5
