"""Where a sample's tokens come from.

    position --> Why (this file): dataset, sample, ranges of documents and of bytes

Made by ``why(n)`` of every dataset; the same ranges, in the same order, that ``get_batch`` reads.
"""

from dataclasses import dataclass


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

    def __str__(self) -> str:
        bytes_ = "" if self.path is None else f" ({self.path} bytes {self.byte_begin}..{self.byte_end})"
        epoch = "" if self.epoch is None else f"epoch {self.epoch} "
        sequence = "" if self.sequence is None else f" sequence {self.sequence}"
        dropped = ", dropped" if self.dropped else ""
        return f"{epoch}document {self.document}{sequence} [{self.offset}:{self.offset + self.length}]{bytes_}{dropped}"


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
