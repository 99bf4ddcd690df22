"""What the builder writes, what it refuses, and that a refusal changes nothing."""

import os
import resource
from array import array
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_data_helpers import idx_bytes, pair_bytes, write_pair

from sixfold.indexed_data import IndexedDataError, IndexedDataset, IndexedDatasetBuilder


def written(prefix):
    """The documents of a pair as lists, read by numpy alone."""
    ends = IndexedDataset(prefix).document_indices
    sequences = [s.tolist() for s in IndexedDataset(prefix)]
    return [sequences[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16", "float32", "float64"])
def test_bytes_are_those_of_the_format(tmp_path, dtype):
    documents = [[[1, 2, 3]], [[4], []], []]
    write_pair(tmp_path / "hand", dtype, documents)
    with IndexedDatasetBuilder(tmp_path / "ours.bin", dtype) as builder:
        builder.add_document([1, 2, 3])
        builder.add_document([4], lengths=[1, 0])
        builder.end_document()
    assert pair_bytes(tmp_path / "ours") == pair_bytes(tmp_path / "hand")


def test_a_dtype_of_the_other_byte_order_is_stored_little_endian(tmp_path):
    write_pair(tmp_path / "hand", "uint16", [[[1, 2]], [[3]]])
    with IndexedDatasetBuilder(tmp_path / "ours.bin", ">u2") as builder:
        builder.add_document(np.array([1, 2], ">u2"))
        builder.add_document([3])
    assert pair_bytes(tmp_path / "ours") == pair_bytes(tmp_path / "hand")


def test_modes_are_written_after_the_document_index(tmp_path):
    write_pair(tmp_path / "hand", "uint8", [[[1, 2], [3]], [[4]]], modes=[0, 5, -1])
    with IndexedDatasetBuilder(tmp_path / "ours.bin", np.uint8, multimodal=True) as builder:
        builder.add_document([1, 2, 3], [2, 1], [0, 5])
        builder.add_item([4], -1)
        builder.end_document()
    assert pair_bytes(tmp_path / "ours") == pair_bytes(tmp_path / "hand")


class Tensor:
    """Stands for torch's: all that is used of it is ``.numpy()``."""

    def __init__(self, ids):
        self.ids = ids

    def numpy(self):
        return np.array(self.ids)


@pytest.mark.parametrize(
    "same",
    [
        lambda ids: ids,
        tuple,
        Tensor,
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, ">i4"),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.repeat(ids, 2)[::2],
        lambda ids: [np.int32(i) for i in ids],
    ],
)
def test_ids_may_come_in_any_integer_type(tmp_path, same):
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16) as builder:
        builder.add_document(same([0, 40_000, 65_535]))
    assert written(tmp_path / "a") == [[[0, 40_000, 65_535]]]


@pytest.mark.parametrize(
    ("dtype", "ids", "position", "value"),
    [
        (np.uint16, [1, 70_000], 1, 70_000),
        (np.uint16, np.array([1, 70_000]), 1, 70_000),
        (np.uint16, np.array([5, 5, -1]), 2, -1),
        (np.uint16, [-1], 0, -1),
        (np.int32, np.array([2**31]), 0, 2**31),
        (np.int32, np.array([-5, -(2**31) - 1]), 1, -(2**31) - 1),
        (np.int32, np.array([2**32 - 1], np.uint32), 0, 2**32 - 1),
        (np.int64, np.array([2**64 - 1], np.uint64), 0, 2**64 - 1),
        (np.uint8, [2**80], 0, 2**80),
    ],
)
def test_an_id_outside_the_dtype_is_refused_by_document_position_and_value(tmp_path, dtype, ids, position, value):
    with IndexedDatasetBuilder(tmp_path / "a.bin", dtype) as builder:
        builder.add_document([1, 2])
        with pytest.raises(IndexedDataError, match=rf"document 1: position {position}: id {value}; {np.dtype(dtype)} "):
            builder.add_document(ids)
        builder.add_document([3])
    assert written(tmp_path / "a") == [[[1, 2]], [[3]]]


