"""The bias by which experts are balanced without a loss: moved after each step by the loads of all ranks.

    step.py: tokens of each expert in the step --> balance_experts (this file) --> shards of layers.*.ffn.router.bias

It comes just before the optimizer, which gets gradients of 0 for these tensors and leaves them, and which hands main
weights on to where ranks gather them. [Note: bias] of moe.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sixfold.gpt.config.frozen import is_frozen
from sixfold.gpt.engine.fsdp_wrap import canonical

if TYPE_CHECKING:
    from sixfold.gpt.engine.rank_model import RankModel

_END = ".ffn.router.bias"


def balance_experts(rank: RankModel, loads: Sequence[float]) -> None:
    """Lower the bias of experts above an equal share of the step's tokens, raise it of those below.

    Args:
        loads: (layers with experts, experts) flattened, the same on all ranks.
    """
    model = rank.config.model
    if not model.expert_bias or not model.expert_bias_update_rate:
        return
    by_layer = torch.tensor(loads, dtype=torch.float64).view(-1, model.num_experts)
    change = (by_layer.mean(1, keepdim=True) - by_layer).sign().mul_(model.expert_bias_update_rate).float()
    for record in rank.state_records(weights_only=True):
        name = canonical(record.name)
        if record.key == "param" and name.endswith(_END) and not is_frozen(rank.config, name):
            layer = int(name.split(".")[1]) - model.expert_layers.start
            part = change[layer, record.start : record.stop]
            record.tensor.detach().reshape(-1).add_(part.to(record.tensor))
