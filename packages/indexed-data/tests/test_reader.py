"""Reading: what comes back, who keeps the map alive, and what it costs."""

import errno
import gc
import os
import pickle
import resource
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from indexed_data_helpers import write_pair

from sixfold.indexed_data import IndexedDataError, IndexedDataset
from sixfold.indexed_data.storage import _DescriptorPool

DOCUMENTS = [[[1, 2, 3]], [[4, 5], []], [], [[6]]]
SEQUENCES = [[1, 2, 3], [4, 5], [], [6]]


@pytest.fixture(params=["map", "file", "object"])
def dataset(request, tmp_path):
    write_pair(tmp_path / "a", "uint16", DOCUMENTS)
    options = {
        "map": {},
        "file": {"mmap": False},
        "object": {"mmap": False, "open_bytes": Stored},
    }[request.param]
    return IndexedDataset(tmp_path / "a", **options)


class Stored:
    """An object store over files."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = file.read()

    def size(self):
        return len(self.data)

    def read(self, offset, nbytes):
        return self.data[offset : offset + nbytes]


def test_sequences_come_back_by_number_slice_and_iteration(dataset):
    assert len(dataset) == 4
    assert [s.tolist() for s in dataset] == SEQUENCES
    assert [dataset[i].tolist() for i in range(-4, 0)] == SEQUENCES
    for a in range(-5, 6):
        for b in range(-5, 6):
            assert [s.tolist() for s in dataset[a:b]] == SEQUENCES[a:b]
    assert dataset[np.int64(1)].dtype == dataset.dtype == np.uint16


def test_parts_come_back_by_offset_and_length(dataset):
    assert dataset.get(0, 1).tolist() == [2, 3]
    assert dataset.get(0, 1, 1).tolist() == [2]
    assert dataset.get(-3, offset=2).tolist() == []
    assert dataset.get(2).tolist() == []


@pytest.mark.parametrize("index", [4, -5, 10**12])
def test_a_sequence_that_is_not_there_is_an_index_error(dataset, index):
    with pytest.raises(IndexError, match=r"no sequence .*: the pair has 4,"):
        dataset[index]


def test_a_slice_has_no_step(dataset):
    with pytest.raises(ValueError, match="step of a slice is 2"):
        dataset[::2]


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 4), (2, 2), (4, None), (-1, 1), (0, -1), (-1, None), (2**62, 2**62)]
)
def test_a_part_outside_its_sequence_is_refused(dataset, offset, length):
    with pytest.raises(IndexedDataError, match="outside of sequence 0, which has 3 tokens"):
        dataset.get(0, offset, length)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("mmap", [True, False])
def test_offsets_and_lengths_may_be_numpy_integers_of_any_width(tmp_path, kind, mmap):
    """Python's int + numpy's narrow one is a narrow one, which wraps: 65,530 + uint16(100) is 94."""
    before = min(np.iinfo(kind).max, 2**20) - 5
    write_pair(tmp_path / "a", "uint8", [[[7] * before, list(range(127))]])
    dataset = IndexedDataset(tmp_path / "a", mmap=mmap)
    assert dataset.get(kind(1), kind(100), kind(20)).tolist() == list(range(100, 120))
    assert dataset.get(kind(1), kind(100)).tolist() == list(range(100, 127))
    with pytest.raises(IndexedDataError, match="outside of sequence 1, which has 127 tokens"):
        dataset.get(1, kind(100), kind(100))


def test_the_index_arrays_are_views_of_the_file(dataset):
    assert dataset.sequence_lengths.tolist() == [3, 2, 0, 1]
    assert dataset.sequence_pointers.tolist() == [0, 6, 10, 10]
    assert dataset.document_indices.tolist() == dataset.get_document_indices().tolist() == [0, 1, 3, 3, 4]
    assert (dataset.sequence_lengths.dtype, dataset.sequence_pointers.dtype) == (np.int32, np.int64)
    dataset.set_document_indices(np.array([0, 4]))
    assert dataset.document_indices.tolist() == [0, 4]


def test_nothing_handed_out_is_writeable(dataset):
    arrays = [dataset[0], dataset.get(0, 1), *dataset[0:2], dataset.sequence_lengths, dataset.sequence_pointers]
    assert not any(array.flags.writeable for array in arrays)


def test_tokens_are_the_whole_bin_without_a_copy(tmp_path):
    write_pair(tmp_path / "a", "uint16", DOCUMENTS)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.shares_memory(dataset.tokens, dataset[1])
    assert IndexedDataset(tmp_path / "a", mmap=False).tokens is None


def test_multimodal_reads_give_the_mode_too(tmp_path):
    write_pair(tmp_path / "a", "uint8", [[[1, 2], [3]], [[4]]], modes=[0, 5, -1])
    dataset = IndexedDataset(tmp_path / "a", multimodal=True)
    ids, mode = dataset[1]
    assert (ids.tolist(), mode) == ([3], 5)
    ids, mode = dataset.get(0, 1)
    assert (ids.tolist(), mode) == ([2], 0)
    sequences, modes = dataset[1:]
    assert ([s.tolist() for s in sequences], modes.tolist()) == ([[3], [4]], [5, -1])
    assert dataset.sequence_modes.tolist() == [0, 5, -1]
    with pytest.raises(IndexedDataError, match="multimodal=True"):
        _ = IndexedDataset(tmp_path / "a").sequence_modes


def test_a_pair_without_sequences_opens_with_length_0(tmp_path):
    write_pair(tmp_path / "a", "uint16", [])
    assert (tmp_path / "a.idx").stat().st_size == 42
    for mmap in (True, False):
        dataset = IndexedDataset(tmp_path / "a", mmap=mmap)
        assert (len(dataset), list(dataset), dataset[:]) == (0, [], [])
        dataset.check()


@pytest.mark.parametrize("end", ["close", "collect"])
def test_an_array_outlives_its_dataset(tmp_path, end):
    write_pair(tmp_path / "a", "int64", [[list(range(100_000))]])
    dataset = IndexedDataset(tmp_path / "a")
    ids, lengths = dataset[0], dataset.sequence_lengths
    dataset.close() if end == "close" else None
    del dataset
    gc.collect()
    assert ids.sum() == sum(range(100_000))
    assert lengths.tolist() == [100_000]


def mapped(path):
    with open("/proc/self/maps") as maps:
        return str(path) in maps.read()


def test_the_file_is_unmapped_when_the_last_view_goes(tmp_path):
    write_pair(tmp_path / "a", "int32", [[[1, 2, 3]]])
    view = IndexedDataset(tmp_path / "a")[0][1:]
    gc.collect()
    assert mapped(tmp_path / "a.bin")
    assert not mapped(tmp_path / "a.idx")
    del view
    assert not mapped(tmp_path / "a.bin")


def test_a_view_held_at_exit_does_not_crash_the_interpreter(tmp_path):
    write_pair(tmp_path / "a", "int32", [[[1, 2, 3]]])
    code = (
        "import sys, atexit\nfrom sixfold.indexed_data import IndexedDataset\n"
        "view = IndexedDataset(sys.argv[1])[0]\natexit.register(lambda: print(view.sum()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "6\n")


def test_a_closed_dataset_says_so(dataset):
    with dataset:
        pass
    dataset.close()
    for call in (lambda: dataset[0], lambda: len(dataset), lambda: dataset.sequence_lengths, lambda: dataset.tokens):
        with pytest.raises(IndexedDataError, match="is closed"):
            call()


def test_a_dataset_travels_by_pickle(dataset):
    copy = pickle.loads(pickle.dumps(dataset))
    assert [s.tolist() for s in copy] == SEQUENCES
    assert copy.path_prefix == dataset.path_prefix
    assert len(pickle.dumps(dataset)) < 500


def test_a_dataset_can_be_read_in_a_forked_child(tmp_path):
    write_pair(tmp_path / "a", "uint16", DOCUMENTS)
    for mmap in (True, False):
        dataset = IndexedDataset(tmp_path / "a", mmap=mmap)
        child = os.fork()
        if child == 0:
            os._exit(0 if dataset[0].tolist() == [1, 2, 3] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert dataset[1].tolist() == [4, 5]


@pytest.mark.parametrize("mmap", [True, False])
def test_a_thousand_open_pairs_need_few_descriptors(tmp_path, mmap):
    for i in range(100):
        write_pair(tmp_path / f"a{i}", "uint16", [[[i]]])
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 80, hard))
    try:
        datasets = [IndexedDataset(tmp_path / f"a{i % 100}", mmap=mmap) for i in range(1000)]
        assert [d[0].item() for d in datasets] == [i % 100 for i in range(1000)]
        assert len(os.listdir("/proc/self/fd")) - before <= 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Switching(OrderedDict):
    """A dict whose every operation is followed at once by one of another thread, which ``elsewhere`` stands for."""

    elsewhere = None

    def _switch(self, done):
        other, self.elsewhere = self.elsewhere, None
        if other is not None:
            other()
        return done

    def pop(self, *arguments):
        return self._switch(super().pop(*arguments))

    def setdefault(self, *arguments):
        return self._switch(super().setdefault(*arguments))

    def __setitem__(self, *arguments):
        return self._switch(super().__setitem__(*arguments))

    def popitem(self, *arguments, **options):
        return self._switch(super().popitem(*arguments, **options))


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_readers_that_put_descriptors_back_at_once_leave_none_open_outside_the_pool():
    before = open_descriptors()
    pool = _DescriptorPool(limit=2)
    pool._idle = Switching()
    for i in range(20):
        key, other = i % 3, (i + i // 3) % 3  # of the same file and of another
        pool._idle.elsewhere = lambda other=other: pool.put(other, os.open(os.devnull, os.O_RDONLY))
        taken = pool.take(key)
        pool._idle.elsewhere = lambda other=other: pool.put(other, os.open(os.devnull, os.O_RDONLY))
        pool.put(key, taken if taken is not None else os.open(os.devnull, os.O_RDONLY))
    assert len(pool._idle) <= 2
    assert open_descriptors() - before == len(pool._idle)
    for descriptor in pool._idle.values():
        os.close(descriptor)  # each is open, and once in the pool


def test_threads_that_read_by_position_get_their_tokens_and_leak_no_descriptor(tmp_path):
    for i in range(20):  # more than the pool keeps
        write_pair(tmp_path / f"a{i}", "uint16", [[[i, j]] for j in range(5)])
    datasets = [IndexedDataset(tmp_path / f"a{i}", mmap=False) for i in range(20)]
    before, interval = open_descriptors(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            read = list(threads.map(lambda n: datasets[n % 20][n % 5].tolist(), range(2_000)))
    finally:
        sys.setswitchinterval(interval)
    assert read == [[n % 20, n % 5] for n in range(2_000)]
    assert open_descriptors() <= before + 16


def test_opening_does_not_touch_the_arrays(tmp_path):
    """A sparse index of 2**28 sequences opens at once, and only its ends are read."""
    n = 2**28
    write_pair(tmp_path / "a", "uint8", [])
    with open(tmp_path / "a.idx", "r+b") as file:
        file.seek(18)
        file.write(n.to_bytes(8, "little") + (2).to_bytes(8, "little"))
        file.truncate(34 + 12 * n + 16)
        file.seek(34 + 12 * n + 8)
        file.write(n.to_bytes(8, "little"))
    dataset = IndexedDataset(tmp_path / "a")
    assert len(dataset) == n
    assert dataset[n // 2].tolist() == []


def test_exists_wants_both_files(tmp_path):
    write_pair(tmp_path / "a", "uint16", DOCUMENTS)
    assert IndexedDataset.exists(tmp_path / "a")
    os.unlink(tmp_path / "a.bin")
    assert not IndexedDataset.exists(tmp_path / "a")


def test_import_loads_numpy_and_the_standard_library_only():
    code = (
        # dataclasses loads inspect; numpy has it loaded only from 2.1 on
        "import sys, numpy, dataclasses\nbefore = set(sys.modules)\nimport sixfold.indexed_data\n"
        "print(*(m for m in set(sys.modules) - before if not m.startswith('sixfold')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded - {"numpy"} <= set(sys.stdlib_module_names)
    assert not loaded & {"argparse", "json", "multiprocessing", "gzip", "concurrent", "inspect", "subprocess"}
    assert len(done.stdout.split()) <= 20  # beside numpy's own; 14 on Python 3.11


def test_a_disk_that_refuses_a_read_is_the_typed_error_and_the_next_read_goes_on(tmp_path, monkeypatch):
    write_pair(tmp_path / "a", "uint16", DOCUMENTS)
    dataset = IndexedDataset(tmp_path / "a", mmap=False)

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    with (
        monkeypatch.context() as broken,
        pytest.raises(IndexedDataError, match=r"a\.bin: byte 6: .*Input/output error"),
    ):
        broken.setattr(os, "pread", refuse)
        dataset[1]
    assert dataset[1].tolist() == [4, 5]
