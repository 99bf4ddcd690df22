"""Whether documents end as the config says, for the arrays that are made of their ends.

    Part, eod --> warn_of_other_eod (this file) --> dataset/gpt.py

Looks at the last token of a few documents. Where the end is another token or there is none, positions and masks would
not begin anew, and nothing else would tell.
"""

import warnings

import numpy as np

from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import several_sequences
from sixfold.blending.numbers.kernels import I64

_LOOKS = 16


def warn_of_other_eod(part: Part, name: str, eod: int, options: str) -> None:
    """Warn if documents of ``part`` do not end with ``eod``; ``options`` are those that need it.

    Cost: 16 tokens read.
    """
    try:
        lasts = [int(part.source.get(number, length - 1, 1)[0]) for number, length in _documents(part)]
    except Exception:  # damaged: the read that meets it says so; or ids that are no numbers
        return
    others = [last for last in lasts if last != eod]
    if others:
        warnings.warn(
            f"{len(others)} of {len(lasts)} sampled documents of {name} do not end with the tokenizer's eod, {eod}; "
            f"one ends with {others[0]}. {options} would not see where documents end: give the eod of the data, or "
            "build the data with it",
            stacklevel=5,
        )


def _documents(part: Part) -> list[tuple[int, int]]:
    """(last sequence, its length) of some documents, spread evenly, without empty ones."""
    if not len(part):
        return []
    ids = part.ids(np.unique(np.linspace(0, len(part) - 1, _LOOKS).astype(np.int64)))
    boundaries = several_sequences(part.source)
    if boundaries is not None:
        ends: I64 = boundaries[np.minimum(np.searchsorted(boundaries, ids, side="right"), len(boundaries) - 1)] - 1
        ids = np.unique(ends)
    lengths = np.asarray(part.source.sequence_lengths)[ids]
    return [(int(number), int(length)) for number, length in zip(ids, lengths, strict=True) if length > 0]
