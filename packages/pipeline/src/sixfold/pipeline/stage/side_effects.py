"""What a forward reads and changes besides its inputs, so that RECOMPUTE finds it as it was and leaves it as it is.

    F --> what its modules hold, their generators, a part of its output (this file) --> the second run, or an error

[Note: one forward, run twice] RECOMPUTE and the backward of a ``Stage(checkpoint=True)`` run a forward a second time.
It begins where the first began, and what it changes is dropped. So a batch norm counts a microbatch once, and a layer
that was left out is left out again. What a forward changes is learned by comparison: all attributes and buffers of the
stage's modules, before and after each F. Each F is compared, since an attribute may move in every tenth alone. Those
that changed are noted with each F. While the forward runs again they stand in the place of today's. What a tensor was
before its first change is a copy, held until then. A tensor's version shows a change. Values are compared in the first
F of a module's mode, and where another tensor of the module changed. Of a list, tuple, dict, set or deque up to 256
parts are looked at, theirs included; of a dataclass or namespace the attributes; of a numpy array the bytes, up to
1 MiB. Of any other attribute it is seen whether another object is there. Generators that a module or a keyword argument
holds are noted as well, and Python's and numpy's own where a forward draws from them. Modules and generators in an
attribute's lists, tuples and dicts are looked at as the stage's own.

[Note: parameters are not put back] A copy of each would double a stage, and gradients would reach the copy. So a second
run that changes one again is refused. A parameter that a forward changes without a new version, by ``.data``, shows in
its sum. Frozen ones are added up around the second run of each step's first microbatch, all of them in a mode's first.

What a stage cannot name (a global, a list in a closure) shows in its output: a part of RECOMPUTE's is compared with
that of the first forward. So is a checkpoint's, of one microbatch in each step, the next one in the next step, and of
all in a mode's first step; for that it runs to its end, while others stop at the last tensor that a backward needs.
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

__all__ = [
    "SideEffects",
    "StateBefore",
    "access",
    "dense_parts",
    "module_of",
    "part_of",
    "process_generators",
    "same_values",
]

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
    """State as one F found it, and the parameters to add up when it runs again."""

    __slots__ = ("__weakref__", "generators", "held", "parameters")

    def __init__(self) -> None:
        self.parameters: list[tuple[dict[str, Any], str, str]] = []
        self.held: list[tuple[dict[str, Any], str, Any]] = []
        self.generators: list[tuple[Callable[[Any], object], Callable[[], Any], Any]] = []


class SideEffects:
    """Those of a stage's forwards."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._loss: nn.Module | None = None
        self._first = True  # the next F is the first of a step
        self._new = False  # it is a step of other modules than the last, or of another mode
        self._count = 0  # of F's in this step
        self._turn = 0  # the F of this step that is compared, if it is a checkpoint's
        self._modules: list[nn.Module] = []
        self._parameters: list[tuple[dict[str, Any], str, str]] = []  # where each is, and its path
        self._moved: set[str] = set()  # paths of those that a forward changed
        self._sums: list[tuple[dict[str, Any], str, str, Tensor]] = []  # of those that the run at hand may change
        self._key: list[tuple[int, bool]] = []
        self._changed: dict[tuple[int, str], Place] = {}
        self._places: list[Place] = []  # as the first F of the step found them
        self._names: list[tuple[dict[str, Any], set[str]]] = []  # of the modules' attributes, likewise
        self._starts: dict[tuple[int, str], tuple[Any, Mark, Any]] = {}  # value, its mark, its copy, of what may change
        self._noted: WeakSet[StateBefore] = WeakSet()  # of F's that may be run again
        self._generators: dict[int, Any] = {}
        self._doubts: list[tuple[ScheduleError, Tensor]] = []  # what a device has compared, and the host not looked at

    def watch(self, loss_fn: Callable[..., Any] | None) -> None:
        """The loss runs with the stage; if it is a module, or a method of one, its state is looked at too."""
        self._loss = module_of(loss_fn)

    def compare(self, what: str, first: list[Tensor], again: list[Tensor], run: str = "RECOMPUTE") -> None:
        """What the second run made is what F made. On a device the host looks in ``settle``.

        Raises:
            ScheduleError: it is not.
        """
        self._compare_sums()
        self._doubt(differs(first, again), another(run, self._stage.index, what, self.names))

    def settle(self) -> None:
        """Look at what a device has compared. Raises ScheduleError."""
        doubts, self._doubts = self._doubts, []
        for error, verdict in doubts:
            if verdict.item():
                raise error

    def _doubt(self, verdict: Tensor | bool, error: ScheduleError) -> None:
        if isinstance(verdict, Tensor) and verdict.device.type != "cpu":
            self._doubts.append((error, verdict))
        elif verdict:
            raise error

    def _compare_sums(self) -> None:
        """Raises ScheduleError: the run at hand changed a parameter."""
        sums, self._sums = self._sums, []  # one error is enough
        for place, name, path, was in sums:
            if (now := _sum(place.get(name))) is not None:
                self._doubt((now != was) & ~(now.isnan() & was.isnan()), twice(self._stage.index, path))
        self._sums = sums

    @property
    def looks_closely(self) -> bool:
        """The next F's second run is compared, if it is a checkpoint's too."""
        return self._first or self._new or self._count == self._turn

    def new_step(self) -> None:
        """Modules may be others, or in another mode."""
        self._first = True
        if self._count:
            self._count, self._turn = 0, (self._turn + 1) % self._count

    @property
    def names(self) -> str:
        """Of what forwards change, for messages."""
        names = sorted({name for _, name in self._changed.values()} | {f"parameter {path}" for path in self._moved})
        return f" (its forwards change {', '.join(names)})" if names else ""

    @contextmanager
    def noted(self, kwargs: Mapping[str, Any]) -> Iterator[StateBefore]:
        """Around an F."""
        before, first, self._first = StateBefore(), self._first, False
        self._count += 1
        if first:
            self._begin_step()
        new = first and self._new
        memo: dict[int, Any] = {}
        for place, name in self._changed.values():
            before.held.append((place, name, _copied(place.get(name, _ABSENT), memo)))
        looked = self._look()
        given = [value for value in kwargs.values() if access(value) is not None]
        for generator in (*self._generators.values(), *given):
            write, read = access(generator)  # type: ignore[misc]
            before.generators.append((write, read, read()))
        states = [(write, read, read()) for write, read in process_generators().values()]
        modes = [module.training for module in self._modules]
        parameters = [place.get(name) for place, name, _ in self._parameters]
        versions = [None if parameter is None else parameter._version for parameter in parameters]
        self._noted.add(before)
        yield before
        for at, was, version in zip(self._parameters, parameters, versions, strict=True):
            now = at[0].get(at[1])
            same = now is was and (now is None or now._version == version)
            if not same and type(now) is type(was):  # fully_shard puts one of another type there
                self._moved.add(at[2])
                before.parameters.append(at)
            elif new or (first and was is not None and not was.requires_grad):
                before.parameters.append(at)
        for module, mode in zip(self._modules, modes, strict=True):
            if module.training is not mode:
                self._change(module.__dict__, "training", mode)
        before.generators += [(write, read, state) for write, read, state in states if not _same_state(state, read())]
        moved = {id(place) for place, name, was, _ in looked if _has_changed(was, place.get(name, _ABSENT))}
        for place, name, was, start in looked:
            now = place.get(name, _ABSENT)
            if _has_changed(was, now) or ((new or id(place) in moved) and _has_values_of_its_own(start, now)):
                self._starts.pop((id(place), name), None)
                self._change(place, name, start)
        for place, names in self._names:
            for name in () if place.keys() <= names else place.keys() - names:
                names.add(name)
                self._change(place, name, _ABSENT)

    def _change(self, place: dict[str, Any], name: str, start: Any) -> None:
        if (id(place), name) not in self._changed:
            self._changed[id(place), name] = place, name
            self._found(place, name, start)

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
        outer, self._sums = self._sums, []
        for place, name, path in before.parameters:
            if (total := _sum(place.get(name))) is not None:
                self._sums.append((place, name, path, total))
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
            try:
                self._compare_sums()
            finally:
                self._sums = outer

    def around(self, kwargs: Mapping[str, Any]) -> NotedForward:
        """A checkpointed forward, and each time that a backward runs it again."""
        return NotedForward(self, kwargs)

    def _begin_step(self) -> None:
        """Find all that may change; whether the modules are others than in the step before, or in another mode."""
        self.settle()
        self._generators, self._places = {}, []
        waiting: list[tuple[str, nn.Module | None, nn.Module | None]]
        waiting = [("", self._stage.module, None), ("loss_fn", self._loss, None)]
        modules: dict[nn.Module, str] = {}
        seen: set[int] = set()
        for prefix, root, holder in waiting:
            if root is None or (holder is not None and any(module is holder for module in root.modules())):
                continue  # what holds its holder is a way back to the whole model
            for path, module in root.named_modules(prefix=prefix):
                if module in modules:
                    continue
                modules[module] = path
                for place, name, value in _held_by(module, seen):
                    for part in _inside(value):
                        if isinstance(part, nn.Module):
                            waiting.append((f"{path}.{name}[...]".lstrip("."), part, module))
                        else:
                            self._generators[id(part)] = part
                    if id(value) not in self._generators:
                        self._places.append((place, name))
        key = [(id(module), module.training) for module in modules]
        self._new, self._key, self._modules = key != self._key, key, list(modules)
        if self._new:
            self._changed, self._starts, self._moved = {}, {}, set()
        self._names = [(module.__dict__, {_RUNNERS, *module.__dict__}) for module in modules]
        self._names += [(module._buffers, set(module._buffers)) for module in modules]
        self._parameters = [
            (module._parameters, name, f"{path}.{name}".lstrip("."))
            for module, path in modules.items()
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.is_inference()
        ]

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
        self._effects, self._context = effects, effects.noted(kwargs)
        self._part: list[Tensor] | None = None
        self.before: StateBefore | None = None
        self.early_stop = not effects.looks_closely

    def __enter__(self) -> None:
        self.before = self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def contexts(self) -> tuple[NotedForward, RepeatedForward]:
        """Of the first run, and of the others."""
        return self, RepeatedForward(self._effects, self)

    def made(self, outputs: Any) -> Any:
        """``outputs``, those of the first run; those of a later run are compared if it comes to its end."""
        if self.early_stop or self.before is None:
            return outputs
        if self._part is None:
            self._part = part_of(outputs)
        else:
            self._effects.compare("output", self._part, part_of(outputs), "the checkpoint")
        return outputs


