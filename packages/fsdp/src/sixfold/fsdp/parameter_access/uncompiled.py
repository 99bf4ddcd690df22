"""Functions that torch.compile runs as they are: they ask tensors what no graph can hold.

saved_weights.py, main_parameters.py --> uncompiled (this file)

``torch.compiler.disable`` would say the same, and imports the compiler (seconds) where nobody compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """``function`` is neither traced on its own nor inside a caller; what it calls wants the same mark."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
