"""Whose backward reaches a layer: the I that a runner runs, or one that somebody runs inside of it or of the forward.

    a node of autograd --> the frame that entered autograd (this file) --> weight_gradients.py

[Note: a pass inside of a pass] A hook, a Function's backward or a forward may run a backward of its own: an implicit
layer's solver, an attack, a reentrant checkpoint. It may go through layers whose weight gradients wait for W.
Autograd's number of the graph task tells it apart from I. What it was asked for only its caller knows: torch's
function that enters autograd. That stands on this thread or, where a device's thread runs the nodes, on the one that
runs the step. A pass that was given ``inputs`` makes no gradient of a weight. One without accumulates into all. Plain
autograd adds what a pass made for a parameter as soon as the pass is done with it. So W keeps the sums of passes
apart, in that order.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.split_backward.deferred import Cast, Entry
from sixfold.pipeline.torch_private import ENTRY, asked_of, frame_of

if TYPE_CHECKING:
    from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

__all__ = ["NOBODY", "Asked", "ends_here", "joins", "task"]

NOBODY = -2  # no graph task's number, and not that of no graph task
Asked = frozenset[int] | None  # ids of the tensors that a backward is to give gradients of; None: of all leaves
task = torch._C._current_graph_task_id


def joins(store: WeightGradientStore, entries: list[Entry], targets: tuple[Any, ...]) -> bool:
    """A pass that is not known to be ``store``'s I reached a layer: whether W is to make its weight gradients.

    They are next in ``entries`` then. [Note: a pass inside of a pass]

    Raises:
        ScheduleError: the pass is asked for a gradient of ``targets`` itself, or nobody knows what it is asked for.
    """
    here, own = sys._getframe(1), store.entry
    back = here.f_back
    if back is not None and back.f_code is own:  # what nearly every call is: the first layer that I reaches
        store.task = task()
        return True
    now, slot = task(), store.slot
    if now != store.inner[0]:
        frame = _entered(here, own)
        if frame is None:
            frame = _entered(frame_of(store.thread), own)
            if frame is None or (frame.f_code is own and store.task != NOBODY):
                raise _unseen(store, "and nothing tells which gradients it is to make")
        if frame.f_code is own:
            store.task = now
            return True
        store.inner = now, _asked_of(frame)
    asked = store.inner[1]
    if asked is None:
        if slot is None or slot.entries is not entries:
            raise _unseen(store, "outside of its microbatch")
        slot.passes[len(entries)] = now
        return True
    if any(id(target.parameter if type(target) is Cast else target) in asked for target in targets):
        raise _unseen(store, "and asks for the gradient of a weight of theirs")
    return False


def ends_here() -> bool:
    """The backward that reached the output of a layer was asked for that output's gradient, and goes no further."""
    further = torch._C._current_autograd_node().next_functions
    try:
        return not any(node is not None and torch._C._will_engine_execute_node(node) for node, _ in further)
    except RuntimeError:  # the layer's input is a leaf whose gradient is asked for
        return False


def _entered(frame: FrameType | None, own: CodeType) -> FrameType | None:
    """The innermost frame from ``frame`` outwards that entered autograd: torch's, or that of ``own``."""
    while frame is not None and frame.f_code is not ENTRY and frame.f_code is not own:
        frame = frame.f_back
    return frame


def _asked_of(frame: FrameType) -> Asked:
    """What torch's ``frame`` was asked for."""
    return frozenset(map(_identity, asked_of(frame))) or None


def _identity(one: Any) -> int:
    """Of the tensor, or of that which an edge of the graph leads to."""
    return id(getattr(getattr(one, "node", None), "variable", one))


def _unseen(store: WeightGradientStore, what: str) -> ScheduleError:
    return ScheduleError(
        f"stage {store.index}: a backward of its own (torch.autograd.grad, Tensor.backward) runs through layers whose "
        f"weight gradients wait for W, {what}; run a program whose backwards are B, or use a subclass for these "
        "layers, whose gradients are then made in I"
    )
