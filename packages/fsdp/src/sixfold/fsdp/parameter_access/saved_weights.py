"""Weights that outlive their unit's call: saved by autograd, returned by the unit, or left behind as a view.

    engine/gather.py frees and gathers --> Versions (this file) --> autograd asks them when it unpacks what it saved
    hooks/forward_backward.py's calls --> SavedWeights, own_outputs (this file) --> engine/engine.py gathers again
    guard.py's calls --> EscapedViews (this file) --> guard.py, whose classes ask

A unit's memory is another unit's after its call, while its address stays. [Note: one range per unit]

[Note: versions say what is here] Autograd refuses a saved tensor whose version changed since it was saved. So the
parameters of a unit have another version while their weights are elsewhere, and a new one after each change of main
weights. Then a saved weight is right, or torch raises "modified by an inplace operation". Views share the version of
their parameter. A backward that comes through a unit's outputs finds it gathered, so it never meets this.

[Note: ways out] A gradient may enter a unit at a tensor that is not one of its outputs. Such a tensor left by a
forward hook, an attribute or an object that pytree cannot take apart. In the first step every saved tensor of a call
goes through ``SavedWeights``. It gathers such a unit again and remembers it. Later only tensors of such units, and of
units with forward hooks inside, go through it. Without a hook a saved tensor costs nothing, with one about 5 us. What
opens later is torch's error.

[Note: views left behind] A view of a parameter is a plain tensor, and torch asks it nothing. After the call it may
show weights of another unit. Every tensor object counts in its storage. So views were left if a unit's call ends with
more of them than it began with and autograd saved. That is checked in the first calls, with a graph and without. Then
all tensors of the process are looked at once (0.1 s), and those become ``LentView``. A usual model leaves none, and
pays two numbers per call.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.parameter_access.uncompiled import uncompiled

_DEEP = 6  # objects inside objects of an output that are looked at
_PLAIN = (int, float, str, bytes, type, FunctionType, BuiltinFunctionType, nn.Module, torch.dtype, torch.device)
_CALLS = 2  # without a graph, that are looked at
_SCANS = 8  # of one model that find nothing, at most
_MARK = 2**31 + 6  # a version that no tensor has
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter


class _FlatBufferVersions:
    """Versions of one flat buffer's parameters: even while its weights are here (``home``), odd while they are not."""

    __slots__ = ("always", "count", "home", "now", "of", "parameters")

    def __init__(self, of: ParamAndGradBuffer) -> None:
        self.of = of
        self.parameters = tuple(record.parameter for record in of.records)
        self.count = len(self.parameters)
        self.always = of.weights.whole_here  # readable at any time
        first = max((one._version for one in self.parameters), default=0)
        self.home = first + first % 2
        self.set(self.home + (not self.always))

    @uncompiled
    def set(self, version: int) -> None:
        self.now = version
        _set_versions(self.parameters, (version,) * self.count)

    @uncompiled
    def written(self) -> int | None:
        """The place of a parameter that somebody else wrote to."""
        now = self.now
        for at, one in enumerate(self.parameters):
            if one._version != now:
                return at
        return None


