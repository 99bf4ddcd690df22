"""The one metadata file of an apportioned blend, and what several builder threads do."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import ListDataset, config, numbered, write_pair

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset, GPTDatasetConfig
from sixfold.blending.cache import index_files as cache
from sixfold.blending.cache import indices
from sixfold.blending.source import ListSource

pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")

LENGTHS = {"wiki": [30, 0, 7, 55, 2, 19, 80], "code": [8, 90, 41, 13], "math": [9, 9, 70]}
ARRAYS = ("document_index", "sample_index", "shuffle_index")


class Tokenizer:
    eod = 0
    unique_identifiers = {"class": "Toy"}  # noqa: RUF012


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # it guards against a power cut, which no test makes


@pytest.fixture
def prefixes(tmp_path):
    for name, lengths in LENGTHS.items():
        write_pair(tmp_path / name, lengths)
    return [str(tmp_path / name) for name in LENGTHS]


def build(prefixes, folder, sizes=(60, 10, 0), order="apportioned", **more):
    fields = {"blend": (prefixes, [0.5, 0.3, 0.2]), "split": "1,1", "path_to_cache": folder and str(folder)} | more
    made = GPTDatasetConfig(random_seed=5, sequence_length=8, tokenizer=Tokenizer(), order=order, **fields)
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, made).build()


def contents(parts):
    return [
        [data.dataset_index.tolist(), data.dataset_sample_index.tolist()]
        + [getattr(dataset, name).tolist() for dataset in data.datasets for name in ARRAYS]
        for data in parts
        if data is not None
    ]


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def records(folder):
    return sorted(Path(folder).glob("*.json"))


@pytest.fixture
def calls(monkeypatch):
    """Names of the functions that built or read a whole index, in this test."""
    made = []

    def watch(name):
        function = getattr(indices, name)
        monkeypatch.setattr(indices, name, lambda *arguments: made.append(name) or function(*arguments))

    watch("build_indices")
    watch("indices_fit")
    return made


def test_a_blend_has_one_metadata_file_per_part_and_its_datasets_have_none(prefixes, tmp_path, calls):
    first = contents(build(prefixes, tmp_path / "cache"))
    assert calls == ["build_indices"] * 6
    kinds = [name.split("-", 1)[1] for name in files(tmp_path / "cache")]
    expected = [f"GPTDataset-{part}-{name}.npy" for part in ("train", "valid") for name in ARRAYS] * 3
    assert sorted(kinds) == sorted([*expected, *(f"BlendedDataset-{part}-sixfold.json" for part in ("train", "valid"))])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    calls.clear()
    assert contents(build(prefixes, tmp_path / "cache")) == first == contents(build(prefixes, None))
    assert calls[:1] != ["indices_fit"], "the metadata file vouches for all"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == before


def test_the_second_start_reads_no_array(prefixes, tmp_path, calls):
    build(prefixes, tmp_path / "cache")
    calls.clear()
    build(prefixes, tmp_path / "cache")
    assert calls == []


DAMAGE = {
    "gone": lambda path: path.unlink(),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "a list": lambda path: path.write_text("[1, 2]"),
    "no notes": lambda path: path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), 7))),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_without_its_metadata_file_every_array_is_read_in_full_once_and_the_file_written_again(
    damage, prefixes, tmp_path, calls
):
    first, before = contents(build(prefixes, tmp_path / "cache")), files(tmp_path / "cache")
    for path in records(tmp_path / "cache"):
        DAMAGE[damage](path)
    calls.clear()
    assert contents(build(prefixes, tmp_path / "cache")) == first
    assert calls == ["indices_fit"] * 6
    assert files(tmp_path / "cache") == before
    calls.clear()
    build(prefixes, tmp_path / "cache")
    assert calls == []


def test_an_array_that_changed_under_the_metadata_file_is_built_anew(prefixes, tmp_path, calls):
    first, before = contents(build(prefixes, tmp_path / "cache")), files(tmp_path / "cache")
    for path in sorted((tmp_path / "cache").glob("*-train-*.npy")):
        array = np.load(path).copy()
        if not array.size:
            continue
        array.flat[array.size // 2] += 1
        np.save(path, array)
        calls.clear()
        assert contents(build(prefixes, tmp_path / "cache")) == first, path.name
        assert calls == ["indices_fit", "build_indices"], path.name
    again = files(tmp_path / "cache")
    assert {name: again[name] for name in again if name.endswith(".npy")} == {
        name: before[name] for name in before if name.endswith(".npy")
    }


@pytest.mark.parametrize("keep_times", [False, True])
def test_data_that_changed_under_the_metadata_file_is_never_read_through_a_stale_index(keep_times, prefixes, tmp_path):
    before = contents(build(prefixes, tmp_path / "cache"))
    times = os.stat(f"{prefixes[0]}.idx").st_mtime_ns
    write_pair(prefixes[0], LENGTHS["wiki"][::-1] if not keep_times else [*LENGTHS["wiki"], 5])
    if keep_times:  # other data with the time of the old: its size and its checksum tell
        os.utime(f"{prefixes[0]}.idx", ns=(times, times))
        os.utime(f"{prefixes[0]}.bin", ns=(times, times))
    after = contents(build(prefixes, tmp_path / "cache"))
    assert after != before
    assert after == contents(build(prefixes, tmp_path / "fresh"))


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_data_that_is_replaced_between_its_opening_and_its_index_is_not_taken_for_what_the_index_is_of(
    order, prefixes, tmp_path
):
    class Replaced(GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            source = GPTDataset.build_low_level_dataset(dataset_path, config)
            if dataset_path == prefixes[0]:
                write_pair(dataset_path, LENGTHS["wiki"][::-1])  # as many sequences and tokens
            return source

    Replaced.__name__ = "GPTDataset"  # whose files are looked for next
    fields = {"blend": (prefixes, [0.5, 0.3, 0.2]), "split": "1", "order": order, "tokenizer": Tokenizer()}
    made = GPTDatasetConfig(random_seed=5, sequence_length=8, path_to_cache=str(tmp_path / "cache"), **fields)
    BlendedMegatronDatasetBuilder(Replaced, [60, 0, 0], lambda: True, made).build()
    after, fresh = (
        contents(build(prefixes, tmp_path / folder, [60, 0, 0], order, split="1")) for folder in ("cache", "fresh")
    )
    assert after == fresh


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_mapped_indices_hold_no_descriptor_and_stay_when_their_files_go(order, prefixes, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    parts = build(prefixes, tmp_path / "cache", order=order)
    assert len(os.listdir("/proc/self/fd")) == before
    first = contents(parts)
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    assert contents(parts) == first
    with pytest.raises(ValueError, match="read-only"):
        parts[0].datasets[0].shuffle_index[0] = 0


def test_every_array_is_flushed_before_the_file_that_vouches_for_it_is_there(prefixes, tmp_path, monkeypatch):
    flushed, kept = [], []

    def flush(path):
        flushed.append(Path(path).name)
        part = "train" if "-train-" in path else "valid"
        kept.extend(found for found in records(tmp_path / "cache") if part in found.name)

    monkeypatch.setattr(cache, "_flush", flush)
    build(prefixes, tmp_path / "cache")
    assert sorted(flushed) == sorted(name for name in files(tmp_path / "cache") if name.endswith(".npy"))
    assert not kept
    flushed.clear()
    build(prefixes, tmp_path / "cache")
    assert not flushed


def test_two_blends_of_the_same_samples_share_the_arrays(prefixes, tmp_path, calls):
    build(prefixes, tmp_path / "cache", split="1")
    calls.clear()
    build(None, tmp_path / "cache", split="1", blend=(prefixes[::-1], [0.2, 0.3, 0.5]))
    assert "build_indices" not in calls
    assert len(records(tmp_path / "cache")) == 2


@pytest.mark.parametrize("order", ["stateless", "megatron", "apportioned"])
def test_threads_change_nothing_but_who_opens_and_builds(order, prefixes, tmp_path, monkeypatch):
    opened, built = set(), set()
    open_one, build_one = GPTDataset.build_low_level_dataset, indices.build_indices

    class Watched(GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            opened.add(threading.current_thread().name)
            return open_one(dataset_path, config)

    def building(*arguments):
        built.add(threading.current_thread().name)
        return build_one(*arguments)

    monkeypatch.setattr(indices, "build_indices", building)
    batches = []
    for threads in (1, 3):
        made = GPTDatasetConfig(
            random_seed=5, sequence_length=8, tokenizer=Tokenizer(), order=order, split="1,1",
            blend=(prefixes, [0.5, 0.3, 0.2]), num_dataset_builder_threads=threads,
            path_to_cache=str(tmp_path / f"cache-{threads}"),
        )  # fmt: skip
        opened.clear()
        built.clear()
        parts = BlendedMegatronDatasetBuilder(Watched, [60, 10, 0], lambda: True, made).build()
        batches.append([part.get_batch(range(10))["tokens"].tolist() for part in parts[:2]])
        workers = {f"sixfold-builder_{number}" for number in range(3)}
        assert opened <= (workers if threads > 1 else {"MainThread"})
        assert built <= (workers if threads > 1 else {"MainThread"})
        assert bool(built) == (order != "stateless")
    assert batches[0] == batches[1]
    assert (
        not (tmp_path / "cache-1").exists() or files(tmp_path / "cache-1").keys() == files(tmp_path / "cache-3").keys()
    )


def test_the_error_of_the_first_prefix_is_raised_whichever_thread_meets_its_own_first(prefixes, tmp_path):
    named = [prefixes[0], str(tmp_path / "missing-1"), str(tmp_path / "missing-2")]
    for _ in range(5):
        with pytest.raises(BlendingError, match=r"missing-1\.idx or .* is missing"):
            build(named, None, num_dataset_builder_threads=3)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_that_does_not_say_of_which_dataset_it_is_gets_a_note_and_no_thread_stays(
    threads, prefixes, monkeypatch
):
    def full(*_):
        raise MemoryError("out of memory")

    class Shut(GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            raise PermissionError("no key")

    fields = {"blend": (prefixes, [0.5, 0.3, 0.2]), "split": "1", "num_dataset_builder_threads": threads}
    made = GPTDatasetConfig(random_seed=5, sequence_length=8, order="megatron", tokenizer=Tokenizer(), **fields)
    with pytest.raises(PermissionError) as error:
        BlendedMegatronDatasetBuilder(Shut, [60, 0, 0], lambda: True, made).build()
    assert error.value.__notes__ == [f"while {prefixes[0]} was opened"]
    monkeypatch.setattr(indices, "build_indices", full)
    with pytest.raises(MemoryError) as error:
        BlendedMegatronDatasetBuilder(GPTDataset, [60, 0, 0], lambda: True, made).build()
    assert error.value.__notes__ == [f"while the train part of {prefixes[0]} was made"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("sixfold-builder")]


@pytest.mark.parametrize("threads", [0, -1, 1.5, None])
def test_a_number_of_threads_that_is_none_is_refused(threads):
    with pytest.raises(BlendingError, match="num_dataset_builder_threads is"):
        config(num_dataset_builder_threads=threads)


def test_a_dataset_of_lists_is_kept_too_but_read_in_full_each_time(tmp_path, monkeypatch, calls):
    monkeypatch.setattr(ListDataset, "pairs", {"a": ListSource(numbered([20] * 9))})
    for expected in (["build_indices"], ["indices_fit"]):
        calls.clear()
        made = config(order="apportioned", blend=(["a"], [1]), split="1", path_to_cache=str(tmp_path))
        BlendedMegatronDatasetBuilder(ListDataset, [10, 0, 0], lambda: True, made).build()
        assert calls == expected
