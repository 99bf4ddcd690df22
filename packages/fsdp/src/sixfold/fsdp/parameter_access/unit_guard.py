"""A unit's parameters in its calls: shown to its layers, hidden from everyone else; and views that a call leaves.

    engine.py begins and ends calls --> UnitGuard, EscapedViews (this file) --> guard.py's classes, which ask

[Note: views left behind] A view of a parameter is a plain tensor: nobody asks it whose weights it shows, and after the
call they may be another unit's. Every tensor object counts in its storage. So in a unit's first calls, with a graph and
without, more counts at the end than at the beginning, and than autograd saved, tell that views were left. Then all
tensors of the process are looked at once (0.1 s), and those become ``LentView``. A usual model leaves none, and pays
two numbers per call.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.parameter_access.guard import Guard, guarded_class, lend, shown_class
from sixfold.fsdp.parameter_access.uncompiled import uncompiled

_CALLS = 2  # without a graph, that are looked at
_SCANS = 8  # of one model that find nothing, at most
_MARK = 2**31 + 6  # a version that no tensor has
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
_set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter


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


class EscapedViews:
    """Of one unit's calls. [Note: views left behind]"""

    def __init__(self, unit: Unit, saved: SavedViews) -> None:
        self._unit = unit
        self._saved = saved
        self._left = _CALLS
        self._began: list[dict[int, int] | None] = []  # of calls that run

    @uncompiled
    def begin(self, learns: bool) -> None:
        """A call begins, its unit is gathered; ``learns``: it is of the first step."""
        if not self._unit.shares:
            return
        wanted = learns
        if not torch.is_grad_enabled():
            wanted = self._left > 0
            self._left -= wanted
        self._began.append(self._counts() if wanted and self._saved.scans else None)

    @uncompiled
    def end(self, guards: tuple[Guard, ...]) -> None:
        """It ended."""
        before = self._began.pop() if self._began else None
        if before is not None and any(now > before.get(at, now) for at, now in self._counts().items()):
            found = self._find()
            self._saved.scans -= not found
            for tensor in found:
                lend(tensor, guards)

    @uncompiled
    def clear(self) -> None:
        """Calls were interrupted."""
        self._began.clear()

    def _storages(self) -> set[int]:
        return {stream.weights.gathered.untyped_storage()._cdata for stream in self._unit.streams}

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


class UnitGuard:
    """The parameters of one unit, shown to its layers and hidden from everyone else."""

    def __init__(
        self, guards: Sequence[Guard], views: EscapedViews, *, as_sharded: bool = False, strides: bool = False
    ) -> None:
        self.guards = tuple(guards)
        self._views = views
        self._swaps = []
        for one in guards:
            whole = one.record.buffer.weights.whole_here and not as_sharded
            shown = shown_class(one.own_class, placed=whole, strides=strides)
            self._swaps.append((one.record.parameter, shown, guarded_class(one.own_class)))
            one.mark()
        self.hide()

    def begin_call(self, *, learns: bool) -> None:
        """The unit's call begins, gathered; ``learns``: it is of the first step."""
        self.reveal()
        self._views.begin(learns)

    def end_call(self) -> None:
        """Its call that began last is over."""
        self.hide()
        self._views.end(self.guards)

    def interrupted(self) -> None:
        """Calls that began are over, and nobody told of their ends."""
        self.hide()
        self._views.clear()

    def reveal(self) -> None:
        """Layers read its parameters: in a call, and in a recompute."""
        for parameter, shown, _ in self._swaps:
            parameter.__class__ = shown

    def hide(self) -> None:
        """They do no more."""
        for parameter, _, guarded in self._swaps:
            parameter.__class__ = guarded

    def refuse_written(self) -> None:
        """The unit's call is over, without an error.

        Raises:
            FsdpError: a parameter was written to through ``.data``. [Note: .data in a call]
        """
        for guard in self.guards:
            if guard.taken is not None:
                guard.refuse_written()

    def close(self) -> None:
        """The model is gone: its parameters hold nothing any more."""
        for guard in self.guards:
            guard.gone = True
        self.hide()
