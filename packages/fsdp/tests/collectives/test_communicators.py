"""Communicators and registered memory: what is made, of what kind, and what is said where it cannot be."""

from __future__ import annotations

import gc
import os
import time
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fsdp_count_helpers import Calls
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same

from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, fully_shard_optimizer
from sixfold.fsdp.collectives.communicators import Communicators, nccl_options
from sixfold.fsdp.collectives.streams import CudaStream
from sixfold.fsdp.collectives.user_buffers import UserBuffers


@pytest.fixture(scope="module")
def alone():
    """A real gloo group of one rank, in this process."""
    store = dist.HashStore()
    brief = timedelta(seconds=3)  # a thread that waits for a rank that does not come ends before this process does
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=brief)
    yield store
    dist.destroy_process_group()


def train(group=None, strategy="optim_grads_params", steps=2, **buffers):
    net = make_net()
    model = FullyShardedDataParallel(
        net,
        process_group=group,
        strategy=strategy,
        fsdp_unit_modules=[Block],
        buffers=BufferConfig(**buffers),
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    with Calls() as calls:
        for step in range(steps):
            loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
            model.clip_grad_norm_(1e9)
            optimizer.step()
            optimizer.zero_grad()
    return model.full_state_dict(), calls.names, model


def test_a_group_of_one_is_silent_by_itself(alone):
    _, calls, model = train(dist.group.WORLD)
    assert calls == [] and model.report()["communicators"] == "none: one process"


@pytest.mark.parametrize(
    ("strategy", "reductions"),
    [("no_shard", "allreduce"), ("optim", "allreduce"), ("optim_grads_params", "reduce_scatter_base")],
)
def test_a_group_of_one_communicates_when_asked_with_the_same_bits(alone, strategy, reductions):
    plain, _, _ = train(None, strategy)
    weights, calls, model = train(dist.group.WORLD, strategy, always_communicate=True)
    assert same(plain, weights) == []
    units = len(model.units)
    norms = 2 if strategy != "no_shard" else 0
    assert calls.count(reductions) == 2 * units + (norms if reductions == "allreduce" else 0)
    if strategy == "optim_grads_params":
        assert calls.count("allgather_base") >= 2 * units


def test_gathers_and_reductions_each_have_a_communicator_and_share_the_given_one_when_asked(alone):
    _, _, apart = train(dist.group.WORLD, always_communicate=True)
    comm = apart._engine.ranks.shard
    assert len({comm.gathers, comm.reductions, dist.group.WORLD}) == 3
    assert apart.report()["communicators"] == "gloo: 2 made from the given groups"
    _, _, shared = train(dist.group.WORLD, always_communicate=True, share_communicator=True)
    comm = shared._engine.ranks.shard
    assert comm.gathers is comm.reductions is dist.group.WORLD
    assert shared.report()["communicators"] == "gloo: the given groups, shared"


@pytest.mark.slow
def test_models_made_and_dropped_leave_no_keys_and_no_descriptors(alone, descriptors):
    before = None
    for _ in range(4):
        _, _, model = train(dist.group.WORLD, steps=1, always_communicate=True)
        del model
        gc.collect()
        keys, open_now = len(alone.list_keys()), descriptors()
        before = before or (keys, open_now)
    assert keys == before[0] and open_now <= before[1] + 1


@pytest.fixture
def descriptors():
    return lambda: len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nccl_max_ctas": 4}, "the group's back end for cpu is gloo"),
        ({"user_buffers": "require"}, "user_buffers is 'require' on cpu, and the group's back end for cpu is gloo"),
    ],
)
def test_what_only_nccl_can_do_is_refused_on_gloo(alone, options, says):
    with pytest.raises(FsdpError, match=says):
        train(dist.group.WORLD, always_communicate=True, **options)


def test_a_communicator_that_a_rank_does_not_come_to_is_an_error_in_time(alone, monkeypatch):
    """The group says two ranks, and nobody plays the second."""

    class Two:
        def __getattr__(self, name):
            return getattr(dist.group.WORLD, name)

        def size(self):
            return 2

    communicators = Communicators(dist.PrefixStore("nobody", alone), torch.device("cpu"), BufferConfig(), timeout_s=0.2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    began = time.monotonic()
    with pytest.raises(FsdpError, match=r"communicator for gathers of ranks \[0, 1\] could not be made"):
        communicators.comm(Two())
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nccl_min_ctas": 0}, "nccl_min_ctas is 0"),
        ({"nccl_min_ctas": 8, "nccl_max_ctas": 4}, "nccl_min_ctas is 8 and nccl_max_ctas 4"),
    ],
)
def test_cta_limits_are_sane(options, says):
    with pytest.raises(FsdpError, match=says):
        BufferConfig(**options)


def test_in_one_process_buffers_are_ordinary_and_required_ones_are_refused():
    _, _, model = train(None)
    assert model.report()["user_buffers"] == "off: nothing is sent: one process"
    with pytest.raises(FsdpError, match=r"user_buffers is 'require' on cpu, and nothing is sent"):
        train(None, user_buffers="require")
    _, _, model = train(None, user_buffers="off")
    assert model.report()["user_buffers"] == "off: user_buffers='off'"


