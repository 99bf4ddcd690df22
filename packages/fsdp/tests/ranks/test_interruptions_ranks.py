"""An exception inside the package, caught on two ranks alike: the next steps are right, or one error ends the model.

Ranks have different tensors in their shards, so the k-th tensor operation is not the same place on both. The k-th call
of a function is.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, batch, make_adamw, make_net
from fsdp_interrupt_helpers import RaisesAtCall, gradients, sweep
from torch import nn

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FsdpError, fully_shard, fully_shard_optimizer
from sixfold.fsdp.buffers.gradients import Gradients
from sixfold.fsdp.buffers.weights import Weights
from sixfold.fsdp.collectives.comm import GlooComm
from sixfold.fsdp.engine.gather import Gathering
from sixfold.fsdp.faults.deadlines import Faults
from sixfold.fsdp.parameter_access.guard import UnitGuard
from sixfold.fsdp.parameter_access.saved_weights import Versions

KINDS = {
    "zero-3": {},
    "zero-3 all": {"buffers": BufferConfig(gathered_bytes="all")},
    "zero-2": {"strategy": "optim_grads"},
    "zero-1": {"strategy": "optim"},
    "zero-0": {"strategy": "no_shard"},
}
POINTS = [
    (Weights, "refresh_source"),
    *[(GlooComm, name) for name in ("all_gather", "swap", "all_reduce")],
    *[(Gathering, name) for name in ("use", "_claim", "_finish")],
    *[(Gradients, name) for name in ("hold", "sum_in", "sum_in_own", "add", "take", "stage", "land", "landed")],
    *[(UnitGuard, name) for name in ("reveal", "hide", "begin_call", "end_call")],
    (Versions, "here"),
    (Faults, "wait"),
]


def middle_and_last(calls):
    return sorted({calls[len(calls) // 2], calls[-1]}) if calls else []


def wrapped(kind):
    net = make_net()
    model = fully_shard(net, process_group=dist.group.WORLD, fsdp_unit_modules=[Block, nn.Embedding], **KINDS[kind])
    return model, fully_shard_optimizer(make_adamw(net.parameters()), model)


def interrupted(rank, ranks, kind, every):
    found = {}
    for owner, name in POINTS:
        found[name] = sweep(
            partial(wrapped, kind),
            rank,
            ranks,
            list if every else middle_and_last,
            torch.OutOfMemoryError,
            1,
            by_microbatch=kind in ("zero-3", "zero-3 all", "zero-2"),
            raises=partial(RaisesAtCall, owner=owner, name=name),
        )
    return found


@pytest.mark.parametrize("every", [False, True], ids=["middle and last", "every call"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_two_ranks_go_on_with_the_bits_of_a_plain_net_or_one_error_ends_the_model(kind, every):
    mine, other = run_ranks(interrupted, 2, kind, every, timeout=600.0)
    assert mine == other and sum(sum(one.values()) for one in mine.values()) > 10


ENDS = {"gather": (Gathering, "use"), "reduce": (Gradients, "take")}


def goes_on_after(rank, ranks, op):
    model, optimizer = wrapped("zero-3")
    loss = model(batch(0, 0, rank)).sum()
    with RaisesAtCall(1, MemoryError, *ENDS[op]), pytest.raises(MemoryError):
        loss.backward()
    told = []
    for use in (optimizer.zero_grad, optimizer.step, model.full_state_dict, lambda: gradients(model, 1, rank)):
        with pytest.raises(FsdpError) as error:
            use()
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("op", ENDS)
def test_on_several_ranks_each_call_after_it_says_to_restart_from_the_last_checkpoint(op):
    for told in run_ranks(goes_on_after, 2, op):
        assert len(told) == 4
        for text in told:
            assert f"MemoryError came in the midst of a {op}" in text and "restart from the last checkpoint" in text
