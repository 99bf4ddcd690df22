"""The gradient of a part of a parameter, as the user finds it on a main parameter.

    gradients.py --> main.grad is a ShardGradient (this file) --> torch's clip_grad_norm_: FsdpError

A norm over main gradients is one rank's part of a norm. Adding such norms up over ranks is right. So only torch's
function that scales by one is refused. Any other norm raises a warning, because SAM's recipes scale by theirs.
engine/engine.py gives gradients Tensor's own class for the length of a step.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.torch_private import functions_of

_NORMS = frozenset({"_foreach_norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "norm"})
_ONE_PART = (
    "a norm of main.grad is that of this rank's part of the gradient, so ranks that scale by it get different weights. "
    "model.grad_square_sum().sqrt() is the norm over all ranks. You may also add up squares over ranks yourself"
)


class ShardGradient(Tensor):
    """A part of a main gradient, between backward and step: torch's ``clip_grad_norm_`` raises, all else is a Tensor's.

    Its norm would be that of one rank's part, and each rank would scale by another factor.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _NORMS:
            asks = _torchs_norm()
            if asks is not None:
                raise FsdpError(
                    f"torch's {asks} is given main parameters of a sharded model, and would take the norm of this "
                    "rank's part alone; use model.clip_grad_norm_(), which sums over ranks",
                    op="reduce",
                )
            warnings.warn(_ONE_PART, UserWarning, stacklevel=3)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)


_TORCHS = {
    "clip_grad_norm_": "clip_grad_norm_",
    "get_total_norm": "get_total_norm",
    "_get_total_norm": "get_total_norm",
}


def _torchs_norm() -> str | None:
    """The function of ``torch.nn.utils.clip_grad`` that asks: each rank would scale by its own part's norm."""
    asking = [_TORCHS[name] for name in functions_of("torch.nn.utils.clip_grad", most=11) if name in _TORCHS]
    return asking[-1] if asking else None
