"""A step that goes over the parameters of one flat buffer after the other.

    optimizer.step --> ChunkedStep (this file) --> before and after each chunk: state_offload.py, Widened (this file)

A chunk is what an optimizer holds of one flat buffer of a unit. Knows parameter groups; moves nothing itself.

[Note: chunks step alone] torch's optimizers treat each parameter by itself, except LBFGS. So a step over some
parameters and then over the others gives the bits of one step. Nothing is known of other optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from sixfold.fsdp.buffers.main_gradients import MainGradients


def steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """[Note: chunks step alone]"""
    what = type(optimizer).__name__
    return type(optimizer) is getattr(torch.optim, what, None) and what != "LBFGS"


def replaced_step(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of a ``step`` that a user has set on the object; learning rate schedulers set one that only counts."""
    step = vars(optimizer).get("step")
    if step is None:
        return None
    one = getattr(step, "__func__", step)
    if _module(one) == "torch.optim.lr_scheduler":
        while _module(one).startswith("torch.") and hasattr(one, "__wrapped__"):
            one = one.__wrapped__
        if _module(one).startswith("torch."):
            return None
    return one.__code__.co_name if hasattr(one, "__code__") else type(one).__name__


def _module(function: Any) -> str:
    """Where it was written; ``__module__`` is copied by ``functools.wraps``."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


class Visitor(Protocol):
    """What happens around the chunks of a step, by their numbers."""

    def begin(self, chunks: Sequence[int]) -> None:
        """A step over ``chunks`` begins, in this order; a closure has run."""

    def before(self, chunk: int) -> None:
        """``chunk`` steps next."""

    def after(self, chunk: int) -> None:
        """``chunk`` has stepped."""

    def end(self) -> None:
        """The step is over, also by an exception."""


class Widened:
    """Gradients of one chunk after the other in main_dtype: no step has all of them. [Note: narrow main gradients]"""

    def __init__(self, mains: Sequence[MainGradients]) -> None:
        self._mains = list(mains)

    def begin(self, chunks: Sequence[int]) -> None:
        """Nothing is wide."""

    def before(self, chunk: int) -> None:
        """As the step finds them."""
        self._mains[chunk].widen()

    def after(self, chunk: int) -> None:
        """As they rest."""
        self._mains[chunk].narrow()

    def end(self) -> None:
        """Those of a chunk that raised too."""
        for one in self._mains:
            one.narrow()


class ChunkedStep:
    """The steps of one optimizer.

    Args:
        chunks: main parameters, by flat buffer: all that its groups may ever hold (``add_param_group``). A step goes
            over those of which its groups hold one.
        plain: says whether this is no step of the user's (state is being made ahead).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chunks: Sequence[Sequence[nn.Parameter]],
        visitors: Sequence[Visitor],
        plain: Callable[[], bool],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._inside = [frozenset(map(id, chunk)) for chunk in chunks]
        self._visitors = tuple(visitors)
        self._plain = plain

    def step(self, closure: Callable[[], Any] | None, raw: Callable[..., Any]) -> Any:
        """A step of ``raw``, the optimizer's own, chunk by chunk."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer of a step is gone"
        if self._plain():
            return raw(optimizer) if closure is None else raw(optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = optimizer.param_groups
        all_params = [group["params"] for group in groups]
        held = {id(one) for params in all_params for one in params}
        chunks = [at for at, inside in enumerate(self._inside) if not held.isdisjoint(inside)]
        try:
            for visitor in self._visitors:
                visitor.begin(chunks)
            for at in chunks:
                for visitor in self._visitors:
                    visitor.before(at)
                for group, params in zip(groups, all_params, strict=True):
                    group["params"] = [one for one in params if id(one) in self._inside[at]]
                raw(optimizer)
                for visitor in self._visitors:
                    visitor.after(at)
        finally:
            for group, params in zip(groups, all_params, strict=True):
                group["params"] = params
            for visitor in self._visitors:
                visitor.end()
        return loss


def install(
    optimizer: torch.optim.Optimizer,
    chunks: Sequence[Sequence[nn.Parameter]],
    visitors: Sequence[Visitor],
    plain: Callable[[], bool],
) -> None:
    """From now on ``optimizer.step()`` goes chunk by chunk.

    torch has no hook around a step. So the method is replaced on the object, as learning rate schedulers do. Hooks of
    the optimizer run as before, once for each step.
    """
    chunked = ChunkedStep(optimizer, chunks, visitors, plain)
    raw = type(optimizer).step
    while getattr(raw, "hooked", False):  # torch.compile may have wrapped it once more
        raw = raw.__wrapped__  # type: ignore[attr-defined]  # hooks are called around all chunks, not around each
    counted = getattr(optimizer.step, "_wrapped_by_lr_sched", False)

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]  # what a scheduler made before looks at
        return chunked.step(closure, raw)

    around = torch.optim.Optimizer.profile_hook_step(step)
    if counted:
        around._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(around, optimizer)  # type: ignore[method-assign]
