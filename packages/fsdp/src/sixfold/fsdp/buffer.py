"""The memory of one unit: main weights, gathered compute weights, local and main gradients.

    layout.py --> DataParallelBuffer, ParamAndGradBuffer (this file) --> gather.py, reduce.py, state.py

Knows shards and views; starts no collective and installs no hook. N is the size of the shard dimension,
S the elements of a shard. Compute weights, main weights and gradients share one element layout.

[Note: views made once] A parameter's ``.data`` becomes a view of gathered memory when the model is wrapped and
never moves again. Gathers write into that memory beneath autograd's version counters (each ``.data`` keeps its
own), so backward accepts weights that were gathered twice, and no step makes a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.config import MixedPrecision, ShardingStrategy
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.layout import Layout, Slice, TensorSpec, plan_layout
from sixfold.fsdp.part import ShardGradient

Granularity = Callable[[str, nn.Parameter], str | int]


class DataParallelBuffer:
    """One flat tensor in the layout of a unit: all shards, or this rank's alone.

    Args:
        layout: planned in elements of ``itemsize`` bytes.
        flat: (N * S,) or more for the whole, (S,) for the shard of ``rank``.
    """

    def __init__(self, layout: Layout, itemsize: int, rank: int, flat: Tensor) -> None:
        self.flat = flat
        self.shard_numel = layout.shard_bytes // itemsize
        self._whole = layout.world_size == 1 or flat.numel() != self.shard_numel
        self._rank = rank
        self._specs = {
            spec.name: (offset // itemsize, spec)
            for spec, offset in zip(layout.specs, layout.offsets_bytes, strict=True)
        }
        self._slices = {part.name: (part, part.offset_bytes // itemsize) for part in layout.slices(rank)}

    @property
    def shard(self) -> Tensor:
        """(S,) this rank's part."""
        start = self._rank * self.shard_numel if self._whole else 0
        return self.flat[start : start + self.shard_numel]

    def full(self, name: str) -> Tensor:
        """The whole tensor, in its shape."""
        if not self._whole:
            raise FsdpError(f"{name}: this buffer holds one shard; a full view needs the gathered buffer")
        offset, spec = self._specs[name]
        return self.flat[offset : offset + spec.numel].view(spec.shape)

    def slice(self, name: str) -> Slice | None:
        """What of ``name`` this rank's shard holds."""
        found = self._slices.get(name)
        return None if found is None else found[0]

    def local(self, name: str) -> Tensor:
        """This rank's part of ``name``: (n,) by element and block, (rows, ...) by row, the full shape by tensor.

        A tensor of shape () is (1,) by each of them.
        """
        part, offset = self._slices[name]
        flat = self.shard[offset : offset + part.stop - part.start]
        return flat.view(local_shape(self._specs[name][1], part))


