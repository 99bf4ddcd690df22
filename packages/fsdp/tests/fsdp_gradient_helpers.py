"""Main gradients that are the same whole ones at every layout: what is under test comes after the reduction.

tests --> set_gradients (this file) --> main.grad of this rank's parts
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn


def gradient_of(name: str, shape: torch.Size) -> Tensor:
    """Of exponents that differ much between elements."""
    draw = torch.Generator().manual_seed(crc32(name.encode()))
    exponents = torch.randint(-30, 3, shape, generator=draw)
    return torch.ldexp(torch.randn(shape, generator=draw), exponents) * 1e-3


def set_gradients(model: Any, net: nn.Module, change: dict[str, float] | None = None) -> None:
    """Each rank's part of whole gradients.

    Args:
        net: has the whole shapes under the model's names.
        change: first elements of tensors.
    """
    parts = {record.name: record for record in model.state_records() if record.key == "param"}
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    for name, main in model.main_parameters():
        whole = gradient_of(name, shapes[name]).reshape(-1)
        if change and name in change:
            whole[0] = change[name]
        main.grad = whole[parts[name].start : parts[name].stop].view_as(main).clone()
