"""Who waits for a reduction: a stand-in for a device's streams writes down what is launched and what waits.

Nothing runs late here: the numbers are those of a CPU. What is asserted is the order in which a device would be told.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from fsdp_stream_helpers import StandInStream
from torch import nn

from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer
from sixfold.fsdp.collectives.comm import LocalComm, Ranks
from sixfold.fsdp.collectives.gradient_sums import BackendSum

pytestmark = pytest.mark.usefixtures("as_sharded")


class Log(StandInStream):
    """A SideStream, and a group whose collectives and waits are written down where they are asked for."""

    size, rank = 1, 0

    def __init__(self):
        self.lines: list[str] = []
        self.entered = False
        self.marks = 0

    # ---- SideStream

    @property
    @contextmanager
    def inside(self):
        assert not self.entered, "the stream is entered inside itself"
        self.lines.append("reduce follows compute")
        self.entered = True
        yield
        self.entered = False

    def mark(self):
        assert self.entered
        self.marks += 1
        return self.marks

    def join(self, event):
        assert not self.entered, "compute waits while the reduce stream is current"
        if event is not None:
            self.lines.append(f"compute waits for {event}")

    # ---- what a reduction does

    def note(self, text):
        self.lines.append(f"{text}{'' if self.entered else ' on compute'}")


def logged(at_once=True, **options):
    """A model in one process whose reductions tell ``Log`` what they do."""
    net = make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block, nn.Embedding, net.head], **options)
    log, reduction = Log(), model._engine.reduction
    reduction._side, reduction._at_once = log, at_once
    for flat_buffer in (one for unit in model._engine.units for one in unit.trained):
        watch(log, flat_buffer)
    return net, model, log


def watch(log, flat_buffer):
    """The flat buffer's sum over ranks, and its landing."""
    gradients, name = flat_buffer.gradients, flat_buffer.unit or "root"
    land, landed = gradients.land, gradients.landed

    def noted_land(*args):
        log.note(f"{name} lands")
        land(*args)

    def noted_landed(*args):
        log.lines.append(f"{name} is free")
        landed(*args)

    gradients.land, gradients.landed = noted_land, noted_landed


def backward(model):
    loss_of(model(batch(0, 0, 0)), batch(0, 0, 0)).backward()


def waits_and_landings(log, steps, model):
    """The last of ``steps`` backwards: for each wait of compute, which reduction it is for and how many have landed."""
    for _ in range(steps):
        before = len(log.lines), log.marks
        model.zero_grad()
        backward(model)
    found, landed = [], 0
    for line in log.lines[before[0] :]:
        landed += line.endswith("lands")
        if line.startswith("compute waits"):
            found.append((int(line.split()[-1]) - before[1], landed))
    return found


def test_a_slot_is_waited_for_when_the_next_unit_but_one_needs_it():
    _, model, log = logged(strategy="optim_grads", buffers=BufferConfig(bucket_bytes=1 << 20))
    # Backward of head, block 2, 1, 0, embedding, root. Two slots: block 1 waits for the head, block 0 for block 2, the
    # embedding for block 1. The root holds no slot; what is left is waited for at the end.
    assert waits_and_landings(log, 3, model) == [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 6)]
    first = [line for line in log.lines if line.startswith("head")][:2]
    assert first == ["head lands", "head is free"]


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_sums_in_own_memory_are_waited_for_at_the_end_of_the_backward_alone(strategy):
    for precision in ({}, {"reduce_dtype": torch.bfloat16}):
        _, model, log = logged(strategy=strategy, mixed_precision=MixedPrecision(**precision))
        assert waits_and_landings(log, 3, model) == [(at, 6) for at in range(1, 7)]


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("precision", [{}, {"reduce_dtype": torch.bfloat16}, {"grad_dtype": torch.bfloat16}], ids=str)
def test_streams_never_wait_for_each_other_both_ways(strategy, precision):
    _, model, log = logged(strategy=strategy, mixed_precision=MixedPrecision(**precision))
    waits, units = waits_and_landings(log, 2, model), len(model.units)
    assert sorted(reduction for reduction, _ in waits) == list(range(1, units + 1)), "each once, none of an old step"
    assert all("on compute" not in line for line in log.lines)
    assert all(reduction < landed or landed == units for reduction, landed in waits), "none waits for the newest"


class Replica(LocalComm):
    """Two replicas, of which the other one is silent; each sum is written down."""

    size = 2

    def __init__(self, log):
        self.log = log

    def all_reduce(self, full):
        self.log.note("sum over replicas")


def test_both_sums_of_hybrid_sharding_are_enqueued_before_a_unit_lands():
    _, model, log = logged(strategy="optim_grads")
    paths = model._engine.reduction.paths
    for flat_buffer in (one for unit in model._engine.units for one in unit.trained):
        flat_buffer.ranks = Ranks(shard=flat_buffer.ranks.shard, outer=Replica(log))
        paths.sums[flat_buffer.ranks.outer] = BackendSum()
    waits_and_landings(log, 2, model)
    lines = [line for line in log.lines if not line.startswith(("compute", "reduce follows")) and "free" not in line]
    assert lines[::2] == ["sum over replicas"] * (len(lines) // 2)
    assert all(line.endswith("lands") for line in lines[1::2])


def test_few_units_keep_what_autograd_made():
    _, model, log = logged(mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
    backward(model)
    flying, most = 0, 0
    for line in log.lines:
        flying += line.endswith("lands") - line.endswith("is free")
        most = max(most, flying)
    assert most == 2


def test_where_the_host_waits_a_reduction_is_finished_as_late_as_it_may():
    _, model, log = logged(at_once=False, strategy="optim")
    backward(model)
    order = [line.split()[0] for line in log.lines if line.endswith("lands")]
    assert set(order) == {name or "root" for name in model.units}
    entered = [at for at, line in enumerate(log.lines) if line == "reduce follows compute"]
    first_landing = next(at for at, line in enumerate(log.lines) if line.endswith("lands"))
    assert len([at for at in entered if at < first_landing]) == len(model.units) + 1, "all were sent before one landed"


def test_pieces_of_a_large_unit_take_turns_in_the_slots_and_wait_for_no_host():
    net, model, log = logged(strategy="optim_grads_params", buffers=BufferConfig(bucket_bytes=512))
    expected = make_net()
    optimizer, plain = fully_shard_optimizer(make_adamw(net.parameters()), model), make_adamw(expected.parameters())
    for step in range(2):
        log.lines.clear()
        for one, opt in ((model, optimizer), (expected, plain)):
            loss_of(one(batch(step, 0, 0)), batch(step, 0, 0)).backward()
            opt.step()
            opt.zero_grad()
    assert same(model.full_state_dict(), expected.state_dict()) == []
    landings = [line.split()[0] for line in log.lines if line.endswith("lands")]
    assert landings.count("embedding") == 2  # 884 bytes of sums: pieces of 128 elements
    assert model.report()["bytes"]["reduce_buffers"] == 2 * 512
