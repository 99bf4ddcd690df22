"""The compiled kernels, if they are there.

    native/*.c --> _native --> kernels (this file) --> permutation.py, blend, megatron, batches, ...

Every kernel computes what a few lines of numpy next to its caller compute, bit for bit. The caller asks ``kernels()``.
That is None if there was no compiler at install time: the caller then uses numpy. Nothing else imports ``_native``.
"""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


class Level(IntEnum):
    """What computes: numpy, or a kernel with the instructions of x86-64 that it may use."""

    NUMPY = -1
    PLAIN = 0
    AVX2 = 1
    AVX512 = 2


class Kernels(Protocol):
    """The functions of ``_native``. Arrays are C-contiguous.

    A wrong one raises TypeError, ValueError or BufferError, and nothing is written.
    """

    def permute(self, key: U64, size: I64, index: I64, out: I64, /) -> int:
        """``out[i]`` is where the permutation of ``size`` by ``key`` sends ``index[i]``.

        ``key`` and ``size`` have one item or as many as ``index``. Returns how many there are. Or the place of the
        first index outside of its size, or of a size above 2^53; ``out`` is then as it was.
        """

    def permute_range(self, key: int, size: int, begin: int, out: Ints, /) -> object:
        """``out[i]`` (uint32 or int64) is where ``begin + i`` goes; ``begin + out.size <= size <= 2^53``."""

    def greedy(self, weight: F64, left: I64, dataset: Ints, sample: I64, /) -> object:
        """Fill ``dataset`` (N,) int16 and ``sample`` (N,) as ``megatron.greedy`` says; see there.

        ``weight`` (D,) >= 0. ``left`` (D,) > 0 with the sum N is used up to zeros; without an item it is endless.
        """

    def tree(self, quota: I64, /) -> object:
        """A handle of the quota tree; ``quota`` (D,) >= 0, its sum in 1..2^62."""

    def tree_locate(self, tree: object, position: I64, dataset: I64, sample: I64, /) -> int:
        """What ``QuotaTree.locate`` returns; the place of the first negative position, or how many there are."""

    def shuffle(self, key: U32, next: int, items: Ints, lowest: int, /) -> int:
        """``RandomState.shuffle``: swap the last item, then the one before it, ... down to item ``lowest`` (1: all).

        ``key`` (624,) is the state's and is changed. ``next`` is its ``pos``; the new one is returned. Items have 4
        or 8 bytes.
        """

    def sample_rows(
        self, document: npt.NDArray[np.int32], length: I64, low: int, sequence_length: int, extra: int, rows: Ints, /
    ) -> int:
        """What ``megatron.sample_index.sample_index_of`` returns, into ``rows``.

        ``length`` is of documents ``low`` and on.

        Returns the place of the first document without a length, or how many places there are.
        """

    def open_map(self, ids: npt.NDArray[Any], /) -> object:
        """A handle of the flat ids of a source, which it keeps open; TypeError for a type that int64 does not hold."""

    def gather(
        self, maps: tuple[object, ...], found: int, pad: int, rows: int, ranges: I64, tokens: I64, labels: I64,
        begins: npt.NDArray[np.bool_], /,
    ) -> int:  # fmt: skip
        """What ``batches.gather`` does. Returns ``found``, or the first range that does not fit (nothing was read)."""

    def arrays_of_rows(
        self, eod: int, pad: int, flags: int, rows: int, tokens: I64, labels: I64, begins: npt.NDArray[np.bool_],
        loss_mask: npt.NDArray[Any], positions: npt.NDArray[Any], numbers: npt.NDArray[Any], /,
    ) -> int:  # fmt: skip
        """What ``SampleLayout._by_numpy`` does; returns the documents in the batch."""

    def boundaries(self, begins: npt.NDArray[np.bool_], cu_seqlens: Ints, /) -> object:
        """The places of True, then the size, into an array of just so many items."""

    def open_line(self, lengths: Ints, pointers: I64, members: I64, names: Ints, numbers: I64, grids: I64, /) -> object:
        """A finder of ranges in the stateless order; see ``samples.token_line.TokenLine.finder``."""

    def open_index(self, lengths: Ints, pointers: I64, *indices_and_numbers: Ints) -> object:
        """A finder of ranges through indices; see ``megatron.index_order.IndexOrder.finder``."""

    def group_sums(self, key: int, numbers: I64, lengths: Ints, pointers: I64, out: I64, /) -> int:
        """What ``GloballyShuffledLine._slots`` says: tokens of groups of permuted documents, checked against pointers.

        ``numbers``: documents, first group, documents in a group, number in the source of the first, bytes of an id.
        Returns how many groups are done; fewer than asked: the next one has a document that does not fit.
        """

    def best_fit(self, length: I64, capacity: int, item: I64, row: I64, /) -> int:
        """What ``samples.best_fit.best_fit`` returns, into ``item`` and ``row``; returns the number of rows.

        ``item`` and ``row`` have as many items as ``length`` (1 .. capacity); or none, and rows are only counted.
        """

    def add_epoch(self, finder: object, epoch: int, before: I64, block: Ints, keep: int, /) -> object:
        """Give a line's finder the first slots of an epoch; of the earlier ones the last ``keep`` stay."""

    def add_string(self, finder: object, grid: int, string: I64, /) -> object:
        """Give a line's finder the ``ChunkGrid.string`` of its grid of that place."""

    def find_samples(
        self, finders: tuple[object, ...], sequence_length: int, source: I64, sample: I64, ranges: I64, /
    ) -> int | tuple[int, int]:
        """The ranges of samples, as ``batches.gather.FIELDS`` says; how many there are.

        Or -1: too little room. Another negative number: numpy reads the batch. A pair says what to add first:
        (source, epoch) an epoch, (source, -1) a finder, (source, -2 - n) the string of grid n.
        """

    def level(self) -> int:
        """The best ``Level`` of this processor."""

    def use_level(self, level: int, /) -> object:
        """Use so much of it from now on."""


@dataclass
class _Forced:
    """What a test has asked for; see ``forced``."""

    numpy: bool = False


_forced = _Forced()


def kernels() -> Kernels | None:
    """The compiled kernels, or None where numpy is to do their work."""
    return None if _forced.numpy else _load()


@cache
def _load() -> Kernels | None:
    """Import the extension once; the first one who misses it gets the only warning of this process."""
    try:
        native = importlib.import_module("sixfold.blending._native")
        missing = [name for name, value in vars(Kernels).items() if callable(value) and name[0] != "_"]
        missing = [name for name in missing if not hasattr(native, name)]
        if missing:  # an installation in place, whose sources went on
            raise ImportError(f"{native.__file__} was built from older sources: it has no {missing[0]}")
        return cast(Kernels, native)
    except ImportError as error:
        warnings.warn(
            f"sixfold.blending runs without its compiled kernels ({error}). NumPy gives the same results, several "
            "times slower. Install a wheel, or a C compiler and then the package again: pip install --force-reinstall "
            "--no-cache-dir sixfold-blending (pip keeps what it built without one)",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def levels() -> list[Level]:
    """Every level that can be forced here, numpy first."""
    native = _load()
    return [level for level in Level if level < 0 or (native is not None and level <= native.level())]


@contextmanager
def forced(level: Level) -> Iterator[None]:
    """Compute at ``level`` inside this block, in the whole process: for tests and benchmarks."""
    native = _load()
    _forced.numpy = level == Level.NUMPY
    if native is not None and level >= 0:
        native.use_level(level)
    try:
        yield
    finally:
        _forced.numpy = False
        if native is not None:
            native.use_level(native.level())
