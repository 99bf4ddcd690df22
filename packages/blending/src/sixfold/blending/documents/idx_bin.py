"""Opening path prefixes (this file): the only place that knows who reads ``.idx`` and ``.bin``."""

import os
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec

from sixfold.blending.documents.source import DocumentSource
from sixfold.blending.errors import BlendingError


def pair_of(prefix: str) -> list[str]:
    """The files of a prefix: those of a pair, or a view of one."""
    if os.path.exists(f"{prefix}.view") and not os.path.lexists(f"{prefix}.idx"):
        return [f"{prefix}.view"]
    return [f"{prefix}.idx", f"{prefix}.bin"]


def is_gone(prefix: str) -> bool:
    """Whether nothing of a prefix is there. Of a URL the store is asked, which raises its own error if it fails."""
    if "://" not in prefix:
        return not any(map(os.path.lexists, pair_of(prefix)))
    store = import_module("sixfold.indexed_data").RemoteStore()
    for file in pair_of(prefix):
        with suppress(FileNotFoundError):
            store(file).size()
            return False
    return True


def open_prefix(prefix: str, *, mmap: bool = True) -> DocumentSource:
    """The dataset at ``prefix``. Cost: a few system calls per file, whatever its size.

    Raises:
        BlendingError: sixfold-indexed-data is not installed, or a file of the pair is missing.
        IndexedDataError: the pair is damaged.
    """
    if find_spec("sixfold.indexed_data") is None:
        raise BlendingError(
            f"{prefix}: reading .idx/.bin needs sixfold-indexed-data; pip install 'sixfold-blending[indexed]'"
        )
    indexed_data = import_module("sixfold.indexed_data")
    try:
        dataset: DocumentSource = indexed_data.IndexedDataset(prefix, mmap=mmap)
    except indexed_data.IndexedDataError:
        if indexed_data.IndexedDataset.exists(prefix):
            raise
        raise BlendingError(
            f"{prefix}.idx or {prefix}.bin is missing; a prefix names both files, without extension"
        ) from None
    if len(dataset.sequence_lengths) and getattr(dataset, "trailing_bytes", 0) == len(dataset.sequence_lengths):
        raise BlendingError(
            f"{prefix} is a multimodal pair: a mode for each sequence follows its index. To read it as text all the "
            "same, return IndexedDataset(prefix) from build_low_level_dataset of your own class"
        )
    return dataset
