"""Documents as this package sees them: any source of token sequences, lists in memory, and data that was deleted.

anything with lengths and get() --> DocumentSource (this file) --> part.py
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import I64


@runtime_checkable
class DocumentSource(Protocol):
    """Token sequences by number; ``sixfold.indexed_data.IndexedDataset`` is one.

    Used if present: ``sequence_pointers`` (byte where each sequence begins), ``tokens`` (all ids,
    flat, or None), ``path_prefix`` (for messages and ``why``), ``loss_mask`` with ``mask`` (which tokens count),
    ``prefetch`` (ranges of the flat ids that are read next), ``provenance`` (files and lines, for ``why``).
    """

    @property
    def sequence_lengths(self) -> npt.NDArray[Any]:
        """(sequences,) tokens of each."""

    @property
    def dtype(self) -> Any:
        """The ids' numpy type."""

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Ids ``offset`` to ``offset + length`` of sequence ``idx``."""


def _refuse_ids(ids: Sequence[Any], dtype: np.dtype[Any]) -> None:
    """BlendingError for the first that is no whole number, or none that ``dtype`` and int64 hold."""
    array, least, most = np.array(ids), int(np.iinfo(dtype).min), min(int(np.iinfo(dtype).max), 2**63 - 1)
    if not ids or (array.dtype.kind in "iu" and least <= int(array.min()) and int(array.max()) <= most):
        return
    for token in ids:
        if not isinstance(token, int | np.integer) or isinstance(token, bool) or not least <= token <= most:
            what = "text" if isinstance(token, str | bytes) else "id"
            raise BlendingError(
                f"a sequence has the {what} {token!r}; ids of {dtype} are whole numbers {least}..{most}"
            )


class ListSource:
    """Lists of ids in memory as a ``DocumentSource``, for trials and tests."""

    def __init__(self, sequences: Sequence[Sequence[int]], dtype: npt.DTypeLike = np.int64) -> None:
        self.dtype = np.dtype(dtype)
        flat = [token for sequence in sequences for token in sequence]
        if self.dtype.kind in "iu":
            _refuse_ids(flat, self.dtype)
        self.sequence_lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
        self.sequence_pointers = (np.cumsum(self.sequence_lengths, dtype=np.int64) - self.sequence_lengths) * (
            self.dtype.itemsize
        )
        self.tokens = np.array(flat, dtype=self.dtype)
        self.tokens.flags.writeable = False  # ``get`` hands out views, as a mapped pair does

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        begin = int(self.sequence_pointers[idx]) // self.dtype.itemsize + offset
        end = begin + (int(self.sequence_lengths[idx]) - offset if length is None else length)
        return self.tokens[begin:end]


class AbsentSource:
    """A dataset that has left the blend and was deleted: only that it gives no sample any more is known."""

    dtype = np.dtype(np.uint16)
    sequence_lengths = np.zeros(0, dtype=np.int32)

    def __init__(self, path_prefix: str, told: Mapping[str, Any] | None = None) -> None:
        """A deleted pair; ``told`` is what the state of the run says of it, None if there is no word of it."""
        self.path_prefix = path_prefix
        self.told = told

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        raise self.asked()

    def asked(self) -> BlendingError:
        """The error for whoever needs it."""
        return BlendingError(
            f"{self.path_prefix}.idx and .bin are not there, and positions before the change that removes the dataset "
            "read it; bring the pair back, or resume from a position after the change"
        )


def pointers_of(source: DocumentSource) -> Any:
    """(sequences,) first byte of each sequence, None if the source does not say."""
    return getattr(source, "sequence_pointers", None)


def several_sequences(source: DocumentSource) -> I64 | None:
    """(documents + 1,) first sequence of each document of a source with more sequences than documents, else None."""
    boundaries: I64 | None = getattr(source, "document_indices", None)
    return None if boundaries is None or len(boundaries) - 1 >= len(source.sequence_lengths) else boundaries
