"""Reading ahead: the same batches in the same order, errors in their place, and a thread that ends."""

import gc
import os
import threading
import time

import numpy as np
import pytest
from blending_helpers import blend, numbered

from sixfold.blending import BlendingError, Prefetcher


@pytest.fixture
def data():
    return blend({"a": numbered([50, 7]), "b": numbered([33])}, [1, 2], create_cu_seqlens=True)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "sixfold-prefetch"]


def eventually(holds, within_s=5.0):
    deadline = time.monotonic() + within_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)
    return holds()


class Slow:
    """Reads when it is told to."""

    def __init__(self):
        self.go, self.begun, self.asked = threading.Event(), threading.Event(), []

    def get_batch(self, positions, *, out=None):
        self.asked.append(positions)
        self.begun.set()
        assert self.go.wait(10), "the test let it hang"
        return {"tokens": np.array(positions)}


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("ring", [False, True])
def test_batches_come_in_order_and_are_those_of_get_batch(data, depth, ring):
    positions = [range(step * 4, step * 4 + 4) for step in range(25)]
    make_out = (lambda: data.get_batch(range(4))) if ring else None
    with Prefetcher(data, iter(positions), depth, make_out=make_out) as batches:
        taken = [{name: array.tolist() for name, array in batch.items()} for batch in batches]
    expected = [data.get_batch(some) for some in positions]
    assert taken == [{name: array.tolist() for name, array in batch.items()} for batch in expected]
    assert not threads()


def test_without_a_ring_batches_stay_as_they_were(data):
    with Prefetcher(data, (range(step, step + 3) for step in range(9))) as batches:
        kept = list(batches)
    for step, batch in zip(range(9), kept, strict=True):
        assert np.array_equal(batch["tokens"], data.get_batch(range(step, step + 3))["tokens"])


def test_a_batch_of_the_ring_is_left_alone_until_the_next_is_taken(data):
    made = []
    positions = [range(step * 4, step * 4 + 4) for step in range(30)]
    with Prefetcher(data, positions, 2, make_out=lambda: made.append(data.get_batch(range(4))) or made[-1]) as batches:
        for some, batch in zip(positions, batches, strict=True):
            eventually(lambda: len(batches._queue._ready) == 2 or batches._queue._ended, 1.0)
            assert any(batch is one for one in made)
            assert np.array_equal(batch["tokens"], data.get_batch(some)["tokens"])
    assert len(made) == 3  # depth + 1


def test_no_more_than_depth_batches_are_read_ahead():
    slow, asked = Slow(), []
    slow.go.set()

    def positions():
        for step in range(50):
            asked.append(step)
            yield [step]

    with Prefetcher(slow, positions(), 3) as batches:
        next(batches)
        assert eventually(lambda: len(slow.asked) == 4)
        time.sleep(0.05)
        assert len(slow.asked) == 4
        assert len(asked) <= 5


@pytest.mark.parametrize("where", ["get_batch", "positions", "out"])
def test_an_error_is_raised_in_its_place_and_again(data, where):
    def positions():
        yield range(4)
        yield range(4, 8)
        if where == "positions":
            raise OSError("no more positions")
        yield [-1] if where == "get_batch" else range(5)

    make_out = (lambda: data.get_batch(range(4))) if where == "out" else None
    error = {"get_batch": IndexError, "positions": OSError, "out": BlendingError}[where]
    with Prefetcher(data, positions(), make_out=make_out) as batches:
        assert np.array_equal(next(batches)["tokens"], data.get_batch(range(4))["tokens"])
        assert np.array_equal(next(batches)["tokens"], data.get_batch(range(4, 8))["tokens"])
        for _ in range(2):
            with pytest.raises(error):
                next(batches)
    assert not threads()


def test_a_read_that_hangs_is_told_with_what_it_reads():
    slow = Slow()
    with Prefetcher(slow, [[7, 8]], timeout_s=0.05) as batches:
        assert slow.begun.wait(10)
        with pytest.raises(BlendingError, match=r"no batch came in 0.05 s; it reads 2 positions from 7 on"):
            next(batches)
        slow.go.set()
        assert eventually(lambda: batches._queue._ended, 10.0)
        assert next(batches)["tokens"].tolist() == [7, 8]  # late, not lost
        with pytest.raises(StopIteration):
            next(batches)


def test_closing_ends_the_thread_at_once_and_twice_is_once(data):
    batches = Prefetcher(data, (range(step, step + 2) for step in range(10**9)))
    next(batches)
    batches.close()
    batches.close()
    assert not threads()
    with pytest.raises(StopIteration):
        next(batches)


def test_a_prefetcher_that_nobody_holds_ends_its_thread(data):
    batches = Prefetcher(data, (range(step, step + 2) for step in range(10**9)))
    next(batches)
    assert threads()
    del batches
    gc.collect()
    assert eventually(lambda: not threads())


def test_a_forked_child_is_told_so_instead_of_waiting(data):
    read, write = os.pipe()
    with Prefetcher(data, (range(step, step + 2) for step in range(10**9))) as batches:
        next(batches)
        child = os.fork()
        if child == 0:
            try:
                next(batches)
                said = "a batch"
            except BlendingError as error:
                said = str(error)
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        said = os.read(read, 1000).decode()
        os.close(read)
        os.waitpid(child, 0)
    assert "forked" in said


@pytest.mark.parametrize(("depth", "timeout_s"), [(0, 1), (-1, 1), (1.5, 1), (2, 0), (2, float("nan"))])
def test_a_prefetcher_that_cannot_work_is_refused(data, depth, timeout_s):
    with pytest.raises(BlendingError, match=r"depth is|timeout_s is"):
        Prefetcher(data, [], depth, timeout_s=timeout_s)
    assert not threads()


def test_a_blend_of_memory_maps_looks_nowhere_ahead(data):
    assert not data.looks_ahead
    data.look_ahead(range(8))