class Versions:
    """[Note: versions say what is here]

    Attributes:
        written: parameters that were written to in a call of their unit, which the next gather undoes.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.written: set[nn.Parameter] = set()
        with torch._C.DisableTorchFunctionSubclass():
            self._by_unit = {unit.name: [_FlatBufferVersions(one) for one in unit.flat_buffers] for unit in units}

    @uncompiled
    def here(self, unit: str) -> None:
        """``unit`` is gathered."""
        for one in self._by_unit[unit]:
            if one.now != one.home:
                one.set(one.home)

    @uncompiled
    def gone(self, unit: str) -> None:
        """``unit`` gives its memory up."""
        with torch._C.DisableTorchFunctionSubclass():
            for one in self._by_unit[unit]:
                self._note_written(one)
                if not one.always:
                    one.set(one.home + 1)

    @uncompiled
    def changed(self, unit: str, *, frozen: bool) -> None:
        """Main weights changed (``frozen``: those of frozen parameters too): what was saved before is of no use."""
        with torch._C.DisableTorchFunctionSubclass():
            for one in self._by_unit[unit]:
                if one.of.trainable or frozen:
                    one.home += 2
                    if not one.now & 1:
                        self._note_written(one)
                        one.set(one.home)

    @uncompiled
    def accept(self, record: ParamRecord) -> None:
        """What was done to a parameter so far is no write."""
        for one in self._by_unit[record.flat_buffer.unit]:
            if one.of is record.flat_buffer:
                _set_versions((record.parameter,), (one.now,))

    @uncompiled
    def look(self) -> nn.Parameter | None:
        """A parameter that was written to in place since the wrap."""
        with torch._C.DisableTorchFunctionSubclass():
            for all_of_unit in self._by_unit.values():
                for one in all_of_unit:
                    self._note_written(one)
        return next(iter(self.written), None)

    @uncompiled
    def _note_written(self, versions: _FlatBufferVersions) -> None:
        at = versions.written()
        if at is not None:
            self.written.add(versions.parameters[at])


class SavedViews:
    """What autograd holds of gathered memory in the first step, by storage."""

    def __init__(self) -> None:
        self._held: dict[int, list[weakref.ref[Tensor]]] = {}
        self.scans = _SCANS

    @uncompiled
    def add(self, kept: Tensor) -> None:
        """``kept`` is saved."""
        self._held.setdefault(kept.untyped_storage()._cdata, []).append(weakref.ref(kept))

    @uncompiled
    def alive(self, storage: int) -> list[Tensor]:
        """Those in ``storage`` that are still saved."""
        found = [one() for one in self._held.get(storage, ())]
        return [one for one in found if one is not None]

    @uncompiled
    def clear(self) -> None:
        """A step ended."""
        self._held.clear()


class _Kept(NamedTuple):
    """A saved tensor; ``unit``: whose weights it shows, None: nobody's."""

    tensor: Tensor
    version: int
    unit: Unit | None


class SavedWeights:
    """Saved tensors of one unit's calls. [Note: ways out]

    Args:
        needed: called with a unit whose saved weights are about to be used; gathers it.
        stale: the error for weights that have changed since.
        views: called with what is kept of gathered memory in the first step.
    """

    def __init__(
        self,
        unit: Unit,
        needed: Callable[[Unit], None],
        stale: Callable[[Unit], FsdpError],
        views: SavedViews,
    ) -> None:
        self._unit = unit
        self._views = views
        self._units = [one for one in (unit, *unit.around) if one.flat_buffers]
        self._needed, self._stale = needed, stale
        self.found = False  # a gradient entered otherwise than through outputs
        self.entered = -1  # autograd's task that came through outputs last
        self.learns, self._began = True, False
        own = set(unit.modules)
        self._inside = [part._forward_hooks for module in unit.modules for part in module.modules() if part not in own]
        self._first: int | None = None  # hooks inside that are ours: of units inside

    @uncompiled
    def next_step(self) -> None:
        """A step ended: what a unit's first one did not show is not looked for."""
        self.learns = self.learns and not self._began

    @uncompiled
    def push(self) -> bool:
        """A call begins; returns whether what it saves goes through here. [Note: ways out]

        Not where somebody else's hooks hold it (a checkpoint, ``save_on_cpu``).
        """
        if not self._unit.shares:
            return False
        hooks = sum(map(len, self._inside))
        if self._first is None:
            self._first = hooks
        if not ((self.learns or self.found or hooks != self._first) and torch.is_grad_enabled()):
            return False
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None and not isinstance(getattr(top[0], "__self__", None), SavedWeights):
            return False
        self._began = True
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        return True

    @staticmethod
    @uncompiled
    def pop() -> None:
        """It ended."""
        torch._C._autograd._pop_saved_tensors_default_hooks()

    @uncompiled
    def _pack(self, tensor: Tensor) -> _Kept:
        version, kept = tensor._version, tensor.detach()  # detached: an output would hold its own node
        for unit in self._units:
            if lies_in(kept, unit):
                if self.learns:
                    self._views.add(kept)
                return _Kept(kept, version, unit)
        return _Kept(kept, version, None)

    @uncompiled
    def _unpack(self, kept: _Kept) -> Tensor:
        tensor, version, unit = kept
        self._needed(self._unit if unit is None else unit)  # without weights too: gradients of some will come
        if tensor._version != version:
            if unit is not None:
                raise self._stale(unit)
            raise RuntimeError(  # as torch says it where no hook is
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
                "instead"
            )
        return tensor


