"""The main gradients of a flat buffer: where they lie, and in which dtype an optimizer finds them.

    gradients.py lands sums --> MainGradients (this file) --> main.grad, which optimizers and their norms read

Whether a main gradient is *alive* is no state of ours: ``main.grad`` is the user's to set to None at any moment.

[Note: narrow main gradients] torch's optimizers compute with the gradient's dtype, and raise when it is not the
parameter's. Between the reduction and the step, main gradients lie in the narrower ``grad_dtype``. In the step, main
parameters have copies in main_dtype: one flat buffer after the other (optimizers/chunked_step.py), or all where the
optimizer needs all. What a step does to the copies (GradScaler's unscaling) is gone after it.

[Note: gradients that are held] A tensor ``g = main.grad`` that is kept over ``zero_grad()`` is the user's, as in plain
torch. If somebody has such a tensor, or one on its storage, new gradients get new memory. It is asked once per
reduction, by the counts of CPython and of torch's storage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from sixfold.fsdp.buffers.flat_tensor import Cut, ParamRecord
from sixfold.fsdp.buffers.shard_gradient import ShardGradient


def _references(of: Sequence[Tensor | None]) -> int:
    """The most that any has."""
    return max((sys.getrefcount(one) for one in of if one is not None), default=0)


_ALONE = _references([torch.empty(0)])  # of a tensor that is in a list and nowhere else


def _on_storage(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ASKED = _on_storage(torch.empty(0)) - 1  # by asking


class MainGradients:
    """(main_numel,) in ``grad_dtype``, made when the first sum lands, and the view of each main parameter.

    Args:
        dtype: main_dtype, in which a step finds them.
    """

    def __init__(
        self,
        records: Sequence[ParamRecord],
        cut: Cut,
        *,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._records = records
        self._cut = cut
        self._dtype, self._grad_dtype = dtype, grad_dtype
        self._device = device
        self._mains = [record.main for record in records]
        self._flat: Tensor | None = None
        self._views: list[Tensor | None] | None = None  # by record
        self._wide: list[Tensor | None] | None = None  # what a step finds. [Note: narrow main gradients]

    @property
    def nbytes(self) -> int:
        """Of their memory; 0 before it is made."""
        return 0 if self._flat is None else self._flat.nbytes

    @property
    def narrow_at_rest(self) -> bool:
        """A step needs copies. [Note: narrow main gradients]"""
        return self._grad_dtype != self._dtype

    @property
    def alive(self) -> bool:
        """A main parameter has a gradient."""
        for main in self._mains:  # noqa: SIM110  a generator costs more than what it asks
            if main is not None and main.grad is not None:
                return True
        return False

    def each_alive(self) -> tuple[bool, ...]:
        """By record: its main parameter has a gradient, which lies in our memory afterwards; empty: none has."""
        if not self.alive:
            return ()
        views = self._views or [None] * len(self._mains)
        return tuple([self._alive(main, view) for main, view in zip(self._mains, views, strict=True)])

    def _alive(self, main: Tensor | None, view: Tensor | None) -> bool:
        if main is None or main.grad is None:
            return False
        if main.grad is not view and view is not None:  # the user's, or a widened one
            with torch._C.DisableTorchFunctionSubclass():
                view.copy_(main.grad)
        return True

    def none_at(self, at: int) -> bool:
        """The main parameter of record ``at``, which lies here, has no gradient."""
        main = self._mains[at]
        return main is not None and main.grad is None

    @property
    def version(self) -> int:
        """How often their memory was written to, by whomever."""
        return 0 if self._flat is None else self._flat._version

    def as_at(self, version: int) -> bool:
        """Those that are alive are what they were at ``version``."""
        if self._flat is None or self._flat._version != version:
            return False
        pairs = zip(self._mains, self._views or [None] * len(self._mains), strict=True)
        return all(main is None or main.grad is None or main.grad is view for main, view in pairs)

    # ---- memory

    def lie_in(self, memory: Tensor) -> bool:
        """They lie in ``memory``'s storage."""
        mine = self._flat
        return mine is not None and mine.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()

    def lie_at(self, memory: Tensor) -> None:
        """Their memory is not made but given."""
        self._flat = memory

    def leave(self) -> None:
        """New local sums need the memory in which they are alive: take their own."""
        assert self._flat is not None, "main gradients that have no memory leave it"
        self._flat = self._flat.clone()
        before, self._views = self._views or [None] * len(self._mains), self._make_views(self._flat)
        for main, old, view in zip(self._mains, before, self._views, strict=True):
            if main is not None and main.grad is not None and main.grad is old:
                main.grad = view

    def memory(self) -> Tensor:
        """Where sums land."""
        if self._flat is None:
            self._flat = torch.zeros(self._cut.main_numel, dtype=self._grad_dtype, device=self._device)
        if self._views is None:
            self._views = self._make_views(self._flat)
        return self._flat

    def _make_views(self, flat: Tensor) -> list[Tensor | None]:
        mine = self._cut.view_of(flat)
        views = [None if record.main is None else mine.local(record.name) for record in self._records]
        for main, view in zip(self._mains, views, strict=True):
            if view is not None and main is not None:
                if self._cut.parts > 1:
                    view.__class__ = ShardGradient
                if self.narrow_at_rest:
                    main.grad_dtype = None  # any; else torch refuses a gradient of another dtype
        return views

    def held_by_others(self, *ours: Tensor) -> bool:
        """Somebody else has a tensor in their memory; ``ours``: tensors there that are not main gradients.

        [Note: gradients that are held]
        """
        if self._flat is None or self._views is None:
            return False
        if _references(self._views) > _ALONE:
            return True
        known = {id(one) for one in (self._flat, *self._views, *ours) if one is not None}
        return _on_storage(self._flat) - _ASKED > len(known)

    def part_from(self) -> None:
        """Their memory is somebody else's now; none is alive."""
        self._flat = self._views = None

    # ---- what main parameters have

    def give(self, had: Sequence[bool]) -> None:
        """A reduction has landed: main parameters have their gradients, of records that ``had`` one."""
        for main, gets, view in zip(self._mains, had, self._views or [None] * len(self._mains), strict=True):
            if gets and main is not None:
                main.grad = view
        if self._wide is not None:  # a closure inside the step
            self.widen()

    def take_back(self, at: int) -> None:
        """The main gradient of record ``at``, zeros, was nobody's: it is None."""
        main, view = self._mains[at], (self._views or [None] * len(self._mains))[at]
        wide = None if self._wide is None else self._wide[at]
        if main is not None and main.grad is not None and (main.grad is view or main.grad is wide):
            main.grad = None
        if self._wide is not None:
            self._wide[at] = None

    def widen(self) -> None:
        """A step begins: gradients are plain tensors in main_dtype. [Note: narrow main gradients]"""
        if not self.narrow_at_rest:
            self._show(Tensor)
            return
        self._wide = [
            None if main is None or main.grad is None else _plain(main.grad).to(self._dtype) for main in self._mains
        ]
        for main, wide in zip(self._mains, self._wide, strict=True):
            if wide is not None and main is not None:
                main.grad = wide

    def narrow(self) -> None:
        """The step is over."""
        if self._wide is None:
            self._show(ShardGradient)
            return
        views = self._views or [None] * len(self._mains)
        for main, wide, mine in zip(self._mains, self._wide, views, strict=True):
            if wide is not None and main is not None and main.grad is wide:
                main.grad = mine
        self._wide = None

    def _show(self, shown: type[Tensor]) -> None:
        for view in (self._views or ()) if self._cut.parts > 1 else ():
            if view is not None:
                view.__class__ = shown


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)
