"""Main parameters in the user's hands: were they written to, or given other memory, since they were looked at last?

    EMA swaps, SAM, schedule-free optimizers --> MainParameter, MainParameters (this file) --> engine.py gathers anew

Writes in place are told by versions, ``.data = ...`` by addresses. A write through ``.data`` changes neither. So
taking ``.data`` leaves a digest of the value, which is compared at the next look. A program that never takes ``.data``
pays nothing. Knows no gather and no rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffers.digest import tensor_digest
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.parameter_access.uncompiled import uncompiled

_MARK = "_sixfold_fsdp_main"  # in a main parameter's own __dict__
_data: Any = torch._C.TensorBase.data
_version: Callable[[Tensor], int] = attrgetter("_version")
_address: Callable[[Tensor], int] = Tensor.data_ptr


class MainParameter(nn.Parameter):
    """A main parameter between steps: a Parameter that knows when its ``.data`` is taken."""

    @property
    def data(self) -> Tensor:
        """The value without a graph."""
        mains = self.__dict__.get(_MARK)
        value = cast(Tensor, _data.__get__(self))
        if mains is not None:
            mains.note_taken(self, value)
        return value

    @data.setter
    def data(self, value: Tensor) -> None:
        mains = self.__dict__.get(_MARK)
        if mains is not None:
            mains.part_from(self, value)
        _data.__set__(self, value)


class MainParameters:
    """All main parameters that this rank holds."""

    def __init__(self, records: Sequence[ParamRecord]) -> None:
        self._records = [record for record in records if record.main is not None]
        self._all = [record.main for record in self._records if record.main is not None]
        self.ids = frozenset(map(id, self._all))
        self._places = [record.flat_buffer.weights.main.local(record.name) for record in self._records]
        self._addresses = [*map(_address, self._places)]
        self._versions = [*map(_version, self._all)]
        self._taken: dict[int, tuple[nn.Parameter, int]] = {}  # digests of values whose .data was taken, by id
        self._held: dict[int, list[weakref.ref[Tensor]]] = {}  # values that were taken, while somebody has them
        self._settled = True  # whatever is written now, no copy of it exists
        for main in self._all:
            main.__dict__[_MARK] = self
        self.show(MainParameter)

    @uncompiled
    def show(self, cls: type[nn.Parameter]) -> None:
        """Of this class from now on: an optimizer picks its kernels by the exact class."""
        for main in self._all:
            main.__class__ = cls

    @uncompiled
    def note_taken(self, main: nn.Parameter, value: Tensor) -> None:
        """Its ``.data`` is about to be the user's, as ``value``."""
        if not self._settled and id(main) not in self._taken:
            self._taken[id(main)] = main, tensor_digest(value)
        held = self._held.setdefault(id(main), [])
        held[:] = [one for one in held if one() is not None]
        held.append(weakref.ref(value))

    @uncompiled
    def part_from(self, main: nn.Parameter, value: Tensor) -> None:
        """Its ``.data`` becomes ``value``: what was taken before keeps its numbers, in memory of its own."""
        for one in self._held.pop(id(main), ()):
            taken = one()
            if taken is not None and taken is not value:
                _data.__set__(taken, taken.clone())

    @uncompiled
    def settle(self) -> None:
        """Gathered copies were given up: until the next look, nothing that is written makes any of them stale."""
        self._settled = True
        self._taken.clear()

    @uncompiled
    def copied(self) -> None:
        """Gathers may begin."""
        self._settled = False

    @uncompiled
    def look(self) -> bool:
        """Whether any was written to since the last look, with copies about; all lie in their places afterwards.

        Raises:
            FsdpError: ``.data`` was set to a tensor that does not fit.
        """
        moved = self.adopt()
        before, self._versions = self._versions, [*map(_version, self._all)]
        if self._settled:
            return False
        changed = moved or self._versions != before
        if self._taken:
            taken, self._taken = self._taken, {}
            changed = changed or any(tensor_digest(_data.__get__(one)) != digest for one, digest in taken.values())
        return changed

    @uncompiled
    def adopt(self) -> bool:
        """What ``.data`` was set to goes to where main weights lie; returns whether any was set."""
        if [*map(_address, self._all)] == self._addresses:
            return False
        for record, main, place, address in zip(self._records, self._all, self._places, self._addresses, strict=True):
            if main.data_ptr() == address:
                continue
            value = _data.__get__(main)
            if value.shape != place.shape or value.dtype != place.dtype or value.device != place.device:
                raise FsdpError(
                    f"{record.name}: .data of its main parameter was set to a tensor of shape {tuple(value.shape)}, "
                    f"{value.dtype} on {value.device}; this rank's part is {tuple(place.shape)}, {place.dtype} on "
                    f"{place.device}. Set it to a tensor like main.data",
                    unit=record.flat_buffer.unit,
                )
            place.copy_(value)
            _data.__set__(main, place)
        return True
