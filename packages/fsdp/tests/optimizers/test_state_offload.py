"""Optimizer state in host memory: the bits of a step without it, two chunks on the device, host tensors that stay.

On a CPU "device" and "host" are both memory of the process, on the same code path; each has tensors of its own.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager

import pytest
import torch
from fsdp_helpers import Block, same
from fsdp_world import MAKERS, WHOLE, World, a_closure
from torch import nn

from sixfold.fsdp import BufferConfig, FsdpError, fully_shard, fully_shard_optimizer
from sixfold.fsdp.optimizers.chunked_step import ChunkedStep
from sixfold.fsdp.optimizers.state_offload import HostState

OFFLOAD = {"fsdp_unit_modules": [Block], "buffers": BufferConfig(offload=True)}
TENSOR = {**OFFLOAD, "granularity": lambda name, parameter: "tensor"}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, OFFLOAD) for name in MAKERS),
        *((name, {**TENSOR, "strategy": "optim"}) for name in ("AdamW", "Adagrad")),
    ],
)
@pytest.mark.slow
def test_every_optimizer_gives_its_plain_bits(name, options):
    plain, world = World(None, MAKERS[name]), World(options, MAKERS[name])
    for one in (plain, world):
        one.train(2)
        a_closure(one)
    assert same(plain.weights(), world.weights()) == []


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_of_whole_tensors_give_their_plain_bits(name):
    plain, world = World(None, WHOLE[name]), World(TENSOR, WHOLE[name])
    plain.train(3)
    world.train(3)
    assert same(plain.weights(), world.weights()) == []


def test_hooks_run_once_for_a_step_also_where_torch_compile_has_wrapped_the_optimizers_class():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # wraps some classes' step for good
    plain, world = World(None, MAKERS["RAdam"]), World(OFFLOAD, MAKERS["RAdam"])
    calls = []
    world.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    plain.train(2)
    world.train(2)
    assert calls == ["before"] * 2 and same(plain.weights(), world.weights()) == []


def test_fused_and_foreach_give_their_plain_bits():
    for how in ("fused", "foreach"):
        make = lambda p, how=how: torch.optim.AdamW(p, lr=1e-2, **{how: True})  # noqa: E731
        plain, world = World(None, make), World(OFFLOAD, make)
        plain.train(3)
        world.train(3)
        assert same(plain.weights(), world.weights()) == []


def large(state):
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}


def test_host_tensors_keep_their_addresses_and_records_are_aliases_of_them():
    world = World(OFFLOAD, adamw)
    world.train(1)
    before = {(r.name, r.key): r.tensor.data_ptr() for r in world.call.state_records(world.optimizer)}
    values = {(r.name, r.key): r.tensor.clone() for r in world.call.state_records(world.optimizer)}
    world.train(2, first=1)
    records = world.call.state_records(world.optimizer)
    assert {(r.name, r.key): r.tensor.data_ptr() for r in records} == before
    assert all(not torch.equal(r.tensor, values[r.name, r.key]) for r in records if r.key == "exp_avg")


@contextmanager
def watching(monkeypatch, seen):
    """Bytes of state that lie in other storages than the host's, whenever an AdamW looks at its state in a step."""
    plain = torch.optim.AdamW._init_group

    def look(self, group, *lists):
        result = plain(self, group, *lists)
        storages = {}
        for state in self.state.values():
            for value in large(state).values():
                storages[value.untyped_storage().data_ptr()] = value.nbytes
        seen.append({"device": storages.keys() - seen_host, "bytes": storages, "params": len(group["params"])})
        return result

    seen_host = set()
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", look)
    yield seen_host


