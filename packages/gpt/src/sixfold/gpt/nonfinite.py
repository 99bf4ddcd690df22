"""Where a non-finite value arose first.

a step's batch --> replay of the forward with hooks (this file) --> (stage, module)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sixfold.gpt.build import RankModel, canonical
from sixfold.gpt.data import Microbatch


def first_nonfinite(rank: RankModel, batch: list[Microbatch]) -> tuple[int, str] | None:
    """(stage, module) of the first non-finite output on this rank, found by replaying the forward with hooks."""
    found: list[tuple[int, str]] = []
    handles = []

    def watch(stage: int, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if torch.is_tensor(output) and output.is_floating_point() and not bool(output.isfinite().all()):
                found.append((stage, name))

        return hook

    for name, module in rank.model.module.named_modules():
        if "." in name:  # below a stage of the container
            handles.append(module.register_forward_hook(watch(int(name.partition(".")[0]), canonical(name))))
    try:
        inputs = [m.tokens for m in batch] if rank.is_first else None
        rank.runner.evaluate(inputs, None, kwargs=[m.kwargs for m in batch], program=rank.program(len(batch)))
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
