"""Transforms and modes of torch under which a gather or a reduction would move nothing, or something else.

    engine.py, before it moves anything --> refuse_transforms (this file) --> FsdpError, and nothing has changed

torch.func's grad refuses writes to tensors from outside it, a tracer records them in place of what they are for, and
fake tensors have no elements. ``vmap`` alone leaves gathers as they are, and a backward beneath it is watched by what
its wrappers hold (``below_vmap``). A mode that counts or prints changes nothing either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.parameter_access.uncompiled import uncompiled

_top_transform: Any = torch._C._functorch.peek_interpreter_stack
_transforms: Any = torch._C._functorch.get_interpreter_stack
_VMAP = torch._C._functorch.TransformType.Vmap
_batched: Any = torch._C._functorch.is_batchedtensor
_unwrapped: Any = torch._C._functorch.get_unwrapped
_active_mode: Any = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL
_tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]

_REMEDY = (
    "do it with an unwrapped model, whose weights may be those of full_state_dict(). Gradients for inputs come from "
    "torch.autograd.grad and torch.autograd.functional.jacobian too. Nothing was changed"
)


@uncompiled
def refuse_transforms(unit: str | None, step: int, *, functions: bool = True) -> None:
    """Raise where real weights and gradients would not be moved. About 1 us.

    Args:
        unit: whose weights are about to be used, None where it is all of them; step: of the run, for the error.
        functions: refuse transforms of torch.func too. False where nothing is gathered: their own backward leaves no
            gradient on a parameter.
    """
    what = ""
    if _active_mode(_FAKE) is not None:
        what = "FakeTensorMode is active (a memory estimator, torch.export), and its tensors have no elements"
    elif _active_mode(_FUNCTIONAL) is not None:
        what = "FunctionalTensorMode is active, which replaces writes by copies, and a gather is a write"
    elif functions and _top_transform() is not None:
        kinds = [one.key().name for one in _transforms() if one.key() != _VMAP]
        if kinds:
            what = f"a transform of torch.func runs ({', '.join(kinds)}), which admits no write to gathered weights"
    elif _tracing():
        what = "torch.jit.trace runs, which records gathers and cannot replay them"
    if what:
        raise FsdpError(f"the model is used while {what}; {_REMEDY}", unit=unit, step=step, op="gather")


def below_vmap(tensor: Tensor) -> Tensor:
    """The tensor that a backward meets: autograd records beneath the wrappers of ``torch.vmap``."""
    while _batched(tensor):
        tensor = _unwrapped(tensor)
    return tensor
