"""The ends of what a pair can hold, folders that refuse, and disks that fill: a clear error, and nothing lost."""

import json
import os
import resource
import tracemalloc
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from indexed_data_helpers import idx_bytes, pair_bytes, write_pair

from sixfold.indexed_data import IndexedDataError, IndexedDataset, IndexedDatasetBuilder, build, merge, verify
from sixfold.indexed_data.cli import main

LONGEST = 2**31 - 1
NOBODY = 65_534


# ---- documents of no tokens and of too many


@pytest.mark.parametrize("mmap", [True, False])
def test_documents_without_sequences_and_sequences_without_tokens_are_written_read_and_merged(tmp_path, mmap):
    documents = [[], [[]], [[], []], [[7]], []]
    write_pair(tmp_path / "hand", "uint16", documents)
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16) as builder:
        builder.end_document()
        builder.add_document([])
        builder.add_document(np.empty(0, np.int64), [0, 0])
        builder.add_document([7], lengths=[1])
        builder.add_document([], lengths=[])
    assert pair_bytes(tmp_path / "a") == pair_bytes(tmp_path / "hand")
    assert [s.tolist() for s in IndexedDataset(tmp_path / "a", mmap=mmap)] == [[], [], [], [7]]
    assert verify(tmp_path / "a", vocab_size=8).ok
    write_pair(tmp_path / "twice", "uint16", documents * 2)
    merge([tmp_path / "a", tmp_path / "a"], tmp_path / "ours")
    assert pair_bytes(tmp_path / "ours") == pair_bytes(tmp_path / "twice")


def test_pairs_of_no_documents_merge_to_one_of_no_documents(tmp_path):
    write_pair(tmp_path / "a", "uint16", [])
    merge([tmp_path / "a"] * 3, tmp_path / "b")
    assert pair_bytes(tmp_path / "b") == pair_bytes(tmp_path / "a")
    report = verify(tmp_path / "b", vocab_size=1)
    assert (report.ok, report.sequences, report.documents, report.tokens) == (True, 0, 0, 0)


@pytest.mark.parametrize(
    ("tensor", "lengths"),
    [
        (np.broadcast_to(np.uint16(1), LONGEST + 1), None),
        (np.broadcast_to(np.int64(1), LONGEST + 1), None),
        (range(LONGEST + 1), None),
        (np.broadcast_to(np.uint16(1), LONGEST + 2), [1, LONGEST + 1]),
    ],
)
def test_a_sequence_of_2_to_the_31_tokens_is_refused_before_any_memory_is_taken(tmp_path, tensor, lengths):
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16) as builder:
        builder.add_document([1])
        tracemalloc.start()
        with pytest.raises(IndexedDataError, match=rf"document 1: length \d is {LONGEST + 1}; .* 0 to {LONGEST}"):
            builder.add_document(tensor, lengths)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        builder.add_document([2])
    assert peak < 2**20
    assert [s.tolist() for s in IndexedDataset(tmp_path / "a")] == [[1], [2]]


def test_the_longest_sequence_is_read_where_pointers_need_64_bits(tmp_path):
    """Three sequences of 2^31-1 ids and a short one: a .bin of 12 GiB without blocks on the disk."""
    lengths = [LONGEST, LONGEST, LONGEST, 2]
    (tmp_path / "a.idx").write_bytes(idx_bytes("uint16", lengths, [0, 3, 4]))
    with open(tmp_path / "a.bin", "wb") as file:
        try:
            file.truncate(2 * sum(lengths) - 6)
        except OSError as error:
            pytest.skip(f"this file system holds no sparse file of 12 GiB: {error}")
        file.seek(0, os.SEEK_END)
        file.write(np.array([7, 8, 9], np.uint16).tobytes())
    for mmap in (True, False):
        dataset = IndexedDataset(tmp_path / "a", mmap=mmap)
        dataset.check()
        assert dataset[3].tolist() == [8, 9]
        assert dataset.get(2, LONGEST - 2, 2).tolist() == [0, 7]
        with pytest.raises(IndexedDataError, match=f"outside of sequence 2, which has {LONGEST} tokens"):
            dataset.get(2, LONGEST, 1)


# ---- folders and files that may not be used


