"""The three indices of one part of one dataset: built, checked, and read.

    Part, EpochPlan --> build_indices, indices_fit --> IndexOrder (this file): sample --> ranges --> dataset/base.py

``IndexOrder`` takes the place of ``samples.chunk_grid.SampleOrder``. K counts documents met,
P samples asked for.
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import pointers_of
from sixfold.blending.errors import BlendingError
from sixfold.blending.megatron.document_index import EpochPlan, document_index, shuffle_dtype, shuffle_index
from sixfold.blending.megatron.sample_index import sample_index_of
from sixfold.blending.numbers.kernels import I64, Kernels
from sixfold.blending.samples.chunk_grid import Pieces
from sixfold.blending.samples.range_table import range_table
from sixfold.blending.samples.token_line import Ranges, runs

Arrays = dict[str, npt.NDArray[Any]]
INDICES = ("document_index", "sample_index", "shuffle_index")


def build_indices(part: Part, plan: EpochPlan, seed: int) -> Arrays:
    """``INDICES`` by name, as megatron-core makes them.

    Raises:
        BlendingError: a document's number does not fit int32.
        The source's error: lengths that do not fit their pointers.
    """
    random = np.random.RandomState(seed)
    documents = document_index(_members(part), plan, random)
    samples = sample_index_of(documents, *_lengths(part), plan)
    return {"document_index": documents, "sample_index": samples, "shuffle_index": shuffle_index(plan, random)}


def indices_fit(arrays: Arrays, part: Part, plan: EpochPlan) -> bool:
    """Whether arrays of unknown origin are indices of this part under this plan, whatever the seed.

    Each epoch that is shuffled alone has every document once, rows lie where the lengths put them, and
    the shuffle is one.
    """
    if not shapes_fit(arrays, part, plan):
        return False
    documents, samples, shuffle = (arrays[name] for name in INDICES)
    members = _members(part)
    last = documents.size - members.size if plan.before_last is not None else documents.size
    for epochs, some in ((plan.epochs - (last < documents.size), documents[:last]), (1, documents[last:])):
        if some.size and not _holds_each(some, members, epochs):
            return False
    expected = sample_index_of(documents, *_lengths(part), plan)
    if samples.dtype != expected.dtype or not np.array_equal(samples, expected):
        return False
    last = plan.samples if plan.before_last is None else plan.before_last
    return _permutes(shuffle[:last], 0) and _permutes(shuffle[last:], last)


def _holds_each(documents: npt.NDArray[np.int32], members: I64, times: int) -> bool:
    """Whether every one of ``members`` is there so many times, and nothing else."""
    low, high = int(members.min()), int(members.max())
    if int(documents.min()) < low or int(documents.max()) > high:
        return False
    expected = np.bincount(members - low, minlength=high - low + 1) * times
    return np.array_equal(np.bincount(documents - np.int32(low), minlength=expected.size), expected)


def _permutes(some: npt.NDArray[Any], low: int) -> bool:
    """Whether ``some`` is ``low, low + 1, ...`` in any order."""
    if some.size and not low <= int(some.min()) <= int(some.max()) < low + some.size:
        return False
    seen = np.zeros(some.size, dtype=np.bool_)
    seen[some - some.dtype.type(low)] = True
    return bool(seen.all())


def shapes_fit(arrays: Arrays, part: Part, plan: EpochPlan) -> bool:
    """Whether arrays that a side file vouches for have the shapes and types of this part's indices."""
    documents, samples, shuffle = (arrays[name] for name in INDICES)
    return (
        documents.dtype == np.int32
        and documents.shape == (len(part) * plan.epochs,)
        and samples.dtype in (np.int32, np.int64)
        and samples.shape == (plan.samples + 1, 2)
        and shuffle.dtype == shuffle_dtype(plan.samples)
        and shuffle.shape == (plan.samples,)
    )


def _members(part: Part) -> I64:
    return part.ids(np.arange(len(part)))


def _lengths(part: Part) -> tuple[I64, int]:
    """Tokens of documents ``low``, ``low + 1``, ..., each member's checked against its pointer; and ``low``."""
    members = _members(part)
    low, high = (int(members.min()), int(members.max())) if members.size else (0, -1)
    if members.size == high - low + 1 and np.all(np.diff(members) == 1):
        return part.every_length(), low
    length_D = np.zeros(high - low + 1, dtype=np.int64)
    length_D[members - low] = part.every_length()
    return length_D, low