def test_a_step_has_two_chunks_of_state_on_the_device_and_leaves_two_slots(monkeypatch):
    world = World(OFFLOAD, adamw)
    world.train(1)
    records = [r for r in world.call.state_records(world.optimizer) if r.key != "param"]
    in_unit: dict[str, int] = {}
    for r in records:
        unit = ".".join(r.name.split(".")[:2]) if r.name.startswith("blocks") else ""
        in_unit[unit] = in_unit.get(unit, 0) + -(-r.tensor.nbytes // 128) * 128
    seen: list = []
    with watching(monkeypatch, seen) as host:
        host.update(r.tensor.untyped_storage().data_ptr() for r in records)
        world.train(1, first=1)
    assert len(seen) == len(in_unit) == 4, "one look at each chunk"
    assert sum(one["params"] for one in seen) == len(world.held())
    assert all(1 <= len(one["device"]) <= 2 for one in seen), "slots"
    (report,) = world.call.report()["offload"]
    assert report == {"host_bytes": sum(r.tensor.nbytes for r in records), "device_bytes": 2 * max(in_unit.values())}


def test_the_first_step_makes_no_more_state_on_the_device_than_a_chunk(monkeypatch):
    world = World(OFFLOAD, adamw)
    seen: list = []
    with watching(monkeypatch, seen) as host:
        alive = []
        keep = HostState.keep

        def kept(self, mains):
            keep(self, mains)
            homes = {value.untyped_storage().data_ptr() for value in self._host.values()}
            state = self._optimizer().state
            alive.append([v for m in mains for v in large(state.get(m, {})).values() if v.data_ptr() not in homes])

        monkeypatch.setattr(HostState, "keep", kept)
        world.train(1)
    assert not host and len(seen) == 4
    assert all(one == [] for one in alive), "after a chunk all of its state is in host memory"


class Recorder:
    """A side stream that writes down what happens on it."""

    def __init__(self):
        self.log = []

    @property
    @contextmanager
    def inside(self):
        self.log.append("enter")
        yield

    def mark(self):
        self.log.append("mark")
        return self

    def join(self, event):
        assert event is self
        self.log.append("join")

    def synchronize(self):
        self.log.append("host waits")


def test_the_next_chunk_is_on_its_way_before_a_chunk_steps_and_the_host_waits_once():
    mains = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = torch.optim.SGD(mains, lr=0.1, momentum=0.9)
    stream = Recorder()
    chunks = [[m] for m in mains]
    host = HostState(optimizer, chunks, device=torch.device("cpu"), stream=stream, pinned=False)

    def step(optimizer):
        (main,) = [m for group in optimizer.param_groups for m in group["params"]]
        stream.log.append(f"step {next(i for i, m in enumerate(mains) if m is main)}")

    ChunkedStep(optimizer, chunks, [host], plain=lambda: False).step(None, step)
    bring, out = ["enter", "mark"], ["enter"]
    assert stream.log == [
        *bring, *bring, "join", "step 0", *out, *bring, "join", "step 1", *out, "join", "step 2", *out,
        *out, "mark", "host waits",
    ]  # fmt: skip
    assert [m for group in optimizer.param_groups for m in group["params"]] == mains


def test_a_step_that_raises_leaves_groups_and_state_whole():
    world = World(OFFLOAD, adamw)
    world.train(1)
    before = {(r.name, r.key): r.tensor.data_ptr() for r in world.call.state_records(world.optimizer)}
    held = world.held()
    world.loss(1).backward()
    world.optimizer.param_groups[0]["lr"] = "no number"
    with pytest.raises(TypeError):
        world.optimizer.step()
    assert [id(p) for p in world.held()] == [id(p) for p in held]
    assert {(r.name, r.key): r.tensor.data_ptr() for r in world.call.state_records(world.optimizer)} == before


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "SGD"])
def test_state_made_ahead_lies_in_host_memory_and_begins_the_first_step(name):
    plain, world = World(None, MAKERS[name]), World(OFFLOAD, MAKERS[name])
    world.call.materialize_state(world.optimizer)
    (report,) = world.call.report()["offload"]
    states = [value for state in world.optimizer.state.values() for value in large(state).values()]
    assert report["host_bytes"] == sum(value.nbytes for value in states) > 0 and report["device_bytes"] == 0
    plain.train(2)
    world.train(2)
    assert same(plain.weights(), world.weights()) == []


@pytest.mark.slow
def test_a_loaded_state_dict_goes_to_host_memory():
    world, other = World(OFFLOAD, adamw), World(OFFLOAD, adamw)
    for one in (world, other):
        one.train(2)
    world.optimizer.load_state_dict(world.optimizer.state_dict())
    gc.collect()
    (report,) = world.call.report()["offload"]
    assert report["host_bytes"] == sum(v.nbytes for s in world.optimizer.state.values() for v in large(s).values())
    for one in (world, other):
        one.train(1, first=2)
    assert same(other.weights(), world.weights()) == []


def test_hooks_run_once_for_a_step_and_schedulers_count_it():
    world = World(None, adamw)
    scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 1, gamma=0.5)
    torch.manual_seed(0)
    model = fully_shard(world.net, **OFFLOAD)
    fully_shard_optimizer(world.optimizer, model)
    calls = []
    world.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    world.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            world.loss(step).backward()
            world.optimizer.step()
            world.optimizer.zero_grad()
            scheduler.step()
    assert calls == ["before", "after"] * 2
    assert world.optimizer.param_groups[0]["lr"] == 1e-2 / 4


class Own(torch.optim.SGD):
    """A user's."""


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: Own(p, lr=0.1), "Own is not known to step each parameter by itself"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS is not known to step each parameter by itself"),
        (lambda p: torch.optim.Muon([one for one in p if one.ndim == 2]), "Muon over matrices in pieces"),
    ],
)
def test_optimizers_that_need_more_than_a_chunk_are_refused(make, says):
    with pytest.raises(FsdpError, match=says + ".*offload=False"):
        World(OFFLOAD, make)


def test_a_step_that_was_replaced_on_the_object_is_refused():
    def make(parameters):
        optimizer = adamw(parameters)
        step = optimizer.step
        optimizer.step = lambda *args: step(*args)
        return optimizer

    with pytest.raises(FsdpError, match=r"AdamW.step is replaced on the object by <lambda>.*offload=False"):
        World(OFFLOAD, make)
