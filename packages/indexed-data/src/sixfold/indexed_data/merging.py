"""Joining pairs end to end.

    pairs --> merge (this file) --> writer.py

Order is kept; pointers and document ends are computed anew; the .bin files are copied by the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sixfold.indexed_data.disk import checked_prefix
from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.reader import IndexedDataset
from sixfold.indexed_data.writer import IndexedDatasetBuilder


def merge(
    inputs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], *, multimodal: bool = False
) -> None:
    """Write the documents of all ``inputs`` (path prefixes), in that order, as the pair ``output``.

    An output that is there already is replaced when the new one is whole; it may be one of the inputs.

    Raises:
        IndexedDataError: no inputs, different dtypes, a damaged pair, or modes unexpected or missing.
    Cost: memory of the index arrays alone, whatever the size of the .bin files.
    """
    if isinstance(inputs, str | os.PathLike):
        raise IndexedDataError(f"inputs is {os.fspath(inputs)!r}; it is a list of path prefixes")
    if not inputs:
        raise IndexedDataError(f"{os.fspath(output)}: nothing to merge; give at least one path prefix")
    with IndexedDataset(inputs[0], multimodal) as first:
        dtype = first.dtype
    with IndexedDatasetBuilder(checked_prefix(output) + ".bin", dtype, multimodal) as builder:
        for prefix in inputs:
            builder.add_index(prefix)
