"""Tiny unmodified models of transformers, made from their configs, and data parallel emulated on a plain one.

third_party/test_transformers.py, ranks/test_transformers_ranks.py --> MODELS, emulate (this file)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32}


def llama(*, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            **SIZES, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, pad_token_id=0
        )
    )


def esm() -> nn.Module:
    """The encoder of protein language models (BioNeMo's ESM-2), with its tied head."""
    from transformers import EsmConfig, EsmForMaskedLM

    special = {"pad_token_id": 1, "mask_token_id": 30, "position_embedding_type": "rotary"}
    return EsmForMaskedLM(EsmConfig(**SIZES, **NO_DROPOUT, **special))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT))


MODELS = {
    "llama": (llama, "LlamaDecoderLayer"),
    "tied llama": (lambda: llama(tied=True), "LlamaDecoderLayer"),
    "esm": (esm, "EsmLayer"),
    "bert": (bert, "BertLayer"),
}


def make(name: str, reentrant: bool | None = None) -> nn.Module:
    """In training mode; ``reentrant``: activation checkpointing by transformers' own switch, in that form."""
    torch.manual_seed(0)
    net = MODELS[name][0]().train()
    if reentrant is not None:
        net.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    return net


def tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(2, 30, (2, 7), generator=generator)


def loss_of(call: Any, step: int, rank: int) -> Tensor:
    x = tokens(step, rank)
    return call(input_ids=x, attention_mask=torch.ones_like(x), labels=x).loss


def emulate(name: str, *, ranks: int, steps: int) -> dict[str, Tensor]:
    """Weights after ``steps`` of plain data parallel: gradients added from rank 0 on, divided once."""
    net = make(name)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(steps):
        for rank in range(ranks):
            loss_of(net, step, rank).backward()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in net.state_dict().items()}
