"""The arena: one piece of shared memory that a rank's tensors are copied into while the trainer waits.

    tensors --> Arena.take (this file) --> shared memory --> MappedArena.tensors (this file) --> writer.write
    trainer <-- ProgressCounter (this file) <-- first page <-- worker

The memory is a memfd that the trainer and its worker both map: no name that could be left behind, no limit of
``/dev/shm``. It is kept: a copy runs at 20 GB/s into memory that was touched before and at 1 into fresh
shared memory. Once tensors were on a CUDA device the trainer registers it as pinned; the worker never
touches CUDA.

[Note: fresh shared memory] The kernel gives shared memory in pages of 4 KiB, and takes as long for them as for ten
copies. Private memory it gives in pages of 2 MiB where it can, almost for nothing. So a call whose tensors have no room
in the arena copies them into private memory. ``settle``, in the thread of the handle, moves them into the arena piece
by piece and gives each piece back. So there is one copy at any time, and one piece twice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from threading import Lock
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.background.fence import Fence
from sixfold.dist_ckpt.background.lazy_copy import LazyCopy
from sixfold.dist_ckpt.errors import StorageError
from sixfold.dist_ckpt.formats.frame import LARGE_ALIGNMENT, LARGE_BYTES, SMALL_ALIGNMENT
from sixfold.dist_ckpt.interpreter import Pool
from sixfold.dist_ckpt.reused_memory import recycled
from sixfold.dist_ckpt.state.tensor_memory import is_plain
from sixfold.dist_ckpt.storage.frame_file import libc

COPY_THREADS = 2
_MADV_POPULATE_WRITE = 23
_YIELD_S = 1e-3  # in which the call that began this thread returns, also where threads are not preempted
_PIECE_BYTES = 2**25  # that the arena grows by at a time
_GRAIN_BYTES = 2**21  # the arena grows in whole huge pages
_SMALL_BYTES = 2**20  # up to here a tensor is copied by the caller: a thread costs more
_SLICE_BYTES = 64 * 2**20  # a larger tensor is copied in slices, so that the threads end together


class Place(NamedTuple):
    """Where a tensor lies in the arena."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # where to, and what


class Pinned:
    """Memory that the CUDA driver has pinned, and copies into it on a stream of their own.

    Args:
        cuda: ``torch.cuda``; tests pass a fake.
        device: whose tensors are copied on the stream.
    """

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device)

    def register(self, address: int, nbytes: int) -> None:
        """Pin the arena's memory."""
        code = self._cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(code) != 0:
            raise StorageError(
                f"cudaHostRegister of {nbytes} bytes gave {code}; raise the limit of locked memory (ulimit -l), or "
                "save synchronously"
            )

    def unregister(self, address: int) -> None:
        """Undo that."""
        self._cuda.cudart().cudaHostUnregister(address)

    def now(self) -> Any:
        """An event behind what the caller's stream has been given so far."""
        return self._cuda.current_stream(self._device).record_event()

    @contextmanager
    def copied(self, pairs: Pairs, after: Any = None) -> Iterator[Pairs]:
        """Copies from the device go on inside and are complete behind it; gives the pairs of other devices.

        Args:
            after: what they wait for, of ``now``; None: for what the caller's stream has been given.
        """
        if after is None:
            self._stream.wait_stream(self._cuda.current_stream(self._device))
        else:
            self._stream.wait_event(after)
        with self._cuda.stream(self._stream):
            for target, source in pairs:
                if source.device == self._device:
                    target.copy_(source, non_blocking=True)
            copied = self._stream.record_event()
        try:
            yield [pair for pair in pairs if pair[1].device != self._device]
        finally:
            copied.synchronize()


def pinned_for(tensors: Sequence[torch.Tensor]) -> Pinned | None:
    """What pins the arena as soon as a tensor is on a CUDA device."""
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    return None if device is None else Pinned(torch.cuda, device)


