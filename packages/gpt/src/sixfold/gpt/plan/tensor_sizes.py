"""What a rank has to store: tensors of a layer and of a stage, and how sixfold.fsdp groups them.

    config, parallel, layers of a rank --> units (this file) --> stored_bytes.py --> plan.py
    activations are in activation_bytes.py

Integers only: no torch, no tensors, no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import GPTConfig, ParallelConfig, TrainConfig

_QK_NORMS = ("q_norm", "k_norm")
_WHOLE_LATENTS = ("q_a", "kv_a")
_WHOLE = (*_WHOLE_LATENTS, "router", "router.bias", "shared_gate")
_MATRICES = ("q", "k", "v", "out", *_WHOLE_LATENTS, "q_b", "kv_b", "gate", "up", "down")  # Muon's
_QUANTIZED = (*_MATRICES, *(f"{of}.{name}" for of in ("experts", "shared") for name in ("gate", "up", "down")))


@dataclass(frozen=True, slots=True)
class Stream:
    """Tensors of a unit that the same ranks share, in the order of the module: elements on one rank before sharding.

    Attributes:
        moments: AdamW's (2) or Muon's (1), for each tensor.
        quantized: it travels as fp8; () where none does.
        whole: every tensor-parallel rank has it; () where tp is 1.
        experts: they are shared by the dp * cp / ep ranks that hold the same experts; else by all of dp x cp.
    """

    tensors: tuple[int, ...]
    moments: tuple[int, ...]
    quantized: tuple[bool, ...] = ()
    whole: tuple[bool, ...] = ()
    experts: bool = False

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(self.tensors)


@dataclass(frozen=True, slots=True)
class Unit:
    """What is gathered and freed together: its class, and its tensors by the ranks that share them."""

    kind: str
    streams: tuple[Stream, ...]

    @property
    def numel(self) -> int:
        """Elements of all tensors on one rank."""
        return sum(stream.numel for stream in self.streams)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of each."""
        return tuple(numel for stream in self.streams for numel in stream.tensors)


def layer_tensors(model: GPTConfig, layer: int, tp: int = 1, ep: int = 1) -> dict[str, int]:
    """Elements of each tensor of a layer on one rank, before fsdp shards them, in the order of the module."""
    hidden = model.hidden_size
    queries = model.num_attention_heads * model.head_dim // tp
    keys = model.num_query_groups * model.head_dim // tp
    before, behind = model.norm_position != "post", model.norm_position != "pre"
    sizes = {"attention_norm": hidden} if before else {}
    if model.kv_lora_rank:
        sizes |= _latent_tensors(model, tp)
    else:
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            sizes[f"{name}"] = hidden * width
            if model.qkv_bias:
                sizes[f"{name}.bias"] = width
        sizes["out"] = queries * hidden
    if model.qk_norm:
        whole = model.qk_norm_over == "projection"
        sizes |= {"q_norm": queries * tp, "k_norm": keys * tp} if whole else dict.fromkeys(_QK_NORMS, model.head_dim)
    sizes |= {"attention_post_norm": hidden} if behind else {}
    sizes |= {"ffn_norm": hidden} if before else {}
    return sizes | _second_part(model, layer, tp, ep) | ({"ffn_post_norm": hidden} if behind else {})


def _latent_tensors(model: GPTConfig, tp: int) -> dict[str, int]:
    """Of latent attention."""
    hidden, heads, of_q, of_kv = (
        model.hidden_size,
        model.num_attention_heads // tp,
        model.q_lora_rank,
        model.kv_lora_rank,
    )
    sizes = {"q": hidden * heads * model.head_dim}
    if of_q:
        sizes = {"q_a": hidden * of_q, "q_a_norm": of_q, "q_b": of_q * heads * model.head_dim}
    sizes |= {"kv_a": hidden * (of_kv + model.qk_rope_head_dim), "kv_a_norm": of_kv}
    sizes["kv_b"] = of_kv * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return sizes | {"out": heads * model.v_head_dim * hidden}


