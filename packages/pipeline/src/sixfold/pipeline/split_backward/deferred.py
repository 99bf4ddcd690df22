"""What layers leave to W: entries in a slot, by operators that defer all of their parameters or none.

layers, linear, user_operators --> MicrobatchEntries, Operator, Cast (this file) --> weight_gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function

from sixfold.pipeline.errors import ScheduleError

if TYPE_CHECKING:
    from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

__all__ = [
    "PLAIN",
    "Cast",
    "Entry",
    "MicrobatchEntries",
    "Operator",
    "add_up",
    "applied",
    "as_it_is",
    "changed",
    "graph_is_made",
    "looked_after",
    "modes_of_users",
    "of_torch",
    "open_slot",
    "summed",
]

# How to make the gradients, of what (parameter, Cast or None each), from what was saved, and the output's gradient.
Entry = tuple[Callable[[Any, Tensor, Any], Sequence[Tensor | None]], tuple[Any, ...], Any, Tensor]

PLAIN = (nn.Parameter, Tensor)
graph_is_made = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_saved_by: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks
_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
_DEVICES = "torch.utils._device"  # module of the mode of torch.set_default_device
_any_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


class MicrobatchEntries:
    """What I of one microbatch left.

    Attributes:
        again: a part of its forward may run once more in I: somebody looked after saved tensors, or no graph was made.
        entries: in the order of I.
        refused: what is not deferred in this microbatch: a checkpoint's second forward must decide as its first.
        watched: layers that go through their first I, with what they deferred.
        caught: ids of parameters that got a gradient by another way.
        casts: by id of autograd's node, the casts of autocast.
        passes: by place of an entry, the pass that made it where that was not I. [Note: a pass inside of a pass]
    """

    __slots__ = ("again", "casts", "caught", "entries", "passes", "refused", "watched")

    def __init__(self, refused: frozenset[tuple[int, str]]) -> None:
        self.again = False
        self.entries: list[Entry] = []
        self.refused = refused
        self.passes: dict[int, int] = {}
        self.watched: tuple[tuple[Operator, tuple[Any, ...]], ...] = ()  # nothing is made that most do not need
        self.caught: frozenset[int] = frozenset()
        self.casts: dict[int, Cast] | None = None


class Cast:
    """A parameter as autocast cast it; uses that share the cast add their gradients in its type."""

    __slots__ = ("node", "parameter")

    def __init__(self, node: Any, parameter: Tensor) -> None:
        self.node, self.parameter = node, parameter


class Operator:
    """Parameters whose gradients are deferred together, or not at all.

    Attributes:
        names: of the parameters, in the order of an entry's targets.
        never: those that another module holds too, which does not defer.
        watched: it has not been through an I. [Note: one sum per microbatch]
    """

    __slots__ = ("names", "never", "watched")

    def __init__(self, names: tuple[str, ...], never: frozenset[str] = frozenset()) -> None:
        self.names = names
        self.never = never
        self.watched = True

    def waits(self, slot: MicrobatchEntries, wanted: tuple[Tensor | None, ...]) -> bool:
        """The gradients of ``wanted`` are deferred: all of them, or none and autograd makes them."""
        some = False
        for name, parameter in zip(self.names, wanted, strict=True):
            if parameter is None:
                continue
            if name in self.never or (slot.refused and (id(self), name) in slot.refused):
                return False
            if self.watched and parameter._backward_hooks:  # which would see twice what is caught
                return False
            some = True
        return some


def applied(function: type[Function]) -> Callable[..., Tensor]:
    """``function.apply`` without its search for default arguments and functorch's wrappers: 6 us of 13."""
    above: Any = super(Function, function)
    return above.apply  # type: ignore[no-any-return]


def open_slot(store: WeightGradientStore, input: Any) -> MicrobatchEntries | None:
    """The slot that a layer defers into; None where it runs as it is."""
    slot = store.slot
    if slot is None:
        return None
    if not graph_is_made():
        slot.again = True
        return None
    return None if type(input) is not Tensor or _compiling() or _transformed() else slot


def of_torch(function: Any, module: Any) -> Any:
    """``function`` if ``module`` of torch defines it; of a patch that was there before us None, which nothing is."""
    return function if getattr(function, "__globals__", None) is vars(module) else None


def modes_of_users() -> bool:
    """A TorchFunctionMode is on that may make something else of a layer; a default device makes none."""
    return _any_mode() and any(type(mode).__module__ != _DEVICES for mode in _modes())


def looked_after(slot: MicrobatchEntries) -> bool:
    """Somebody looks after saved tensors: what an operator holds must be among them, and it may run once more."""
    if _saved_by(False) is None:
        return False
    slot.again = True
    return True


def changed() -> NoReturn:
    raise ScheduleError(
        "a layer's input or the gradient of its output was changed in place before W, which still needed it"
    )


def summed(targets: list[Any], gradients: list[Any]) -> tuple[list[Any], list[Any]]:
    """Each target once, with the sum of what came for it, in that order; without those that want or get none."""
    sums: dict[int, Tensor] = {}
    found: dict[int, Any] = {}
    for target, gradient in zip(targets, gradients, strict=True):
        if target is None or gradient is None:
            continue
        key = id(target)
        sums[key] = sums[key] + gradient if key in sums else gradient
        found[key] = target
    return list(found.values()), list(sums.values())


def add_up(there: list[Tensor], arriving: list[Tensor]) -> None:
    """``add_`` of each, in one call: one kernel on a GPU and half of the host's time; of two it would be no gain."""
    if len({before.data_ptr() for before in there}) == len(there):
        torch._foreach_add_(there, arriving)
        return
    for before, gradient in zip(there, arriving, strict=True):  # of parameters that share a gradient's memory
        before.add_(gradient)


def as_it_is(saved: Any, gradient: Tensor, targets: Any) -> tuple[Tensor]:
    """What makes a gradient that is there."""
    return (gradient,)
