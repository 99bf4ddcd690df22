"""The index of a pair: views over the bytes of the .idx. What a sound pair keeps is in pair_rules.py.

    .idx bytes --> Index (this file) --> pair_rules.py, reader.py, verifying.py

No files are touched here: the bytes come in as one array, and the size of .bin as a number. A name that ends in _S
is an array of shape (S,), in _D of shape (D,): S sequences, D = documents + 1 boundaries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.format import HEADER, Header

_LOOKS, LOOKED_AT = 16, 64  # places of each array, and numbers there, that tell one pair from another
DAMAGED = "Run `sixfold-data verify`, then write the pair again"

Bytes = npt.NDArray[np.uint8]


class Index:
    """The arrays of one .idx, not copied, and the one place that turns a sequence number into a place in .bin."""

    __slots__ = (
        "bin_bytes",
        "bin_path",
        "boundaries_D",
        "header",
        "idx_path",
        "itemsize",
        "lengths_S",
        "modes_S",
        "pointers_S",
        "sequences",
        "trailing_bytes",
    )

    def __init__(self, raw: Bytes, prefix: str, bin_bytes: int, multimodal: bool) -> None:
        """View ``raw``, the whole .idx of ``prefix``, whose .bin has ``bin_bytes`` bytes. O(1).

        Raises:
            IndexedDataError: the header is wrong, or its counts ask for more bytes than there are.
        """
        self.idx_path, self.bin_path = prefix + ".idx", prefix + ".bin"
        self.header = header = Header.unpack(raw[: HEADER.size].tobytes(), self.idx_path)
        need = header.index_bytes(multimodal)
        if raw.size < need:
            counts = f"{header.sequences} sequences, {header.boundaries} boundaries"
            problem = Problem(
                f"an .idx holds the {counts}{' and the modes' if multimodal else ''} that its header counts",
                self.idx_path,
                f"{raw.size} bytes",
                f"at least {need} bytes",
            )
            raise IndexedDataError.broken(
                problem,
                "The file was cut or its header damaged: write the pair again",
            )
        lengths, pointers, boundaries, modes = header.offsets
        self.lengths_S = raw[lengths:pointers].view("<i4")
        self.pointers_S = raw[pointers:boundaries].view("<i8")
        self.boundaries_D = raw[boundaries:modes].view("<i8")
        self.modes_S = raw[modes : modes + header.sequences].view("i1") if multimodal else None
        self.sequences, self.itemsize = header.sequences, header.dtype.itemsize
        self.bin_bytes, self.trailing_bytes = bin_bytes, int(raw.size - need)

    def digest(self) -> int:
        """A checksum of some lengths, pointers and boundaries. O(1)."""
        import zlib  # only here: most readers need none

        digest = 0
        for array in (self.lengths_S, self.pointers_S, self.boundaries_D):
            for at in places(array.size):
                digest = zlib.crc32(array[at : at + LOOKED_AT].tobytes(), digest)
        return digest

    def span(self, i: int) -> tuple[int, int]:
        """(first token in .bin, number of tokens) of sequence ``i``, 0 <= i < S. Checked, O(1).

        [Note: checked on every read] A sequence ends where the next one begins. So the read that meets a changed
        length or pointer raises, and never gives the tokens of a neighbour. numpy takes a length of -1 for
        "everything", so the sign is checked too.
        """
        pointer, length = self.pointers_S.item(i), self.lengths_S.item(i)
        end = pointer + length * self.itemsize
        following = self.pointers_S.item(i + 1) if i + 1 < self.sequences else self.bin_bytes
        if end != following or length < 0 or pointer < 0 or end > self.bin_bytes or pointer % self.itemsize:
            problem = Problem(
                "a sequence ends where the next one begins, inside .bin",
                f"{self.idx_path}: sequence {i}",
                f"{length} tokens from byte {pointer}, so an end at byte {end}",
                f"an end at byte {following} of {self.bin_bytes}",
            )
            raise IndexedDataError.broken(problem, DAMAGED)
        return pointer // self.itemsize, length


def places(count: int) -> list[int]:
    """Where a checksum looks at an array of ``count``: evenly from the first on to the last."""
    last = max(0, count - LOOKED_AT)
    return sorted({last * number // (_LOOKS - 1) for number in range(_LOOKS)}) if count else []
