"""The optimizers over a rank's parameters, before they are sharded.

    config.optimizer, named parameters --> build_optimizer (this file) --> fsdp's fully_shard_optimizer of each part

Groups are made from the original shapes: afterwards main parameters may be one-dimensional. Names decide who is whose,
and names are canonical, so that a parameter has the same optimizer at every layout.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sixfold.gpt.config.train_config import OptimizerConfig

# What Muon orthogonalises. Tables, norms, biases, experts and their router are AdamW's.
_MATRIX = re.compile(r"layers\.\d+\.(attention\.(q|k|v|out|q_a|q_b|kv_a|kv_b)|ffn\.(gate|up|down))\.weight")
# What fp8 quantises: these, and experts. Tables, norms, biases and routers stay bfloat16.
_EXPERTS = re.compile(r"layers\.\d+\.ffn\.(experts|shared)\.(gate|up|down)\.weight")


def is_layer_matrix(name: str) -> bool:
    """Whether ``name``, canonical, is one of the unfused matrices inside layers."""
    return _MATRIX.fullmatch(name) is not None


def is_quantized(name: str) -> bool:
    """Whether ``name``, canonical, travels as fp8 bytes with train.precision = "fp8"."""
    return is_layer_matrix(name) or _EXPERTS.fullmatch(name) is not None


class Optimizers:
    """Optimizers that together update every parameter once, with the few members that training and checkpoints use."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The live groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """The live state of each parameter."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def clear_state(self) -> None:
        """As before the first step."""
        for part in self.parts:
            part.state.clear()

    def zero_grad(self) -> None:
        """Gradients are used once."""
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        """One update of every parameter. Collective where a part's is."""
        for part in self.parts:
            part.step()


def build_optimizer(config: OptimizerConfig, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizers:
    """AdamW, or Muon on the matrices inside layers beside AdamW on the rest.

    Weight decay is on parameters of at least two dimensions (embedding included) and on nothing else.

    Args:
        named_parameters: canonical names and parameters of any device, ``meta`` too; one that comes twice counts once,
            and one that is frozen not at all.
    Returns:
        ``torch.optim.AdamW``, fused (one pass over weights, gradients and moments), and ``torch.optim.Muon`` with
        ``adjust_lr_fn="match_rms_adamw"``: it takes the same learning rate. A group without parameters is left out, and
        so is a Muon without matrices; with no parameter at all AdamW has one empty group, so that an empty stage has
        an optimizer too.
    """
    names = {id(parameter): (name, parameter) for name, parameter in reversed(list(named_parameters))}
    named = [(name, parameter) for name, parameter in reversed(names.values()) if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if config.name == "muon" and is_layer_matrix(name)]
    taken = {id(parameter) for parameter in matrices}
    rest = [parameter for _, parameter in named if id(parameter) not in taken]
    parts: list[torch.optim.Optimizer] = [_adamw(config, rest)]
    if matrices:
        parts.append(
            torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return Optimizers(parts)


def _adamw(config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    decayed = [parameter for parameter in parameters if parameter.dim() >= 2]
    kept = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    present = [group for group in groups if group["params"]] or groups[:1]
    return torch.optim.AdamW(present, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
