"""Calls of Megatron-LM on several ranks: async_sharded_save, cached_distribution, checkpointable tensors, log lines."""

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked_worker import fork_workers

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, ShardedTensor
from sixfold.dist_ckpt.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from sixfold.dist_ckpt.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from sixfold.dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy


def state_of(rank, ranks, value):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value), (0, rank, ranks)), "step": 7}


def schedule_and_finalise(rank, ranks, folder):
    fork_workers()
    calls, queue = [], AsyncCallsQueue(persistent=True)
    state = state_of(rank, ranks, 1.0)
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    request = dist_ckpt.save(state, folder / "a", strategy, async_sharded_save=True)
    state["w"].data.fill_(5.0)  # training goes on: the values are those of the call
    request.add_finalize_fn(lambda: calls.append("tracker"))
    first = queue.schedule_async_request(request)
    own = AsyncRequest(calls.append, ("own",), [lambda: calls.append("end of own")])
    second = queue.schedule_async_request(own)
    in_flight = queue.get_num_unfinalized_calls()
    done = queue.maybe_finalize_async_calls(blocking=True)
    dist_ckpt.save(state, folder / "b", async_sharded_save=True).execute_sync()
    # A failure on one rank is one on all; its finalize functions do not run.
    broken = AsyncRequest((lambda: 1 / 0) if rank == 1 else (lambda: None), (), [lambda: calls.append("never")])
    queue.schedule_async_request(broken)
    try:
        queue.maybe_finalize_async_calls(blocking=True)
        text = ""
    except CheckpointError as error:
        text = str(error)
    polled = []
    queue.schedule_async_request(AsyncRequest(None, (), []))
    while not polled:
        polled = queue.maybe_finalize_async_calls()
    try:
        request.freeze().add_finalize_fn(print)
        frozen = False
    except CheckpointError:
        frozen = True
    queue.close()
    return (first, second, in_flight, done, polled), calls[:1] == ["own"], calls[1:], text, frozen


@pytest.mark.slow
def test_an_async_save_is_scheduled_and_finalised_as_megatron_does(tmp_path):
    results = run_ranks(schedule_and_finalise, 2, tmp_path)
    assert results[0] == results[1]
    numbers, own_ran_first, calls, text, frozen = results[0]
    assert numbers == (0, 1, 2, [0, 1], [3])
    assert own_ran_first
    assert calls == ["tracker", "end of own"]
    assert "ZeroDivisionError" in text
    assert frozen
    assert dist_ckpt.load_plain_tensors(tmp_path / "a")["w"].tolist() == [1.0] * 6
    assert dist_ckpt.load_plain_tensors(tmp_path / "b")["w"].tolist() == [5.0] * 6


def distributions(rank, ranks, folder):
    """Three replicated shards and one of this rank's own."""
    state = {f"r{i}": ShardedTensor.from_rank_offsets(f"r{i}", torch.ones(4, i + 1), replica_id=rank) for i in range(3)}
    state["own"] = ShardedTensor.from_rank_offsets("own", torch.ones(2), (0, rank, ranks))
    save = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), do_cache_distribution=True)
    load = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), do_cache_distribution=True)
    before = save.cached_distribution, load.cached_distribution
    for _ in range(2):
        dist_ckpt.save(state, folder / "c", save)
        dist_ckpt.load(state, folder / "c", load)
    saved, read = save.cached_distribution, load.cached_distribution
    mine = sorted(
        record.key for shard, record in saved.shard_to_metadata.items() if shard == state[record.key].shard_id
    )
    return before, [d.main_rank_for_shard for d in (saved, read)], [d.all_ranks_for_shard for d in (saved, read)], mine


@pytest.mark.slow
def test_who_saves_and_who_loads_can_be_looked_at(tmp_path):
    results = run_ranks(distributions, 2, tmp_path)
    (before, main, holders, mine), (_, main_of_1, holders_of_1, _) = results
    assert before == (None, None)
    assert (main, holders) == (main_of_1, holders_of_1)
    assert mine == ["own", "r0", "r1", "r2"]
    replicated, own = ("r0", (0, 0), None), ("own", (2,), None)
    for main_rank, ranks in zip(main, holders, strict=True):
        assert set(main_rank) == set(ranks) == {*((f"r{i}", (0, 0), None) for i in range(3)), ("own", (0,), None), own}
        assert (ranks[replicated], ranks[own], main_rank[own]) == ([0, 1], [1], 1)
        assert {main_rank[(f"r{i}", (0, 0), None)] for i in range(3)} == {0, 1}  # both have work
        loads = [sum(4 * (i + 1) for i in range(3) if main_rank[(f"r{i}", (0, 0), None)] == rank) for rank in (0, 1)]
        assert loads == [12, 12]


