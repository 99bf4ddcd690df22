"""The arena: one piece of shared memory that a rank's tensors are copied into while the trainer waits.

    tensors --> Arena.take (this file) --> shared memory --> tensors_in (this file) --> transfer.write

The memory is a memfd that the trainer and its worker both map: no name that could be left behind, no limit of
``/dev/shm``. It is kept: a copy runs at 20 GB/s into memory that was touched before and at 1 into fresh
shared memory. Where tensors are on a CUDA device the trainer registers it as pinned; the worker never
touches CUDA.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import StorageError
from sixfold.dist_ckpt.files.frame import LARGE_ALIGNMENT, LARGE_BYTES, SMALL_ALIGNMENT
from sixfold.dist_ckpt.state.dense import is_plain

COPY_THREADS = 2
_GRAIN_BYTES = 2**21  # the arena grows in whole huge pages
_SMALL_BYTES = 2**20  # up to here a tensor is copied by the caller, without a view of the arena for it
_SLICE_BYTES = 64 * 2**20  # a larger tensor is copied in slices, so that the threads end together


class Place(NamedTuple):
    """Where a tensor lies in the arena."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # where to, and what


class PlainMemory:
    """Copies from CPU tensors by a few threads; nothing to register."""

    def register(self, address: int, nbytes: int) -> None:
        """Prepare the arena's memory for copies from one kind of device."""

    def unregister(self, address: int) -> None:
        """Undo that."""

    def copy(self, pairs: Pairs) -> None:
        """Copy each second tensor into the first; complete when it returns."""
        parts = _equal_parts([part for pair in pairs for part in _slices(*pair)], COPY_THREADS)
        if len(parts) == 1:
            _copy_all(parts[0])
            return
        with ThreadPoolExecutor(COPY_THREADS) as pool:
            list(pool.map(_copy_all, parts))


class PinnedMemory(PlainMemory):
    """Copies from CUDA tensors on a stream of their own into memory that the driver has pinned.

    Args:
        cuda: ``torch.cuda``; tests pass a fake.
        device: whose tensors come first; tensors of other devices are copied in order after it.
    """

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device)

    def register(self, address: int, nbytes: int) -> None:
        code = self._cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(code) != 0:
            raise StorageError(
                f"cudaHostRegister of {nbytes} bytes gave {code}; raise the limit of locked memory (ulimit -l), or "
                "save synchronously"
            )

    def unregister(self, address: int) -> None:
        self._cuda.cudart().cudaHostUnregister(address)

    def copy(self, pairs: Pairs) -> None:
        on_device = [pair for pair in pairs if pair[1].device == self._device]
        others = [pair for pair in pairs if pair[1].device != self._device]
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            for target, source in on_device:
                target.copy_(source, non_blocking=True)
            copied = self._stream.record_event()
        super().copy(others)  # meanwhile
        copied.synchronize()


def memory_for(tensors: Sequence[torch.Tensor]) -> PlainMemory:
    """The kind of memory that suits the tensors: pinned as soon as one is on a CUDA device."""
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    return PlainMemory() if device is None else PinnedMemory(torch.cuda, device)


