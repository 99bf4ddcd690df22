"""What a forward reads and changes besides its inputs, so that RECOMPUTE finds it as it was and leaves it as it is.

    F --> what its modules hold, their generators, a part of its output (this file) --> RECOMPUTE, or an error

[Note: one forward, run twice] RECOMPUTE and the backward of a ``Stage(checkpoint=True)`` run a forward a second time.
It begins where the first began, and what it changes is dropped. So a batch norm counts a microbatch once, and a layer
that was left out is left out again. What a forward changes is learned by comparison: all attributes and buffers of the
stage's modules, before and after each F. Each F is compared, since an attribute may move in every tenth alone. Those
that changed are noted with each F. While the forward runs again they stand in the place of today's. What a tensor was
before its first change is a copy, held until then. A tensor's version shows a change. Values are compared in the first
F of a module's mode, and where another tensor of the module changed. Generators that a module or a keyword argument
holds are noted as well, and Python's and numpy's own where a forward draws from them. What a stage cannot name (a
global, a list in a closure) shows in its output. A part of RECOMPUTE's output is compared with that of the first
forward. A checkpoint ends its second forward before there is an output, and torch compares shapes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.stage.stage import Stage

__all__ = ["SideEffects", "StateBefore", "access", "part_of", "process_generators"]

Place = tuple[dict[str, Any], str]  # an attribute or buffer
_PLAIN = (int, float, complex, str, type(None))
_GROWS = (list, dict, set)
OF_ALL_MODULES = frozenset(nn.Module().__dict__)
_SAMPLE = 64  # elements
_ROUNDING = 64  # in units of the dtype's last place


class StateBefore:
    """State as one F found it."""

    __slots__ = ("__weakref__", "generators", "held")

    def __init__(self) -> None:
        self.held: list[tuple[dict[str, Any], str, Any]] = []
        self.generators: list[tuple[Callable[[Any], object], Callable[[], Any], Any]] = []


class SideEffects:
    """Those of a stage's forwards."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._loss: nn.Module | None = None
        self._first = True  # the next F is the first of a step
        self._key: list[tuple[int, bool]] = []
        self._changed: dict[tuple[int, str], Place] = {}
        self._places: list[Place] = []  # as the first F of the step found them
        self._starts: dict[tuple[int, str], tuple[Any, int, Any]] = {}  # value, its mark, its copy, of what may change
        self._noted: WeakSet[StateBefore] = WeakSet()  # of F's that may be run again
        self._generators: dict[int, Any] = {}
        self._doubts: list[tuple[str, Tensor]] = []  # what a device has compared, and the host not looked at

    def watch(self, loss_fn: Callable[..., Any] | None) -> None:
        """The loss runs with the stage; if it is a module, or a method of one, its state is looked at too."""
        owner = getattr(loss_fn, "__self__", loss_fn)
        self._loss = owner if isinstance(owner, nn.Module) else None

    def compare(self, what: str, first: list[Tensor], again: list[Tensor]) -> None:
        """What RECOMPUTE made is what F made. On a device the host looks in ``settle``.

        Raises:
            ScheduleError: it is not.
        """
        verdict = differs(first, again)
        if isinstance(verdict, Tensor):
            self._doubts.append((what, verdict))
        elif verdict:
            raise another(self._stage.index, what, self.names)

    def settle(self) -> None:
        """Look at what a device has compared. Raises ScheduleError."""
        doubts, self._doubts = self._doubts, []
        for what, verdict in doubts:
            if verdict.item():
                raise another(self._stage.index, what, self.names)

    def new_step(self) -> None:
        """Modules may be others, or in another mode."""
        self._first = True

    @property
    def names(self) -> str:
        """Of what forwards change, for messages."""
        names = sorted({name for _, name in self._changed.values()})
        return f" (its forwards change {', '.join(names)})" if names else ""

    @contextmanager
    def noted(self, kwargs: Mapping[str, Any]) -> Iterator[StateBefore]:
        """Around an F."""
        before, first, self._first = StateBefore(), self._first, False
        new = first and self._begin_step()
        for place, name in self._changed.values():
            if name in place:
                before.held.append((place, name, _copied(place[name])))
        looked = self._look()
        given = [value for value in kwargs.values() if access(value) is not None]
        for generator in (*self._generators.values(), *given):
            write, read = access(generator)  # type: ignore[misc]
            before.generators.append((write, read, read()))
        states = [(write, read, read()) for write, read in process_generators().values()]
        yield before
        self._noted.add(before)
        before.generators += [(write, read, state) for write, read, state in states if not _same_state(state, read())]
        moved = {id(place) for place, name, was, _ in looked if _has_changed(was, place.get(name))}
        for place, name, was, start in looked:
            now = place.get(name)
            if _has_changed(was, now) or ((new or id(place) in moved) and _has_values_of_its_own(start, now)):
                self._changed[id(place), name] = place, name
                self._starts.pop((id(place), name), None)
                self._found(place, name, start)

    def _found(self, place: dict[str, Any], name: str, start: Any) -> None:
        """What was seen to change now was ``start`` in all F's until here."""
        for before in self._noted:
            if all((id(place), name) != (id(there), known) for there, known, _ in before.held):
                before.held.append((place, name, start))

    @contextmanager
    def repeated(self, before: StateBefore) -> Iterator[None]:
        """Around a RECOMPUTE: state is what F found, and behind it as if nothing had run."""
        now = [(place, name, place.get(name)) for place, name, _ in before.held]
        states = [read() for _, read, _ in before.generators]
        try:
            for place, name, start in before.held:
                place[name] = _copied(start)
            for write, _, state in before.generators:
                write(state)
            yield
        finally:
            for place, name, value in now:
                place[name] = value
            for (write, _, _), state in zip(before.generators, states, strict=True):
                write(state)

    def contexts(self, kwargs: Mapping[str, Any]) -> tuple[NotedForward, RepeatedForward]:
        """Around a checkpointed forward, and around each time that a backward runs it again."""
        noting = NotedForward(self, kwargs)
        return noting, RepeatedForward(self, noting)

    def _begin_step(self) -> bool:
        """Find all that may change; whether the modules are others than in the step before, or in another mode."""
        self.settle()
        roots = [root for root in (self._stage.module, self._loss) if root is not None]
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        key = [(id(module), module.training) for module in modules]
        new, self._key = key != self._key, key
        if new:
            self._changed, self._starts = {}, {}
        self._generators, self._places = {}, []
        for module in modules:
            for place, name, value in _held_by(module):
                if access(value) is not None:
                    self._generators[id(value)] = value
                else:
                    self._places.append((place, name))
        return new

    def _look(self) -> list[tuple[dict[str, Any], str, Any, Any]]:
        """What may change and did not yet: where it is, what shows a change, and a copy to begin with again."""
        looked: list[tuple[dict[str, Any], str, Any, Any]] = []
        for place, name in self._places:
            value, key = place.get(name), (id(place), name)
            if key in self._changed:
                continue
            if isinstance(value, _PLAIN):
                looked.append((place, name, (value, 0), value))
            elif isinstance(value, (Tensor, *_GROWS)):
                mark = value._version if isinstance(value, Tensor) else len(value)
                was = self._starts.get(key)
                if was is None or was[0] is not value or was[1] != mark:
                    if was is not None:  # by an F that nobody runs again, or between steps
                        self._found(place, name, was[2])
                    start = value.detach().clone() if isinstance(value, Tensor) else copy(value)
                    was = self._starts[key] = value, mark, start
                looked.append((place, name, (value, mark), was[2]))
        return looked


