"""Every wait for another rank ends at its deadline: rank 1 is stopped in each of them, and rank 0 says so in time."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from fault_helpers import Acts, Report, runner_of, stop, stop_at, timeout_of
from pipeline_helpers import batch, layers, square_loss
from torch import nn

from ranktest import run_ranks, store
from sixfold.pipeline import gpipe, one_f_one_b
from sixfold.pipeline.compiler.token_scaling import TokenCount
from sixfold.pipeline.transport.process_groups import GroupControl, GroupLinks, Outgoing
from sixfold.pipeline.transport.shared_memory import SharedOutgoing

TIMEOUT_S = 0.5
ALLOWED_S = TIMEOUT_S + 1.0


def beside_a_stopped_rank(rank: int, ranks: int, where: str, edges: str | None) -> Report:
    """Rank 1 stops at ``where``; what rank 0 gets, and how long it took."""
    dist.barrier()  # both are up: on a busy machine one may be late by more than the deadline
    module: nn.Module = layers(ranks)[rank]
    scale, loss = "mean", square_loss
    if where == "tokens":
        scale, loss = "token", lambda o, t: (square_loss(o, t), o.numel())  # type: ignore[assignment]
    if rank == 1:
        if where == "making":
            stop()
        elif where in ("agreeing", "connecting"):
            stop_at(*{"agreeing": (GroupControl, "gather"), "connecting": (GroupLinks, "connect")}[where])
        elif where == "tokens":
            TokenCount.tell = lambda *_: None  # type: ignore[method-assign]
            stop_at(TokenCount, "divide")
        elif where == "forward":
            module = Acts(3, stop)
        elif where == "backlog":
            module = Acts(1, stop)
        elif where == "sending":
            stop_at(SharedOutgoing if edges is None else Outgoing, "send")
    program, rows = (gpipe(ranks, 12), 24) if where == "backlog" else (one_f_one_b(ranks, 4), 8)
    runner = None

    def make_and_step() -> None:
        nonlocal runner
        runner = runner or runner_of(program, rank, module, TIMEOUT_S, loss_fn=loss, scale=scale, edges=edges)
        for _ in range(3 if where == "backlog" else 0):  # a rank that is ahead by more than a batch waits in its SEND
            runner.evaluate(*batch(rows))
        runner.step(*batch(rows))

    return timeout_of(make_and_step)


@pytest.mark.parametrize(
    ("where", "edges"),
    [
        *((where, None) for where in ("making", "agreeing", "connecting", "forward", "sending", "tokens", "backlog")),
        *((where, "groups") for where in ("connecting", "forward", "sending", "backlog")),
    ],
)
@pytest.mark.slow
def test_a_stopped_rank_is_a_timeout_in_every_wait(where, edges):
    kind, text, took = run_ranks(beside_a_stopped_rank, 2, where, edges, allow_exit=(1,))[0]
    assert kind == "PipelineTimeout"
    assert took < ALLOWED_S, f"{took:.2f} s: {text}"
    assert "rank 0 wait" in text
    if where != "making":
        assert "rank 1 silent" in text
    if where == "backlog":
        assert "SEND_F" in text


def store_of_rank_1(rank: int, ranks: int) -> dist.TCPStore:
    """At a port that the system gives it: one that was free a moment ago may be another test's by now."""
    wait = timedelta(seconds=20)
    if rank == 1:
        hosted = dist.TCPStore("127.0.0.1", 0, ranks, True, timeout=wait, wait_for_workers=False)
        store().set("port", str(hosted.port))
        return hosted
    return dist.TCPStore("127.0.0.1", int(store().get("port")), ranks, False, timeout=wait)


def beside_a_stopped_store(rank: int, ranks: int) -> Report:
    """Rank 1 hosts the store of the report, and stops: the store does not answer either."""
    hosted = store_of_rank_1(rank, ranks)
    dist.barrier()
    module = Acts(3, stop) if rank == 1 else layers(ranks)[rank]
    runner = runner_of(one_f_one_b(ranks, 4), rank, module, TIMEOUT_S, store=hosted)
    return timeout_of(lambda: runner.step(*batch(8)))


def test_a_report_does_not_wait_for_a_store_whose_host_is_stopped():
    _, text, took = run_ranks(beside_a_stopped_store, 2, allow_exit=(1,))[0]
    assert took < ALLOWED_S, f"{took:.2f} s: {text}"
    assert "for rank 1" in text


def make_in_a_stopped_group(rank: int, ranks: int) -> Report:
    """The group's own store is hosted by rank 1, which stops before rank 0 asks it."""
    dist.destroy_process_group()
    hosted = store_of_rank_1(rank, ranks)
    dist.init_process_group("gloo", store=hosted, rank=rank, world_size=ranks, timeout=timedelta(seconds=20))
    dist.barrier()
    if rank == 1:
        stop()
    while not store().check(["stopped"]):
        time.sleep(0.01)
    time.sleep(0.05)
    return timeout_of(lambda: runner_of(one_f_one_b(ranks, 4), rank, layers(2)[0], TIMEOUT_S))


def test_a_runner_is_not_made_with_a_stopped_host_of_the_groups_store():
    _, text, took = run_ranks(make_in_a_stopped_group, 2, allow_exit=(1,))[0]
    assert took < ALLOWED_S, f"{took:.2f} s: {text}"
    assert "rank 0 waited 0.5 s for all 2 ranks to make their runner" in text
