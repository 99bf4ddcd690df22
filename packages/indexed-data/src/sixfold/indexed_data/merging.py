"""Joining pairs end to end.

    pairs --> merge (this file) --> writer.py

The order of the pairs is kept. writer.py computes pointers and document ends again, and has the kernel copy .bin files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sixfold.indexed_data.atomic_files import files_of
from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.paths import AnyPath, output_prefix, path_text
from sixfold.indexed_data.reader import IndexedDataset
from sixfold.indexed_data.writer import IndexedDatasetBuilder


def merge(inputs: Sequence[AnyPath], output: AnyPath, *, multimodal: bool = False, overwrite: bool = False) -> None:
    """Write the documents of all ``inputs`` (path prefixes), in that order, as the pair ``output``.

    With ``overwrite`` an output that is there already is replaced when the new one is whole; it may be one of the
    inputs.

    Raises:
        IndexedDataError: an output that is there already, no inputs, different dtypes, a damaged pair, or modes
            unexpected or missing.
    Cost: memory of the index arrays alone, whatever the size of the .bin files.
    """
    if isinstance(inputs, str | bytes | os.PathLike):
        raise IndexedDataError(f"inputs is {path_text('inputs', inputs)!r}; it is a list of path prefixes")
    prefix = output_prefix(output)
    prefixes = list(inputs)
    if not prefixes:
        raise IndexedDataError(f"{prefix}: nothing to merge; give at least one path prefix")
    there = files_of(prefix)
    if there and not overwrite:
        raise IndexedDataError(f"{there[0]} is there already; pass overwrite (--overwrite) to replace the pair")
    with IndexedDataset(prefixes[0], multimodal) as first:
        dtype = first.dtype
    with IndexedDatasetBuilder(prefix + ".bin", dtype, multimodal) as builder:
        for path_prefix in prefixes:
            builder.add_index(path_prefix)
