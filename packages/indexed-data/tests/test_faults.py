"""Damaged pairs: each way a file can be wrong, and when it is noticed. No read ever gives other tokens."""

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from indexed_data_helpers import idx_bytes, write_pair

from sixfold.indexed_data import IndexedDataError, IndexedDataset, pair_rules, verify

DOCUMENTS = [[[1, 2, 3]], [[4, 5], [6]], [[7]]]
SEQUENCES = [[1, 2, 3], [4, 5], [6], [7]]
LENGTHS, POINTERS, BOUNDARIES = 34, 34 + 4 * 4, 34 + 12 * 4


@pytest.fixture
def prefix(tmp_path):
    write_pair(tmp_path / "a", "uint16", DOCUMENTS)
    return str(tmp_path / "a")


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def cut(path, size):
    os.truncate(path, size)


ON_OPEN = {
    ".bin missing": (lambda p: os.unlink(p + ".bin"), r"a\.bin: found No such file"),
    ".idx missing": (lambda p: os.unlink(p + ".idx"), r"a\.idx: found No such file"),
    ".idx a folder": (lambda p: (os.unlink(p + ".idx"), os.mkdir(p + ".idx")), "a folder"),
    ".bin empty": (lambda p: cut(p + ".bin", 0), "found 0 bytes, expected 14 bytes"),
    ".idx empty": (lambda p: cut(p + ".idx", 0), "found 0 bytes, expected at least 34"),
    ".bin cut": (lambda p: cut(p + ".bin", 13), "found 13 bytes, expected 14 bytes"),
    ".bin longer": (lambda p: cut(p + ".bin", 16), "found 16 bytes, expected 14 bytes"),
    "header cut": (lambda p: cut(p + ".idx", 33), "found 33 bytes, expected at least 34"),
    "arrays cut": (lambda p: cut(p + ".idx", 113), "found 113 bytes, expected at least 114"),
    "magic": (lambda p: overwrite(p + ".idx", 0, b"XX"), r"b'XXIDIDX\\x00\\x00'"),
    "fairseq": (lambda p: overwrite(p + ".idx", 0, b"TNTIDX\0\0"), "fairseq"),
    "version": (lambda p: overwrite(p + ".idx", 9, b"\2"), "version 2"),
    "dtype code": (lambda p: overwrite(p + ".idx", 17, b"\x09"), "dtype code 9"),
    "2^60 sequences": (
        lambda p: overwrite(p + ".idx", 18, struct.pack("<Q", 2**60)),
        f"at least {34 + 12 * 2**60 + 32}",
    ),
    "2^64-1 documents": (lambda p: overwrite(p + ".idx", 26, struct.pack("<Q", 2**64 - 1)), "expected at least"),
    "no boundaries": (lambda p: overwrite(p + ".idx", 26, struct.pack("<Q", 0)), "an empty document index"),
    "first boundary": (lambda p: overwrite(p + ".idx", BOUNDARIES, b"\1"), "starts at 0"),
    "last boundary": (lambda p: overwrite(p + ".idx", BOUNDARIES + 24, b"\5"), "found 5, expected 4"),
    "first pointer": (lambda p: overwrite(p + ".idx", POINTERS, b"\2"), "begins at byte 0"),
    "last pointer": (lambda p: overwrite(p + ".idx", POINTERS + 24, b"\2"), "found 14 bytes, expected 4 bytes"),
    "last length": (lambda p: overwrite(p + ".idx", LENGTHS + 12, b"\2"), "found 14 bytes, expected 16 bytes"),
}


@pytest.mark.parametrize("fault", ON_OPEN)
@pytest.mark.parametrize("mmap", [True, False])
def test_noticed_on_open_and_in_verify(prefix, fault, mmap):
    damage, message = ON_OPEN[fault]
    damage(prefix)
    with pytest.raises(IndexedDataError, match=message) as caught:
        IndexedDataset(prefix, mmap=mmap)
    assert prefix in str(caught.value)
    report = verify(prefix)
    assert not report.ok
    assert caught.value.problem in report.problems


@pytest.mark.slow
def test_magic_is_checked_without_asserts_too(prefix):
    overwrite(prefix + ".idx", 0, b"XX")
    code = "import sys\nfrom sixfold.indexed_data import IndexedDataset\nIndexedDataset(sys.argv[1])"
    done = subprocess.run([sys.executable, "-O", "-c", code, prefix], capture_output=True, text=True)
    assert done.returncode == 1
    assert "IndexedDataError" in done.stderr


