"""The optimizer over a rank's parameters, before they are sharded.

    config.optimizer, named parameters --> build_optimizer (this file) --> fsdp's fully_shard_optimizer

Groups are made from the original shapes: afterwards main parameters may be one-dimensional.
"""

from collections.abc import Iterable

import torch
from torch import nn

from sixfold.gpt.config import OptimizerConfig
from sixfold.gpt.errors import ConfigError


def build_optimizer(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """AdamW with decay on parameters of at least two dimensions (embedding included) and on nothing else.

    Args:
        named_parameters: canonical names and parameters of any device, ``meta`` too; one that comes twice counts once.
    Returns:
        ``torch.optim.AdamW``, fused (one pass over weights, gradients and moments). A group without parameters is
        left out; with no parameter at all there is one empty group, so that an empty stage has an optimizer too.
    Raises:
        ConfigError: another optimizer than AdamW.
    """
    if config.name != "adamw":
        raise ConfigError(f"optimizer.name is {config.name!r}; Muon is not supported: use adamw")
    parameters = {id(parameter): parameter for _, parameter in named_parameters}.values()
    decayed = [parameter for parameter in parameters if parameter.dim() >= 2]
    kept = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    present = [group for group in groups if group["params"]] or groups[:1]
    return torch.optim.AdamW(present, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
