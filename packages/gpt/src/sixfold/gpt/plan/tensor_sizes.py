"""What a rank has to store: tensors of a layer and of a stage, and how sixfold.fsdp groups them.

    config, parallel, layers of a rank --> units (this file) --> stored_bytes.py --> plan.py
    activations are in activation_bytes.py

Integers only: no torch, no tensors, no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from sixfold.gpt.config.frozen import is_frozen
from sixfold.gpt.config.layer_tensors import QK_NORMS, full_name, layer_tensors
from sixfold.gpt.config.lora import ROW_PARALLEL, is_adapter

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import GPTConfig, ParallelConfig, TrainConfig

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
        frozen: they have no gradients and no moments.
    """

    tensors: tuple[int, ...]
    moments: tuple[int, ...]
    quantized: tuple[bool, ...] = ()
    whole: tuple[bool, ...] = ()
    experts: bool = False
    frozen: bool = False

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
    def trained(self) -> tuple[Stream, ...]:
        """Those with gradients."""
        return tuple(stream for stream in self.streams if not stream.frozen)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of each."""
        return tuple(numel for stream in self.streams for numel in stream.tensors)


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
    one_table = tied_here and not config.two_tables
    head_name = "embedding.weight" if model.tie_embeddings else "head.weight"
    table, head = (
        _stream([(table_numel(model, tp), moments)], frozen=is_frozen(config, name))
        for name, moments in (("embedding.weight", 2), (head_name, 0 if tied_here else 2))
    )
    root: dict[bool, list[tuple[int, int]]] = {False: [], True: []}  # by frozen: elements and moments
    units: list[Unit] = []
    alike: dict[tuple[bool, ...], Unit] = {}  # layers, by whether they have experts, and by what of them is frozen
    for stage, layers in sorted(stages.items()):
        if stage == 0:
            if one_table:
                root[table.frozen].append((table.numel, 2))
            else:
                units.append(Unit("embedding", (table,)))
        for layer in layers:
            kind = model.has_experts(layer), *_frozen_tensors(config, layer)
            if kind not in alike:
                alike[kind] = Unit("layer", _layer_streams(config, layer, tp, parallel.ep))
            units.append(alike[kind])
        if stage == last:
            root[is_frozen(config, "norm.weight")].append((model.hidden_size, 2))
            if not one_table:
                units.append(Unit("head", (head,)))
    streams = tuple(_stream(sizes, frozen=frozen) for frozen, sizes in root.items() if sizes)
    return Unit("root", streams), *units


def _stream(sizes: Sequence[tuple[int, int]], *, frozen: bool) -> Stream:
    """Of tensors of (elements, moments) each; frozen ones have no moments."""
    return Stream(tuple(n for n, _ in sizes), tuple(0 if frozen else m for _, m in sizes), frozen=frozen)


def _frozen_tensors(config: TrainConfig, layer: int) -> tuple[bool, ...]:
    """Whether each tensor of a layer is frozen, in their order; () if the run has no ``train.frozen``."""
    if not config.train.frozen:
        return ()
    return tuple(is_frozen(config, full_name(layer, short)) for short in layer_tensors(config.model, layer))


def _layer_streams(config: TrainConfig, layer: int, tp: int, ep: int) -> tuple[Stream, ...]:
    """What all ranks of dp x cp share and, if ep splits them, the experts; each by trained and frozen tensors."""
    sizes = layer_tensors(config.model, layer, tp, ep, config.lora)
    muon, fp8 = config.optimizer.name == "muon", config.train.precision == "fp8"
    kinds = {n: (ep > 1 and n.startswith("experts."), is_frozen(config, full_name(layer, n))) for n in sizes}
    found = []
    for experts, frozen in product((False, True), (False, True)):
        names = [name for name, kind in kinds.items() if kind == (experts, frozen)]
        moments = tuple(0 if frozen else 1 if muon and name in _MATRICES else 2 for name in names)
        quantized = tuple(name in _QUANTIZED for name in names) if fp8 else ()
        whole = tuple("norm" in name or name in _WHOLE or _is_whole_adapter(name) for name in names) if tp > 1 else ()
        found.append(Stream(tuple(sizes[name] for name in names), moments, quantized, whole, experts, frozen))
    return tuple(stream for stream in found if stream.tensors)


def _is_whole_adapter(name: str) -> bool:
    """The matrix of an adapter that every tensor-parallel rank has whole: B if the target is row-parallel, else A."""
    target, _, end = name.partition(".")
    return is_adapter(name) and (end == "lora_b") == (target in ROW_PARALLEL)


def summed_numel(config: TrainConfig, layers: Iterable[int], *, sequence: bool, last: bool) -> int:
    """Elements of a stage whose gradients are summed over tensor-parallel ranks, each of which has the whole tensor."""
    always, more = (*QK_NORMS, "router", "shared_gate"), (*_WHOLE_LATENTS, "router.bias")
    inside = sum(
        size
        for layer in layers
        for name, size in layer_tensors(config.model, layer, lora=config.lora).items()
        if (name in always or _is_whole_adapter(name) or (sequence and ("norm" in name or name in more)))
        and not is_frozen(config, full_name(layer, name))
    )
    norm = last and sequence and not is_frozen(config, "norm.weight")
    return inside + (config.model.hidden_size if norm else 0)


def largest_tensor(units: Iterable[Unit]) -> int:
    """Elements of the largest tensor."""
    return max((numel for unit in units for numel in unit.tensors), default=0)
