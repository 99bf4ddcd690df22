"""Where the ids of samples lie, one row per range (this file).

    SampleOrder, IndexOrder, PackedRows --> range_table --> batches/reader.py, batches/gather.py

A range is a row of ``FIELDS``: ids ``begin .. begin + length`` of the flat data of ``source`` (tokens ``offset ...`` of
its sequence). The first ``shown`` go to tokens of ``row`` from ``column`` on. The last ``labels`` of them (all, or all
but the first) go to labels, one column to the left. R counts ranges, P pieces.
"""

import numpy as np

from sixfold.blending.documents.part import Part
from sixfold.blending.numbers.kernels import I64
from sixfold.blending.samples.token_line import Ranges

FIELDS = ("source", "sequence", "offset", "begin", "length", "shown", "row", "column", "labels")
SOURCE, SEQUENCE, OFFSET, BEGIN, LENGTH, SHOWN, ROW, COLUMN, LABELS = range(len(FIELDS))


def range_table(part: Part, row_P: I64, column_P: I64, shown_P: I64, read_P: I64, ranges: Ranges) -> I64:
    """The table of pieces: ``shown_P`` tokens of each, in ``read_P`` ids that lie in ``ranges``; source 0."""
    first_P = np.cumsum(read_P) - read_P
    inside_R = np.cumsum(ranges.length) - ranges.length - first_P[ranges.piece]
    first_token_R = part.first_token(ranges.sequence)
    columns = {
        "source": 0,
        "sequence": ranges.sequence,
        "offset": ranges.offset,
        "begin": -1 if first_token_R is None else first_token_R + ranges.offset,
        "length": ranges.length,
        "shown": np.clip(shown_P[ranges.piece] - inside_R, 0, ranges.length),
        "row": row_P[ranges.piece],
        "column": column_P[ranges.piece] + inside_R,
        "labels": ranges.length - (inside_R == 0),
    }
    table = np.empty((ranges.piece.size, len(FIELDS)), dtype=np.int64)
    for field, name in enumerate(FIELDS):
        table[:, field] = columns[name]
    return table
