"""Pairs written by hand, without the package: the independent oracle of its tests. And the peer."""

import importlib.util
import struct
import sys
import warnings
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def idx_bytes(dtype, lengths, boundaries, modes=()):
    """An .idx as the table of the format says, one struct.pack per number."""
    data = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[np.dtype(dtype).name], len(lengths), len(boundaries))
    data += b"".join(struct.pack("<i", length) for length in lengths)
    pointer = 0
    for length in lengths:
        data += struct.pack("<q", pointer)
        pointer += length * np.dtype(dtype).itemsize
    data += b"".join(struct.pack("<q", boundary) for boundary in boundaries)
    return data + b"".join(struct.pack("<b", mode) for mode in modes)


def write_pair(prefix, dtype, documents, modes=()):
    """Write ``documents``, lists of sequences, which are lists of ids."""
    sequences = [sequence for document in documents for sequence in document]
    boundaries = [0]
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(s, dtype).tobytes() for s in sequences))
    Path(f"{prefix}.idx").write_bytes(idx_bytes(dtype, [len(s) for s in sequences], boundaries, modes))


def pair_bytes(prefix):
    """(.idx, .bin) as they lie on the disk."""
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


def load_peer():
    """megatron-core's module ``indexed_dataset``, as it is, without the 2,800 modules its package loads first.

    Two stand-ins, gone when it is loaded: ``megatron.core`` without its __init__, which imports the whole library (4 s
    of CPU time), and ``megatron.core.utils`` with the only name that is used of it, a logger.
    """
    pytest.importorskip("torch", reason="megatron-core needs torch")
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip("needs megatron-core, a peer that only tests use")
    package, utils = ModuleType("megatron.core"), ModuleType("megatron.core.utils")
    package.__path__ = found.submodule_search_locations
    utils.log_single_rank = lambda *_: None
    with mock.patch.dict(sys.modules, {package.__name__: package, utils.__name__: utils}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("megatron.core.datasets.indexed_dataset")
