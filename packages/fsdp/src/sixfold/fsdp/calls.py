"""What the engine knows of a call, of a stage, and of the backward that runs now.

    CallContext, StageState, accumulates, asked_for (this file) --> engine.py, hooks.py, stage.py

Values and two questions about the backward; no event is handled here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd import graph

from sixfold.fsdp.flat import ParamRecord
from sixfold.fsdp.units import Unit

in_backward: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside


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


def asked_for() -> frozenset[int] | None:
    """``id`` of each of the ``inputs`` that the backward that runs now was given; None: it was given none.

    Autograd does not tell a parameter that was left out from one that is not in the graph, so its caller is asked:
    torch's function that enters it, on this thread or, where a device's thread runs the backward, on another.
    """
    here = sys._getframe(1)
    found = _entered(here)
    if found is None:
        others = (_entered(one) for one in sys._current_frames().values() if one is not here)
        candidates = [one for one in others if one is not None]
        found = candidates[0] if len(candidates) == 1 else None  # of two backwards nobody says which this is
    if found is None:
        return None
    inputs = (found.f_locals["args"][3:4] or (found.f_locals["kwargs"].get("inputs"),))[0]
    return frozenset(map(id, inputs)) if inputs else None


def _entered(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from ``frame`` outwards that entered autograd."""
    while frame is not None and frame.f_code is not graph._engine_run_backward.__code__:
        frame = frame.f_back
    return frame


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
        here: FrameType | None = sys._getframe(1) if self.frame is not None else None
        while here is not None and here is not self.frame:
            here = here.f_back
        return here is not self.frame


def calling_frame() -> FrameType | None:
    """The innermost call of a module on the stack."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here.f_code.co_name != "_call_impl":
        here = here.f_back
    return here


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
