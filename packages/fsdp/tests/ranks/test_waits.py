"""Every wait ends: the other side is stopped (SIGSTOP: no socket closes), and the survivor says so in time.

One test for each row of the table in docs/design/fsdp/waits.md. Deadlines are shortened after the wrap, so
that a busy machine does not miss them while the ranks set up.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net

from ranktest import run_ranks, store
from sixfold.fsdp import FsdpError, MixedPrecision, fully_shard, fully_shard_optimizer

DEADLINE_S = 0.3


def shorten(model) -> None:
    """Deadlines of all steps, after the wrap."""
    faults = model._engine.faults
    faults.timeout_s = faults.first_step_timeout_s = DEADLINE_S


def stop_me() -> None:
    store().set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def meet_a_stopped_rank(action) -> tuple[str, float]:
    """What ``action`` raised, and after how many seconds; the stopped rank is ended afterwards."""
    pid = int(store().get("stopped"))
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.005)
    began = time.monotonic()
    with pytest.raises(FsdpError) as caught:
        action()
    seconds = time.monotonic() - began
    os.kill(pid, signal.SIGKILL)
    return str(caught.value), seconds


def stale_forward(model, optimizer, net):
    model.refresh()
    model(batch(0, 0, 0))


def backward_and_sync(model, optimizer, net):
    with model.no_sync():
        loss_of(model(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    model.finish_grad_sync()


def norm(model, optimizer, net):
    model.clip_grad_norm_(1.0)


def step(model, optimizer, net):
    with model.no_sync():
        loss_of(model(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    optimizer.step()


def muon(model, optimizer, net):
    matrices = [p for p in net.blocks.parameters() if p.ndim == 2]
    stepping = fully_shard_optimizer(torch.optim.Muon(matrices), model)
    mains = [main for group in stepping.param_groups for main in group["params"]]
    before = [main.detach().clone() for main in mains]
    for main in mains:
        main.grad = torch.ones_like(main)
    try:
        stepping.step()
    finally:
        assert mains and all(map(torch.equal, mains, before)), "a weight moved without the pieces"


def whole_state(model, optimizer, net):
    model.full_state_dict()


def given_state(model, optimizer, net):
    model.load_full_state_dict(None)  # the stopped rank was to give it


WAITS = {
    "gather of a unit": (stale_forward, {}, "op gather"),
    "reduction of a unit": (backward_and_sync, {"strategy": "optim"}, "op reduce"),
    "reduction in rank order": (
        backward_and_sync,
        {"strategy": "optim", "mixed_precision": MixedPrecision(grad_sum="rank_order")},
        "op reduce",
    ),
    "sum of the norm": (norm, {"checks": "off"}, "op reduce"),
    "reduction inside step()": (step, {"strategy": "optim"}, "op reduce"),
    "pieces of Muon's matrices": (muon, {}, "op step"),
    "whole state that the stopped rank was to give": (given_state, {}, "op load"),
    "whole state that is to be gathered": (whole_state, {}, "op save"),
    # The root unit has fp8 parameters too: the first thing sent is the scales of all.
    "scales of fp8 parameters": (
        stale_forward,
        {"mixed_precision": MixedPrecision(fp8=lambda name: True)},
        "op gather",
    ),
    "control exchange": (stale_forward, {"checks": "unit"}, "op gather"),
}


def wait_for_a_stopped_rank(rank, ranks, wait):
    action, options, _ = WAITS[wait]
    net = make_net()
    model = fully_shard(net, process_group=dist.group.WORLD, fsdp_unit_modules=[Block], **options)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    model(batch(0, 0, 0))
    if rank == 1:
        stop_me()
    shorten(model)
    return meet_a_stopped_rank(lambda: action(model, optimizer, net))


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.slow
def test_a_wait_for_a_stopped_rank_ends_by_its_deadline_and_names_it(wait):
    text, seconds = run_ranks(wait_for_a_stopped_rank, 2, wait, allow_exit=(1,))[0]
    assert "the process of rank 1 is stopped; no sign of life from rank 1 (no " in text and WAITS[wait][2] in text
    assert seconds < DEADLINE_S + 2


def wrap_beside_a_stopped_rank(rank, ranks):
    if rank == 1:
        stop_me()
    return meet_a_stopped_rank(lambda: fully_shard(make_net(), process_group=dist.group.WORLD, timeout_s=DEADLINE_S))


def test_wrapping_beside_a_stopped_rank_ends_at_its_deadline():
    text, seconds = run_ranks(wrap_beside_a_stopped_rank, 2, allow_exit=(1,))[0]
    assert "no sign of life from rank 1" in text and "op check" in text
    assert seconds < DEADLINE_S + 2


def meet_in_a_stopped_store(rank, ranks, when):
    """Rank 1 serves the store in which survivors meet, and is stopped."""
    if rank == 1:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store().set("port", str(server.port))
    port = int(store().get("port"))
    mine = server if rank == 1 else dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    options = {"process_group": dist.group.WORLD, "fsdp_unit_modules": [Block], "fault_store": mine}
    if when == "wrap":
        if rank == 1:
            store().get("ready")
            stop_me()
        store().set("ready", "1")
        return meet_a_stopped_rank(lambda: fully_shard(make_net(), timeout_s=DEADLINE_S, **options))
    model = fully_shard(make_net(), **options)
    model(batch(0, 0, 0))
    if rank == 1:
        stop_me()
    shorten(model)
    model._engine.faults._store._answer_s = DEADLINE_S
    return meet_a_stopped_rank(lambda: stale_forward(model, None, None))


@pytest.mark.parametrize("when", ["wrap", "step"])
@pytest.mark.slow
def test_a_fault_store_whose_process_is_stopped_holds_nobody(when):
    text, seconds = run_ranks(meet_in_a_stopped_store, 2, when, allow_exit=(1,))[0]
    assert "fault_store does not answer" in text
    assert seconds < DEADLINE_S + 5
