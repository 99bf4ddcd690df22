"""What users do with pairs: pickle them, replace them, change folders, hand over numbers that look alike."""

import pickle
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest

from sixfold.indexed_data import IndexedDataError, IndexedDataset, IndexedDatasetBuilder, build, merge


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("other", [[[1, 2, 3], [4]], [[1, 2], [3, 4, 6]], [[1, 2, 3], [4, 5]], [[1]]], ids=str)
def test_a_pickle_refuses_another_pair_of_its_name(tmp_path, other, mmap):
    prefix = write(tmp_path / "a", [[1, 2], [3, 4, 5]])
    kept = pickle.dumps(IndexedDataset(prefix, mmap=mmap))
    assert pickle.loads(kept)[1].tolist() == [3, 4, 5]
    write(tmp_path / "a", [[1, 2], [3, 4, 5]])  # the same, built again or copied
    assert pickle.loads(kept)[1].tolist() == [3, 4, 5]
    write(tmp_path / "a", other)
    with pytest.raises(IndexedDataError, match=r"a: the pair was replaced since it was pickled: it had 2 sequences"):
        pickle.loads(kept)


def test_a_pickle_of_a_relative_path_opens_the_same_pair_in_another_folder(tmp_path, monkeypatch):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a", [[1, 2]] if folder == "one" else [[7, 8]])
    monkeypatch.chdir(tmp_path / "one")
    kept = pickle.dumps(IndexedDataset("a"))
    monkeypatch.chdir(tmp_path / "two")
    assert pickle.loads(kept)[0].tolist() == [1, 2]
    assert pickle.loads(kept).path_prefix == "a", "as it was given, for messages"


def test_document_indices_that_were_set_travel_with_a_pickle(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", [[1], [2], [3]]))
    dataset.set_document_indices(np.array([0, 3]))
    assert pickle.loads(pickle.dumps(dataset)).document_indices.tolist() == [0, 3]


@pytest.mark.parametrize("number", [True, False, np.True_, 1.0, "1", None], ids=repr)
def test_a_sequence_number_that_is_none_is_refused(tmp_path, number):
    dataset = IndexedDataset(write(tmp_path / "a", [[1], [2], [3]]))
    for read in (dataset.get, dataset.__getitem__):
        with pytest.raises(TypeError):
            read(number)


# ---- numbers that look alike

MASKS = [[True, False], (True,), [0, 1, True], [True, 500], np.array([True, False]), np.array([True, 2], object)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.float32])
@pytest.mark.parametrize("ids", MASKS, ids=repr)
def test_a_mask_is_no_row_of_ids(tmp_path, ids, dtype):
    with IndexedDatasetBuilder(tmp_path / "a.bin", dtype) as builder:
        with pytest.raises(IndexedDataError, match=r"(True|bool)"):
            builder.add_document(ids)
        builder.add_document([0, 1, 1, 0])
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [0, 1, 1, 0]


def test_bools_are_no_lengths_modes_or_sizes(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16, multimodal=True) as builder:
        for arguments in (([5], [True]), ([5, 6], [1, True]), ([5], [1], [True]), ([5], np.array([True]))):
            with pytest.raises(IndexedDataError, match=r"is (np\.)?True_?; it is a whole number"):
                builder.add_document(*arguments)
        builder.add_document([5], [np.int8(1)], [np.uint64(1)])
    with pytest.raises(IndexedDataError, match="vocab_size is True; it is a whole number"):
        IndexedDatasetBuilder(tmp_path / "b.bin", vocab_size=True)


@pytest.mark.parametrize("wrong", [{"workers": True}, {"workers": "2"}, {"workers": 1.5}, {"part_bytes": "9"}], ids=str)
def test_a_build_refuses_numbers_that_are_none(tmp_path, wrong):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(IndexedDataError, match="it is a whole number"):
        build([tmp_path / "a.txt"], tmp_path / "a", **wrong)


# ---- files of others, and scripts of others


@pytest.mark.parametrize("how", ["replaced", "written to"])
def test_a_pair_that_changes_between_its_check_and_its_copy_is_not_joined(tmp_path, monkeypatch, how):
    parts = [write(tmp_path / name, [[1, 2], [3, 4, 5]]) for name in ("a", "b")]
    check = IndexedDataset.check

    def checked_and_then_changed(pair):
        check(pair)
        if pair.path_prefix == parts[1]:
            if how == "replaced":
                write(tmp_path / "b", [[9, 9, 9], [9, 9]])
            else:
                (tmp_path / "b.bin").write_bytes(np.full(5, 9, np.uint16).tobytes())

    monkeypatch.setattr(IndexedDataset, "check", checked_and_then_changed)
    with pytest.raises(IndexedDataError, match=r"b\.bin: the pair was replaced or written to while it was joined"):
        merge(parts, tmp_path / "both")
    assert not list(tmp_path.glob("both*"))
    monkeypatch.undo()
    merge(parts, tmp_path / "both")  # the remedy: again, when nobody writes
    assert [ids.tolist() for ids in IndexedDataset(tmp_path / "both")][2] in ([9, 9, 9], [9, 9])


SCRIPT = """
from sixfold.indexed_data import build
{guard}build(["a.jsonl"], "out", workers=2, part_bytes=20)
"""


@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__":\n    '], ids=["without", "with"])
@pytest.mark.slow
def test_a_script_without_its_main_guard_is_told_so_and_with_it_builds(tmp_path, guard):
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 8)
    (tmp_path / "script.py").write_text(SCRIPT.format(guard=guard))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    if guard:
        assert done.returncode == 0, done.stderr
        assert len(IndexedDataset(tmp_path / "out")) == 8
        return
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and 'if __name__ == "__main__"' in last and "killed" not in last
    assert not (tmp_path / "out.idx").exists()


def test_a_full_disk_leaves_the_old_pair_and_says_so(tmp_path):
    prefix = write(tmp_path / "a", [[1, 2, 3]])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
        with pytest.raises(IndexedDataError, match="no new pair is made, and one of that name stays as it was"):
            builder.add_document(np.zeros(500_000, np.uint16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]


def test_a_folder_of_others_is_never_emptied_also_if_it_has_a_plan(tmp_path):
    (tmp_path / "out.building").mkdir()
    for name in ("plan.json", "thesis.txt"):
        (tmp_path / "out.building" / name).write_text("{}")
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(IndexedDataError, match=r"out\.building holds thesis\.txt beside what a build makes"):
        build([tmp_path / "a.txt"], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out.building").iterdir()) == ["plan.json", "thesis.txt"]
    (tmp_path / "out.building").rename(tmp_path / "mine")  # the remedy
    build([tmp_path / "a.txt"], tmp_path / "out")


def test_document_indices_that_were_set_are_the_datasets_own(tmp_path):
    dataset, mine = IndexedDataset(write(tmp_path / "a", [[1], [2], [3]])), np.array([0, 3])
    dataset.set_document_indices(mine)
    mine[:] = 0
    assert dataset.document_indices.tolist() == [0, 3]
