"""The weights of a stream: main weights, what a gather sends, and the gathered compute weights.

    flat.py --> Weights (this file) --> gather.py, state.py, report.py

Knows memory and dtypes; starts no collective and installs no hook.

[Note: views made once] A parameter's ``.data`` becomes a view of gathered memory when the model is wrapped and
never moves again. Gathers write into that memory beneath autograd's version counters (each ``.data`` keeps its
own), so backward accepts weights that were gathered twice, and no step makes a view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sixfold.fsdp.flat import Cut, DataParallelBuffer, ParamRecord


class Weights:
    """Main weights (what the optimizer updates), their gather source, and gathered views.

    Made in two moves: the constructor makes main weights, ``bind`` gets the gathered memory.

    Args:
        gather_dtype: what travels; a parameter of a narrower dtype has a copy of its own beside it.
        shards_params: gathered memory is temporary; else it is kept, and the gather source lies in it.
    """

    def __init__(
        self,
        records: Sequence[ParamRecord],
        cut: Cut,
        *,
        gather_dtype: torch.dtype,
        main_dtype: torch.dtype,
        shards_params: bool,
        device: torch.device,
    ) -> None:
        self._records = records
        self._cut = cut
        self._device = device
        self.gather_dtype = gather_dtype
        self.main_dtype = main_dtype
        self.shards_params = shards_params
        self.source_stale = True  # main weights are newer than what a gather would send
        self.gathered_once = False
        self._kept: Tensor | None = None  # gathered memory of this stream alone
        self.compute: DataParallelBuffer
        if shards_params:
            main = torch.zeros(cut.main_numel, dtype=main_dtype, device=device)
            self.source = main if self.aliased else torch.zeros_like(main, dtype=gather_dtype)
        else:  # gathered memory is kept, and the rank's part of it is the gather source, in place
            self._kept = torch.zeros(self.gathered_bytes, dtype=torch.uint8, device=device)
            self.source = cut.part_of(self._wide_part(self._kept))
            main = self.source if self.aliased else torch.zeros_like(self.source, dtype=main_dtype)
        self.main = cut.view_of(main)
        for record in records:
            if self.main.slice(record.name) is not None:
                view = self.main.local(record.name)
                record.main = nn.Parameter(view, requires_grad=record.parameter.requires_grad)

    @property
    def aliased(self) -> bool:
        """Main weights are the gather source: one dtype, no second copy."""
        return self.gather_dtype == self.main_dtype

    @property
    def main_in_gathered(self) -> bool:
        """Main weights lie in the gathered memory."""
        return self.aliased and not self.shards_params

    @property
    def whole_here(self) -> bool:
        """Main weights lie whole in gathered memory: they can be read at any time."""
        return self.main_in_gathered and self._cut.parts == 1

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered memory, copies of narrower dtypes included."""
        total = self._cut.full_numel * self.gather_dtype.itemsize
        for record in self._records:
            if record.dtype != self.gather_dtype:
                total = self._aligned(total) + record.spec.numel * record.dtype.itemsize
        return total

    @property
    def slot_bytes(self) -> int:
        """``gathered_bytes`` rounded up, so that the next stream in a slot starts aligned."""
        return self._aligned(self.gathered_bytes)

    def _aligned(self, nbytes: int) -> int:
        align = self._cut.layout.align_bytes
        return -(-nbytes // align) * align

    def _wide_part(self, memory: Tensor) -> Tensor:
        return memory[: self._cut.full_numel * self.gather_dtype.itemsize].view(self.gather_dtype)

    def bind(self, memory: Tensor | None) -> None:
        """Take ``memory`` (bytes, at an address for ever) for gathered weights; None: this stream's own."""
        if memory is None:
            if self._kept is None:
                self._kept = torch.zeros(self.gathered_bytes, dtype=torch.uint8, device=self._device)
            memory = self._kept
        wide = self._wide_part(memory)
        self.compute = self._cut.view_of(wide)
        self._copies: list[tuple[Tensor, Tensor]] = []
        at = wide.nbytes
        for record in self._records:
            record.gathered = record.compute = self.compute.full(record.name)
            if record.dtype != self.gather_dtype:
                at = self._aligned(at)
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
