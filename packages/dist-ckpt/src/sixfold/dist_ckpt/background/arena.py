"""The arena: one piece of shared memory that a rank's tensors are copied into while the trainer waits.

    tensors --> Arena.take (this file) --> shared memory --> MappedArena.tensors (this file) --> writer.write
    trainer <-- ProgressCounter (this file) <-- first page <-- worker

The memory is a memfd that the trainer and its worker both map: no name that could be left behind, no limit of
``/dev/shm``. It is kept: a copy runs at 20 GB/s into memory that was touched before and at 1 into fresh
shared memory. Once tensors were on a CUDA device the trainer registers it as pinned; the worker never
touches CUDA.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import StorageError
from sixfold.dist_ckpt.formats.frame import LARGE_ALIGNMENT, LARGE_BYTES, SMALL_ALIGNMENT
from sixfold.dist_ckpt.interpreter import Pool
from sixfold.dist_ckpt.reused_memory import recycled
from sixfold.dist_ckpt.state.tensor_memory import is_plain
from sixfold.dist_ckpt.storage.frame_file import libc

COPY_THREADS = 2
_MADV_POPULATE_WRITE = 23
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

    @contextmanager
    def copied(self, pairs: Pairs) -> Iterator[Pairs]:
        """Copies from the device go on inside and are complete behind it; gives the pairs of other devices."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
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
        self._pinned: Pinned | None = None

    def reserve(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Have memory for tensors, pinned if some are on a CUDA device.

        Raises:
            StorageError: there is none, or it cannot be pinned.
        """
        places, needed = layout(tensors)
        pinned = self._pinned or pinned_for(tensors)
        if needed > self.nbytes or pinned is not self._pinned:
            self._unpin()
            self._grow(needed)
            if pinned is not None and self.nbytes:
                pinned.register(self._bytes.data_ptr(), self.nbytes)
                self._pinned = pinned
        return places

    def take(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Copy tensors in; their values are safe when it returns. What was in the arena before is gone.

        Raises: as ``reserve``.
        """
        places = self.reserve(tensors)
        base, pairs, spans = self._bytes.data_ptr(), [], []
        for place, tensor in zip(places, tensors, strict=True):
            if not place.nbytes:
                continue
            if not (tensor.is_cpu and is_plain(tensor)):
                pairs.append((_view(self._bytes, place), tensor.detach()))
            elif place.nbytes <= _SMALL_BYTES:
                ctypes.memmove(base + place.offset, tensor.data_ptr(), place.nbytes)
            else:
                start, nbytes = tensor.data_ptr(), place.nbytes
                cuts = range(0, nbytes, _SLICE_BYTES)  # of what one thread copies at a time
                spans += [(base + place.offset + at, start + at, min(_SLICE_BYTES, nbytes - at)) for at in cuts]
        with (
            Pool(COPY_THREADS) as pool,
            nullcontext(pairs) if self._pinned is None else self._pinned.copied(pairs) as others,
        ):
            moved = pool.map(lambda span: ctypes.memmove(*span), spans)
            for target, source in others:
                target.copy_(source)
            list(moved)
        return places

    def freed(self) -> None:
        """What was taken is needed no more: the worker has ended its job."""
        recycled(self._bytes[mmap.PAGESIZE :])

    def close(self) -> None:
        """Give the memory back; the worker's mapping keeps it until the worker ends."""
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.nbytes = 0
        os.close(self.fd)

    def _grow(self, needed: int) -> None:
        if needed <= self.nbytes:
            return
        size = -(-needed // _GRAIN_BYTES) * _GRAIN_BYTES
        try:
            # Allocates every page: without it a machine without memory would answer a copy with SIGBUS.
            os.posix_fallocate(self.fd, 0, size)
            mapped = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise StorageError(
                f"no shared memory of {size} bytes for the copy of a background save ({error.strerror}); free memory "
                "or save synchronously",
                error.errno,
            ) from error
        self._bytes, self.nbytes = torch.frombuffer(mapped, dtype=torch.uint8), size
        # No fault per page later. (With MAP_POPULATE no other thread of Python would run meanwhile.) Linux before 5.14
        # says that it cannot.
        if (advise := libc("madvise")) is not None:
            advise(ctypes.c_void_p(self._bytes.data_ptr()), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.unregister(self._bytes.data_ptr())
        self._pinned = None


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
