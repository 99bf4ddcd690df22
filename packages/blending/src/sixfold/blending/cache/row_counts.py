"""How many rows each window of packed documents fills: counted, or from a file.

    Windows --> row_counts (this file, through index_files.py) --> orders/best_fit.py

A window takes about a millisecond, so 10,000,000 documents take a second. Ranks that build together count a share each;
see ``builder/builder.py``. The file is 8 bytes per window: 0.5 MB for 1,000,000,000 documents.
"""

import warnings

import numpy as np

from sixfold.blending.cache.file_names import Identifiers, describe, digest
from sixfold.blending.cache.index_files import Arrays, CacheEntry, known_files, load_or_build, stamps_of, vouched
from sixfold.blending.documents.idx_bin import pair_of
from sixfold.blending.numbers.kernels import I64
from sixfold.blending.samples.packed_rows import FORMAT, Windows, window_size

_NAME = "rows"
WITHOUT_FILE_AT_MOST = 10_000_000  # documents, beyond which a start that counts takes long enough to be told


def row_counts(windows: Windows, folder: str | None) -> I64:
    """Rows of each window, (W,).

    Args:
        folder: to keep them in, of data that is a file; None keeps nothing.
    Raises:
        BlendingError: the folder cannot be written to, or the data is damaged.
    """
    known = known_files()
    entry = entry_of(windows, folder) if folder and known.keeps else None

    def build() -> Arrays:
        return {_NAME: windows.rows(range(len(windows))) if known.rows is None else known.rows}

    if entry is not None:
        return load_or_build(entry, build, quick=lambda arrays: _fits(arrays, windows), full=lambda _: False)[_NAME]
    if known.rows is None and len(windows.part) > WITHOUT_FILE_AT_MOST:
        warnings.warn(
            f"{windows.names[1]}: {len(windows.part)} documents are packed to count their rows, by each process at "
            "each start; set path_to_cache, and build on all ranks with a group",
            stacklevel=2,
        )
    return build()[_NAME]


def kept_row_counts(windows: Windows, folder: str | None) -> I64 | None:
    """Those that a file holds; None if there is none that fits."""
    entry = entry_of(windows, folder) if folder else None
    arrays = None if entry is None else vouched(entry, lambda arrays: _fits(arrays, windows))
    return None if arrays is None else arrays[_NAME]


def _fits(arrays: Arrays, windows: Windows) -> bool:
    return arrays[_NAME].dtype == np.int64 and arrays[_NAME].shape == (len(windows),)


def entry_of(windows: Windows, folder: str) -> CacheEntry | None:
    """The file of the counts, None of data in memory. Its name has all that they depend on but the data."""
    prefix = getattr(windows.part.source, "path_prefix", None)
    if prefix is None:
        return None
    seed, name, split = windows.names
    identifiers: Identifiers = {
        "packing": FORMAT,
        "window": window_size(windows.sequence_length),
        "sequence_length": windows.sequence_length,
        "document_shuffle": windows.shuffle,
        "random_seed": seed,
        "name": name,
        "split": split,
    }
    description = describe(identifiers)
    return CacheEntry(
        folder=folder,
        description=description,
        stem=f"{digest(description)}-PackedRows-{split}",
        names=(_NAME,),
        facts=windows.part.fingerprint_of_lengths,
        sources=known_files().stamps or stamps_of(pair_of(prefix)),
    )
