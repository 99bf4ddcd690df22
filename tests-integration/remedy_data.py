"""Pairs and texts for the remedies of data's errors."""

import numpy as np

from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder

EOD = 256


def pair(path, documents=20, tokens=12, dtype=np.uint16, first=0):
    """The prefix of a pair whose ids count on, each document ended by an EOD."""
    with IndexedDatasetBuilder(f"{path}.bin", dtype) as builder:
        for document in range(documents):
            builder.add_document([*(np.arange(tokens - 1) + first + document) % EOD, EOD])
    return str(path)


def ids_of(prefix, **options):
    """All ids of a pair."""
    return np.concatenate([np.ravel(ids) for ids in IndexedDataset(prefix, **options)[:]]).tolist()


def texts(folder, **files):
    """Text files and their paths."""
    paths = []
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(text)
        paths.append(str(path))
    return paths