class NotedForward:
    """``noted``, as torch's checkpoint takes it."""

    def __init__(self, effects: SideEffects, kwargs: Mapping[str, Any]) -> None:
        self._context = effects.noted(kwargs)
        self.before = StateBefore()

    def __enter__(self) -> None:
        self.before = self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class RepeatedForward:
    """``repeated``, any number of times."""

    def __init__(self, effects: SideEffects, noting: NotedForward) -> None:
        self._effects, self._noting = effects, noting
        self._context: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._context = self._effects.repeated(self._noting.before)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _held_by(module: nn.Module) -> Iterable[tuple[dict[str, Any], str, Any]]:
    attributes = module.__dict__
    for name, value in attributes.items():
        if name not in OF_ALL_MODULES:
            yield attributes, name, value
    for name, value in module._buffers.items():
        yield module._buffers, name, value


def _has_changed(was: tuple[Any, int], now: Any) -> bool:
    value, mark = was
    if now is not value:
        return True
    if isinstance(value, Tensor):
        return value._version != mark
    return isinstance(value, _GROWS) and len(value) != mark


def _has_values_of_its_own(start: Any, now: Any) -> bool:
    """A batch norm's kernel changes its statistics without a new version; its count of batches has one."""
    return isinstance(now, Tensor) and not torch.equal(start, now.detach())


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        # One with a history is kept as it is: a backward through it is autograd's to do or to refuse.
        return value if value.grad_fn is not None else value.detach().clone().requires_grad_(value.requires_grad)
    return copy(value) if isinstance(value, _GROWS) else value


