"""Every wait has a deadline: the other side is stopped with SIGSTOP, or never comes. The design note has a table."""

import fcntl
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
from indexed_data_helpers import write_pair

from sixfold.indexed_data import IndexedDataError, IndexedDataset, IndexedDatasetBuilder, build, verify
from sixfold.indexed_data import atomic_files as disk
from sixfold.indexed_data.text import workers

STOPS = """
import os, signal

class Stops:
    vocab_size, eod = 300, 299

    def encode(self, text):
        if text == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return [1]
"""


def interrupt(done, total):
    if done == 2:
        raise KeyboardInterrupt


@pytest.mark.parametrize(("progress", "ends_with"), [(None, IndexedDataError), (interrupt, KeyboardInterrupt)])
@pytest.mark.slow
def test_a_build_whose_worker_is_stopped_ends_keeps_its_parts_and_leaves_no_process(
    tmp_path, monkeypatch, progress, ends_with
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stops.py").write_text(STOPS)
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n' * 39 + '{"text": "stop"}\n')
    began = time.monotonic()
    with pytest.raises(ends_with, match="input part a") as caught:
        build(["a.jsonl"], "out", tokenizer="stops:Stops", workers=2, part_bytes=200, timeout_s=1, progress=progress)
    assert time.monotonic() - began < 60
    if ends_with is IndexedDataError:
        assert "made progress for 1 s" in str(caught.value)
    assert multiprocessing.active_children() == []
    assert not IndexedDataset.exists("out")
    assert os.path.exists("out.building/part-00000.json")


@pytest.mark.slow
def test_a_build_neither_waits_for_a_process_of_its_caller_nor_ends_it(tmp_path, monkeypatch):
    """Started while the build runs: by another thread, or by ``progress``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n' * 40)
    callers = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    build(["a.jsonl"], "out", workers=2, part_bytes=300, timeout_s=1, progress=lambda n, _: n == 1 and callers.start())
    assert callers.is_alive()
    callers.kill()
    callers.join()


def test_time_in_which_the_build_was_stopped_too_is_no_deadline(monkeypatch):
    """Ctrl-Z for an hour, then fg: the clock has run, nobody has."""
    stopped_s = [0.0]
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s[0]))
    part = Future()
    threading.Timer(0.1, stopped_s.__setitem__, (0, 3600.0)).start()
    threading.Timer(0.3, part.set_result, ("done",)).start()
    assert workers._WorkerProcesses([], timeout_s=0.8).result(part, "input part a") == "done"


@pytest.fixture
def stopped(tmp_path):
    """stopped(path): a process that holds the lock of ``path`` and is stopped; it gives back how to end it."""
    children = []

    def hold(path):
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
            os.write(tell, b"x")
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        children.append(child)
        os.read(ready, 1)
        os.waitpid(child, os.WUNTRACED)
        return lambda: (os.kill(child, signal.SIGKILL), os.waitpid(children.pop(), 0))

    yield hold
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_writer_does_not_wait_for_ever_for_the_lock_of_its_folder_and_loses_nothing(tmp_path, monkeypatch, stopped):
    monkeypatch.setattr(disk, "LOCK_TIMEOUT_S", 0.2)
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16)
    builder.add_document([1, 2])
    end = stopped(tmp_path)
    began = time.monotonic()
    with pytest.raises(IndexedDataError, match=r"has held the lock of its folder for 0\.2 s; .*finalize again"):
        builder.finalize()
    assert 0.2 < time.monotonic() - began < 30
    end()
    builder.finalize()
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_a_writer_passes_by_the_temporary_file_of_a_stopped_one(tmp_path, stopped):
    (tmp_path / "a.bin.tmp-sixfold-0").write_bytes(b"its")
    stopped(tmp_path / "a.bin.tmp-sixfold-0")
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16) as builder:
        builder.add_document([1, 2])
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.bin.tmp-sixfold-0", "a.idx"]


def test_a_build_beside_a_stopped_one_of_the_same_output_is_refused_at_once(tmp_path, monkeypatch, stopped):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "out.building").mkdir()
    (tmp_path / "out.building" / "lock").touch()
    stopped("out.building/lock")
    with pytest.raises(IndexedDataError, match="another build of the same output is running"):
        build(["a.txt"], "out")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("end", [".bin", ".idx"])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_pipe_under_the_name_of_a_pair_is_no_wait_for_its_writer(tmp_path, end, mmap):
    write_pair(tmp_path / "a", "uint16", [[[1]]])
    os.unlink(tmp_path / f"a{end}")
    os.mkfifo(tmp_path / f"a{end}")
    with pytest.raises(IndexedDataError, match="a pipe, socket or device"):
        IndexedDataset(tmp_path / "a", mmap=mmap)
    assert not verify(tmp_path / "a").ok