class RepeatedForward:
    """``repeated``, any number of times."""

    def __init__(self, effects: SideEffects, noting: NotedForward) -> None:
        self._effects, self._noting = effects, noting
        self._context: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._context = self._effects.repeated(self._noting.before or StateBefore())
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


def _inside(value: Any) -> Iterator[Any]:
    """Modules and generators: itself, or those that its lists, tuples and dicts hold."""
    stack, seen = [value], set()
    for _ in range(_MANY):
        if not stack:
            return
        part = stack.pop()
        if isinstance(part, _HOLDERS):
            if id(part) not in seen and len(part) <= _MANY:
                seen.add(id(part))
                stack += part.values() if isinstance(part, dict) else part
        elif isinstance(part, nn.Module) or (not isinstance(part, (*_PLAIN, Tensor)) and access(part) is not None):
            yield part


def _sum(parameter: Any) -> Tensor | None:
    """Of the elements, None of what is not a plain tensor or has no memory now."""
    values = parameter if parameter is None else parameter.detach()
    if type(values) is not Tensor or values.layout is not torch.strided or not values.untyped_storage().nbytes():
        return None
    if values.element_size() == 1:  # float8 has no sum
        values = values.view(torch.uint8)
    return values.sum(dtype=None if values.is_complex() or values.device.type == "mps" else torch.float64)


