"""The weights of a flat buffer: main weights, what a gather sends, and the gathered compute weights.

    packing.py, flat_tensor.py --> Weights (this file) --> engine/gather.py, state/records.py, report/model_report.py

Knows memory and dtypes; starts no collective and installs no hook.

[Note: views made once] A parameter's ``.data`` becomes a view of gathered memory when the model is wrapped and never
moves again. Gathers write into that memory beneath autograd's version counters, because each ``.data`` keeps its own.
So backward accepts weights that were gathered twice, and no step makes a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffers.column_ranges import round_up
from sixfold.fsdp.buffers.flat_tensor import Cut, ParamRecord
from sixfold.fsdp.buffers.packing import travels_as
from sixfold.fsdp.fp8.quantized import Fp8Scales, QuantizedTensor
from sixfold.fsdp.fp8.scaled_matmul import Fp8Matmul, show_bytes_only


class Weights:
    """Main weights (what the optimizer updates), their gather source, and gathered views.

    ``source`` (this rank's part) and ``gathered`` (all parts) are what a gather takes and fills: of one dtype where all
    parameters travel alike, else bytes. [Note: one collective for several dtypes] What did not travel in the dtype that
    its layers read has a copy of its own behind ``gathered``.

    Made in three moves: the constructor makes main weights, ``bind`` gets the gathered memory, ``scales`` are given.

    Args:
        pitch: bytes of a position of ``cut`` in gathered memory.
        shards_params: gathered memory is temporary; else it is kept, and the gather source lies in it.
        fp8: names of parameters that travel as bytes with a scale; ``matmul``: what their layers multiply.
    """

    def __init__(
        self,
        records: Sequence[ParamRecord],
        cut: Cut,
        *,
        pitch: int,
        main_dtype: torch.dtype,
        shards_params: bool,
        device: torch.device,
        fp8: Collection[str] = (),
        matmul: Fp8Matmul = Fp8Matmul.emulate,
    ) -> None:
        self._records = records
        self._cut, self._align = cut, cut.layout.align_bytes
        self._pitch = pitch
        self._device = device
        self._fp8 = frozenset(fp8)
        self._matmul = matmul
        self._travel = {one.name: travels_as(one.dtype, pitch, fp8=one.name in fp8) for one in records}
        dtypes = set(self._travel.values())
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self.main_dtype = main_dtype
        self.shards_params = shards_params
        self.source_stale = True  # main weights are newer than what a gather would send
        self.gathered_once = False
        self.aliased = self.dtype == main_dtype and not fp8  # main weights are the gather source
        self.scales: Fp8Scales | None = None
        self.gathered: Tensor
        self._kept: Tensor | None = None  # gathered memory of this flat buffer alone
        self._copies: tuple[list[Tensor], list[Tensor]] = [], []  # what layers read, and what travelled for it
        if shards_params:
            self.source = torch.zeros(cut.main_numel * pitch, dtype=torch.uint8, device=device).view(self.dtype)
        else:
            self._kept = torch.zeros(self.padded_bytes, dtype=torch.uint8, device=device)
            start = 0 if cut.parts == 1 else cut.part * cut.shard_numel * pitch
            self.source = self._kept[start : start + cut.main_numel * pitch].view(self.dtype)
        main = self.source if self.aliased else torch.zeros(cut.main_numel, dtype=main_dtype, device=device)
        self.main = cut.view_of(main)
        self._sent: tuple[list[Tensor], list[Tensor]] = [], []  # parts of the source, and of main weights
        self.quantized: tuple[QuantizedTensor, ...] = tuple(
            QuantizedTensor(one.name, one.spec.shape) for one in records if one.name in fp8
        )
        self._of = {tensor.name: tensor for tensor in self.quantized}
        for record in records:
            self._place_main(record)

    def _place_main(self, record: ParamRecord) -> None:
        part = self.main.slice(record.name)
        if part is None:
            return
        view = self.main.local(record.name)
        # Of .data, which has a version of its own: a gather into the same memory is no write of the user's
        # (parameter_access/main_parameters.py).
        record.main = nn.Parameter(view.data, requires_grad=record.parameter.requires_grad)
        flat = view.view(-1)
        at = part.offset_bytes // self._cut.itemsize * self._pitch
        sent = self._bytes(self.source, at, flat.numel(), self._travel[record.name])
        if record.name in self._of:
            self._of[record.name].main, self._of[record.name].source = flat, sent
        else:
            self._sent[0].append(sent)
            self._sent[1].append(flat)

    def _bytes(self, memory: Tensor, at: int, numel: int, dtype: torch.dtype) -> Tensor:
        return memory.view(torch.uint8)[at : at + numel * dtype.itemsize].view(dtype)

    @property
    def main_in_gathered(self) -> bool:
        """Main weights lie in the gathered memory."""
        return self.aliased and not self.shards_params

    @property
    def whole_here(self) -> bool:
        """Main weights lie whole in gathered memory: they can be read at any time."""
        return self.main_in_gathered and self._cut.parts == 1

    @property
    def wire_bytes(self) -> int:
        """What a gather fills: the bytes that travel, and this rank's own."""
        return self._cut.full_numel * self._pitch

    @property
    def gathered_bytes(self) -> int:
        """``wire_bytes`` and the copies behind them."""
        total = self.wire_bytes
        for record in self._records:
            dtype = self._copied_as(record)
            if dtype is not None:
                total = round_up(total, self._align) + record.spec.numel * dtype.itemsize
        return total

    @property
    def nan_bytes(self) -> int:
        """Bytes of the NaNs that stand for values of weights whose layers multiply bytes."""
        return sum(one.dtype.itemsize for one in self._records if one.name in self._of and self._matmul.on_bytes)

    @property
    def padded_bytes(self) -> int:
        """``gathered_bytes`` rounded up, so that the unit's next flat buffer starts aligned."""
        return round_up(self.gathered_bytes, self._align)

    def _copied_as(self, record: ParamRecord) -> torch.dtype | None:
        """Dtype of the copy that layers read, or None: they read what travelled."""
        wanted = torch.uint8 if record.name in self._fp8 and self._matmul.on_bytes else record.dtype
        return None if wanted == self._travel[record.name] else wanted

    def bind(self, memory: Tensor | None) -> None:
        """Take ``memory`` (bytes) for gathered weights, again only when their unit moves; None: memory of its own."""
        if memory is None:
            if self._kept is None:
                self._kept = torch.zeros(self.padded_bytes, dtype=torch.uint8, device=self._device)
            memory = self._kept
        self.gathered = memory[: self.wire_bytes].view(self.dtype)
        self._copies = [], []
        end = self.wire_bytes
        for record, offset in zip(self._records, self._cut.layout.offsets_bytes, strict=True):
            at = offset // self._cut.itemsize * self._pitch
            read = travelled = self._bytes(self.gathered, at, record.spec.numel, self._travel[record.name])
            dtype = self._copied_as(record)
            if dtype is not None:
                at = round_up(end, self._align)
                read = self._bytes(memory, at, record.spec.numel, dtype)
                end = at + read.nbytes
            self._bind_record(record, travelled, read)
        self.spreads = bool(self._copies[0] or self.quantized)  # some do not travel as layers read them

    def _bind_record(self, record: ParamRecord, travelled: Tensor, read: Tensor) -> None:
        tensor = self._of.get(record.name)
        if tensor is not None:
            tensor.gathered = travelled
            if self._matmul.on_bytes:
                tensor.q = read.view(record.spec.shape)
                nowhere = torch.full((), math.nan, dtype=record.dtype, device=self._device)
                record.compute = nowhere.expand(record.spec.shape)
                return
            tensor.compute = read
        elif read is not travelled:
            self._copies[0].append(read)
            self._copies[1].append(travelled)
        record.compute = read.view(record.spec.shape)

    def show_bytes_only(self, replaced: Callable[[], bool]) -> None:
        """From now on only ``F.linear`` reads fp8 parameters whose layers multiply bytes, and who ``replaced`` lets."""
        for record in self._records:
            if record.name in self._of and self._matmul.on_bytes:
                show_bytes_only(record.parameter, self._of[record.name], self._matmul, replaced)

    def write_main(self, record: ParamRecord, value: Tensor) -> None:
        """Keep this rank's part of a full start value."""
        part = self.main.slice(record.name)
        if part is not None and record.main is not None:
            self.main.local(record.name).view(-1).copy_(value.detach().reshape(-1)[part.start : part.stop])

    def main_changed(self) -> None:
        """What was gathered is of older main weights."""
        self.source_stale, self.gathered_once = True, False
        if self.scales is not None:
            self.scales.main_changed(self.quantized)

    def refresh_source(self, wait: Callable[[Any], None]) -> None:
        """What a gather sends, where it is stale: main weights as they travel. ``wait``: of the scales' all-reduce."""
        if self.scales is not None:
            self.scales.refresh(self.quantized, wait)
        if not self.aliased:
            if self.dtype != torch.uint8 and not self.quantized:
                self.source.copy_(self.main.flat)
            elif self._sent[0]:
                torch._foreach_copy_(*self._sent)
            for tensor in self.quantized:
                tensor.leave()
        self.source_stale = False

    def spread_copies(self) -> None:
        """After a gather, where it ``spreads``: weights that did not travel as layers read them."""
        if self._copies[0]:
            torch._foreach_copy_(*self._copies)
        for tensor in self.quantized:
            tensor.arrive()


def whole_main(record: ParamRecord) -> Tensor:
    """In one process: a copy of the main weight in the parameter's shape."""
    if record.main is None:  # no elements
        flat_buffer = record.flat_buffer
        return torch.zeros(record.spec.shape, dtype=flat_buffer.weights.main_dtype, device=flat_buffer.device)
    return record.main.detach().clone().view(record.spec.shape)