@pytest.mark.parametrize(
    ("ids", "problem"), [(["a"], "position 0 is .*'a'"), ([0.1], "change when stored"), ([2**24 + 1], "change")]
)
def test_what_a_float_dtype_cannot_hold_is_refused(tmp_path, ids, problem):
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.float32) as builder:
        with pytest.raises(IndexedDataError, match=f"document 0: .*{problem}"):
            builder.add_document(ids)
        builder.add_document([0.5])
    assert written(tmp_path / "a") == [[[0.5]]]


def test_negative_ids_fit_a_signed_dtype(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.int32) as builder:
        builder.add_document(np.array([-100, 2**31 - 1, -(2**31)]))
    assert written(tmp_path / "a") == [[[-100, 2**31 - 1, -(2**31)]]]


@pytest.mark.parametrize("ids", [[0, 300], np.array([0, 300], np.uint16), np.array([0, -1], np.int32)])
def test_an_id_outside_the_vocabulary_is_refused(tmp_path, ids):
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.int32, vocab_size=300) as builder:
        builder.add_document([299])
        with pytest.raises(IndexedDataError, match=r"position 1: id (300|-1); .* from 0 to 299"):
            builder.add_document(ids)
    assert written(tmp_path / "a") == [[[299]]]


@pytest.mark.parametrize(
    "ids", [[1.5], [1, "2"], np.array([1.0]), np.array([True]), "text", [[1, 2]], np.ones((2, 2), int)]
)
def test_what_is_no_row_of_integers_is_refused(tmp_path, ids):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", np.int32)
    with pytest.raises(IndexedDataError, match="document 0"):
        builder.add_document(ids)
    builder.finalize()
    assert written(tmp_path / "a") == []


@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        (lambda b: b.add_document([1, 2, 3], [1, 1]), "add up to 2, the document has 3"),
        (lambda b: b.add_document([1], [2, -1]), "length 1 is -1"),
        (lambda b: b.add_document([1, 2], [1, 1], [0]), "1 modes for 2 sequences"),
        (lambda b: b.add_document([1], [1], [200]), "mode 0 is 200; a mode is from -128 to 127"),
        (lambda b: b.add_document([1, 2], [1.5, 1.5]), "length 0 is 1.5; it is a whole number"),
        (lambda b: b.add_document([1, 2], 2), "lengths is 2; it is a sequence"),
        (lambda b: b.add_document([1], [1], ["1"]), "mode 0 is '1'; it is a whole number"),
        (lambda b: b.add_document([1, 2], (n for n in (1.5, 2))), "length 0 is 1.5; it is a whole number"),
        (lambda b: b.add_document([1, 2], (n for n in (2**40, 2))), f"length 0 is {2**40}"),
        (lambda b: b.add_document([1], [1], (n for n in (200, 1))), "mode 0 is 200; a mode is from -128 to 127"),
    ],
)
def test_lengths_and_modes_that_do_not_add_up_are_refused_with_both_numbers(tmp_path, call, numbers):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", np.int32, multimodal=True)
    with pytest.raises(IndexedDataError, match=numbers):
        call(builder)
    builder.finalize()
    assert pair_bytes(tmp_path / "a") == (idx_bytes("int32", [], [0]), b"")


COUNTS = {
    "a list": list,
    "a tuple": tuple,
    "an array": np.array,
    "a narrow array": lambda counts: np.array(counts, np.int8),
    "a list of numpy's integers": lambda counts: [np.int64(n) for n in counts],
    "a list of unsigned ones": lambda counts: list(np.array(counts, np.int8).view(np.uint8)),
    "an array of python": lambda counts: array("q", counts),
    "a generator": lambda counts: (n for n in counts),
    "a tensor": lambda counts: pytest.importorskip("torch", reason="a torch tensor").tensor(counts),
}


