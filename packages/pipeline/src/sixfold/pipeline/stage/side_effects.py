"""What a forward reads and changes besides its inputs, so that RECOMPUTE finds it as it was and leaves it as it is.

    F --> what its modules hold, their generators, a part of its output (this file) --> RECOMPUTE, or an error

[Note: one forward, run twice] RECOMPUTE and the backward of a ``Stage(checkpoint=True)`` run a forward a second time.
It begins where the first began, and what it changes is dropped. So a batch norm counts a microbatch once, and a layer
that was left out is left out again. What a forward changes is learned by comparison: all attributes and buffers of the
stage's modules, before and after each F. Each F is compared, since an attribute may move in every tenth alone. Those
that changed are noted with each F. While the forward runs again they stand in the place of today's. What a tensor was
before its first change is a copy, held until then. A tensor's version shows a change. Values are compared in the first
F of a module's mode, and where another tensor of the module changed. Of a list, tuple, dict, set or deque up to 256
parts are looked at, theirs included; of a dataclass or namespace the attributes; of a numpy array the bytes, up to
1 MiB. Of any other attribute it is seen whether another object is there. Generators that a module or a keyword argument
holds are noted as well, and Python's and numpy's own where a forward draws from them. What a stage cannot name (a
global, a list in a closure) shows in its output. A part of RECOMPUTE's output is compared with that of the first
forward. A checkpoint ends its second forward before there is an output, and torch compares shapes.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.microbatches.cut_batch import alike
from sixfold.pipeline.stage.stage import Stage

__all__ = ["SideEffects", "StateBefore", "access", "module_of", "part_of", "process_generators"]

Place = tuple[dict[str, Any], str]  # an attribute or buffer
Mark = int | list[tuple[Any, int]] | None  # by which a change in place is seen; None where none is looked for
_PLAIN = (int, float, complex, str, type(None))
_HOLDERS = (list, tuple, dict, set, deque)
_MANY = 256  # parts of a holder that are looked at
_ARRAY_BYTES = 2**20  # of a numpy array that is looked at
_RUNNERS = "forward"  # a layer whose weight gradient waits for W has it as its own, in some F's and not in others
_ABSENT = object()  # in the place of an attribute that is not there
OF_ALL_MODULES = frozenset(nn.Module().__dict__)
_SAMPLE = 64  # elements
_ROUNDING = 64  # in units of the dtype's last place


def module_of(loss_fn: Callable[..., Any] | None) -> nn.Module | None:
    """The module that ``loss_fn`` is, or is a method of."""
    owner = getattr(loss_fn, "__self__", loss_fn)
    return owner if isinstance(owner, nn.Module) else None


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
        self._names: list[tuple[dict[str, Any], set[str]]] = []  # of the modules' attributes, likewise
        self._starts: dict[tuple[int, str], tuple[Any, Mark, Any]] = {}  # value, its mark, its copy, of what may change
        self._noted: WeakSet[StateBefore] = WeakSet()  # of F's that may be run again
        self._generators: dict[int, Any] = {}
        self._doubts: list[tuple[str, Tensor]] = []  # what a device has compared, and the host not looked at

    def watch(self, loss_fn: Callable[..., Any] | None) -> None:
        """The loss runs with the stage; if it is a module, or a method of one, its state is looked at too."""
        self._loss = module_of(loss_fn)

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
        memo: dict[int, Any] = {}
        for place, name in self._changed.values():
            before.held.append((place, name, _copied(place.get(name, _ABSENT), memo)))
        looked = self._look()
        given = [value for value in kwargs.values() if access(value) is not None]
        for generator in (*self._generators.values(), *given):
            write, read = access(generator)  # type: ignore[misc]
            before.generators.append((write, read, read()))
        states = [(write, read, read()) for write, read in process_generators().values()]
        yield before
        self._noted.add(before)
        before.generators += [(write, read, state) for write, read, state in states if not _same_state(state, read())]
        moved = {id(place) for place, name, was, _ in looked if _has_changed(was, place.get(name, _ABSENT))}
        for place, name, was, start in looked:
            now = place.get(name, _ABSENT)
            if _has_changed(was, now) or ((new or id(place) in moved) and _has_values_of_its_own(start, now)):
                self._changed[id(place), name] = place, name
                self._starts.pop((id(place), name), None)
                self._found(place, name, start)
        for place, names in self._names:
            for name in () if place.keys() <= names else place.keys() - names:
                names.add(name)
                if (id(place), name) not in self._changed:
                    self._changed[id(place), name] = place, name
                    self._found(place, name, _ABSENT)

    def _found(self, place: dict[str, Any], name: str, start: Any) -> None:
        """What was seen to change now was ``start`` in all F's until here."""
        for before in self._noted:
            if all((id(place), name) != (id(there), known) for there, known, _ in before.held):
                before.held.append((place, name, start))

    @contextmanager
    def repeated(self, before: StateBefore) -> Iterator[None]:
        """Around a RECOMPUTE: state is what F found, and behind it as if nothing had run."""
        now = [(place, name, place.get(name, _ABSENT)) for place, name, _ in before.held]
        states = [read() for _, read, _ in before.generators]
        memo: dict[int, Any] = {}
        try:
            for place, name, start in before.held:
                _put(place, name, _copied(start, memo))
            for write, _, state in before.generators:
                write(state)
            yield
        finally:
            for place, name, value in now:
                _put(place, name, value)
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
        self._names = [(module.__dict__, {_RUNNERS, *module.__dict__}) for module in modules]
        seen: set[int] = set()
        for module in modules:
            for place, name, value in _held_by(module, seen):
                if access(value) is not None:
                    self._generators[id(value)] = value
                else:
                    self._places.append((place, name))
        return new

    def _look(self) -> list[tuple[dict[str, Any], str, Any, Any]]:
        """What may change and did not yet: where it is, what shows a change, and a copy to begin with again."""
        looked: list[tuple[dict[str, Any], str, Any, Any]] = []
        memo: dict[int, Any] = {}
        for place, name in self._places:
            value, key = place.get(name, _ABSENT), (id(place), name)
            if key in self._changed:
                continue
            if (mark := _mark(value)) is None:
                looked.append((place, name, (value, None), value))
                continue
            was = self._starts.get(key)
            if was is None or was[0] is not value or not _same_mark(was[1], mark):
                if was is not None:  # by an F that nobody runs again, or between steps
                    self._found(place, name, was[2])
                if isinstance(value, Tensor) and id(value) not in memo:  # one for all modules that hold it
                    memo[id(value)] = value.detach().clone()
                start = _copied(value, memo)
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