def _put(place: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        place.pop(name, None)
    else:
        place[name] = value


def _is_array(value: Any) -> bool:
    """A numpy array that is small enough to be read before and after each F."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.nbytes <= _ARRAY_BYTES


def is_plain(value: Any) -> bool:
    """A number, a text, None, or a tuple of them: nothing can change inside of it."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value))


def _mark(value: Any) -> Mark:
    if isinstance(value, Tensor):
        return _version_of(value)
    if _is_array(value):
        return hash(value.tobytes())
    if isinstance(value, _HOLDERS) and not is_plain(value):
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
    return isinstance(now, Tensor) and not same_values(start, now.detach())


def same_values(one: Tensor, other: Tensor) -> bool:
    """As ``torch.equal``, also of sparse and nested tensors, which it does not take, and of those on meta."""
    if one.is_meta:
        return True
    if one.layout is not other.layout or one.is_nested is not other.is_nested:
        return False
    if one.layout is torch.strided and not one.is_nested:
        return torch.equal(one, other)
    if not one.is_nested and one.shape != other.shape:
        return False
    ours, theirs = dense_parts(one), dense_parts(other)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def dense_parts(tensor: Any) -> tuple[Tensor, ...]:
    """The tensors that a sparse or nested one consists of, in its memory; any other is its only part."""
    if tensor.is_nested:
        return (tensor.values(), tensor.offsets()) if tensor.layout is torch.jagged else tensor.unbind()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


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


def another(run: str, stage: int, what: str, names: str) -> ScheduleError:
    """The second run did not repeat the first."""
    return ScheduleError(
        f"{run} of stage {stage} made another {what} than its forward{names}: the stage or loss_fn reads state "
        "or draws from a generator that none of its modules holds, or changes its targets in place; make these "
        "attributes, buffers or list entries of its modules, change a copy, or run the stage without RECOMPUTE and "
        "checkpoint"
    )


def twice(stage: int, path: str) -> ScheduleError:
    """[Note: parameters are not put back]"""
    return ScheduleError(
        f"the forward of stage {stage} changes parameter {path}, and its second run would change it twice; make it a "
        "buffer, which is put back, change it behind step(), or run the stage without RECOMPUTE and checkpoint"
    )
