"""Saves beside a thread that writes the tensors: an average kept by a thread, memory shared with another process."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_worker import Forked

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor
from sixfold.dist_ckpt.background import worker_process
from sixfold.dist_ckpt.background.arena import Arena
from sixfold.dist_ckpt.background.saver import AsyncSaver
from sixfold.dist_ckpt.dcp import Reader, Writer
from sixfold.dist_ckpt.stores import MemoryStore

ELEMENTS = 3 << 20  # 12 MiB, four blocks


class Writing:
    """A thread that changes a tensor all the time."""

    def __init__(self, tensor):
        self.tensor, self.stops = tensor, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.stops.wait(0.0002):
            self.tensor[:: 1 << 10].add_(1)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *failure):
        self.stops.set()
        self.thread.join()


def in_memory(folder):
    return MemoryStore()


@pytest.mark.parametrize("place", [lambda folder: folder / "c", in_memory], ids=["folder", "stream"])
@pytest.mark.slow
def test_a_save_beside_a_thread_that_writes_the_tensor_is_whole(tmp_path, place):
    tensor, where = torch.zeros(ELEMENTS), place(tmp_path)
    for _ in range(3):
        with Writing(tensor):
            dist_ckpt.save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, where, group=None)
        loaded = dist_ckpt.load_plain_tensors(where)["w"]
        assert loaded.min() >= 0
        assert loaded.max() <= tensor.max()
        assert bool((loaded == loaded.round()).all())
        assert dist_ckpt.tools.verify(where)["ok"]


def test_a_save_by_torch_beside_a_thread_that_writes_the_tensor_is_whole(tmp_path):
    tensor, target = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    with Writing(tensor):
        dcp.save({"w": tensor}, storage_writer=Writer(tmp_path / "c"))
    dcp.load({"w": target}, storage_reader=Reader(tmp_path / "c"))
    assert 0 <= target.min() <= target.max() <= tensor.max()


def test_a_background_save_beside_a_thread_that_writes_the_tensor_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "_start_worker", Forked)
    tensor = torch.zeros(ELEMENTS)
    with Writing(tensor):
        dist_ckpt.async_save({"w": ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / "c", group=None).wait()
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].max() <= tensor.max()


def test_the_first_worker_starts_behind_the_copy_which_has_all_cores(tmp_path, monkeypatch):
    order = []

    def take(self, tensors, plain=Arena.take):
        order.append("copy")
        return plain(self, tensors)

    def start(fds):
        order.append("worker")
        return Forked(fds)

    monkeypatch.setattr(Arena, "take", take)
    monkeypatch.setattr(worker_process, "_start_worker", start)
    with AsyncSaver(None) as saver:
        for step in (1, 2):
            saver.save({"w": torch.full((9,), float(step))}, tmp_path / f"{step}").wait()
    assert order == ["copy", "worker", "copy"]
