"""Names of tensors in Hugging Face's files.

    canonical name, shape --> pieces (this file) --> convert.py

One of ours is one of theirs, but for the matrices of experts: ours have a leading axis of experts, in the files each
expert has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_INSIDE = {
    "attention_norm": "input_layernorm", "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj", "attention.out": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj", "ffn.router": "mlp.gate",
    "ffn.experts.gate": "mlp.experts.{}.gate_proj", "ffn.experts.up": "mlp.experts.{}.up_proj",
    "ffn.experts.down": "mlp.experts.{}.down_proj", "ffn.shared.gate": "mlp.shared_expert.gate_proj",
    "ffn.shared.up": "mlp.shared_expert.up_proj", "ffn.shared.down": "mlp.shared_expert.down_proj",
    "ffn.shared_gate": "mlp.shared_expert_gate",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the files.

    Attributes:
        expert: whose part of a canonical tensor it is; None: it is all of it.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None


def hf_name(name: str, names: Mapping[str, str]) -> str:
    """layers.3.attention.q.weight -> model.layers.3.self_attn.q_proj.weight; ``{}`` stands for an expert's number.

    Args:
        names: of an architecture, where they are not Llama's.
    """
    head, _, leaf = name.rpartition(".")
    if head in _OUTSIDE:
        return f"{_OUTSIDE[head]}.{leaf}"
    _, layer, part = head.split(".", 2)
    if whole := names.get(f"{part}.{leaf}"):
        return f"model.layers.{layer}.{whole}"
    return f"model.layers.{layer}.{names.get(part) or _INSIDE[part]}.{leaf}"


def pieces(name: str, shape: tuple[int, ...], names: Mapping[str, str]) -> list[Piece]:
    """The tensors that hold canonical tensor ``name`` of ``shape``, in the order of its leading axis."""
    theirs = hf_name(name, names)
    if "{}" not in theirs:
        return [Piece(theirs, shape)]
    return [Piece(theirs.format(expert), shape[1:], expert) for expert in range(shape[0])]
