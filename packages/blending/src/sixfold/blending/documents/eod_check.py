"""Whether documents end with the EOD of the config, for arrays that depend on it.

    Part, eod --> warn_of_other_eod (this file) --> dataset/gpt.py

Looks at the last token of a few documents. If documents end with another token or with none, positions and masks do
not restart, and no other check finds it.
"""

import warnings

import numpy as np

from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import several_sequences
from sixfold.blending.numbers.kernels import I64

_LOOKS = 16
_BY_EOD_ALONE = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")  # the others see the lengths too
_REMEDY = "create_cu_seqlens and create_document_ids also see where documents begin in the files"


def warn_of_other_eod(part: Part, name: str, eod: int, options: list[str]) -> None:
    """Warn if documents of ``part`` do not end with ``eod``; ``options`` are those that need it.

    A negative ``eod`` says that the data has none: then warn of the options that see nothing else.

    Cost: 16 tokens read.
    """
    if eod < 0:
        without_effect = [option for option in options if option in _BY_EOD_ALONE]
        if without_effect:
            warnings.warn(
                f"{', '.join(without_effect)} without effect: tokenizer.eod is {eod}, which no token is. {_REMEDY}",
                stacklevel=5,
            )
        return
    try:
        lasts = [int(part.source.get(number, length - 1, 1)[0]) for number, length in _documents(part)]
    except Exception:  # damaged: the read that meets it says so; or ids that are no numbers
        return
    others = [last for last in lasts if last != eod]
    if others:
        warnings.warn(
            f"{len(others)} of {len(lasts)} sampled documents of {name} do not end with the tokenizer's eod, {eod}; "
            f"one ends with {others[0]}. With {', '.join(options)} each id {eod} ends a document. Give the eod of the "
            f"data, build the data with one, or pass eod=-1 if it has none: {_REMEDY}",
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
