"""The shape of a message: of its tensors shape, dtype and whether a gradient is wanted, of what is no tensor the value.

values <--> specs <--> bytes (this file) --> messages.py, shared_memory.py
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Action

__all__ = ["Plain", "Specs", "TensorSpec", "pack_specs", "specs_of", "unpack_specs", "words_of"]

TensorSpec = tuple[torch.Size, torch.dtype, bool]  # shape, dtype, whether its gradient is wanted
_PLAIN = (type(None), bool, int, float)
_DTYPES = {
    name: dtype
    for name, dtype in sorted(vars(torch).items())
    if isinstance(dtype, torch.dtype)
    and re.fullmatch(r"bool|b?float(8_.*|16|32|64)|u?int(8|16|32|64)|complex(64|128)", name)
}


class Plain:
    """A value that is no tensor, as part of a shape: equal by type and spelling, so that NaN equals itself."""

    __slots__ = ("value",)

    def __init__(self, value: float | None) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))

    def __str__(self) -> str:
        return repr(self.value)


Spec = TensorSpec | Plain
Specs = tuple[Spec, ...]


def specs_of(values: tuple[Any, ...]) -> Specs:
    """The shape of a message."""
    return tuple([_spec(value) for value in values])


def _spec(value: Any) -> Spec:
    return (value.shape, value.dtype, value.requires_grad) if isinstance(value, Tensor) else Plain(value)


def pack_specs(specs: Specs, action: Action) -> bytes:
    """Bytes that tell them to another rank.

    Raises:
        ScheduleError: something does not travel between stages.
    """
    entries: list[object] = []
    for spec in specs:
        if isinstance(spec, Plain):
            if type(spec.value) not in _PLAIN:
                raise ScheduleError(
                    f"stage {action.stage} made a {type(spec.value).__name__} of microbatch {action.microbatch}; "
                    "tensors, None, ints, floats and bools travel between stages"
                )
            entries.append({"plain": spec.value})
            continue
        shape, dtype, wants_gradient = spec
        if (name := str(dtype).removeprefix("torch.")) not in _DTYPES:
            raise ScheduleError(f"{dtype} does not travel between stages; known are {', '.join(_DTYPES)}")
        entries.append([name, list(shape), wants_gradient])
    return json.dumps(entries).encode()


def unpack_specs(header: bytes | bytearray) -> Specs:
    """What ``pack_specs`` packed."""
    return tuple(
        Plain(entry["plain"]) if isinstance(entry, dict) else (torch.Size(entry[1]), _DTYPES[entry[0]], bool(entry[2]))
        for entry in json.loads(header)
    )


def words_of(specs: Specs, *, gradients: bool = False) -> str:
    """For messages; ``gradients``: whether each tensor's is wanted too."""
    return ", ".join(_words(spec, gradients) for spec in specs) or "nothing"


def _words(spec: Spec, gradients: bool) -> str:
    if isinstance(spec, Plain):
        return str(spec)
    shape, dtype, wanted = spec
    return f"{dtype} {tuple(shape)}" + (f" {'with' if wanted else 'without'} a gradient" if gradients else "")
