"""The gradient memory of a stream: where the local sum lies, and where main gradients lie.

    flat.py --> Gradients (this file) --> reduce.py

Knows memory; starts no collective and installs no hook. A local sum has the size of the whole stream, main
gradients that of what this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sixfold.fsdp.flat import Cut, ParamRecord
from sixfold.fsdp.part import ShardGradient


class Gradients:
    """Local sums and main gradients of a stream; an idle one of a stream that is frozen.

    Args:
        shards_grads: main gradients have memory of their own from the start; else they may take the local sum's.
    """

    def __init__(
        self,
        unit: str,
        records: Sequence[ParamRecord],
        cut: Cut,
        *,
        main_dtype: torch.dtype,
        shards_grads: bool,
        device: torch.device,
    ) -> None:
        self._unit = unit
        self._records = records
        self._cut = cut
        self._dtype = main_dtype
        self._shards_grads = shards_grads
        self._device = device
        self.local: Tensor | None = None  # (full_numel,) local sums that wait for their reduction
        self.in_pool = False  # ``local`` lies in the shared pool
        self._own_local: Tensor | None = None
        self._own_views: list[Tensor] = []
        self._pool_views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._home: Tensor | None = None
        self._home_is_local = False

    @property
    def own_local_bytes(self) -> int:
        """Bytes of full-size local gradient sums that only this stream uses."""
        return 0 if self._own_local is None else self._own_local.nbytes

    @property
    def home_bytes(self) -> int:
        """Bytes of main gradients that lie in no local sum."""
        return 0 if self._home is None or self._home_is_local else self._home.nbytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of a local sum in the pool, rounded up, so that the next stream's starts aligned."""
        align = self._cut.layout.align_bytes
        return -(-self._cut.full_numel * self._dtype.itemsize // align) * align

    def use_own_local(self) -> None:
        """Sum local gradients in memory of this stream alone."""
        if self._own_local is None:
            self._own_local = torch.zeros(self._cut.full_numel, dtype=self._dtype, device=self._device)
            self._own_views = self._views(self._own_local)
            if not self._shards_grads and self._home is None:
                # The reduced gradient takes the place of its local sum: no memory of its own.
                self._home, self._home_is_local = self._cut.part_of(self._own_local), True
        elif self._home_is_local and any(
            record.main is not None and record.main.grad is not None for record in self._records
        ):
            self._move_home()
        self._start_local(self._own_local, self._own_views, in_pool=False)

    def use_pool_local(self, slot: int, memory: Tensor) -> None:
        """Sum local gradients in ``memory`` (bytes) of slot ``slot`` of the shared pool, until they are reduced."""
        if slot not in self._pool_views:
            flat = memory[: self._cut.full_numel * self._dtype.itemsize].view(self._dtype)
            self._pool_views[slot] = flat, self._views(flat)
        flat, views = self._pool_views[slot]
        self._start_local(flat, views, in_pool=True)

    def _views(self, flat: Tensor) -> list[Tensor]:
        buffer = self._cut.view_of(flat)
        return [buffer.full(record.name) for record in self._records]

    def _start_local(self, flat: Tensor, views: list[Tensor], *, in_pool: bool) -> None:
        self.local, self.in_pool = flat, in_pool
        for record, view in zip(self._records, views, strict=True):
            record.local_grad, record.filled = view, False

    def _move_home(self) -> None:
        """Main gradients are alive in the memory that new local sums need: give them their own."""
        assert self._home is not None, f"unit {self._unit!r} moves main gradients that it has not"
        old, self._home, self._home_is_local = self._home, self._home.clone(), False
        for record, view in zip(self._records, self._home_views(), strict=True):
            if record.main is not None and record.main.grad is not None and record.main.grad is record.main_grad:
                record.main.grad = view
            record.main_grad = view
        del old

    def _home_views(self) -> list[Tensor | None]:
        assert self._home is not None, f"unit {self._unit!r} has no place for main gradients"
        buffer = self._cut.view_of(self._home)
        views = [None if record.main is None else buffer.local(record.name) for record in self._records]
        for view in views if self._cut.parts > 1 else ():
            if view is not None:
                view.__class__ = ShardGradient
        return views

    def take_local(self, fill_zeros: bool) -> tuple[Tensor, list[bool]]:
        """Hand the local sums to a reduction: (full_numel,) and which parameters had any.

        ``fill_zeros``: parameters without a gradient contribute zeros, as on every other rank; only those frozen
        after wrapping or left out of ``backward(inputs=)`` (on all ranks alike) have none, as in plain training.
        """
        local = self.local
        assert local is not None, f"unit {self._unit!r} has no local gradients to reduce"
        had = [record.filled or (fill_zeros and record.wanted and not record.left_out) for record in self._records]
        for record in self._records:
            if not record.filled and fill_zeros and record.local_grad is not None:
                record.local_grad.zero_()
            record.filled = record.left_out = False
        self.local = None
        return local, had

    def release_own_local(self) -> None:
        """Free the memory of ``use_own_local``; no sum is in it."""
        assert self.local is None and not self._home_is_local, f"unit {self._unit!r} still uses its own sums"
        self._own_local, self._own_views = None, []
        for record in self._records:
            record.local_grad = None

    def result_place(self, local: Tensor) -> Tensor:
        """Where ``local``'s reduction writes: the main gradients' own place while none is alive, else in ``local``."""
        if self._home is None:
            self._home = torch.zeros(self._cut.main_numel, dtype=self._dtype, device=self._device)
        alive = any(record.main is not None and record.main.grad is not None for record in self._records)
        return self._cut.part_of(local) if alive else self._home

    def add_result(self, result: Tensor, had: Sequence[bool]) -> None:
        """Add a reduced and divided sum to main gradients; ``had`` leaves out parameters without any."""
        home = self._home
        assert home is not None, f"unit {self._unit!r} has no place for main gradients"
        if self._records and self._records[0].main_grad is None and all(r.main_grad is None for r in self._records):
            for record, view in zip(self._records, self._home_views(), strict=True):
                record.main_grad = view
        held = [(i, record) for i, record in enumerate(self._records) if record.main is not None]
        if all(had) and all(r.main is not None and r.main.grad is r.main_grad for _, r in held):
            home.add_(result)
            return
        in_place = result.data_ptr() == home.data_ptr()
        incoming = None if in_place else self._cut.view_of(result)
        for i, record in held:
            assert record.main is not None and record.main_grad is not None, f"{record.name} is not held here"
            if not had[i]:
                continue
            if record.main.grad is None:
                if incoming is not None:
                    record.main_grad.copy_(incoming.local(record.name))
                record.main.grad = record.main_grad
            else:
                assert incoming is not None, f"{record.name}: a sum was written over its live gradient"
                record.main.grad.add_(incoming.local(record.name))