ON_READ = {
    "length -1": (lambda p: overwrite(p + ".idx", LENGTHS + 4, struct.pack("<i", -1)), [1]),
    "length -5": (lambda p: overwrite(p + ".idx", LENGTHS, struct.pack("<i", -5)), [0]),
    "length longer": (lambda p: overwrite(p + ".idx", LENGTHS, struct.pack("<i", 4)), [0]),
    "length shorter": (lambda p: overwrite(p + ".idx", LENGTHS + 4, struct.pack("<i", 1)), [1]),
    "pointer odd": (lambda p: overwrite(p + ".idx", POINTERS + 8, struct.pack("<q", 5)), [0, 1]),
    "pointer far": (lambda p: overwrite(p + ".idx", POINTERS + 16, struct.pack("<q", 2**62)), [1, 2]),
    "pointer negative": (lambda p: overwrite(p + ".idx", POINTERS + 16, struct.pack("<q", -2)), [1, 2]),
    "pointers exchanged": (lambda p: overwrite(p + ".idx", POINTERS + 8, struct.pack("<qq", 10, 6)), [0, 1, 2]),
}


@pytest.mark.parametrize("fault", ON_READ)
@pytest.mark.parametrize("mmap", [True, False])
def test_noticed_on_the_read_that_meets_it_on_check_and_in_verify(prefix, fault, mmap):
    damage, broken = ON_READ[fault]
    damage(prefix)
    dataset = IndexedDataset(prefix, mmap=mmap)
    for i, tokens in enumerate(SEQUENCES):
        if i in broken:
            for read in (lambda i=i: dataset[i], lambda i=i: dataset.get(i, 0, 1), lambda i=i: dataset[i : i + 1]):
                with pytest.raises(IndexedDataError, match=rf"a\.idx: sequence {i}: "):
                    read()
        else:
            assert dataset[i].tolist() == tokens
    with pytest.raises(IndexedDataError, match="sequence"):
        dataset.check()
    assert not verify(prefix).ok


def test_a_document_index_that_decreases_is_noticed_by_check_and_verify(prefix):
    overwrite(prefix + ".idx", BOUNDARIES + 8, b"\4")
    dataset = IndexedDataset(prefix)
    with pytest.raises(IndexedDataError, match="never decreases"):
        dataset.check()
    (problem,) = verify(prefix).problems
    assert (problem.rule, problem.value, problem.expected) == (
        "the document index never decreases",
        "an end at sequence 3",
        ">= 4",
    )


@pytest.mark.parametrize("seed", range(25))
def test_no_single_damaged_byte_gives_other_tokens(tmp_path, seed):
    """A read gives the tokens of the sound pair, or the typed error; whatever byte of the index was hit."""
    rng = np.random.default_rng(seed)
    documents = [[rng.integers(0, 9, n).tolist()] for n in rng.integers(0, 6, 12)]
    write_pair(tmp_path / "a", "int32", documents)
    size = (tmp_path / "a.idx").stat().st_size
    # Not the dtype code: int32 read as another dtype of 4 bytes is a sound pair of other numbers.
    offset = int(rng.choice([i for i in range(size) if i != 17]))
    byte = (tmp_path / "a.idx").read_bytes()[offset]
    overwrite(tmp_path / "a.idx", offset, bytes([byte ^ int(rng.integers(1, 256))]))
    try:
        dataset = IndexedDataset(tmp_path / "a")
    except IndexedDataError:
        assert not verify(tmp_path / "a").ok
        return
    assert not verify(tmp_path / "a").ok
    for i, (tokens,) in enumerate(documents):
        try:
            assert dataset[i].tolist() == tokens
        except IndexedDataError:
            pass


def test_a_break_beyond_the_first_block_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(pair_rules, "BLOCK", 3)
    write_pair(tmp_path / "a", "uint16", [[[1, 2]] for _ in range(20)])
    for sequence in (11, 15):
        overwrite(tmp_path / "a.idx", 34 + 4 * sequence, struct.pack("<i", -7))
    problems = {problem.rule: problem.where for problem in verify(tmp_path / "a").problems}
    assert problems["a length is not negative"].endswith("a.idx: sequence 11, and 1 more")
    assert problems["a sequence ends where the next one begins"].endswith("a.idx: sequence 11, and 1 more")