def access(value: Any) -> tuple[Callable[[Any], object], Callable[[], Any]] | None:
    """How the state of a generator is written and read; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.set_state, value.get_state
    if isinstance(value, random.Random):
        return value.setstate, value.getstate
    if (numpy := sys.modules.get("numpy.random")) is not None:
        if isinstance(value, numpy.RandomState):
            return value.set_state, value.get_state
        if isinstance(value, numpy.Generator):
            bits = value.bit_generator
            return lambda state: setattr(bits, "state", state), lambda: bits.state
    return None


def process_generators() -> dict[str, tuple[Callable[[Any], object], Callable[[], Any]]]:
    found: dict[str, Any] = {"random": (random.setstate, random.getstate)}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found["numpy"] = numpy.set_state, numpy.get_state
    return found


def _same_state(left: Any, right: Any) -> bool:
    return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in zip(left, right, strict=True))


# ---- outputs


def part_of(outputs: Any) -> list[Tensor]:
    """Some elements of each tensor of ``outputs``, to compare."""
    values = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return [_some(value.detach()) for value in values if isinstance(value, Tensor)]


def _some(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or not tensor.numel():
        return torch.empty(0)
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor[(slice(None, 8),) * tensor.dim()].reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLE)].clone()


def differs(first: list[Tensor], again: list[Tensor]) -> Tensor | bool:
    """Whether they differ by more than rounding; on a device a tensor that says so."""
    if len(first) != len(again) or any(
        a.shape != b.shape or a.dtype != b.dtype for a, b in zip(first, again, strict=True)
    ):
        return True
    verdict: Tensor | bool = False
    for one, other in zip(first, again, strict=True):
        if one.dtype.is_floating_point or one.dtype.is_complex:
            largest = one.abs().nan_to_num(0.0).amax() if one.numel() else 0.0
            limit = largest * (_ROUNDING * torch.finfo(one.dtype).eps)
            far = ((one - other).abs() > limit) | (one.isnan() != other.isnan())
        else:
            far = one != other
        verdict = verdict | far.any()
    return bool(verdict) if isinstance(verdict, Tensor) and verdict.device.type == "cpu" else verdict


def another(stage: int, what: str, names: str) -> ScheduleError:
    """RECOMPUTE did not repeat its forward."""
    return ScheduleError(
        f"RECOMPUTE of stage {stage} made another {what} than its forward{names}: the stage or loss_fn reads state "
        "or draws from a generator that none of its modules holds; make these attributes or buffers of its modules, or "
        "run a program without RECOMPUTE"
    )
