"""Small messages between the ranks of the main mesh, on the host.

    rows of integers, texts --> Control (this file) --> rank_agreement.py, start_values.py, load_full_state.py

[Note: two channels] Data moves on communicators of the given group. These messages move through the store that the
group was made from. No group is made for them, and no descriptor is opened. Never an object collective, never a device
tensor.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from sixfold.fsdp.collectives.comm import Launches
from sixfold.fsdp.errors import FsdpError

Rows = list[list[int]]
WaitWork = Callable[[Any], None]

_FIRST_PAUSE_S = 20e-6  # between two looks for a message; they grow, so that waiting ranks do not storm the store
_LONGEST_PAUSE_S = 0.05
_END_S = 0.2  # for the thread to end
_WORD = 62  # bits that a number of a row holds
_FEW = 16  # ranks that a text tells of


class Control(Protocol):
    """Fixed-size exchanges: every rank gives a row of int64, all get all rows, by position in the mesh."""

    def start(self, row: Sequence[int], wait: WaitWork) -> Callable[[], Rows]:
        """Send now; the returned callable waits and returns the rows."""

    def start_with(self, row: Sequence[int], bits: int, count: int, wait: WaitWork) -> Callable[[], tuple[Rows, int]]:
        """The same with ``count`` bits beside the row, of which all ranks get the union."""


class NoControl:
    """One process."""

    def start(self, row: Sequence[int], wait: WaitWork) -> Callable[[], Rows]:
        """The only row."""
        return lambda: [list(row)]

    def start_with(self, row: Sequence[int], bits: int, count: int, wait: WaitWork) -> Callable[[], tuple[Rows, int]]:
        """The only row, and its own bits."""
        return lambda: ([list(row)], bits)


class StoreControl:
    """Exchanges through a store, one after another, on a thread of their own.

    Every rank sets its row. The first rank collects them and sets them all as one value. So a rank costs the store
    three messages, whatever the number of ranks. Keys of an exchange are deleted by whoever made them, as soon as all
    have read them.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._handed: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.launches = Launches()  # what this rank began, by width
        arguments = (self._handed, self._stop, store, rank, size)
        thread = threading.Thread(target=_serve, args=arguments, name="sixfold-fsdp-control", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self._stop, self._handed, thread)  # ends the thread

    def start(self, row: Sequence[int], wait: WaitWork) -> Callable[[], Rows]:
        """It travels while the caller goes on."""
        finish = self.start_with(row, 0, 0, wait)
        return lambda: finish()[0]

    def start_with(self, row: Sequence[int], bits: int, count: int, wait: WaitWork) -> Callable[[], tuple[Rows, int]]:
        """The first rank makes the union: what each rank reads of the bits does not grow with their number."""
        work = Exchange(row, bits, -(-count // 64))
        self.launches.add(len(row), None)
        self._handed.put(work)

        def finish() -> tuple[Rows, int]:
            wait(work)
            return work.rows, work.bits

        return finish


def _end(stop: threading.Event, handed: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    """A process must not end while the thread is inside a store's call."""
    stop.set()
    handed.put(None)
    thread.join(_END_S)


class Exchange:
    """One exchange, waited for as torch's Work is; ``bits``, in 64-bit ``words``, are all ranks' when it is done."""

    def __init__(self, row: Sequence[int], bits: int = 0, words: int = 0) -> None:
        self.row = row
        self.bits, self.words = bits, words
        self.rows: Rows = []
        self.error: BaseException | None = None
        self.done = threading.Event()

    def is_completed(self) -> bool:
        """It ended, well or not."""
        return self.done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """As Work's, in time."""
        if not self.done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(f"control exchange: {self.error}") from self.error


def _serve(
    handed: queue.SimpleQueue[Exchange | None], stop: threading.Event, store: Store, rank: int, size: int
) -> None:
    """The thread of StoreControl. It holds no model."""
    number = 0
    while (work := handed.get()) is not None:
        number += 1
        try:
            mine = _pack(work.row, work.bits, work.words)
            data = _exchange(store, number, mine, rank, size, stop)
            work.rows, work.bits = _rows(data, len(work.row), work.words)
        except BaseException as error:  # raised in the thread that waits for it
            work.error = error
        work.done.set()


def _pack(row: Sequence[int], bits: int, words: int, *, apart: bool = False) -> bytes:
    """``apart``: the bits are not here but in the first rank's row."""
    head = struct.pack(f"<{2 + len(row)}q", len(row), -words if apart else words, *row)
    return head if apart else head + bits.to_bytes(8 * words, "little")


def _unpack(data: bytes) -> Iterator[tuple[list[int], int, int]]:
    """Rows, each with its bits and its words of bits."""
    at = 0
    while at < len(data):
        width, words = struct.unpack_from("<2q", data, at)
        row = list(struct.unpack_from(f"<{width}q", data, at + 16))
        at += 16 + 8 * width
        bits = int.from_bytes(data[at : at + 8 * max(words, 0)], "little")
        at += 8 * max(words, 0)
        yield row, bits, abs(words)


def _joined(messages: Sequence[bytes]) -> bytes:
    """All ranks' rows, and one union of their bits."""
    parts = [next(_unpack(one)) for one in messages]
    if not parts[0][2] or any(words != parts[0][2] for _, _, words in parts):
        return b"".join(messages)
    union = 0
    for _, bits, _ in parts:
        union |= bits
    return b"".join(_pack(row, union, words, apart=at > 0) for at, (row, _, words) in enumerate(parts))


def _rows(data: bytes, width: int, words: int) -> tuple[Rows, int]:
    """Every rank's row, and the union of all bits; each says how wide it is.

    Raises:
        RuntimeError: another rank's has not ``width`` numbers and ``words`` of bits: it is at another call. All ranks
            see all, so all raise.
    """
    parts = list(_unpack(data))
    if any(len(row) != width or has != words for row, _, has in parts):
        widths = ", ".join(f"{len(row) + has} by rank {rank}" for rank, (row, _, has) in enumerate(parts[:_FEW]))
        raise RuntimeError(f"ranks are at different calls; numbers sent: {widths}")
    union = 0
    for _, bits, _ in parts:
        union |= bits
    return [row for row, _, _ in parts], union


def _exchange(store: Store, number: int, mine: bytes, rank: int, size: int, stop: threading.Event) -> bytes:
    everyone = f"control/{number}/all"
    store.set(f"control/{number}/{rank}", mine)  # type: ignore[arg-type]
    if rank:
        _await(store, [everyone], stop)
        data: bytes = store.get(everyone)
    else:
        keys = [f"control/{number}/{peer}" for peer in range(size)]
        _await(store, keys, stop)
        data = _joined(store.multi_get(keys) if store.has_extended_api() else [*map(store.get, keys)])  # type: ignore[attr-defined]
        store.set(everyone, data)  # type: ignore[arg-type]
        if number > 1:  # whoever sent a row of this exchange has read all of the last one
            store.delete_key(f"control/{number - 1}/all")
    store.delete_key(f"control/{number}/{rank}")
    return data


def _await(store: Store, keys: list[str], stop: threading.Event) -> None:
    """Wait until all ``keys`` are there. ``Store.wait`` would hold the connection that other threads use too."""
    pause_s = _FIRST_PAUSE_S
    while not store.check(keys):
        if stop.is_set():
            raise RuntimeError("the model was dropped")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.25, _LONGEST_PAUSE_S)


class GroupControl:
    """All-gathers of CPU tensors, over the shard dimension and then over replicas: for back ends without a store of
    many processes (torch's fake one)."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = [group for group in groups if dist.get_world_size(group) > 1]
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

    def start_with(self, row: Sequence[int], bits: int, count: int, wait: WaitWork) -> Callable[[], tuple[Rows, int]]:
        """Bits are numbers of the row, ``_WORD`` to each."""
        chunks = [bits >> at & (1 << _WORD) - 1 for at in range(0, count, _WORD)]
        finish = self.start([*row, *chunks], wait)

        def finish_all() -> tuple[Rows, int]:
            rows, union = finish(), bits
            for one in rows:
                for at, chunk in enumerate(one[len(row) :]):
                    union |= chunk << at * _WORD
            return [one[: len(row)] for one in rows], union

        return finish_all


def control_of(groups: Sequence[dist.ProcessGroup], model_store: Store | None, rank: int, size: int) -> Control:
    """The control channel of a mesh: [shard] or [replicate, shard], through its model_store if it has one."""
    if size == 1:
        return NoControl()
    return GroupControl(groups[::-1]) if model_store is None else StoreControl(model_store, rank, size)


def exchange(control: Control, row: Sequence[int], wait: WaitWork) -> Rows:
    """One exchange, at once."""
    return control.start(row, wait)()


def farewell(control: Control, wait: WaitWork) -> None:
    """Before all ranks raise what all know: nobody ends, and with it perhaps the store, before all have read it.

    A rank that is left behind here knows all too, and raises the same.
    """
    with contextlib.suppress(FsdpError):
        exchange(control, [0], wait)


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