def test_cta_limits_and_priority_stand_in_the_options_of_the_groups_that_are_made(monkeypatch):
    class Options:
        def __init__(self, is_high_priority_stream):
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(min_ctas=None, max_ctas=None)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    made = nccl_options(BufferConfig(nccl_min_ctas=2, nccl_max_ctas=16), 600.0)
    assert (made.config.min_ctas, made.config.max_ctas, made.is_high_priority_stream) == (2, 16, True)
    assert made._timeout.total_seconds() == 630.0
    made = nccl_options(BufferConfig(nccl_max_ctas=16), 60.0)
    assert (made.config.min_ctas, made.config.max_ctas) == (None, 16)


def test_side_streams_have_high_priority(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append(priority))
    CudaStream(torch.device("cuda", 0))
    assert made == [-1]


def test_compute_waits_for_what_was_launched_inside_a_joined_side_stream_and_for_nothing_else(monkeypatch):
    log = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            log.append(f"{self.name} is marked")
            return "mark"

        def wait_event(self, event):
            log.append(f"{self.name} waits for the {event}")

    @contextmanager
    def entered(stream):
        log.append(f"into {stream.name}")
        yield
        log.append(f"out of {stream.name}")

    compute = Stream("compute")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    side = CudaStream(torch.device("cuda", 0))
    with side.inside:
        log.append("gather")
    with side.joined:
        log.append("cast")
    assert log == [
        "side waits for compute", "into side", "gather", "out of side",
        "side waits for compute", "into side", "cast", "side is marked", "out of side", "compute waits for the mark",
    ]  # fmt: skip


class Backend:
    """Stands in for torch's NCCL back end."""

    mem_allocator = "nccl memory"

    def __init__(self, log, refuses=()):
        self.log, self.refuses = log, refuses

    def register_mem_pool(self, pool, symm=False):
        if symm in self.refuses:
            raise RuntimeError(f"NCCL says no to symm={symm}\nand more")
        self.log.append(("register", pool, symm))

    def deregister_mem_pool(self, pool):
        self.log.append(("deregister", pool))


@pytest.fixture
def pools(monkeypatch):
    """torch.cuda's pools, as far as they are used, and what happened to them."""
    log = []

    @contextmanager
    def use(pool, device):
        log.append(("use", pool))
        yield

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    return log


CUDA = torch.device("cuda", 0)
POOL = "pool of nccl memory"


def register(mode, backends, ranks=8, on_all=lambda mine: mine):
    buffers = UserBuffers(mode, CUDA, backends, ranks, None)
    with buffers.memory():
        pass
    buffers.register(on_all)
    return buffers


def test_the_best_path_registers_a_window_with_both_communicators(pools):
    buffers = register("auto", [Backend(pools), Backend(pools)])
    assert pools == [("use", POOL), ("register", POOL, True), ("register", POOL, True)]
    assert buffers.report() == "symmetric"
    buffers.close()
    assert pools[3:] == [("deregister", POOL)] * 2


@pytest.mark.parametrize(
    ("ranks", "version", "refuses", "why"),
    [
        (1, (2, 27, 3), (), "a group of one has no peers"),
        (8, (2, 21, 5), (), "NCCL 2.21.5 has no windows"),
        (8, (2, 27, 3), (True,), "NCCL says no to symm=True"),
    ],
)
def test_without_windows_each_rank_registers_for_itself(pools, monkeypatch, ranks, version, refuses, why):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    buffers = register("require", [Backend(pools, refuses)], ranks)
    assert buffers.report().startswith(f"registered: {why}") and ("register", POOL, False) in pools


def test_a_rank_goes_the_way_that_all_can_go(pools):
    """The other rank cannot: nothing collective is begun, and what was registered alone is taken back."""
    buffers = register("auto", [Backend(pools)], on_all=lambda mine: False)
    assert buffers.report() == "off: another rank cannot; symmetric: another rank cannot"
    assert pools == [("use", POOL)]
    answers = iter([True, False, True, True])
    buffers = register("auto", [Backend(pools)], on_all=lambda mine: next(answers) and mine)
    assert buffers.report() == "registered: another rank could not"
    assert pools[-3:] == [("register", POOL, True), ("deregister", POOL), ("register", POOL, False)]


def test_required_buffers_that_nccl_refuses_are_an_error_and_automatic_ones_a_reason(pools):
    refusing = [Backend(pools, refuses=(True, False))]
    assert register("auto", refusing).report() == (
        "off: NCCL says no to symm=False; symmetric: NCCL says no to symm=True"
    )
    with pytest.raises(FsdpError, match=r"user_buffers is 'require' on cuda:0, and NCCL says no to symm=False"):
        register("require", refusing)


def test_a_back_end_without_pools_is_a_reason(pools):
    buffers = register("auto", [SimpleNamespace(mem_allocator=None)])
    assert "has no mem_allocator and no register_mem_pool" in buffers.report()