def _second_part(model: GPTConfig, layer: int, tp: int, ep: int) -> dict[str, int]:
    """Of the feed-forward part."""
    hidden, sizes = model.hidden_size, dict[str, int]()
    if not model.has_experts(layer):
        return dict.fromkeys(("gate", "up", "down"), hidden * model.ffn_hidden_size // tp)
    each = model.num_experts // ep * hidden * model.moe_ffn_hidden_size // tp
    sizes["router"] = model.num_experts * hidden
    sizes |= {"router.bias": model.num_experts} if model.expert_bias else {}
    sizes |= dict.fromkeys(("experts.gate", "experts.up", "experts.down"), each)
    if model.shared_ffn_hidden_size:
        shared = hidden * model.shared_ffn_hidden_size // tp
        sizes |= dict.fromkeys(("shared.gate", "shared.up", "shared.down"), shared)
        if model.shared_expert_gate:
            sizes["shared_gate"] = hidden
    return sizes


def table_numel(model: GPTConfig, tp: int = 1) -> int:
    """Elements of the embedding, and of the head, with vocabulary padding."""
    return model.padded_vocab_size // tp * model.hidden_size


def stage_parameters(model: GPTConfig, layers: Sequence[int], *, first: bool, last: bool) -> int:
    """Parameters of a stage before any split, without vocabulary padding; a tied table counts on the first stage."""
    tables = model.vocab_size * model.hidden_size * (first + (last and not model.tie_embeddings))
    inside = sum(sum(layer_tensors(model, layer).values()) for layer in layers)
    return inside + tables + (model.hidden_size if last else 0)


def units_of_rank(
    config: TrainConfig, parallel: ParallelConfig, stages: Mapping[int, Sequence[int]], *, tied_here: bool
) -> tuple[Unit, ...]:
    """The fsdp units of a rank: the root unit, then the others in the order of the module.

    Args:
        parallel: with the degrees of the world.
        stages: layers of each stage on the rank.
        tied_here: the first and the last stage have one embedding and are both on the rank. The root unit then holds
            it, or with ``config.two_tables`` the head has a copy without an optimizer.
    """
    model, last, tp = config.model, parallel.stages - 1, parallel.tp
    one_table, second = tied_here and not config.two_tables, 0 if tied_here else 2
    table = Stream((table_numel(model, tp),), (2,))
    root: list[int] = []
    units: list[Unit] = []
    alike: dict[bool, Unit] = {}  # layers, by whether they have experts
    for layer in (layer for layers in stages.values() for layer in layers):
        experts = model.has_experts(layer)
        if experts not in alike:
            alike[experts] = Unit("layer", _layer_streams(config, layer, tp, parallel.ep))
    for stage, layers in sorted(stages.items()):
        if stage == 0:
            if one_table:
                root.append(table.numel)
            else:
                units.append(Unit("embedding", (table,)))
        units += [alike[model.has_experts(layer)] for layer in layers]
        if stage == last:
            root.append(model.hidden_size)
            if not one_table:
                units.append(Unit("head", (Stream(table.tensors, (second,)),)))
    return Unit("root", (Stream(tuple(root), (2,) * len(root)),) if root else ()), *units


def _layer_streams(config: TrainConfig, layer: int, tp: int, ep: int) -> tuple[Stream, ...]:
    """What all ranks of dp x cp share and, where ep splits them, the experts."""
    sizes = layer_tensors(config.model, layer, tp, ep)
    muon, fp8 = config.optimizer.name == "muon", config.train.precision == "fp8"
    found = []
    for experts in (False, True):
        names = [name for name in sizes if (ep > 1 and name.startswith("experts.")) is experts]
        moments = tuple(1 if muon and name in _MATRICES else 2 for name in names)
        quantized = tuple(name in _QUANTIZED for name in names) if fp8 else ()
        whole = tuple("norm" in name or name in _WHOLE for name in names) if tp > 1 else ()
        found.append(Stream(tuple(sizes[name] for name in names), moments, quantized, whole, experts))
    return tuple(stream for stream in found if stream.tensors)


def summed_numel(model: GPTConfig, layers: Iterable[int], *, sequence: bool, last: bool) -> int:
    """Elements of a stage whose gradients are summed over tensor-parallel ranks, each of which has the whole tensor."""
    always, more = (*_QK_NORMS, "router", "shared_gate"), (*_WHOLE_LATENTS, "router.bias")
    sizes = (pair for layer in layers for pair in layer_tensors(model, layer).items())
    inside = sum(size for name, size in sizes if name in always or (sequence and ("norm" in name or name in more)))
    return inside + (model.hidden_size if last and sequence else 0)


def largest_tensor(units: Iterable[Unit]) -> int:
    """Elements of the largest tensor."""
    return max((numel for unit in units for numel in unit.tensors), default=0)
