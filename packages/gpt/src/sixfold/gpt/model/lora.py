"""Linears with a low-rank adapter: W x + b + scale * B (A x).

    GPTModel, [lora] --> add_adapters (this file) --> the same modules, some linears with lora_a and lora_b

A is (rank, in) and B (out, rank) of this rank's part: tensor parallelism cuts B with the rows of W, or A with its
columns. The other of the two every rank has whole, and its gradient is summed over tp (weight_sharding.py). B begins
as 0, so that the first forward is the base's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sixfold.gpt.model.decoder import Block

if TYPE_CHECKING:
    from sixfold.gpt.config.lora import LoraConfig


class AdaptedLinear(nn.Linear):
    """``base`` with an adapter beside it: its own parameters are the same tensors under the same names."""

    def __init__(self, base: nn.Linear, lora: LoraConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias, self.scale = base.weight, base.bias, lora.scale
        self.lora_a = nn.Parameter(torch.empty(lora.rank, base.in_features, device=base.weight.device))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, lora.rank, device=base.weight.device))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        adapted = F.linear(self.scale * F.linear(input, self.lora_a), self.lora_b)
        return F.linear(input, self.weight, self.bias) + adapted


def add_adapters(model: nn.Module, lora: LoraConfig) -> None:
    """Give an adapter to each linear that ``lora`` names, in place; with rank 0 nothing changes."""
    if not lora.rank:
        return
    for block in model.modules():
        if isinstance(block, Block):
            for part in (block.attention, block.ffn):
                for name, child in list(part.named_children()):
                    if name in lora.targets and isinstance(child, nn.Linear):
                        setattr(part, name, AdaptedLinear(child, lora))