@dataclass(frozen=True)
class IndexOrder:
    """Samples of one part through its three indices; position n is sample ``shuffle_index[n]`` of the line."""

    part: Part
    plan: EpochPlan
    arrays: Arrays

    def __post_init__(self) -> None:
        for array in self.arrays.values():
            array.flags.writeable = False  # they are handed out, and samples are looked up in them

    @property
    def document_shuffle(self) -> str:
        """All documents are shuffled together."""
        return "global"

    @property
    def only_length(self) -> int:
        """Tokens of every sample."""
        return self.plan.sequence_length

    def sequence_lengths(self, sample_B: I64) -> I64:
        """Tokens of each sample."""
        return np.full(sample_B.size, self.plan.sequence_length, dtype=np.int64)

    def pieces(self, sample_B: I64) -> Pieces:
        """One stretch of the line per sample."""
        row = np.arange(sample_B.size)
        begin = self.arrays["shuffle_index"][sample_B].astype(np.int64) * self.plan.sequence_length
        return Pieces(row=row, column=np.zeros_like(row), begin=begin, length=self.sequence_lengths(sample_B))

    def ranges(self, pieces: Pieces, more: int) -> tuple[I64, Ranges]:
        """(tokens read of each piece, their ranges); the token behind a piece where the order has one.

        Raises:
            BlendingError: the indices do not fit the lengths (files that changed while they were open).
        """
        plan, sample_P = self.plan, pieces.begin // self.plan.sequence_length
        end = plan.total_tokens
        length_P = np.minimum(pieces.length + min(more, plan.extra), end - np.minimum(pieces.begin, end - plan.extra))
        rows = self.arrays["sample_index"]
        first_P, offset_P = rows[sample_P].astype(np.int64).T
        piece_K, place_K = runs(first_P, rows[sample_P + 1, 0].astype(np.int64) - first_P + 1)
        sequence_K = self.arrays["document_index"][place_K].astype(np.int64)
        offset_K = np.where(place_K == first_P[piece_K], np.maximum(offset_P, 0)[piece_K], 0)
        there_K = self.part.lengths(sequence_K) - offset_K
        before_K = np.cumsum(there_K) - there_K
        before_K -= before_K[np.searchsorted(piece_K, piece_K)]
        length_K = np.clip(length_P[piece_K] - before_K, 0, there_K)
        read_P = np.bincount(piece_K, length_K, sample_P.size).astype(np.int64)
        read_P[piece_K[there_K < 0]] = -1  # the document ends before the sample begins in it
        short = np.flatnonzero(read_P != length_P)
        if short.size:
            at = short[0]
            raise BlendingError(
                f"{self.part.label}: sample {sample_P[at]} of the index has fewer than its {length_P[at]} tokens; the "
                "data changed under the index: build it again"
            )
        some = np.flatnonzero(length_K)
        none = np.full(some.size, -1, dtype=np.int64)
        return length_P, Ranges(piece_K[some], none, sequence_K[some], offset_K[some], length_K[some])

    def table(self, samples: I64) -> I64:
        """The range table of ``samples``, each with the token behind it; rows count through them, source is 0."""
        pieces = self.pieces(samples)
        read_P, ranges = self.ranges(pieces, 1)
        return range_table(self.part, pieces.row, pieces.column, pieces.length, read_P, ranges)

    def ranges_of(self, sample: int) -> Ranges:
        """The tokens of one sample."""
        return self.ranges(self.pieces(np.array([sample])), 0)[1]

    def finder(self, native: Kernels) -> object:
        """A handle of these indices for ``Kernels.find_samples``; errors as of ``SampleOrder.finder``."""
        plan, source = self.plan, cast(Any, self.part.source)
        numbers = [np.dtype(source.dtype).itemsize, plan.sequence_length, plan.extra, plan.total_tokens]
        return native.open_index(
            source.sequence_lengths,
            pointers_of(source),
            *(self.arrays[name] for name in INDICES),
            np.array(numbers, dtype=np.int64),
        )

    def add(self, native: Kernels, finder: object, what: int) -> None:
        """Indices have nothing to add."""
        raise AssertionError(f"epoch {what} is asked of indices")

    def __len__(self) -> int:
        return self.plan.samples

    def find(self, sample: int) -> int:
        """The position that gives row ``sample`` of the sample index."""
        return int(np.flatnonzero(cast(I64, self.arrays["shuffle_index"]) == sample)[0])
