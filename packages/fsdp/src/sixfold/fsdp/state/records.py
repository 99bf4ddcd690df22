"""Live aliases of what a checkpoint holds.

    buffers/flat_buffer.py, optimizer --> state_records (this file) --> gpt's checkpoint adapter, the user

Communicates nothing; whole tensors are load_full_state.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.errors import FsdpError


@dataclass(frozen=True)
class StateRecord:
    """Elements ``[start, stop)`` of one flattened tensor of the model or of its optimizer state.

    Attributes:
        name: the parameter's full name.
        key: ``"param"``, or the optimizer's name of the state (``"exp_avg"``).
        global_shape: the parameter's shape. State of another shape (Adafactor's ``row_var``) has its own shape. Such
            optimizers hold whole tensors, so ``[0, numel)`` of it lies here.
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


def state_records(units: Sequence[Unit], optimizer: torch.optim.Optimizer | None) -> list[StateRecord]:
    """Records of everything held here; communicates nothing. Scalar state stays in ``optimizer.state``."""
    found: list[StateRecord] = []
    for unit in units:
        for flat_buffer in unit.flat_buffers:
            replica = flat_buffer.ranks.outer.rank if flat_buffer.cut.parts > 1 else flat_buffer.ranks.rank
            for record in flat_buffer.records:
                part = flat_buffer.weights.main.slice(record.name)
                if part is None or record.main is None:
                    continue
                tensors = {"param": record.main.detach()}
                if optimizer is not None and record.main in optimizer.state:
                    tensors.update(_tensors(optimizer.state[record.main], record))
                for key, tensor in tensors.items():
                    if tensor.shape == record.main.shape:
                        place = tuple(record.spec.shape), part.start, part.stop
                    else:
                        place = tuple(tensor.shape), 0, tensor.numel()
                    found.append(StateRecord(record.name, key, *place, tensor.view(-1), replica))
    return found


def _tensors(state: dict[str, Any], record: ParamRecord) -> dict[str, Tensor]:
    """State tensors that a record can hold; scalars stay in ``optimizer.state``.

    Raises:
        FsdpError: a state that is neither: left out in silence it would be missing from a checkpoint.
    """
    assert record.main is not None, f"{record.name} is not held here"
    found = {}
    for key, value in state.items():
        inside = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] if value is not None else []
        if not isinstance(value, Tensor):
            if inside:
                raise _unfit(record, key, f"a {type(value).__name__} of {len(inside)} tensors")
        elif value.shape == record.main.shape or (value.numel() != 1 and record.whole_on_one_rank):
            if not value.is_contiguous():
                raise _unfit(record, key, f"not contiguous (strides {value.stride()})")
            found[key] = value
        elif value.numel() != 1:
            raise _unfit(
                record, key, f"of shape {tuple(value.shape)} beside a part of shape {tuple(record.main.shape)}"
            )
    return found


def _unfit(record: ParamRecord, key: str, what: str) -> FsdpError:
    return FsdpError(
        f"optimizer state {key!r} of {record.name} is {what}: no record can say which part of a tensor it is. Wrap "
        "with granularity 'tensor' for this parameter, or save optimizer.state_dict() on each rank",
        unit=record.flat_buffer.unit,
    )