@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """This process as a user who may write in the current folder, but not in locked/, where a pair and a text are."""
    (tmp_path / "locked").mkdir()
    write_pair(tmp_path / "a", "uint16", [[[1, 2]]])
    write_pair(tmp_path / "locked" / "a", "uint16", [[[3]]])
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "locked" / "a.txt").write_text("text")
    for name in ("a.bin", "a.txt"):
        (tmp_path / "locked" / name).chmod(0)
    (tmp_path / "locked").chmod(0o555)
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)  # and with it root's right to pass by permissions
    yield tmp_path
    if root:
        os.seteuid(0)
    (tmp_path / "locked").chmod(0o755)


FORBIDDEN = {
    "a pair that may not be read": (lambda: IndexedDataset("locked/a"), r"locked/a\.bin: found Permission denied"),
    "without a map": (lambda: IndexedDataset("locked/a", mmap=False), r"locked/a\.bin: found Permission denied"),
    "a folder that may not be written": (
        lambda: IndexedDatasetBuilder("locked/b.bin"),
        r"locked/b\.bin: cannot be written: Permission denied",
    ),
    "a merge into it": (lambda: merge(["a", "a"], "locked/b"), r"locked/b\.bin: cannot be written: Permission denied"),
    "a merge of it": (lambda: merge(["a", "locked/a"], "b"), r"locked/a\.bin: found Permission denied"),
    "a build into it": (lambda: build("a.txt", "locked/b"), r"locked/b\.building: cannot be made: Permission denied"),
    "a build of it": (lambda: build("locked/a.txt", "b"), r"locked/a\.txt: cannot be read: .*Permission denied"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_without_permission_the_file_is_named_and_nothing_is_changed(nobody, what):
    call, message = FORBIDDEN[what]
    before = sorted(os.listdir()), sorted(os.listdir("locked"))
    with pytest.raises(IndexedDataError, match=message):
        call()
    assert (sorted(os.listdir()), sorted(os.listdir("locked"))) == before


def test_verify_and_the_command_say_the_same_without_a_traceback(nobody, capsys):
    (problem,) = verify("locked/a").problems
    assert (problem.where, problem.value) == ("locked/a.bin", "Permission denied")
    assert main(["build", "a.txt", "--output", "locked/b", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"]["type"] == "IndexedDataError"
    assert printed.err == "sixfold-data: locked/b.building: cannot be made: Permission denied\n"


def test_a_folder_that_is_closed_while_a_pair_is_written_keeps_the_old_pair(nobody):
    os.mkdir("open")
    write_pair("open/a", "int32", [[[7]]])
    before = pair_bytes("open/a")
    builder = IndexedDatasetBuilder("open/a.bin")
    builder.add_document([1, 2])
    os.chmod("open", 0o555)
    with pytest.raises(IndexedDataError, match=r"open/a\.bin: not written, Permission denied"):
        builder.finalize()
    assert pair_bytes("open/a") == before
    os.chmod("open", 0o755)
    IndexedDatasetBuilder("open/a.bin").finalize()  # takes away what could not be removed
    assert sorted(os.listdir("open")) == ["a.bin", "a.idx"]


# ---- disks that fill


@contextmanager
def disk_of(nbytes):
    """No file may grow beyond ``nbytes``: every write that would is refused, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kernel", [True, False])
def test_a_merge_for_which_the_disk_is_too_small_keeps_its_inputs_and_the_old_output(tmp_path, monkeypatch, kernel):
    def refuse(*_):
        raise OSError("not here")

    if not kernel:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    for name in ("a", "b", "out"):
        write_pair(tmp_path / name, "uint16", [[list(range(1000))]])
    before = pair_bytes(tmp_path / "out")
    with disk_of(3000), pytest.raises(IndexedDataError, match=r"out\.bin: not written, File too large"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", overwrite=True)
    assert pair_bytes(tmp_path / "out") == before
    assert sorted(os.listdir(tmp_path)) == sorted(name + end for name in ("a", "b", "out") for end in (".bin", ".idx"))


@pytest.mark.parametrize(
    ("workers", "nbytes", "message", "kept"),
    [
        (1, 2_500, r"input part a\.jsonl\[1000:2000\]: .*File too large", 1),  # the second part is the larger one
        (2, 2_500, r"input part a\.jsonl\[1000:2000\]: .*File too large", 1),
        (1, 4_000, r"the parts cannot be joined: .*File too large.*run the same command again", 3),
    ],
)
@pytest.mark.slow
def test_a_build_for_which_the_disk_is_too_small_goes_on_when_there_is_room(
    tmp_path, monkeypatch, workers, nbytes, message, kept
):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": "x" * n}) for n in (80, 900, 1400, 100)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    build("a.jsonl", "whole")
    with disk_of(nbytes), pytest.raises(IndexedDataError, match=message):
        build("a.jsonl", "out", part_bytes=1000, workers=workers)
    assert not IndexedDataset.exists("out")
    finished = [name for name in os.listdir("out.building") if name.endswith(".json") and name != "plan.json"]
    assert len(finished) >= kept
    build("a.jsonl", "out", part_bytes=1000)
    assert pair_bytes("out") == pair_bytes("whole")
    assert sorted(os.listdir()) == [
        "a.jsonl",
        *(f"{prefix}.{end}" for prefix in ("out", "whole") for end in ("bin", "idx", "manifest.json")),
    ]


# ---- what a killed writer leaves


def test_a_new_writer_removes_what_dead_ones_left_and_nothing_else(tmp_path):
    dead = [f"a.bin.tmp-sixfold-{i}" for i in (0, 2, 3, 4, 5)] + ["a.idx.tmp-sixfold-0", "a.idx.tmp-sixfold-1"]
    others = ["a.bin.tmp-sixfold-0.mine", "aa.bin.tmp-sixfold-0", "a.bin.tmp-0", "a.bin.tmp-sixfold-x"]
    for name in (*dead, *others):
        (tmp_path / name).write_bytes(b"left")
    alive = IndexedDatasetBuilder(tmp_path / "a.bin")
    alive.add_document([1])
    with IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        builder.add_document([2, 3])
    assert [s.tolist() for s in IndexedDataset(tmp_path / "a")] == [[2, 3]]
    alive.finalize()
    assert [s.tolist() for s in IndexedDataset(tmp_path / "a")] == [[1]]
    assert sorted(os.listdir(tmp_path)) == sorted(["a.bin", "a.idx", *others])


def test_what_is_no_writers_file_keeps_a_temporary_name(tmp_path):
    (tmp_path / "thesis").write_bytes(b"mine")
    (tmp_path / "a.bin.tmp-sixfold-0").symlink_to("thesis")
    (tmp_path / "a.bin.tmp-sixfold-1").mkdir()
    os.mkfifo(tmp_path / "a.bin.tmp-sixfold-2")
    before = sorted(os.listdir(tmp_path))
    with IndexedDatasetBuilder(tmp_path / "a.bin") as builder:
        builder.add_document([1])
    assert [s.tolist() for s in IndexedDataset(tmp_path / "a")] == [[1]]
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "a.bin", "a.idx"])
    assert (tmp_path / "thesis").read_bytes() == b"mine"


def test_a_finished_writer_leaves_the_file_of_the_next_one_alone(tmp_path):
    """Temporary names are used again: the second builder's has the name that the first one's had."""
    first = IndexedDatasetBuilder(tmp_path / "a.bin")
    first.add_document([1])
    replace, second = os.replace, []

    def begin_another(old, new):
        replace(old, new)
        if not second:
            second.append(IndexedDatasetBuilder(tmp_path / "a.bin"))
            second[0].add_document([2, 3])

    with mock.patch.object(os, "replace", begin_another):
        first.finalize()
    second[0].finalize()
    assert [s.tolist() for s in IndexedDataset(tmp_path / "a")] == [[2, 3]]
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_writing_a_pair_costs_the_same_however_many_files_lie_beside_it(tmp_path, monkeypatch):
    listed = []
    for name in ("listdir", "scandir"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path=".", call=call: listed.append(path) or call(path))
    for i in range(3):
        with IndexedDatasetBuilder(tmp_path / f"a{i}.bin") as builder:
            builder.add_document([1])
    merge([tmp_path / f"a{i}" for i in range(3)], tmp_path / "b")
    assert listed == []
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 40)
    counts = []
    for part_bytes in (14 * 20, 14 * 2):
        build(tmp_path / "a.jsonl", tmp_path / "out", part_bytes=part_bytes, overwrite=True)
        counts.append(len(listed))
    assert counts[1] - counts[0] == counts[0]  # as often for twenty parts as for two
