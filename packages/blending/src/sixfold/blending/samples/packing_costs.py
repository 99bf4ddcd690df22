"""What each way to fill rows costs, counted on some documents (this file) --> ``python -m sixfold.blending packing``.

Pure: lengths in, counts out. Documents longer than a row are cut into whole rows and a rest; only the rests differ.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import whole_number, whole_numbers
from sixfold.blending.numbers.kernels import I64
from sixfold.blending.samples.best_fit import rows_of
from sixfold.blending.samples.packed_rows import window_size

_OPEN_ROWS = 8


@dataclass(frozen=True, slots=True)
class PackingCost:
    """One way to fill rows.

    Attributes:
        packing: "concatenate", "next_fit", "first_fit_8" or "best_fit"; the first and the last are what a config takes.
        rows: that some documents fill.
        padding: columns without a token.
        documents_cut: documents that begin in one row and end in another.
        loss_tokens: columns that have a label. End to end every token has one, also the last of a document, whose label
            is the first of the next.
    """

    packing: str
    rows: int
    padding: int
    documents_cut: int
    loss_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.packing:<12} {self.rows} rows, {self.padding} padding, {self.documents_cut} documents cut, "
            f"{self.loss_tokens} tokens of loss"
        )


def packing_costs(lengths: npt.ArrayLike, sequence_length: int) -> list[PackingCost]:
    """The cost of each packing for documents of these ``lengths``, in their order.

    Concatenation cuts anywhere. Next fit has one open row. First fit has eight, the oldest is closed where none holds a
    document. Best fit packs windows as ``packing="best_fit"`` does.

    Raises:
        BlendingError: lengths that are no counts, or none.
    Cost: about 1 us per document.
    """
    S = whole_number("sequence_length", sequence_length, 1)
    length_D = whole_numbers("lengths", lengths).reshape(-1)
    if length_D.size and int(length_D.min()) < 0:
        raise BlendingError(f"a length is {length_D.min()}; lengths are >= 0")
    length_D = length_D[length_D > 0]
    if not length_D.size:
        raise BlendingError("there are no documents with tokens to pack; give lengths > 0")
    tokens, whole = int(length_D.sum()), int((length_D // S).sum())
    rest_D = length_D % S
    end_D = np.cumsum(length_D)
    crossed = (end_D - 1) // S > (end_D - length_D) // S
    found = [PackingCost("concatenate", -(-tokens // S), -tokens % S, int(crossed.sum()), tokens - 1)]
    ways: dict[str, Callable[[I64, int], int]] = {
        "next_fit": _next_fit,
        "first_fit_8": _first_fit,
        "best_fit": _best_fit,
    }
    for packing, rows_for in ways.items():
        rows = whole + rows_for(rest_D, S)
        cut = int((length_D > S).sum())
        found.append(PackingCost(packing, rows, rows * S - tokens, cut, tokens - length_D.size))
    return found


def _next_fit(rest_D: I64, S: int) -> int:
    rows, room = 0, 0
    for length in rest_D[rest_D > 0].tolist():
        if length > room:
            rows, room = rows + 1, S
        room -= length
    return rows


def _first_fit(rest_D: I64, S: int) -> int:
    rows, rooms = 0, list[int]()
    for length in rest_D[rest_D > 0].tolist():
        at = next((at for at, room in enumerate(rooms) if room >= length), None)
        if at is None:
            rows += 1
            rooms.append(S)
            del rooms[:-_OPEN_ROWS]
            at = len(rooms) - 1
        rooms[at] -= length
    return rows


def _best_fit(rest_D: I64, S: int) -> int:
    return sum(rows_of(some[some > 0], S) for some in _windows(rest_D, window_size(S)))


def _windows(rest_D: I64, size: int) -> Iterator[I64]:
    for begin in range(0, rest_D.size, size):
        yield rest_D[begin : begin + size]
