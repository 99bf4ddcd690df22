"""Whole state in and out over several ranks: who gives, who is told, how much memory it takes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, batch, make_net, same
from fsdp_memory_helpers import peak_bytes
from fsdp_mesh_helpers import MoeBlock, MoeNet, kind_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, torch_state


def make(**options):
    options.setdefault("process_group", dist.group.WORLD)
    return FullyShardedDataParallel(make_net(tied=True), fsdp_unit_modules=[Block], **options)


def other_state():
    net = make_net(tied=True)
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.add_(0.25 + number)
    return net.state_dict()


def refusal(action):
    with pytest.raises(FsdpError) as caught:
        action()
    return str(caught.value), caught.value.ranks


def load_in_every_way(rank, ranks, strategy, granularity):
    found = {}
    sources = {
        "dict on rank 0": lambda: other_state() if rank == 0 else None,
        "pairs on the last": lambda: reversed(other_state().items()) if rank == ranks - 1 else None,
        "pairs on all": lambda: list(other_state().items())[:: 1 if rank else -1],
    }
    for way, source in sources.items():
        model = make(strategy=strategy, granularity=lambda name, parameter: granularity)
        model(batch(0, 0, rank))
        model.load_full_state_dict(source())
        found[way] = same(other_state(), model.full_state_dict())
        found[way + ", gathered"] = bool(model(batch(0, 0, 0)).sum() == found.setdefault("y", plain_answer()))
    return found


def plain_answer():
    net = make_net(tied=True)
    net.load_state_dict(other_state())
    return net(batch(0, 0, 0)).sum()


@pytest.mark.parametrize(
    ("strategy", "granularity"), [("optim", "row"), ("optim_grads_params", "element"), ("optim_grads_params", "tensor")]
)
@pytest.mark.slow
def test_a_state_is_loaded_whoever_gives_it(strategy, granularity):
    for found in run_ranks(load_in_every_way, 2, strategy, granularity):
        found.pop("y")
        assert all(value == [] or value is True for value in found.values()), found


def load_on_replicas(rank, ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make(process_group=None, mesh=mesh)
    model.load_full_state_dict(other_state() if rank == 3 else None)
    model.load_full_state_dict(other_state() if rank == 1 else None)
    some = refusal(lambda: model.load_full_state_dict(other_state() if rank in (0, 2) else None))
    return same(other_state(), model.full_state_dict()), some


@pytest.mark.slow
def test_any_one_rank_of_a_mesh_may_give_and_two_of_four_may_not():
    for differing, (text, _) in run_ranks(load_on_replicas, 4):
        assert differing == []
        assert "ranks [0, 2] of 4 give a state; give it on one rank, or on all" in text


def broken(rank, ranks):
    state = other_state()
    short = {name: value for name, value in state.items() if name != "norm.bias"}
    other = {**state, "norm.bias": state["norm.bias"] + (rank == 1)}

    def raises():
        yield from list(state.items())[:2]
        raise OSError("the file ends here")

    model = make()
    found = {
        "short on one": refusal(lambda: model.load_full_state_dict(short if rank == 1 else None)),
        "short on one of all": refusal(lambda: model.load_full_state_dict(short if rank == 1 else state)),
    }
    untouched = same(make_net(tied=True).state_dict(), model.full_state_dict())
    found["raises on one"] = refusal(lambda: model.load_full_state_dict(raises() if rank == 1 else None))
    found["raises on one of all"] = refusal(lambda: model.load_full_state_dict(raises() if rank else state.items()))
    found["differs"] = refusal(lambda: model.load_full_state_dict(other))
    make(initial="trust").load_full_state_dict(other)
    return untouched, found


@pytest.mark.slow
def test_what_is_wrong_on_one_rank_is_told_on_all_alike():
    first, second = run_ranks(broken, 2)
    assert first == second
    untouched, found = first
    assert untouched == []
    says = {
        "short on one": "on rank 1: missing: norm.bias. nothing was loaded",
        "short on one of all": "on rank 1: missing: norm.bias. nothing was loaded",
        "raises on one": "on rank 1: its source raised OSError: the file ends here. 2 of 18 tensors were loaded",
        "raises on one of all": "on rank 1: its source raised OSError: the file ends here.",
        "differs": "values of norm.bias differ on rank 1; give the same state on all ranks, or on one",
    }
    for case, text in says.items():
        assert text in found[case][0] and found[case][1] == (1,), case


class Wide(nn.Module):
    """Four units of 1 MiB."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))