def local_shape(spec: TensorSpec, part: Slice) -> tuple[int, ...]:
    """Shape of a main parameter that holds ``part``."""
    if spec.granularity == "tensor" and spec.shape:  # of () too: else its state would look like a step counter
        return spec.shape
    if spec.granularity == "row" and spec.shape:
        return ((part.stop - part.start) // max(math.prod(spec.shape[1:]), 1), *spec.shape[1:])
    return (part.stop - part.start,)


class ParamRecord:
    """One parameter in its unit's buffers.

    ``main`` is what the optimizer updates (None where nothing of it lies here); ``filled`` says that ``local_grad``
    holds a local sum; ``wanted`` is ``requires_grad`` as it was last set; ``parameter.data`` is ``compute`` for ever.
    [Note: views made once]
    """

    __slots__ = (
        "buffer", "compute", "dtype", "filled", "gathered", "local_grad", "main", "main_grad", "name", "parameter",
        "spec", "wanted",
    )  # fmt: skip

    def __init__(self, name: str, parameter: nn.Parameter, spec: TensorSpec, dtype: torch.dtype, buffer: Any) -> None:
        self.name = name
        self.parameter = parameter
        self.spec = spec
        self.dtype = dtype
        self.buffer: ParamAndGradBuffer = buffer
        self.compute: Tensor
        self.gathered: Tensor
        self.main: nn.Parameter | None = None
        self.main_grad: Tensor | None = None
        self.local_grad: Tensor | None = None
        self.filled = False
        self.wanted = parameter.requires_grad

    @property
    def whole_on_one_rank(self) -> bool:
        """Its main parameter has the parameter's own shape, on the one rank that holds it. The same on all ranks."""
        in_shape = self.spec.granularity == "tensor" or len(self.spec.shape) == 1
        return in_shape and not self.buffer.layout.is_cut(self.name)


class ParamAndGradBuffer:
    """Buffers of a unit's trainable parameters, or of its frozen ones (a stream of their own: no gradients).

    Args:
        shards, rank: the shard dimension of the mesh.
    Made in two moves: the constructor plans and makes main weights, ``bind`` gets the gathered memory.
    """

    def __init__(
        self,
        unit: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        shards: int,
        rank: int,
        strategy: ShardingStrategy,
        precision: MixedPrecision,
        align_bytes: int,
        device: torch.device,
        granularity: Granularity | None = None,
    ) -> None:
        self.unit = unit
        self.device = device
        self.shards_params = strategy.shards_params
        self.shards_grads = strategy.shards_grads
        self.main_dtype = precision.main_dtype
        self.parts = shards if strategy.shards_optimizer else 1  # shards of main weights
        self.part = rank if strategy.shards_optimizer else 0
        dtypes = [precision.param_dtype or parameter.dtype for _, parameter in parameters]
        self.gather_dtype = reduce(torch.promote_types, dtypes)
        narrow = min((self.gather_dtype, self.main_dtype), key=lambda dtype: dtype.itemsize)
        self._itemsize = narrow.itemsize
        specs = [
            TensorSpec(name, tuple(p.shape), narrow, granularity(name, p) if granularity else "element")
            for name, p in parameters
        ]
        self.layout = plan_layout(specs, self.parts, align_bytes=align_bytes)
        self.shard_numel = self.layout.shard_bytes // self._itemsize
        # Whole sums are cut in `shards` equal pieces by grad_sum="rank_order" under no_shard too.
        self.full_numel = -(-self.parts * self.shard_numel // shards) * shards
        self.records = [
            ParamRecord(name, parameter, spec, dtype, self)
            for (name, parameter), spec, dtype in zip(parameters, specs, dtypes, strict=True)
        ]
        self.trainable = any(parameter.requires_grad for _, parameter in parameters)
        self.source_stale = True  # main weights are newer than what a gather would send
        self.gathered_once = False
        self.local: Tensor | None = None  # (full_numel,) local sums that wait for their reduction
        self.pool_slot: int | None = None
        self._own_local: Tensor | None = None
        self._own_views: list[Tensor] = []
        self._pool_views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._home: Tensor | None = None
        self._home_is_local = False
        self._make_main()

    # ---- weights

    @property
    def aliased(self) -> bool:
        """Main weights are the gather source: one dtype, no second copy."""
        return self.gather_dtype == self.main_dtype

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered memory, copies of narrower dtypes included."""
        total = self.full_numel * self.gather_dtype.itemsize
        for record in self.records:
            if record.dtype != self.gather_dtype:
                total = -(-total // self.layout.align_bytes) * self.layout.align_bytes
                total += record.spec.numel * record.dtype.itemsize
        return total

    @property
    def main_in_gathered(self) -> bool:
        """Main weights lie in the gathered memory."""
        return self.aliased and not self.shards_params

    @property
    def own_local_bytes(self) -> int:
        """Bytes of full-size local gradient sums that only this unit uses."""
        return 0 if self._own_local is None else self._own_local.nbytes

    @property
    def home_bytes(self) -> int:
        """Bytes of main gradients that lie in no local sum."""
        return 0 if self._home is None or self._home_is_local else self._home.nbytes

    @property
    def slot_bytes(self) -> int:
        """``gathered_bytes`` rounded up, so that the next buffer in a slot starts aligned."""
        return -(-self.gathered_bytes // self.layout.align_bytes) * self.layout.align_bytes

    def _make_main(self) -> None:
        numel = self.full_numel if self.parts == 1 else self.shard_numel
        if self.shards_params:
            self._compute: Tensor | None = None
            main = torch.zeros(numel, dtype=self.main_dtype, device=self.device)
            self.source = main if self.aliased else torch.zeros_like(main, dtype=self.gather_dtype)
        else:  # gathered memory is kept, and the rank's part of it is the gather source, in place
            self._compute = torch.zeros(self.gathered_bytes, dtype=torch.uint8, device=self.device)
            compute = self._compute[: self.full_numel * self.gather_dtype.itemsize].view(self.gather_dtype)
            self.source = compute[self.part * self.shard_numel :][:numel]
            main = self.source if self.aliased else torch.zeros_like(self.source, dtype=self.main_dtype)
        self.main = self.view_of(main)
        for record in self.records:
            if self.main.slice(record.name) is not None:
                view = self.main.local(record.name)
                record.main = nn.Parameter(view, requires_grad=record.parameter.requires_grad)

    def view_of(self, flat: Tensor) -> DataParallelBuffer:
        """``flat`` in this unit's layout."""
        return DataParallelBuffer(self.layout, self._itemsize, self.part, flat)

    def bind(self, memory: Tensor | None) -> None:
        """Take ``memory`` (bytes, at an address for ever) for gathered weights; None: this buffer's own."""
        if memory is None:
            if self._compute is None:
                self._compute = torch.zeros(self.gathered_bytes, dtype=torch.uint8, device=self.device)
            memory = self._compute
        at = self.full_numel * self.gather_dtype.itemsize
        self.compute = self.view_of(memory[:at].view(self.gather_dtype))
        self._copies: list[tuple[Tensor, Tensor]] = []
        for record in self.records:
            record.gathered = record.compute = self.compute.full(record.name)
            if record.dtype != self.gather_dtype:
                at = -(-at // self.layout.align_bytes) * self.layout.align_bytes
                end = at + record.spec.numel * record.dtype.itemsize
                record.compute = memory[at:end].view(record.dtype).view(record.spec.shape)
                self._copies.append((record.compute, record.gathered))
                at = end

    def store_main(self, record: ParamRecord, value: Tensor) -> None:
        """Keep this rank's part of a full start value."""
        part = self.main.slice(record.name)
        if part is not None and record.main is not None:
            record.main.data.view(-1).copy_(value.detach().reshape(-1)[part.start : part.stop])

    def refresh_source(self) -> None:
        """What a gather sends: main weights in the gather dtype."""
        if self.source_stale and not self.aliased:
            self.source.copy_(self.main.flat)
        self.source_stale = False

    def spread_copies(self) -> None:
        """After a gather: compute weights of a narrower dtype than travelled."""
        for narrow, wide in self._copies:
            narrow.copy_(wide)

    # ---- gradients

    def use_own_local(self) -> None:
        """Sum local gradients in memory of this unit alone."""
        if self._own_local is None:
            self._own_local = torch.zeros(self.full_numel, dtype=self.main_dtype, device=self.device)
            self._own_views = self._views(self._own_local)
            if not self.shards_grads and self._home is None:
                # The reduced gradient takes the place of its local sum: no memory of its own.
                self._home, self._home_is_local = self._part_of(self._own_local), True
        elif self._home_is_local and any(
            record.main is not None and record.main.grad is not None for record in self.records
        ):
            self._move_home()
        self._start_local(self._own_local, self._own_views, None)

    def use_pool_local(self, slot: int, memory: Tensor) -> None:
        """Sum local gradients in slot ``slot`` of the shared pool, until the reduction is done."""
        if slot not in self._pool_views:
            flat = memory[: self.full_numel * self.main_dtype.itemsize].view(self.main_dtype)
            self._pool_views[slot] = flat, self._views(flat)
        flat, views = self._pool_views[slot]
        self._start_local(flat, views, slot)

    def _views(self, flat: Tensor) -> list[Tensor]:
        buffer = self.view_of(flat)
        return [buffer.full(record.name) for record in self.records]

    def _start_local(self, flat: Tensor, views: list[Tensor], slot: int | None) -> None:
        self.local, self.pool_slot = flat, slot
        for record, view in zip(self.records, views, strict=True):
            record.local_grad, record.filled = view, False

    def _part_of(self, flat: Tensor) -> Tensor:
        return flat if self.parts == 1 else flat[self.part * self.shard_numel :][: self.shard_numel]

    def _move_home(self) -> None:
        """Main gradients are alive in the memory that new local sums need: give them their own."""
        assert self._home is not None, f"unit {self.unit!r} moves main gradients that it has not"
        old, self._home, self._home_is_local = self._home, self._home.clone(), False
        for record, view in zip(self.records, self._home_views(), strict=True):
            if record.main is not None and record.main.grad is not None and record.main.grad is record.main_grad:
                record.main.grad = view
            record.main_grad = view
        del old

    def _home_views(self) -> list[Tensor | None]:
        assert self._home is not None, f"unit {self.unit!r} has no place for main gradients"
        buffer = self.view_of(self._home)
        views = [None if record.main is None else buffer.local(record.name) for record in self.records]
        for view in views if self.parts > 1 else ():
            if view is not None:
                view.__class__ = ShardGradient
        return views

    def take_local(self, fill_zeros: bool) -> tuple[Tensor, list[bool]]:
        """Hand the local sums to a reduction: (full_numel,) and which parameters had any.

        ``fill_zeros``: parameters without a gradient contribute zeros, as on every other rank; only those frozen
        after wrapping (on all ranks alike) have none, as in plain training.
        """
        local = self.local
        assert local is not None, f"unit {self.unit!r} has no local gradients to reduce"
        had = [record.filled or (fill_zeros and record.wanted) for record in self.records]
        for record in self.records:
            if not record.filled and fill_zeros and record.local_grad is not None:
                record.local_grad.zero_()
            record.filled = False
        self.local = None
        return local, had

    def release_own_local(self) -> None:
        """Free the memory of ``use_own_local``; no sum is in it."""
        assert self.local is None and not self._home_is_local, f"unit {self.unit!r} still uses its own sums"
        self._own_local, self._own_views = None, []
        for record in self.records:
            record.local_grad = None

    def result_place(self, local: Tensor) -> Tensor:
        """Where ``local``'s reduction writes: the main gradients' own place while none is alive, else in ``local``."""
        if self._home is None:
            self._home = torch.zeros(self.main.flat.numel(), dtype=self.main_dtype, device=self.device)
        alive = any(record.main is not None and record.main.grad is not None for record in self.records)
        return self._part_of(local) if alive else self._home

    def add_result(self, result: Tensor, had: Sequence[bool]) -> None:
        """Add a reduced and divided sum to main gradients; ``had`` leaves out parameters without any."""
        home = self._home
        assert home is not None, f"unit {self.unit!r} has no place for main gradients"
        if self.records and self.records[0].main_grad is None and all(r.main_grad is None for r in self.records):
            for record, view in zip(self.records, self._home_views(), strict=True):
                record.main_grad = view
        held = [(i, record) for i, record in enumerate(self.records) if record.main is not None]
        if all(had) and all(r.main is not None and r.main.grad is r.main_grad for _, r in held):
            home.add_(result)
            return
        in_place = result.data_ptr() == home.data_ptr()
        incoming = None if in_place else self.view_of(result)
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
