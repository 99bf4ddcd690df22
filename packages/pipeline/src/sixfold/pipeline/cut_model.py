"""From a model of one piece to stages: an nn.Sequential, or a causal language model of Hugging Face's form.

    model, number of stages --> Stages that share its parameters (this file) --> PipelineRunner

Nothing of transformers is imported: what is asked of a model are ``base_model``, ``get_input_embeddings``,
``get_output_embeddings`` and its one list of layers. Each stage runs the model's own forward on some of the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.plan.partition import partition
from sixfold.pipeline.stage import Stage

__all__ = ["stages_of_causal_lm", "stages_of_sequential"]


def stages_of_sequential(model: nn.Sequential, stages: int) -> list[Stage]:
    """``model`` cut between its layers, so that the largest part has few parameters; all parts share its parameters.

    Take those of a rank: ``[made[i] for i in program.stages_of(rank)]``.

    Raises:
        ScheduleError: it is no nn.Sequential, or has fewer layers than stages.
    """
    if not isinstance(model, nn.Sequential):
        raise ScheduleError(f"the model is a {type(model).__name__}; stages_of_sequential cuts an nn.Sequential")
    layers = list(model.named_children())
    sizes = _cut(layers, [layer for _, layer in layers], stages)
    found, begin = [], 0
    for index, size in enumerate(sizes):
        part = nn.Sequential()
        for name, layer in layers[begin : begin + size]:
            part.add_module(name, layer)  # under its own name, so that state dicts fit
        found.append(Stage(part, index))
        begin += size
    return found


def stages_of_causal_lm(model: Any, stages: int) -> list[Stage]:
    """A causal language model of Hugging Face's form (Llama, Qwen, Mistral, GPT-2, ...) as stages.

    The first takes token ids, the last gives logits. ``kwargs`` of a step reach every stage: ``attention_mask``,
    ``position_ids``. Stages share the model's parameters, but for an output embedding that is tied: it becomes a copy,
    tied between the first stage and the last. Take those of a rank: ``[made[i] for i in program.stages_of(rank)]``.

    Raises:
        ScheduleError: the model has no such form, or fewer layers than stages.
    """
    base: Any = getattr(model, "base_model", None)
    lists = [(n, m) for n, m in base.named_children() if isinstance(m, nn.ModuleList)] if base is not None else []
    asked = all(callable(getattr(model, name, None)) for name in ("get_input_embeddings", "get_output_embeddings"))
    if not asked or base is model or len(lists) != 1 or model.get_output_embeddings() is None:
        raise ScheduleError(
            f"the model is a {type(model).__name__}; stages_of_causal_lm takes a Hugging Face causal language model, "
            "whose base_model has one ModuleList: write its stages as modules of your own"
        )
    (name, layers), head = lists[0], model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    tied = head.weight is embedding.weight
    sizes = _cut(list(layers), list(layers), stages)
    found, begin = [], 0
    for index, size in enumerate(sizes):
        first, last = index == 0, index == stages - 1
        part = _part(base, name, layers[begin : begin + size], embedding, first, last)
        own = copy.deepcopy(head) if last and tied and stages > 1 else head
        module = _Part(part, own if last else None, first)
        ends = (
            {"embedding": embedding.weight if first else own.weight} if tied and stages > 1 and first | last else None
        )
        found.append(Stage(module, index, tied=ends))
        begin += size
    return found


class _Part(nn.Module):
    """Some layers of a model, with its own forward.

    Args:
        base: the model without the other layers.
        head: of the last stage.
        first: takes ids.
    """

    def __init__(self, base: nn.Module, head: nn.Module | None, first: bool) -> None:
        super().__init__()
        self.base, self.head, self.first = base, head, first

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        given = {"input_ids" if self.first else "inputs_embeds": x}
        hidden: Tensor = self.base(**given, **kwargs, use_cache=False, return_dict=True).last_hidden_state
        return hidden if self.head is None else self.head(hidden)


class _Zeros(nn.Module):
    """In the place of positions that the first stage has added."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


def _part(
    base: nn.Module, name: str, layers: nn.ModuleList, embedding: nn.Module, first: bool, last: bool
) -> nn.Module:
    """``base`` with these layers alone; what only the first or last stage does is done there alone."""
    part = copy.copy(base)
    part._modules = dict(base._modules)
    seen = False
    for other, module in base._modules.items():
        if other == name:
            part._modules[other] = layers
            seen = True
        elif module is embedding:
            part._modules[other] = module if first else None
        elif isinstance(module, nn.Embedding):  # learned positions
            part._modules[other] = module if first else _Zeros()
        elif isinstance(module, nn.Dropout) and not seen:  # of the embedding
            part._modules[other] = module if first else nn.Identity()
        elif seen and module is not None and any(True for _ in module.parameters()):  # the last norm
            part._modules[other] = module if last else nn.Identity()
    if hasattr(base, "config"):
        config: Any = copy.copy(base.config)
        config.num_hidden_layers = len(layers)
        part.config = config
    return part


def _cut(layers: Sequence[Any], modules: Sequence[nn.Module], stages: int) -> Sequence[int]:
    stages = whole("stages", stages, least=1)
    if stages > len(layers):
        raise ScheduleError(f"the model has {len(layers)} layers for {stages} stages; each has one at least")
    return partition([1.0 + sum(p.numel() for p in module.parameters()) for module in modules], stages)