class Arena:
    """Shared memory that grows when it must and is never given back before ``close``.

    ``fd`` is handed to the worker when it is started and stays the same; ``nbytes`` is the size.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("sixfold-arena", os.MFD_CLOEXEC)
        self.nbytes = 0
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._memory = PlainMemory()

    def take(self, tensors: Sequence[torch.Tensor]) -> list[Place]:
        """Copy tensors in; their values are safe when it returns. What was in the arena before is gone.

        Raises:
            StorageError: there is no memory for them, or it cannot be pinned.
        """
        places, needed = layout(tensors)
        self._grow(needed)
        memory = memory_for(tensors)
        if type(memory) is not type(self._memory):
            self._register(memory)
        base, rest = self._bytes.data_ptr(), []
        for place, tensor in zip(places, tensors, strict=True):
            if place.nbytes <= _SMALL_BYTES and tensor.is_cpu and is_plain(tensor):
                ctypes.memmove(base + place.offset, tensor.data_ptr(), place.nbytes)
            elif place.nbytes:
                rest.append((self._view(place), tensor.detach()))
        self._memory.copy(rest)
        return places

    def close(self) -> None:
        """Give the memory back; the worker's mapping keeps it until the worker ends."""
        self._register(PlainMemory())
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.nbytes = 0
        os.close(self.fd)

    def _grow(self, needed: int) -> None:
        if needed <= self.nbytes:
            return
        size = -(-needed // _GRAIN_BYTES) * _GRAIN_BYTES
        memory = self._memory
        self._register(PlainMemory())
        try:
            # Allocates every page: without it a machine without memory would answer a copy with SIGBUS.
            os.posix_fallocate(self.fd, 0, size)
            mapped = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)  # no fault per page later
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        except OSError as error:
            raise StorageError(
                f"no memory for a staging arena of {size} bytes ({error.strerror}); free memory or save synchronously",
                error.errno,
            ) from error
        self.nbytes = size
        self._register(memory)

    def _register(self, memory: PlainMemory) -> None:
        """Make ``memory`` the kind of the whole arena."""
        if self.nbytes:
            self._memory.unregister(self._bytes.data_ptr())
            self._memory = PlainMemory()
            memory.register(self._bytes.data_ptr(), self.nbytes)
        self._memory = memory

    def _view(self, place: Place) -> torch.Tensor:
        flat = self._bytes[place.offset : place.offset + place.nbytes]
        return flat.view(place.dtype).view(place.shape)


def layout(tensors: Sequence[torch.Tensor]) -> tuple[list[Place], int]:
    """Places end to end, large tensors on page borders so that O_DIRECT can write them, and the bytes they need."""
    places, at = [], 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        at += -at % (LARGE_ALIGNMENT if nbytes >= LARGE_BYTES else SMALL_ALIGNMENT)
        places.append(Place(at, nbytes, tuple(tensor.shape), tensor.dtype))
        at += nbytes
    return places, at


class MappedArena:
    """The worker's side: the same memory, mapped when it is first asked for and again when it has grown."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def tensors(self, places: Sequence[Place], nbytes: int) -> list[torch.Tensor]:
        """Tensors at their places in an arena of ``nbytes``, without a copy."""
        if nbytes and (self._map is None or len(self._map) < nbytes):
            self._map = mmap.mmap(self._fd, nbytes)
        return [self._at(place) for place in places]

    def _at(self, place: Place) -> torch.Tensor:
        if not place.nbytes:
            return torch.empty(place.shape, dtype=place.dtype, device="cpu")
        assert self._map is not None, f"{place} in an arena without memory"
        count = place.nbytes // place.dtype.itemsize
        return torch.frombuffer(self._map, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)


def _slices(target: torch.Tensor, source: torch.Tensor) -> Pairs:
    nbytes = target.numel() * target.element_size()
    if nbytes <= _SLICE_BYTES or not (source.is_cpu and is_plain(source)):
        return [(target, source)]
    step, flat, values = _SLICE_BYTES // target.element_size(), target.view(-1), source.view(-1)
    return [(flat[at : at + step], values[at : at + step]) for at in range(0, len(flat), step)]


def _equal_parts(pairs: Pairs, count: int) -> Sequence[Pairs]:
    """Contiguous runs of nearly equal bytes."""
    sizes = [target.numel() * target.element_size() for target, _ in pairs]
    if sum(sizes) < _SLICE_BYTES:  # a thread costs more than it saves
        return [list(pairs)]
    parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(count)]
    done, total = 0, sum(sizes)
    for pair, nbytes in zip(pairs, sizes, strict=True):
        parts[min(count - 1, (done + nbytes // 2) * count // total)].append(pair)
        done += nbytes
    return parts


def _copy_all(pairs: Pairs) -> None:
    for target, source in pairs:
        if source.is_cpu and is_plain(source):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel() * target.element_size())
        else:
            target.copy_(source)
