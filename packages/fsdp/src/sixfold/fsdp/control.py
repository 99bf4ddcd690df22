"""Small messages between the ranks of the main mesh, on the host.

    rows of integers, texts --> Control (this file) --> checks.py, initial.py

[Note: two channels] Data moves on the given group; this moves on a CPU back end of the same group, on the
fault store, or on a gloo subgroup made once. Never an object collective, never a device tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Rows = list[list[int]]
WaitWork = Callable[[Any], None]


class Control(Protocol):
    """Fixed-size exchanges: every rank gives a row of int64, all get all rows, by position in the mesh."""

    def start(self, row: Sequence[int], wait: WaitWork) -> Callable[[], Rows]:
        """Send now; the returned callable waits and returns the rows."""


class NoControl:
    """One process."""

    def start(self, row: Sequence[int], wait: WaitWork) -> Callable[[], Rows]:
        """The only row."""
        return lambda: [list(row)]


class GroupControl:
    """All-gathers of CPU tensors, over the shard dimension and then over replicas."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], timeout_s: float) -> None:
        self._groups = [_cpu_group(group, timeout_s) for group in groups if dist.get_world_size(group) > 1]
        self._gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

    def _launch(self, group: dist.ProcessGroup, mine: Tensor) -> tuple[Tensor, Any]:
        rows = mine.new_empty(dist.get_world_size(group) * mine.numel())
        return rows, self._gather(rows, mine, group=group, async_op=True)

    def start(self, row: Sequence[int], wait: WaitWork) -> Callable[[], Rows]:
        """The first dimension's exchange travels while the caller goes on."""
        width = len(row)
        rows, work = self._launch(self._groups[0], torch.tensor(row, dtype=torch.int64))

        def finish() -> Rows:
            wait(work)
            result = rows
            for group in self._groups[1:]:
                result, next_work = self._launch(group, result)
                wait(next_work)
            return [[int(value) for value in one] for one in result.view(-1, width).tolist()]

        return finish


def _cpu_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """``group`` if it has a CPU back end, else a gloo group of the same ranks."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return group
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        backend="gloo",
        timeout=timedelta(seconds=timeout_s),
        use_local_synchronization=True,
    )
    return made


def exchange(control: Control, row: Sequence[int], wait: WaitWork) -> Rows:
    """One exchange, at once."""
    return control.start(row, wait)()


def exchange_text(control: Control, text: str, wait: WaitWork) -> list[str]:
    """Every rank's text, by position. Two exchanges: lengths, then padded bytes."""
    data = text.encode()
    lengths = [row[0] for row in exchange(control, [len(data)], wait)]
    words = -(-max(lengths) // 7)  # 7 bytes to an int64 keep it positive
    padded = data.ljust(words * 7, b"\0")
    row = [int.from_bytes(padded[i * 7 : i * 7 + 7], "little") for i in range(words)]
    if not words:
        return ["" for _ in lengths]
    rows = exchange(control, row, wait)
    texts = [b"".join(word.to_bytes(7, "little") for word in one) for one in rows]
    return [one[:length].decode() for one, length in zip(texts, lengths, strict=True)]