def peaks(rank, ranks):
    buffers = BufferConfig(merge_bytes=None)
    group = dist.group.WORLD
    model = FullyShardedDataParallel(Wide(), process_group=group, fsdp_unit_modules=[nn.Linear], buffers=buffers)
    mapped = torch.full((4, 512, 512), 1.5)  # as a mapped file: reading takes no memory of its own

    def pairs():
        return ((f"blocks.{n}.weight", mapped[n]) for n in range(4))

    load, out = model.load_full_state_dict, model.stream_full_state
    total = []
    return (
        peak_bytes(lambda: load(pairs() if rank == 0 else None)),
        peak_bytes(lambda: out(lambda name, value: total.append(float(value.sum())) if rank == 0 else None)),
        peak_bytes(lambda: model.full_state_dict(rank=0)),
        total,
    )


@pytest.mark.slow
def test_no_rank_holds_more_than_one_unit_beyond_its_shards():
    unit, slack = 512 * 512 * 4, 100_000
    for rank, (load, out, full, total) in enumerate(run_ranks(peaks, 2)):
        assert load <= rank * unit + slack and unit <= out <= unit + slack
        assert full <= (5 if rank == 0 else 1) * unit + slack
        assert total == ([1.5 * 512 * 512] * 4 if rank == 0 else [])


def out_of(rank, ranks):
    model = make()
    alone = model.full_state_dict(rank=1)

    def consume(name, value):
        if rank == 1:
            raise OSError("disk full")

    with pytest.raises(OSError if rank == 1 else FsdpError) as caught:
        model.stream_full_state(consume)
    return len(alone), str(caught.value), len(model.full_state_dict())


def test_the_whole_state_on_one_rank_alone_and_a_consumer_that_raises():
    (none, told, _), (all_of_it, own, size) = run_ranks(out_of, 2)
    assert none == 0 and all_of_it == size == len(other_state())
    assert "the consumer on rank 1 raised" in told and own == "disk full"


def on_own_meshes(rank, ranks):
    """Rank 1 holds one expert more, under a name that rank 0 has not."""
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("all", "alone"))["alone"]

    def net(seed):
        made = MoeNet(seed + rank, seed + rank)
        if rank:
            made.blocks[0].own_more = nn.Linear(3, 3)
        return made

    model = FullyShardedDataParallel(
        net(0),
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[MoeBlock],
        mesh_for=lambda name: None if kind_of(name) == "shared" else alone,
    )
    state = {name: value + 1 for name, value in net(7).state_dict().items()}
    model.load_full_state_dict(state)
    found = same(state, model.full_state_dict())
    one = refusal(lambda: model.load_full_state_dict(state if rank == 0 else None))
    dtensors = refusal(lambda: torch_state.get_model_state_dict(model))
    return found, one[0], dtensors[0]


@pytest.mark.slow
def test_parameters_on_meshes_of_their_own_are_loaded_by_every_rank_for_itself():
    for found, one, dtensors in run_ranks(on_own_meshes, 2):
        assert found == []
        assert "is on a mesh of its own, where ranks may hold other values; give a state on every rank" in one
        assert "is on a mesh of its own" in dtensors and "state_records()" in dtensors


def buffers_of_each_rank(rank, ranks):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = FullyShardedDataParallel(net, process_group=dist.group.WORLD, initial="broadcast")
    model(torch.full((4, 3), float(rank + 1)))
    state = model.full_state_dict()
    model.load_full_state_dict(state)
    kept = model.full_state_dict()
    model.load_full_state_dict(state if rank == 0 else None)
    return same(state, kept), model.full_state_dict()["1.running_mean"]


def test_buffers_that_differ_between_ranks_are_loaded_as_each_rank_gives_them_or_from_the_one_that_gives():
    (kept, first), (others, second) = run_ranks(buffers_of_each_rank, 2)
    assert kept == others == []
    assert torch.equal(first, second)


class OddBuffers(nn.Module):
    """Buffers of dtypes that gloo does not send."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for dtype in (torch.complex64, torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool):
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.full((3,), start).to(dtype))
        self.register_buffer("number", torch.tensor(complex(start, 1.0)))


def buffers_from_one(rank, ranks):
    model = FullyShardedDataParallel(OddBuffers(0.0), process_group=dist.group.WORLD, initial="broadcast")
    torch.manual_seed(1)
    given = OddBuffers(1.0).state_dict()
    given["number"] = given["number"].conj()
    model.load_full_state_dict(given if rank == 1 else None)
    found = model.full_state_dict()
    return [name for name, value in given.items() if not torch.equal(found[name].cfloat(), value.cfloat())]


def test_buffers_of_any_dtype_come_from_one_rank():
    assert run_ranks(buffers_from_one, 2) == [[], []]
