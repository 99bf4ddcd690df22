"""Where a sample's tokens come from.

    position --> Why (this file): dataset, sample, ranges of documents and of bytes
    file, line --> positions_that_read (this file) --> positions

Made by ``why(n)`` of every dataset; the same ranges, in the same order, that ``get_batch`` reads. The way back needs no
log: the order says again what each position reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sixfold.blending.batches.reader import Drop, OrderedPart
from sixfold.blending.documents.source import several_sequences
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import I64
from sixfold.blending.samples.range_table import ROW, SEQUENCE, SHOWN, SOURCE

_BLOCK = 4096  # positions at a time


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens ``offset .. offset + length`` of one sequence of a document, and their bytes in the file.

    ``path`` and the bytes are None for a source that is no file, ``epoch`` in the orders that have indices.
    """

    epoch: int | None
    document: int
    offset: int
    length: int
    path: str | None
    byte_begin: int | None
    byte_end: int | None
    sequence: int | None = None  # its number in the source, where documents have several
    dropped: bool = False  # by a change: its columns are padding without loss
    origin: tuple[str, int] | None = None  # file and line that the document was built from, if the pair knows them

    def __str__(self) -> str:
        bytes_ = "" if self.path is None else f" ({self.path} bytes {self.byte_begin}..{self.byte_end})"
        epoch = "" if self.epoch is None else f"epoch {self.epoch} "
        sequence = "" if self.sequence is None else f" sequence {self.sequence}"
        origin = "" if self.origin is None else f" from {self.origin[0]}:{self.origin[1]}"
        dropped = ", dropped" if self.dropped else ""
        place = f"[{self.offset}:{self.offset + self.length}]"
        return f"{epoch}document {self.document}{sequence} {place}{bytes_}{origin}{dropped}"


@dataclass(frozen=True, slots=True)
class Why:
    """One position explained.

    Attributes:
        ranges: in order, they are the sample's tokens without padding.
        epochs: how often the stream has read this dataset's tokens before this sample.
    """

    position: int
    dataset_id: int
    dataset_name: str
    sample: int
    ranges: tuple[TokenRange, ...]
    epochs: float

    def __str__(self) -> str:
        head = (
            f"position {self.position}: sample {self.sample} of dataset {self.dataset_id} ({self.dataset_name}), "
            f"after {self.epochs:.2f} epochs of it"
        )
        return "\n  ".join([head, *map(str, self.ranges)])


def positions_that_read(
    datasets: Sequence[OrderedPart],
    file: str,
    line: int,
    end: int,
    locate: Callable[[I64], tuple[I64, I64]],
    drops: Sequence[Drop] = (),
) -> list[int]:
    """The positions below ``end`` that read tokens of the documents of ``line`` of ``file``, in order.

    Those whose ``why`` names it: a token that is only the last label of a sample does not count.

    Args:
        locate: (dataset, sample) of positions.
        drops: what is not read from some sample on.
    Raises:
        BlendingError: no dataset was built from that file, as far as the pairs know.
    Cost: one search of every position below ``end``; no id is read.
    """
    wanted = {
        number: found for number, each in enumerate(datasets) if (found := _sequences(each, file, line)) is not None
    }
    if not wanted:
        raise BlendingError(
            f"no dataset is known to come from {file!r}; pairs know it if they were built with --provenance, under the "
            "name that build was given"
        )
    positions: list[int] = []
    for begin in range(0, end, _BLOCK):
        position_B = np.arange(begin, min(end, begin + _BLOCK), dtype=np.int64)
        dataset_B, sample_B = locate(position_B)
        for number, sequences in wanted.items():
            at_B = np.flatnonzero(dataset_B == number)
            table = datasets[number].order.table(sample_B[at_B])
            reads = np.isin(table[:, SEQUENCE], sequences) & (table[:, SOURCE] == 0) & (table[:, SHOWN] > 0)
            for drop in drops:
                if drop.source == number:
                    later = sample_B[at_B[table[:, ROW]]] >= drop.first
                    reads &= ~(later & np.isin(table[:, SEQUENCE], drop.sequences))
            positions += position_B[at_B[np.unique(table[reads, ROW])]].tolist()
    return sorted(positions)


def _sequences(dataset: OrderedPart, file: str, line: int) -> I64 | None:
    """The sequences of the documents of a line; None if the source does not know the file."""
    source: Any = dataset.part.source
    provenance = getattr(source, "provenance", None)
    if provenance is None or file not in provenance.files:
        return None
    documents = np.array(provenance.find(file, line), dtype=np.int64)
    boundaries = several_sequences(source)
    if boundaries is None:
        return documents
    runs = [np.arange(boundaries[document], boundaries[document + 1]) for document in documents.tolist()]
    return np.concatenate([np.empty(0, dtype=np.int64), *runs])