@pytest.mark.parametrize("modes", [None, list, COUNTS["a generator"], np.array])
@pytest.mark.parametrize("make", COUNTS.values(), ids=COUNTS)
def test_lengths_of_every_container_are_those_numbers_or_refused(tmp_path, make, modes):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16, multimodal=True)
    kept = []
    for counts in ([5], [2, 3], [0, 5, 0], [4], [6], [-5], [-1, 6], [10, -5], [2, 2], [-128, 133 - 256], []):
        kinds = range(1, len(counts) + 1)
        call = partial(builder.add_document, np.arange(5), make(counts), None if modes is None else modes(kinds))
        if sum(counts) == 5 and min(counts) >= 0:
            call()
            kept += [(n, 0 if modes is None else kind) for n, kind in zip(counts, kinds, strict=True)]
        else:
            with pytest.raises(IndexedDataError, match="length"):
                call()
    builder.add_document([], make([]))  # a document of no sequence
    builder.finalize()
    dataset = IndexedDataset(tmp_path / "a", multimodal=True)
    assert list(zip(dataset.sequence_lengths, dataset.sequence_modes, strict=True)) == kept
    assert dataset.document_indices.tolist() == [0, 1, 3, 6, 6]
    assert [ids.tolist() for ids, _ in dataset if len(ids)] == [[0, 1, 2, 3, 4], [0, 1], [2, 3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("modes", [[1], 1, (n for n in [1])])
def test_modes_in_a_pair_without_modes_are_refused(tmp_path, modes):
    with IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        with pytest.raises(IndexedDataError, match="multimodal=True"):
            builder.add_item([1], mode=1)
        with pytest.raises(IndexedDataError, match="multimodal=True"):
            builder.add_document([1], modes=modes)


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (np.uint32, {}, "uint32 has no code"),
        (np.float16, {}, "float16 has no code"),
        (None, {}, "None has no code"),
        (np.uint16, {"vocab_size": 2.5}, "vocab_size is 2.5; it is a whole number"),
        (np.uint16, {"vocab_size": 70_000}, "vocab_size is 70000"),
        (np.float32, {"vocab_size": 10}, "only integer ids"),
    ],
)
def test_a_builder_that_cannot_work_is_refused_at_once(tmp_path, dtype, options, message):
    with pytest.raises(IndexedDataError, match=message):
        IndexedDatasetBuilder(tmp_path / "a.bin", dtype, **options)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(IndexedDataError, match=r"nowhere/a\.bin: cannot be written"):
        IndexedDatasetBuilder(tmp_path / "nowhere" / "a.bin")


def test_finalize_refuses_sequences_that_belong_to_no_document(tmp_path):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin")
    builder.add_item([1])
    with pytest.raises(IndexedDataError, match="sequences 0 to 0 belong to no document"):
        builder.finalize()
    builder.end_document()
    builder.finalize()
    assert written(tmp_path / "a") == [[[1]]]


def test_the_idx_cannot_take_the_name_of_the_bin(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        builder.add_document([1])
        with pytest.raises(IndexedDataError, match="the two files have two names"):
            builder.finalize(tmp_path / "a.bin")
    assert written(tmp_path / "a") == [[[1]]]


def test_a_folder_with_the_name_of_the_idx_is_named_and_the_old_bin_stays(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"old")
    (tmp_path / "a.idx").mkdir()
    with pytest.raises(IndexedDataError, match=r"a folder is named .*a\.idx"):
        IndexedDatasetBuilder(tmp_path / "a.bin").finalize()
    assert (tmp_path / "a.bin").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("end", ["finalize", "abort"])
@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.add_item([1]),
        lambda b: b.add_document([1]),
        lambda b: b.end_document(),
        lambda b: b.add_index("x"),
        lambda b: b.finalize(),
    ],
)
def test_nothing_can_be_called_after_the_end(tmp_path, end, call):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin")
    getattr(builder, end)()
    with pytest.raises(IndexedDataError, match="make a new builder"):
        call(builder)