class ProgressCounter:
    """Numbers in the first page of an arena; the worker counts, the trainer looks, neither waits."""

    def __init__(self, fd: int) -> None:
        self._cells = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("q")
        self._lock = Lock()  # of the worker's threads that write

    def reset(self) -> None:
        """The trainer's, before a job."""
        self._cells[0] = 0

    def add(self, nbytes: int) -> None:
        """So many bytes more are written; 0: something else has moved."""
        with self._lock:
            self._cells[0] += nbytes
            self._cells[1] += 1

    @property
    def written(self) -> int:
        """Bytes written."""
        return self._cells[0]

    @property
    def fence(self) -> Fence:
        """The trainer's word on the values of the job."""
        return Fence(self._cells[2])

    @fence.setter
    def fence(self, state: Fence) -> None:
        self._cells[2] = state

    @property
    def moves(self) -> int:
        """Differs from what it was if anything has moved."""
        return self._cells[1]


class Arena:
    """Shared memory that grows when it must and is never given back before ``close``.

    ``fd`` is handed to the worker when it is started and stays the same; ``nbytes`` is the size.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("sixfold-arena", os.MFD_CLOEXEC)
        os.truncate(self.fd, mmap.PAGESIZE)  # the counter's
        self.nbytes = 0
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._waiting: torch.Tensor | None = None  # see [Note: fresh shared memory]
        self._later: tuple[Sequence[torch.Tensor], LazyCopy, Any] | None = None  # see lazy_copy.py
        self._pinned: Pinned | None = None

    def reserve(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Have memory for tensors, pinned if some are on a CUDA device.

        Raises:
            StorageError: there is none, or it cannot be pinned.
        """
        places, needed = layout(tensors)
        self._reserved(needed, self._pinned or pinned_for(tensors))
        return places

    def _reserved(self, needed: int, pinned: Pinned | None, moved: Callable[[], object] = lambda: None) -> torch.Tensor:
        if needed > self.nbytes or pinned is not self._pinned:
            self._unpin()
            self._grow(needed, None, moved)
            if pinned is not None and self.nbytes:
                pinned.register(self._bytes.data_ptr(), self.nbytes)
                self._pinned = pinned
        return self._bytes

    def take(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Copy tensors; their values are safe when it returns, and in the arena after ``settle``.

        What was in the arena before is gone.

        Raises: as ``reserve``.
        """
        places, needed = layout(tensors)
        pinned = self._pinned or pinned_for(tensors)
        if needed > self.nbytes and pinned is None:
            memory = self._waiting = _private(needed)
        else:
            memory, self._waiting = self._reserved(needed, pinned), None
        self._fill(memory, places, tensors)
        return places

    def take_later(self, tensors: Sequence[torch.Tensor], lazy: LazyCopy) -> list[Place]:
        """Copy tensors in ``settle``; they stay as they are until ``lazy.fence``."""
        pinned = self._pinned or pinned_for(tensors)
        self._later = tensors, lazy, None if pinned is None else pinned.now()
        return layout(tensors)[0]

    def _fill(
        self, memory: torch.Tensor, places: Sequence[Place], tensors: Sequence[torch.Tensor], after: Any = None
    ) -> None:
        base, pairs, spans = memory.data_ptr(), [], []
        for place, tensor in zip(places, tensors, strict=True):
            if not place.nbytes:
                continue
            if not (tensor.is_cpu and is_plain(tensor)):
                pairs.append((_view(memory, place), tensor.detach()))
            elif place.nbytes <= _SMALL_BYTES:
                ctypes.memmove(base + place.offset, tensor.data_ptr(), place.nbytes)
            else:
                start, nbytes = tensor.data_ptr(), place.nbytes
                cuts = range(0, nbytes, _SLICE_BYTES)  # of what one thread copies at a time
                spans += [(base + place.offset + at, start + at, min(_SLICE_BYTES, nbytes - at)) for at in cuts]
        with (
            Pool(COPY_THREADS) as pool,
            nullcontext(pairs) if self._pinned is None else self._pinned.copied(pairs, after) as others,
        ):
            moved = pool.map(lambda span: ctypes.memmove(*span), spans)
            for target, source in others:
                target.copy_(source)
            list(moved)

    def settle(self, moved: Callable[[], object] = lambda: None) -> None:
        """Move what waits in private memory into the arena, or copy what ``take_later`` was given.

        Args:
            moved: called after each piece.
        Raises: as ``reserve``, or ``LazyCopy.make``. What was taken is lost then.
        """
        later, self._later = self._later, None
        if later is not None:
            tensors, lazy, after = later
            places, needed = layout(tensors)

            def copy() -> None:
                memory = self._reserved(needed, self._pinned or pinned_for(tensors), moved)
                self._fill(memory, places, tensors, after)

            lazy.make(copy)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            time.sleep(_YIELD_S)
            self._grow(len(waiting), waiting, moved)

    def freed(self) -> None:
        """What was taken is needed no more: the worker has ended its job."""
        recycled(self._bytes[mmap.PAGESIZE :])

    def close(self) -> None:
        """Give the memory back; the worker's mapping keeps it until the worker ends."""
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._waiting, self.nbytes = None, 0
        os.close(self.fd)

    def _grow(
        self, needed: int, waiting: torch.Tensor | None = None, moved: Callable[[], object] = lambda: None
    ) -> None:
        if needed <= self.nbytes:
            return
        size, advise = -(-needed // _GRAIN_BYTES) * _GRAIN_BYTES, libc("madvise")
        try:
            os.truncate(self.fd, size)
            mapped = torch.frombuffer(mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED), dtype=torch.uint8)
            for at in range(0, size, _PIECE_BYTES):
                # Allocates every page: without it a machine without memory would answer a copy with SIGBUS.
                os.posix_fallocate(self.fd, at, min(_PIECE_BYTES, size - at))
                # No fault per page later. (With MAP_POPULATE no other thread of Python would run meanwhile.) Linux
                # before 5.14 says that it cannot.
                if advise is not None:
                    _advise(advise, mapped[at : at + _PIECE_BYTES], _MADV_POPULATE_WRITE)
                if waiting is not None:
                    piece = waiting[max(at, mmap.PAGESIZE) : at + _PIECE_BYTES]  # behind the counter
                    ctypes.memmove(mapped.data_ptr() + max(at, mmap.PAGESIZE), piece.data_ptr(), len(piece))
                    if advise is not None:
                        _advise(advise, waiting[at : at + _PIECE_BYTES], mmap.MADV_DONTNEED)
                moved()
        except OSError as error:
            os.truncate(self.fd, max(self.nbytes, mmap.PAGESIZE))
            raise StorageError(
                f"no shared memory of {size} bytes for the copy of a background save ({error.strerror}); free memory "
                "or save synchronously",
                error.errno,
            ) from error
        self._bytes, self.nbytes = mapped, size

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.unregister(self._bytes.data_ptr())
        self._pinned = None


def _private(nbytes: int) -> torch.Tensor:
    """Memory of this process, in huge pages where the kernel has them."""
    try:
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StorageError(
            f"no memory of {nbytes} bytes for the copy of a background save ({error.strerror}); free memory or save "
            "synchronously",
            error.errno,
        ) from error
    with suppress(OSError):  # of a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _advise(madvise: Callable[..., int], memory: torch.Tensor, advice: int) -> None:
    madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory)), advice)


