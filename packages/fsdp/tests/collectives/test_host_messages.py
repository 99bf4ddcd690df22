"""Control messages through a store: what arrives, what stays behind, who leaves first. Threads stand in for ranks."""

from __future__ import annotations

import threading
import time

import pytest
from torch import nn
from torch.distributed import HashStore, PrefixStore

from sixfold.fsdp import FsdpError
from sixfold.fsdp.collectives.host_messages import StoreControl, exchange, exchange_text
from sixfold.fsdp.collectives.own_meshes import Meshes
from sixfold.fsdp.faults.model_store import open_model_store, tidy
from sixfold.fsdp.setup.start_values import agree


def plain_wait(work):
    work.wait(None)


def on_all(ranks, action):
    """``action(rank)`` on a thread for each rank; its results, or what it raised."""
    results = [None] * ranks

    def run(rank):
        try:
            results[rank] = action(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("ranks", [2, 5])
def test_every_rank_gets_all_rows_in_order_and_nothing_piles_up(ranks):
    store = HashStore()
    keys = []

    def run(rank):
        control = StoreControl(store, rank, ranks)
        found = [exchange(control, [rank, -(2**62) + step], plain_wait) for step in range(20)]
        started = [control.start([rank * step], plain_wait) for step in range(4)]  # several on their way
        found += [finish() for finish in started]
        texts = exchange_text(control, "rank " + "é" * rank, plain_wait)
        keys.append(len(store.list_keys()))
        control.close()
        return found, texts

    for found, texts in on_all(ranks, run):
        assert found[:20] == [[[rank, -(2**62) + step] for rank in range(ranks)] for step in range(20)]
        assert found[20:] == [[[rank * step] for rank in range(ranks)] for step in range(4)]
        assert texts == ["rank " + "é" * rank for rank in range(ranks)]
    assert max(keys) <= ranks + 2


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_that_send_rows_of_different_width_are_all_told_how_wide_each_is(ranks):
    store = HashStore()

    def run(rank):
        control = StoreControl(store, rank, ranks)
        try:
            exchange(control, [7] * (3 if rank == 1 else 1), plain_wait)
        finally:
            control.close()

    for error in on_all(ranks, run):
        assert isinstance(error, RuntimeError) and "numbers sent: 1 by rank 0, 3 by rank 1" in str(error)


def test_models_made_and_dropped_leave_two_counters_per_rank_at_most():
    store, ranks = HashStore(), 3

    def model(rank):
        model_store = open_model_store(store, [4, 5, 6], rank, 5.0, "the group's store")
        control = StoreControl(model_store, rank, ranks)
        rows = exchange(control, [rank], plain_wait)
        control.close()
        tidy(model_store, ranks)
        return rows

    for _ in range(4):
        assert on_all(ranks, model) == [[[0], [1], [2]]] * ranks
    assert len(store.list_keys()) == ranks


def test_two_models_of_the_same_ranks_never_read_each_other():
    store = HashStore()

    def both(rank):
        controls = [StoreControl(open_model_store(store, [0, 1], rank, 5.0, "s"), rank, 2) for _ in range(2)]
        finishes = [control.start([10 * at + rank], plain_wait) for at, control in enumerate(controls)]
        return [finish() for finish in finishes]

    assert on_all(2, both) == [[[[0], [1]], [[10], [11]]]] * 2


class Served:
    """A store that lives in rank 0's process, far away from rank 1: each of its calls takes a while."""

    def __init__(self, store, rank, ended):
        self.store, self.rank, self.ended = store, rank, ended

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def slow(*args):
            if self.rank:
                time.sleep(0.02)
                if self.ended.is_set():
                    raise RuntimeError("Connection reset by peer")
            return call(*args)

        return slow


@pytest.mark.parametrize("differ", ["models", "nothing but all have a problem"])
def test_the_rank_that_serves_the_store_does_not_leave_before_all_have_read_why(differ):
    ended, model_store = threading.Event(), PrefixStore("board", HashStore())

    def wrap(rank):
        control = StoreControl(Served(model_store, rank, ended), rank, 2)
        try:
            if differ == "models":
                agree(nn.Linear(3, 3 + rank), {}, None, Meshes(), control, plain_wait_or_fsdp_error)
            else:
                agree(nn.Linear(3, 3), {}, FsdpError("both"), Meshes(), control, plain_wait_or_fsdp_error)
                raise FsdpError("both")
        finally:
            if rank == 0:
                ended.set()  # its process ends, and the store with it

    first, second = on_all(2, wrap)
    assert isinstance(first, FsdpError) and isinstance(second, FsdpError)
    assert ("weight is (3, 3)" in str(first) and "(4, 3)" in str(first)) or str(first) == "both"
    assert str(second) == str(first)


def plain_wait_or_fsdp_error(work):
    try:
        work.wait(None)
    except RuntimeError as error:
        raise FsdpError(f"the store is gone: {error}") from error