def test_an_error_in_the_block_leaves_the_old_pair_and_no_other_file(tmp_path):
    write_pair(tmp_path / "a", "int32", [[[7]]])
    before = pair_bytes(tmp_path / "a")
    with pytest.raises(ZeroDivisionError), IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        builder.add_document([1, 2])
        raise ZeroDivisionError
    assert pair_bytes(tmp_path / "a") == before
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_readers_of_the_old_pair_keep_it(tmp_path):
    write_pair(tmp_path / "a", "int32", [[[7, 8]]])
    old = IndexedDataset(tmp_path / "a")
    with IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        builder.add_document([1, 2, 3])
    assert old[0].tolist() == [7, 8]
    assert written(tmp_path / "a") == [[[1, 2, 3]]]
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_an_old_idx_never_stands_beside_a_new_bin(tmp_path, monkeypatch):
    write_pair(tmp_path / "a", "int32", [[[7, 8]]])
    old = pair_bytes(tmp_path / "a")
    seen = []
    replace, unlink = os.replace, os.unlink

    def watch(step):
        def watched(*paths):
            step(*paths)
            seen.append([p.read_bytes() if p.exists() else None for p in (tmp_path / "a.idx", tmp_path / "a.bin")])

        return watched

    monkeypatch.setattr(os, "replace", watch(replace))
    monkeypatch.setattr(os, "unlink", watch(unlink))
    with IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        builder.add_document([9, 9])
    new_idx, new_bin = pair_bytes(tmp_path / "a")
    assert seen == [[None, old[1]], [None, new_bin], [new_idx, new_bin]]


@pytest.mark.parametrize("at", ["write", "finalize"])
def test_a_disk_that_takes_no_more_leaves_the_old_pair_and_no_other_file(tmp_path, at):
    write_pair(tmp_path / "a", "int32", [[[7]]])
    before = pair_bytes(tmp_path / "a")
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", np.int32)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(IndexedDataError, match="File too large"):
            builder.add_document(np.zeros(2**20 if at == "write" else 500, np.int32))
            builder.finalize()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert pair_bytes(tmp_path / "a") == before
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]
    with pytest.raises(IndexedDataError, match="aborted"):
        builder.add_document([1])


@pytest.mark.parametrize("n", [1, 3, 1000])
def test_pointers_are_the_prefix_sum_over_block_borders(tmp_path, monkeypatch, n):
    monkeypatch.setattr("sixfold.indexed_data.writer._INDEX_BLOCK", 7)
    lengths = np.random.default_rng(n).integers(0, 5, n).tolist()
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16) as builder:
        for length in lengths:
            builder.add_document([1] * length)
    assert pair_bytes(tmp_path / "a")[0] == idx_bytes("uint16", lengths, range(n + 1))


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65_535), max_size=5), max_size=4), max_size=6),
    as_array=st.booleans(),
)
@pytest.mark.slow
def test_what_is_written_is_read(tmp_path_factory, documents, as_array):
    prefix = tmp_path_factory.mktemp("pair") / "a"
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for document in documents:
            flat = [i for sequence in document for i in sequence]
            builder.add_document(np.array(flat, np.int64) if as_array else flat, [len(s) for s in document])
    assert written(prefix) == documents


def test_a_forked_child_that_writes_into_the_same_file_makes_no_pair(tmp_path):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16)
    builder.add_document([1, 2, 3])
    child = os.fork()
    if child == 0:
        builder.add_document(np.zeros(2**20, np.uint16))  # more than the buffer: it goes to the file that both have
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(IndexedDataError, match=r"6 were expected: another process .* wrote into it"):
        builder.finalize()
    assert os.listdir(tmp_path) == []


def test_an_empty_document_may_have_an_empty_mask(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "out.bin", np.uint16) as builder:
        builder.add_document([], loss_mask=[])
        builder.add_document([1, 2], loss_mask=[True, False])
    data = IndexedDataset(tmp_path / "out")
    assert [data.loss_mask(number).tolist() for number in range(2)] == [[], [True, False]]