def layout(tensors: Sequence[torch.Tensor]) -> tuple[list[Place], int]:
    """Places end to end, large tensors on page borders so that O_DIRECT can write them, and the bytes they need."""
    places, at = [], mmap.PAGESIZE  # behind the counter
    for tensor in tensors:
        nbytes = tensor.nbytes
        at += -at % (LARGE_ALIGNMENT if nbytes >= LARGE_BYTES else SMALL_ALIGNMENT)
        places.append(Place(at, nbytes, tuple(tensor.shape), tensor.dtype))
        at += nbytes
    return places, at


class MappedArena:
    """The worker's side: the same memory, mapped when it is first asked for and again when it has grown."""

    def __init__(self, fd: int) -> None:
        self._fd, self._bytes = fd, torch.empty(0, dtype=torch.uint8, device="cpu")

    def tensors(self, places: Iterable[Place]) -> list[torch.Tensor]:
        """Tensors at their places, without a copy."""
        if len(self._bytes) < os.fstat(self._fd).st_size:
            self._bytes = torch.frombuffer(mmap.mmap(self._fd, 0), dtype=torch.uint8)
        return [_view(self._bytes, place) for place in places]


def _view(memory: torch.Tensor, place: Place) -> torch.Tensor:
    return memory[place.offset : place.offset + place.nbytes].view(place.dtype).view(place.shape)
