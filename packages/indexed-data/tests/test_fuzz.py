"""Damaged headers and indices by the thousand: the typed error, or the tokens that were written. Never anything else.

The oracle is the list of sequences that the pair was written from, as bytes: a dtype code changed into another one of
the same size makes a sound pair of other numbers, but of the same bytes.
"""

import os
import random
import struct

import numpy as np
import pytest
from indexed_data_helpers import CODES, idx_bytes

from sixfold.indexed_data import IndexedDataError, IndexedDataset, verify

HEADER = struct.Struct("<9sQBQQ")
NUMBERS = [0, 1, 2, 3, 7, 8, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def random_pair(rng):
    """(.idx, .bin, the bytes of each sequence) of a small sound pair, written by hand."""
    dtype = np.dtype(rng.choice(list(CODES)))
    lengths = [rng.choice([0, 0, 1, 2, 3, 9]) for _ in range(rng.randrange(6))]
    boundaries = sorted(rng.choices(range(len(lengths) + 1), k=rng.randrange(3)))
    modes = [rng.randrange(-128, 128) for _ in lengths] if rng.random() < 0.3 else []
    sequences = [rng.randbytes(length * dtype.itemsize) for length in lengths]
    return idx_bytes(dtype, lengths, [0, *boundaries, len(lengths)], modes), b"".join(sequences), sequences


def damaged(rng, idx):
    """``idx`` with one to three things wrong, most of them in its header."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.randrange(7)
        if kind == 0 and idx:  # one byte, anywhere
            at = rng.randrange(len(idx))
            idx = idx[:at] + bytes([rng.randrange(256)]) + idx[at + 1 :]
        elif kind == 1:  # cut
            idx = idx[: rng.randrange(len(idx) + 1)]
        elif kind == 2:  # longer
            idx += rng.randbytes(rng.choice([1, 4, 8, 20, 100]))
        elif kind == 3:  # no header of anything
            idx = rng.randbytes(34) + idx[34:]
        elif len(idx) >= 34:  # a field of the header: a number at some border, or near the true one
            fields = list(HEADER.unpack(idx[:34]))
            field = rng.randrange(1, 5)
            number = rng.choice([*NUMBERS, fields[field] + rng.choice([-2, -1, 1, 2]), rng.getrandbits(64)])
            fields[field] = number % (256 if field == 2 else 2**64)
            idx = HEADER.pack(*fields) + idx[34:]
    return idx


@pytest.mark.slow
def test_a_damaged_header_ends_in_the_typed_error_or_in_the_tokens_that_were_written(tmp_path, fuzz_chunk):
    seed, cases = fuzz_chunk
    rng = random.Random(seed)
    prefix = str(tmp_path / "a")
    opened = read = 0
    with open(prefix + ".idx", "wb", buffering=0) as idx_file, open(prefix + ".bin", "wb", buffering=0) as bin_file:
        for _ in range(cases):
            idx, data, sequences = random_pair(rng)
            idx = damaged(rng, idx)
            for file, content in ((idx_file, idx), (bin_file, data)):
                os.pwrite(file.fileno(), content, 0)
                file.truncate(len(content))
            found = sequences_of(prefix, multimodal=rng.random() < 0.3, mmap=rng.random() < 0.7)
            opened += found is not None
            for i, ids in enumerate(found or []):
                if ids is not None:
                    read += 1
                    expected = sequences[i] if i < len(sequences) else b""
                    assert ids == expected, f"sequence {i} of {idx!r}"
    assert min(opened, read) > cases // 20  # or the test says nothing


def sequences_of(prefix, multimodal, mmap):
    """The bytes of each sequence, None for one that is refused; None for all where the pair is refused."""
    try:
        dataset = IndexedDataset(prefix, multimodal, mmap)
    except IndexedDataError:
        return None
    found = []
    for i in range(len(dataset)):
        try:
            found.append((dataset[i][0] if multimodal else dataset[i]).tobytes())
        except IndexedDataError:
            found.append(None)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_verify_reports_and_never_raises(tmp_path, seed):
    rng = random.Random(seed)
    idx, data, _ = random_pair(rng)
    (tmp_path / "a.idx").write_bytes(damaged(rng, idx))
    (tmp_path / "a.bin").write_bytes(data)
    report = verify(tmp_path / "a", multimodal=rng.random() < 0.5, vocab_size=256)
    try:
        IndexedDataset(tmp_path / "a").check()
    except IndexedDataError:
        assert not report.ok
