"""The file of row counts: used if it fits, never half written, and not needed."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.cache import row_counts
from sixfold.blending.samples import packed_rows
from sixfold.blending.source import ListSource

indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(packed_rows, "WINDOW_AT_LEAST", 16)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # it guards against a power cut, which no test makes


def write_pair(prefix, seed=0, documents=100):
    with indexed_data.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for length in np.random.default_rng(seed).integers(1, 30, documents):
            builder.add_document(np.arange(length) + 1)


@pytest.fixture
def prefix(tmp_path):
    write_pair(tmp_path / "wiki")
    return str(tmp_path / "wiki")


def build(prefix, folder, **more):
    fields = {"random_seed": 5, "sequence_length": 8, "packing": "best_fit", "blend": ([prefix], None), "split": "1"}
    config = GPTDatasetConfig(**(fields | {"path_to_cache": None if folder is None else str(folder)} | more))
    return BlendedMegatronDatasetBuilder(GPTDataset, [60, 0, 0], lambda: True, config).build()[0]


@pytest.fixture
def counted(monkeypatch):
    """Windows that were counted."""
    calls, rows = [], packed_rows.Windows.rows

    def watched(self, windows):
        calls.extend(windows)
        return rows(self, windows)

    monkeypatch.setattr(packed_rows.Windows, "rows", watched)
    return calls


def test_the_second_start_counts_nothing_and_reads_the_same(prefix, tmp_path, counted):
    first = build(prefix, tmp_path / "cache").get_batch(range(60))["tokens"]
    assert counted == list(range(7))
    counted.clear()
    second = build(prefix, tmp_path / "cache").get_batch(range(60))["tokens"]
    assert counted == []
    assert np.array_equal(first, second)
    assert np.array_equal(first, build(prefix, None).get_batch(range(60))["tokens"])


@pytest.mark.parametrize(
    "more",
    [{"random_seed": 6}, {"sequence_length": 9}, {"document_shuffle": "block"}, {"dataset_names": {"PREFIX": "news"}}],
)
def test_another_config_has_a_file_of_its_own(prefix, tmp_path, counted, more):
    if "dataset_names" in more:
        more = {"dataset_names": {prefix: "news"}}
    build(prefix, tmp_path / "cache")
    counted.clear()
    changed = build(prefix, tmp_path / "cache", **more)
    assert counted
    assert np.array_equal(
        changed.get_batch(range(60))["tokens"], build(prefix, None, **more).get_batch(range(60))["tokens"]
    )


def test_other_data_under_the_same_name_is_counted_anew(prefix, tmp_path, counted):
    build(prefix, tmp_path / "cache")
    write_pair(prefix, seed=1)
    counted.clear()
    build(prefix, tmp_path / "cache").get_batch(range(60))
    assert counted == list(range(7))


@pytest.mark.parametrize("damage", [b"", b"junk", None, "header"])
def test_a_damaged_file_is_counted_anew(prefix, tmp_path, counted, damage):
    expected = build(prefix, tmp_path / "cache").get_batch(range(60))["tokens"]
    (file,) = (tmp_path / "cache").glob("*-rows.npy")
    whole = file.read_bytes()
    cut_or_opened = {
        None: whole[:-8],
        "header": whole.replace(b"}", b" ", 1),
    }  # the header is a dict that Python parses
    file.write_bytes(cut_or_opened.get(damage, damage))
    counted.clear()
    assert np.array_equal(build(prefix, tmp_path / "cache").get_batch(range(60))["tokens"], expected)
    assert counted == list(range(7))


@pytest.mark.parametrize("dies_at", range(6))
def test_a_killed_writer_leaves_nothing_that_is_taken_for_whole(prefix, tmp_path, counted, dies_at):
    """SIGKILL in the place of every rename, and of every write before it."""
    expected = build(prefix, None).get_batch(range(60))["tokens"]
    child = os.fork()
    if child == 0:
        calls = 0

        def dying(name):
            function = getattr(os, name)

            def kill_or_call(*arguments, **named):
                nonlocal calls
                calls += 1
                if calls == dies_at + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **named)

            return kill_or_call

        os.replace, os.fsync = dying("replace"), dying("fsync")
        build(prefix, tmp_path / "cache")
        os._exit(7)  # fewer steps than that
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) in (-signal.SIGKILL, 7)
    counted.clear()
    assert np.array_equal(build(prefix, tmp_path / "cache").get_batch(range(60))["tokens"], expected)
    whole = os.waitstatus_to_exitcode(status) == 7 or any(Path(tmp_path / "cache").glob("*description.txt"))
    assert counted in ([], list(range(7)))
    counted.clear()
    assert np.array_equal(build(prefix, tmp_path / "cache").get_batch(range(60))["tokens"], expected)
    assert counted == [], f"the second writer wrote it whole ({whole})"


def test_a_folder_that_cannot_be_written_to_is_named(prefix, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BlendingError, match=r"cannot write the index .*file.*; set path_to_cache"):
        build(prefix, tmp_path / "file")


def test_many_documents_without_a_folder_are_told(monkeypatch):
    monkeypatch.setattr(row_counts, "WITHOUT_FILE_AT_MOST", 20)
    config = GPTDatasetConfig(random_seed=5, sequence_length=8, packing="best_fit")
    with pytest.warns(UserWarning, match="30 documents are packed to count their rows"):
        GPTDataset(ListSource([[1, 2]] * 30), "a", range(30), 5, Split.train, config)


def test_data_in_memory_has_no_file(tmp_path):
    folder = tmp_path / "cache"
    config = GPTDatasetConfig(random_seed=5, sequence_length=8, packing="best_fit", path_to_cache=str(folder))
    GPTDataset(ListSource([[1, 2]] * 30), "a", range(30), 5, Split.train, config)
    assert not folder.exists()