@uncompiled
def lies_in(tensor: Tensor, unit: Unit) -> bool:
    """``tensor`` shows gathered memory of ``unit``."""
    try:
        at = tensor.data_ptr()
    except RuntimeError:  # sparse, fake, or another kind without memory of its own
        return False
    for low, high in unit.gathered_ranges:  # noqa: SIM110  a generator costs more than what it asks
        if low <= at < high:
            return True
    return False


@uncompiled
def tensors_in(value: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors of a unit's output: those of pytree's containers, and of objects inside them."""
    if isinstance(value, Tensor):
        yield value
    elif value is not None and not isinstance(value, _PLAIN):
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield leaf
            elif leaf is not None and depth < _DEEP and not isinstance(leaf, _PLAIN):
                seen = set() if seen is None else seen
                if id(leaf) not in seen:
                    seen.add(id(leaf))
                    for inside in _parts_of(leaf):
                        yield from tensors_in(inside, depth + 1, seen)


@uncompiled
def _parts_of(value: Any) -> Iterator[Any]:
    """What an object holds, without running code of its own that could use it up."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


@uncompiled
def own_outputs(unit: Unit, output: Any) -> Any:
    """``output`` with copies of what shows ``unit``'s gathered memory; the same object where nothing does.

    Raises:
        FsdpError: an object that is not taken apart holds such a tensor.
    """
    if type(output) is Tensor:
        return output.clone() if lies_in(output, unit) else output
    if not any(lies_in(one, unit) for one in tensors_in(output)):
        return output

    @uncompiled
    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.clone() if lies_in(leaf, unit) else leaf
        if any(lies_in(one, unit) for one in tensors_in(leaf)):
            raise FsdpError(
                f"{unit.name}: its forward returns weights of the unit inside a {type(leaf).__name__}, and their "
                "memory is another unit's after the call; return them in a tuple, list or dict, or return a clone()",
                unit=unit.name,
                op="read",
            )
        return leaf

    return pytree.tree_map(copied, output)


class EscapedViews:
    """Of one unit's calls. [Note: views left behind]

    Attributes:
        began: counts of calls that run, the innermost last (None: it is not looked at); empty: no call is of interest.
    """

    def __init__(self, unit: Unit, saved: SavedViews) -> None:
        self._unit = unit
        self._saved = saved
        self._left = _CALLS
        self.began: list[dict[int, int] | None] = []

    @uncompiled
    def begin(self, learns: bool) -> None:
        """A call begins, its unit is gathered; ``learns``: it is of the first step.

        Not asked of a call with a graph after the first step, unless it is inside one that is looked at.
        """
        if not self._unit.shares:
            return
        wanted = learns
        if not torch.is_grad_enabled():
            wanted = self._left > 0
            self._left -= wanted
        self.began.append(self._counts() if wanted and self._saved.scans else None)

    @uncompiled
    def end(self) -> Sequence[Tensor]:
        """It ended; returns the views that it left."""
        before = self.began.pop()
        if before is None or not any(now > before.get(at, now) for at, now in self._counts().items()):
            return ()
        found = self._find()
        self._saved.scans -= not found
        return found

    @uncompiled
    def clear(self) -> None:
        """Calls were interrupted."""
        self.began.clear()

    def _storages(self) -> set[int]:
        return {one.weights.gathered.untyped_storage()._cdata for one in self._unit.flat_buffers}

    @uncompiled
    def _counts(self) -> dict[int, int]:
        return {at: _use_count(at) - len(self._saved.alive(at)) for at in self._storages()}

    @uncompiled
    def _find(self) -> list[Tensor]:
        """All plain tensors that share a version with a parameter of the unit, and are not what autograd saved."""
        saved = {id(one) for at in self._storages() for one in self._saved.alive(at)}
        with torch._C.DisableTorchFunctionSubclass():
            parameters = tuple(record.parameter for record in self._unit.records)
            versions = tuple(one._version for one in parameters)
            _set_versions(parameters, (_MARK,) * len(parameters))
            try:
                return [
                    one
                    for one in gc.get_objects()
                    if type(one) is Tensor and _version(one) == _MARK and id(one) not in saved
                ]
            finally:
                _set_versions(parameters, versions)


@uncompiled
def _version(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:  # of inference mode
        return 0
