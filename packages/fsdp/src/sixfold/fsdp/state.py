"""Live aliases of what a checkpoint holds, and the whole state dict.

buffer.py, optimizer --> state_records, full_state_dict (this file) --> gpt's checkpoint adapter, the user
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffer import ParamAndGradBuffer
from sixfold.fsdp.comm import Ranks
from sixfold.fsdp.units import Unit


@dataclass(frozen=True)
class StateRecord:
    """Elements ``[start, stop)`` of one flattened tensor of the model or of its optimizer state.

    Attributes:
        name: the parameter's full name.
        key: ``"param"``, or the optimizer's name of the state (``"exp_avg"``).
        global_shape: the parameter's shape.
        tensor: (stop - start,) an alias of the live value: copy into it, then ``model.refresh()``.
        replica: 0 is the copy to save.
    """

    name: str
    key: str
    global_shape: tuple[int, ...]
    start: int
    stop: int
    tensor: Tensor
    replica: int

    def __str__(self) -> str:
        return f"{self.key} {self.name}[{self.start}:{self.stop}] of {self.global_shape} replica {self.replica}"


def state_records(units: Sequence[Unit], ranks: Ranks, optimizer: torch.optim.Optimizer | None) -> list[StateRecord]:
    """Records of everything held here; communicates nothing. Scalar state stays in ``optimizer.state``."""
    found: list[StateRecord] = []
    for unit in units:
        for buffer in unit.buffers:
            replica = ranks.outer.rank if buffer.parts > 1 else ranks.rank
            for record in buffer.records:
                part = buffer.main.slice(record.name)
                if part is None or record.main is None:
                    continue
                tensors = {"param": record.main.detach()}
                if optimizer is not None and record.main in optimizer.state:
                    tensors.update(_per_element(optimizer.state[record.main], record.main))
                shape = tuple(record.spec.shape)
                found += [
                    StateRecord(record.name, key, shape, part.start, part.stop, tensor.view(-1), replica)
                    for key, tensor in tensors.items()
                ]
    return found


def _per_element(state: dict[str, Any], main: Tensor) -> dict[str, Tensor]:
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == main.shape
    }


def full_state_dict(
    module: nn.Module, units: Sequence[Unit], ranks: Ranks, wait: Callable[[Any, str, str], None]
) -> dict[str, Tensor]:
    """Collective: main weights in full shapes and persistent buffers, on every rank; tied names share a tensor."""
    values: dict[nn.Parameter, Tensor] = {}
    for unit in units:
        for buffer in unit.buffers:
            values.update(_gather_main(buffer, ranks, wait))
    entries = module.state_dict(keep_vars=True)
    return {
        name: values[value] if isinstance(value, nn.Parameter) and value in values else _copy(value)
        for name, value in entries.items()
    }


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _gather_main(
    buffer: ParamAndGradBuffer, ranks: Ranks, wait: Callable[[Any, str, str], None]
) -> dict[nn.Parameter, Tensor]:
    flat = buffer.main.flat.detach()
    if buffer.parts > 1:
        full = flat.new_empty(buffer.parts * buffer.shard_numel)
        wait(ranks.shard.all_gather(full, flat.clone()), buffer.unit, "gather")
        flat = full
    whole = buffer.view_of(flat)
    return {record.parameter: whole.full(record.name).clone() for record in buffer.records}
