"""Where a sample's tokens come from.

    position --> Why (this file): dataset, sample, ranges of documents and of bytes

Made by ``why(n)`` of every dataset; the same ranges, in the same order, that ``get_batch`` reads.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens ``offset .. offset + length`` of one sequence ("document"), and their bytes in the file.

    ``path`` and the bytes are None for a source that is no file, ``epoch`` in the orders that have indices.
    """

    epoch: int | None
    document: int
    offset: int
    length: int
    path: str | None
    byte_begin: int | None
    byte_end: int | None

    def __str__(self) -> str:
        bytes_ = "" if self.path is None else f" ({self.path} bytes {self.byte_begin}..{self.byte_end})"
        epoch = "" if self.epoch is None else f"epoch {self.epoch} "
        return f"{epoch}document {self.document} [{self.offset}:{self.offset + self.length}]{bytes_}"


@dataclass(frozen=True, slots=True)
class Why:
    """One position explained. ``ranges`` in order are the sample's tokens without padding."""

    position: int
    dataset_id: int
    dataset_name: str
    sample: int
    ranges: tuple[TokenRange, ...]

    def __str__(self) -> str:
        head = f"position {self.position}: sample {self.sample} of dataset {self.dataset_id} ({self.dataset_name})"
        return "\n  ".join([head, *map(str, self.ranges)])
