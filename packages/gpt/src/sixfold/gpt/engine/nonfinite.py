"""Where a non-finite value arose first.

a step's gradients --> nonfinite_gradient                                 (this file) --> (stage, module) --> blamed
a step's batch --> first_nonfinite, a replay of the forward with hooks    (this file) --> (stage, module) --> blamed
blamed: of all ranks the first                                            (this file) --> loop.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sixfold.gpt.data.token_stream import Microbatch
from sixfold.gpt.engine.rank_model import RankModel, canonical
from sixfold.gpt.errors import NoTargetsError
from sixfold.gpt.parallel.agreement import gather_objects

Place = tuple[int, int, str]  # stage, how many modules came before, name of a module; "" is the stage's own output


def blamed(rank: RankModel, batch: list[Microbatch], gradient: Place | None, step: int) -> tuple[str, int, str]:
    """What was not finite first ("output", "gradient" or "loss"), on which rank, in which module; alike on all ranks.

    Args:
        gradient: this rank's, of ``nonfinite_gradient``.
    Raises:
        NoTargetsError: nothing is wrong with the model: no token of the global batch is a target.
    """
    mine = (first_nonfinite(rank, batch), gradient, sum(m.targets for m in batch))
    found = gather_objects(rank.mesh.control, rank.mesh.size, mine)
    if not any(targets for _, _, targets in found):  # 0 / 0
        raise NoTargetsError(rank.config.data.eod_mask_loss, f"step {step}: ")
    # Forward runs through the stages upwards and backward downwards, and what one rank of a tensor- or context-parallel
    # group has made non-finite the others of its stage get from it, some modules later.
    outputs = [(*place[:2], number, place[2]) for number, (place, _, _) in enumerate(found) if place]
    if outputs:
        *_, first, where = min(outputs)
        return "output" if where else "loss", first, where
    gradients = [(*place[:2], -number, place[2]) for number, (_, place, _) in enumerate(found) if place]
    *_, first, where = max(gradients, default=(0, 0, 0, ""))
    return "gradient", -first, where


def nonfinite_gradient(rank: RankModel) -> Place | None:
    """The last module of this rank with a non-finite gradient: backward comes to it first."""
    for number, (name, parameter) in reversed(list(enumerate(rank.model.main_parameters()))):
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return int(name.partition(".")[0]), number, canonical(name).rpartition(".")[0]
    return None


def first_nonfinite(rank: RankModel, batch: list[Microbatch]) -> Place | None:
    """The first module with a non-finite output on this rank, found by replaying the forward with hooks.

    Of the last stage "" is the losses. Collective over the pipeline.
    """
    found: list[Place] = []
    handles, calls = [], Counter[int]()  # of modules of a stage: as many on all ranks that hold it

    def watch(stage: int, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            calls[stage] += 1
            if torch.is_tensor(output) and output.is_floating_point() and not bool(output.isfinite().all()):
                found.append((stage, calls[stage], name))

        return hook

    for name, module in rank.model.module.named_modules():
        if name:  # a stage of the container, or below one
            handles.append(module.register_forward_hook(watch(int(name.partition(".")[0]), canonical(name))))
    try:
        inputs = [m.tokens for m in batch] if rank.is_first else None
        rank.runner.evaluate(inputs, None, kwargs=[m.kwargs for m in batch], program=rank.program(len(batch)))
    finally:
        for handle in handles:
            handle.remove()
    return min(found, default=None)