def _held_by(module: nn.Module, seen: set[int]) -> Iterable[tuple[dict[str, Any], str, Any]]:
    """Attributes and buffers; of a dataclass or namespace among them, which others may share, its own too, once."""
    attributes = module.__dict__
    for name, value in attributes.items():
        if name not in OF_ALL_MODULES and name != _RUNNERS:
            yield attributes, name, value
            record = isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type))
            if record and id(value) not in seen and hasattr(value, "__dict__"):
                seen.add(id(value))
                own = vars(value)
                yield from ((own, key, part) for key, part in own.items())
    for name, value in module._buffers.items():
        yield module._buffers, name, value


def _put(place: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        place.pop(name, None)
    else:
        place[name] = value


def _is_array(value: Any) -> bool:
    """A numpy array that is small enough to be read before and after each F."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.nbytes <= _ARRAY_BYTES


def _mark(value: Any) -> Mark:
    if isinstance(value, Tensor):
        return _version_of(value)
    if _is_array(value):
        return hash(value.tobytes())
    if isinstance(value, _HOLDERS) and not (isinstance(value, tuple) and all(isinstance(p, _PLAIN) for p in value)):
        return _parts(value)
    return None


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _parts(holder: Any) -> list[tuple[Any, int]]:
    """What it holds, and what that holds, with versions and lengths; all are held, so that no id is used again."""
    found: list[tuple[Any, int]] = []
    stack, seen = [holder], set()
    while stack and len(found) < _MANY:
        value = stack.pop()
        if isinstance(value, _PLAIN):
            found.append((value, 0))
        elif isinstance(value, Tensor):
            found.append((value, _version_of(value)))
        elif _is_array(value):
            found.append((value, hash(value.tobytes())))
        elif isinstance(value, _HOLDERS) and id(value) not in seen:
            seen.add(id(value))
            found.append((value, len(value)))
            if len(value) <= _MANY:
                stack += value
                stack += value.values() if isinstance(value, dict) else ()
        else:
            found.append((value, 0))
    return found


def _same_mark(was: Mark, now: Mark) -> bool:
    if not isinstance(was, list) or not isinstance(now, list):
        return was == now
    return len(was) == len(now) and all(a is b and m == n for (a, m), (b, n) in zip(was, now, strict=True))


def _has_changed(was: tuple[Any, Mark], now: Any) -> bool:
    value, mark = was
    if now is not value or mark is None:
        return now is not value
    return not _same_mark(mark, _mark(value))


def _has_values_of_its_own(start: Any, now: Any) -> bool:
    """A batch norm's kernel changes its statistics without a new version; its count of batches has one."""
    return isinstance(now, Tensor) and not torch.equal(start, now.detach())


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that a forward may change, of a holder with copies of its tensors; ``memo`` has those made, by id."""
    if id(value) in memo:
        return memo[id(value)]
    made: Any = value
    if isinstance(value, Tensor):
        # One with a history is kept as it is: a backward through it is autograd's to do or to refuse.
        made = value if value.grad_fn is not None else value.detach().clone().requires_grad_(value.requires_grad)
    elif _is_array(value):
        made = value.copy()
    elif isinstance(value, tuple) and len(value) <= _MANY:
        parts = [_copied_part(part, memo) for part in value]
        made = value if all(a is b for a, b in zip(value, parts, strict=True)) else alike(value, parts)
    elif isinstance(value, _HOLDERS) and not isinstance(value, tuple):
        made = memo[id(value)] = copy(value)
        if len(value) <= _MANY and not isinstance(value, set):
            for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (own := _copied_part(part, memo)) is not part:
                    made[key] = own
    memo[id(value)] = made
    return made


def _copied_part(part: Any, memo: dict[int, Any]) -> Any:
    """Of a holder; what asks for a gradient is trained, and no copy would get it."""
    return part if isinstance(part, Tensor) and part.requires_grad else _copied(part, memo)


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
        "or draws from a generator that none of its modules holds, or changes its targets in place; make these "
        "attributes or buffers of its modules, change a copy, or run a program without RECOMPUTE"
    )