def through_dcp(rank, ranks, folder):
    def shards(fill):
        rows = torch.full((2, 3), float(rank + 1)) if fill else torch.zeros(2, 3)
        flat = torch.arange(4.0) + 10 * rank if fill else torch.zeros(4)
        several = [torch.full((1,), 7.0 + rank * 2 + i) if fill else torch.zeros(1) for i in range(2)]
        one = ShardedTensor.from_rank_offsets("rows", rows, (0, rank, ranks))
        span = ShardedTensor.from_rank_offsets_flat("flat", flat, (2, 4), flattened_range=slice(4 * rank, 4 * rank + 4))
        many = [ShardedTensor.from_rank_offsets("many", t, (0, rank * 2 + i, 2 * ranks)) for i, t in enumerate(several)]
        return one, span, many

    def state(one, span, many):
        return {
            "rows": CheckpointableShardedTensor.from_sh_ten(one),
            "flat": CheckpointableShardedTensor.from_sh_ten(span),
            "many": LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(shard) for shard in many]),
        }

    saved, empty = shards(fill=True), shards(fill=False)
    dcp.save(state(*saved), checkpoint_id=folder)
    dcp.load(state(*empty), checkpoint_id=folder)
    dist.barrier()
    pairs = [(saved[0], empty[0]), (saved[1], empty[1]), *zip(saved[2], empty[2], strict=True)]
    return all(torch.equal(a.data, b.data) for a, b in pairs)


def test_records_go_through_torchs_own_save_and_load(tmp_path):
    assert run_ranks(through_dcp, 2, tmp_path / "c") == [True, True]
    plain = dist_ckpt.load_plain_tensors(tmp_path / "c")
    assert plain["rows"].tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert plain["flat"].tolist() == [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]
    assert plain["many"].tolist() == [7.0, 8.0, 9.0, 10.0]


def differ(rank, ranks, folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("sixfold.dist_ckpt").addHandler(handler)
    only = {"only0": 1} if rank == 0 else {}
    dist_ckpt.save({**only, "same": 2}, folder / "c")
    return lines


def test_each_rank_logs_how_its_common_data_differs_in_the_peers_words(tmp_path):
    first, second = run_ranks(differ, 2, tmp_path)
    assert first == []
    assert second == [
        "Rank 1 common state dict differs from rank 0 common state dict. Keys only on rank 0: ['only0'], "
        "Keys only on 1: [], Mismatched keys: []"
    ]


def stop_in_a_queue(rank, ranks, folder, stage):
    """Rank 1 is stopped while its request runs, or before it comes to finalise; rank 0 lets it go on afterwards."""
    calls, queue, pids = [], AsyncCallsQueue(timeout_s=0.4), [0] * ranks
    dist.all_gather_object(pids, os.getpid())

    def stop():
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    queue.schedule_async_request(AsyncRequest(stop if stage == "request" else None, (), [lambda: calls.append("end")]))
    if stage == "poll":
        stop()
    while rank == 0 and " T " not in Path(f"/proc/{pids[1]}/stat").read_text():
        time.sleep(0.01)
    start = time.monotonic()
    try:
        queue.maybe_finalize_async_calls(blocking=stage == "request")
        told = "no error", ""
    except CheckpointError as error:
        told = type(error).__name__, str(error)
    seconds = time.monotonic() - start
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    return *told, seconds, calls


@pytest.mark.parametrize("stage", ["request", "poll"])
def test_a_rank_that_is_stopped_ends_the_wait_of_a_queue_at_the_deadline(tmp_path, stage):
    (kind, text, seconds, calls), (_, _, _, calls_of_1) = run_ranks(stop_in_a_queue, 2, tmp_path, stage)
    assert kind == "LostPeerError"
    assert "rank 1 of 2 is dead, absent or later than" in text
    assert seconds < 5
    assert calls == calls_of_1 == []
