"""What the engine knows of a call, of a stage, and of the backward that runs now.

    CallContext, StageState, accumulates (this file) --> engine.py, hooks/forward_backward.py, wrapper/pipeline_stage.py

Values and a question about the backward; no event is handled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from sixfold.fsdp.buffers.flat_buffer import ParamRecord
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.torch_private import runs_still


def accumulates(records: Sequence[ParamRecord]) -> bool:
    """The backward that runs now adds to ``.grad`` of any of these parameters (``autograd.grad`` adds to none)."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        for record in records:
            view = record.parameter.expand_as(record.parameter)
            if view.grad_fn is None:  # frozen after wrapping
                continue
            node: Any = view.grad_fn.next_functions[0][0]
            try:
                if torch._C._will_engine_execute_node(node):
                    return True
            except RuntimeError:  # it is what autograd.grad was asked for
                return False
    return False


class CallContext:
    """One root call: how many forward calls of each unit wait for their backward.

    ``training`` is that of the root call: a reentrant checkpoint inside it runs its forward without grad.
    ``weights`` counts the changes of main weights before it: its graph holds views of those weights.
    ``frame`` is torch's frame of the call while it runs, where nothing else tells of its end.
    """

    __slots__ = ("frame", "outstanding", "training", "weights")

    def __init__(self, units: int, training: bool, weights: int) -> None:
        self.outstanding = [0] * units
        self.training = training
        self.weights = weights
        self.frame: FrameType | None = None

    def left_by_interrupt(self) -> bool:
        """Its frame is not on this thread's stack: the call ended without its hook."""
        return self.frame is not None and not runs_still(self.frame)


class StageState:
    """What the engine knows of a stage of a driven program.

    ``fused``: the program says that its backwards are whole (B); else they are split (I, W), and the gradients that W
    makes come through ``accumulate``.
    """

    def __init__(self, name: str, units: Sequence[Unit], fused: bool) -> None:
        self.name = name
        self.units = tuple(units)
        self.fused = fused
        self.last = False  # its last backward of this step runs
        self.done = False  # its reduce_grad was called in this step