def test_trailing_bytes_are_noted_and_modes_are_guessed(prefix):
    with open(prefix + ".idx", "ab") as file:
        file.write(b"\0" * 4)
    report = verify(prefix)
    assert report.ok
    assert "4 bytes after the last array, one for each sequence: probably the modes" in report.notes[0]
    assert IndexedDataset(prefix)[3].tolist() == [7]
    assert verify(prefix, multimodal=True).notes == ()


def test_modes_that_are_not_there_are_missed_on_open(prefix):
    with pytest.raises(IndexedDataError, match="and the modes"):
        IndexedDataset(prefix, multimodal=True)


def test_verify_counts_and_is_content_with_a_sound_pair(prefix):
    report = verify(prefix, vocab_size=8)
    assert (report.ok, report.problems, report.notes) == (True, (), ())
    assert (report.sequences, report.documents, report.tokens) == (4, 3, 7)


@pytest.mark.parametrize(("dtype", "bad"), [("uint16", 300), ("int32", -1)])
def test_verify_names_the_document_of_an_id_outside_the_vocabulary(tmp_path, dtype, bad):
    write_pair(tmp_path / "a", dtype, [[[1]], [], [[2], [], [3, bad, bad]], [[4]]])
    (problem,) = verify(tmp_path / "a", vocab_size=300).problems
    assert problem.where.endswith("a.bin: document 2, sequence 3, position 1")
    assert (problem.value, problem.expected) == (f"id {bad}", "0 to 299")
    assert verify(tmp_path / "a").ok


def test_verify_counts_a_nan_as_outside_every_vocabulary(tmp_path):
    write_pair(tmp_path / "a", "float32", [[[1.0, float("nan")]]])
    (problem,) = verify(tmp_path / "a", vocab_size=300).problems
    assert (problem.value, problem.where[-10:]) == ("id nan", "position 1")


class Short:
    """An object store that gives less than it was asked for, beyond the index."""

    def __init__(self, path):
        self.path = path

    def size(self):
        return os.path.getsize(self.path)

    def read(self, offset, nbytes):
        with open(self.path, "rb") as file:
            file.seek(offset)
            return file.read(nbytes)[: None if self.path.endswith(".idx") else -1]


def test_a_short_read_of_an_object_is_an_error_with_offset_and_both_sizes(prefix):
    dataset = IndexedDataset(prefix, mmap=False, open_bytes=Short)
    with pytest.raises(IndexedDataError, match=r"a\.bin: byte 6: found 3 bytes, expected 4 bytes"):
        dataset[1]


def test_a_file_cut_while_open_is_an_error_with_offset_and_both_sizes(prefix):
    dataset = IndexedDataset(prefix, mmap=False)
    cut(prefix + ".bin", 8)
    assert dataset[0].tolist() == [1, 2, 3]
    with pytest.raises(IndexedDataError, match=r"a\.bin: byte 6: found 2 bytes, expected 4 bytes"):
        dataset[1]


def test_a_pair_replaced_while_its_descriptor_was_closed_is_not_read(tmp_path):
    for i in range(20):
        write_pair(tmp_path / f"a{i}", "uint16", [[[1, 2, 3]]])
    datasets = [IndexedDataset(tmp_path / f"a{i}", mmap=False) for i in range(20)]  # more than the pool keeps
    write_pair(tmp_path / "new", "uint16", [[[9, 9, 9]]])
    os.replace(tmp_path / "new.bin", tmp_path / "a0.bin")
    with pytest.raises(IndexedDataError, match="another file than the one that was opened"):
        datasets[0][0]


def test_open_bytes_and_a_map_exclude_each_other(prefix):
    with pytest.raises(IndexedDataError, match="mmap=False"):
        IndexedDataset(prefix, open_bytes=Short)


def test_a_size_that_is_no_multiple_of_the_dtype_is_noticed(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    data = bytearray(idx_bytes("uint16", [1, 0], [0, 2]))
    data[34 + 8 + 8 : 34 + 8 + 16] = struct.pack("<q", 3)
    (tmp_path / "a.idx").write_bytes(data)
    with pytest.raises(IndexedDataError, match="a multiple of 2"):
        IndexedDataset(tmp_path / "a")
