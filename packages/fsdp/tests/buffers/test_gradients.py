"""The memory of a flat buffer's gradients: every move, and walks of events against a plain model."""

from __future__ import annotations

import functools
import random
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from sixfold.fsdp import (
    BufferConfig,
    FsdpError,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard_optimizer,
)
from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.reduction_sizes import State
from sixfold.fsdp.collectives.comm import LocalComm, Ranks
from sixfold.fsdp.collectives.gradient_sums import add_into

SHAPES = {"a": (5, 7), "b": (3,), "c": (40,), "d": ()}


class Peers(LocalComm):
    """Two ranks, of which this is ``rank``; nothing is sent here."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def make_flat_buffer(strategy="optim_grads", rank=None, names=tuple(SHAPES), granularity="element", **precision):
    torch.manual_seed(0)
    parameters = [(name, nn.Parameter(torch.randn(SHAPES[name]))) for name in names]
    flat_buffer = ParamAndGradBuffer(
        "blocks.0",
        parameters,
        ranks=Ranks(shard=LocalComm() if rank is None else Peers(rank), outer=LocalComm()),
        strategy=ShardingStrategy(strategy),
        precision=MixedPrecision(**precision),
        align_bytes=16,
        device=torch.device("cpu"),
        granularity=lambda name, parameter: granularity,
    )
    flat_buffer.weights.bind(None)
    return flat_buffer


def gradient_of(record, value: float) -> Tensor:
    return torch.full(record.spec.shape, value)


def memory_of(flat_buffer) -> Tensor:
    return torch.zeros(flat_buffer.gradients.sum_bytes, dtype=torch.uint8)


def land_all(flat_buffer, taken) -> None:
    """What a reduction in one process does."""
    gradients = flat_buffer.gradients
    numel = flat_buffer.cut.main_numel
    place = gradients.result_place(taken, 0, numel)
    total = torch.empty(numel) if place is None else place
    staged = torch.empty(flat_buffer.cut.parts * numel)
    gradients.stage(taken, 0, numel, staged)
    total.copy_(staged.view(flat_buffer.cut.parts, -1)[flat_buffer.cut.part])
    gradients.land(taken, total, 0, numel)
    gradients.landed(taken)


MOVES = {
    "hold": lambda s: s.gradients.hold(),
    "sum_in_own": lambda s: s.gradients.sum_in_own(),
    "sum_in": lambda s: s.gradients.sum_in(memory_of(s)),
    "add": lambda s: s.gradients.add(s.records[0], gradient_of(s.records[0], 1.0)),
    "take": lambda s: s.gradients.take(fill_zeros=True),
    "drop": lambda s: s.gradients.drop(),
    "release_own": lambda s: s.gradients.release_own(),
}
REACH = {
    State.IDLE: [],
    State.HELD: ["hold", "add"],
    State.OWN: ["sum_in_own", "add"],
    State.SLOT: ["sum_in", "add"],
    State.REDUCING: ["sum_in_own", "add", "take"],
}
LEGAL = {
    (State.IDLE, "hold"): State.HELD,
    (State.IDLE, "sum_in_own"): State.OWN,
    (State.IDLE, "sum_in"): State.SLOT,
    (State.IDLE, "release_own"): State.IDLE,
    (State.HELD, "add"): State.HELD,
    (State.HELD, "take"): State.REDUCING,
    (State.HELD, "drop"): State.IDLE,
    (State.OWN, "add"): State.OWN,
    (State.OWN, "take"): State.REDUCING,
    (State.OWN, "drop"): State.IDLE,
    (State.SLOT, "add"): State.SLOT,
    (State.SLOT, "take"): State.REDUCING,
    (State.SLOT, "drop"): State.IDLE,
}


@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
@pytest.mark.parametrize("move", MOVES)
def test_a_move_leads_to_its_state_or_raises_with_state_and_history(state, move):
    flat_buffer = make_flat_buffer()
    for earlier in REACH[state]:
        MOVES[earlier](flat_buffer)
    assert flat_buffer.gradients.state is state
    after = LEGAL.get((state, move))
    if after is not None:
        MOVES[move](flat_buffer)
        assert flat_buffer.gradients.state is after
        return
    with pytest.raises(FsdpError, match=f"{move} while local gradients are {state.value}") as caught:
        MOVES[move](flat_buffer)
    assert caught.value.unit == "blocks.0"
    assert "History: " + (", ".join(one for one in REACH[state] if one != "add") or "none") in str(caught.value)
    assert flat_buffer.gradients.state is state


def test_landing_is_for_reductions_only():
    flat_buffer = make_flat_buffer()
    flat_buffer.gradients.sum_in_own()
    taken = flat_buffer.gradients.take(fill_zeros=True)
    land_all(flat_buffer, taken)
    assert flat_buffer.gradients.state is State.IDLE
    with pytest.raises(FsdpError, match="land while local gradients are idle"):
        flat_buffer.gradients.land(taken, torch.zeros(1), 0, 1)
    with pytest.raises(FsdpError, match="landed while local gradients are idle"):
        flat_buffer.gradients.landed(taken)


def test_sums_move_from_a_slot_to_own_memory_with_what_they_hold():
    flat_buffer = make_flat_buffer()
    memory = memory_of(flat_buffer)
    flat_buffer.gradients.sum_in(memory)
    MOVES["add"](flat_buffer)
    flat_buffer.gradients.leave_slot()
    memory.fill_(255)  # another unit's now
    assert flat_buffer.gradients.state is State.OWN
    MOVES["add"](flat_buffer)
    land_all(flat_buffer, flat_buffer.gradients.take(fill_zeros=True))
    assert torch.equal(flat_buffer.records[0].main.grad, torch.full((35,), 2.0))


def test_a_reduced_gradient_takes_the_place_of_its_local_sum_until_both_are_needed():
    flat_buffer = make_flat_buffer("optim", rank=0)
    for value, own in ((1.0, 0), (2.0, flat_buffer.cut.main_numel * 4)):
        flat_buffer.gradients.sum_in_own()
        flat_buffer.gradients.add(flat_buffer.records[0], gradient_of(flat_buffer.records[0], value))
        assert flat_buffer.gradients.home_bytes == own
        land_all(flat_buffer, flat_buffer.gradients.take(fill_zeros=True))
    held = flat_buffer.records[0].main.grad
    assert torch.equal(held, torch.full_like(held, 3.0))
    assert flat_buffer.gradients.own_local_bytes == flat_buffer.cut.full_numel * 4


def test_own_sums_are_not_released_under_main_gradients():
    flat_buffer = make_flat_buffer("optim", rank=0)
    flat_buffer.gradients.sum_in_own()
    land_all(flat_buffer, flat_buffer.gradients.take(fill_zeros=True))
    with pytest.raises(FsdpError, match="main gradients lie in them"):
        flat_buffer.gradients.release_own()


def test_a_gradient_of_the_users_own_is_added_to_and_kept_in_our_memory():
    flat_buffer = make_flat_buffer()
    record = flat_buffer.records[0]
    flat_buffer.gradients.sum_in_own()
    land_all(flat_buffer, flat_buffer.gradients.take(fill_zeros=True))
    record.main.grad = torch.full_like(record.main, 5.0)
    flat_buffer.gradients.sum_in_own()
    flat_buffer.gradients.add(record, gradient_of(record, 2.0))
    land_all(flat_buffer, flat_buffer.gradients.take(fill_zeros=True))
    assert torch.equal(record.main.grad, torch.full_like(record.main, 7.0))


def test_a_rank_that_holds_nothing_of_a_flat_buffer_takes_part():
    flat_buffer = make_flat_buffer(rank=1, names=["a"], granularity="tensor")
    assert flat_buffer.records[0].main is None
    for _ in range(2):
        flat_buffer.gradients.hold()
        flat_buffer.gradients.add(flat_buffer.records[0], torch.ones(5, 7))
        land_all(flat_buffer, flat_buffer.gradients.take(fill_zeros=True))
    assert flat_buffer.gradients.state is State.IDLE


class Plain:
    """Gradients as a dictionary holds them."""

    def __init__(self, flat_buffer) -> None:
        self.local: dict[str, Tensor] = {}
        self.main: dict[str, Tensor] = {}

    def add(self, name, gradient):
        self.local[name] = self.local[name] + gradient if name in self.local else gradient.clone()

    def reduce(self, names):
        for name in names:
            got = self.local.get(name, torch.zeros(SHAPES[name]))
            self.main[name] = self.main[name] + got if name in self.main else got
        self.local = {}


def main_part(flat_buffer, record, whole: Tensor) -> Tensor:
    part = flat_buffer.weights.main.slice(record.name)
    return whole.reshape(-1)[part.start : part.stop]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(60))
def test_a_random_walk_agrees_with_a_dictionary(seed):
    rng = random.Random(seed)
    strategy = rng.choice(list(ShardingStrategy))
    flat_buffer = make_flat_buffer(strategy, rng.choice([None, 0, 1]))
    gradients, plain = flat_buffer.gradients, Plain(flat_buffer)
    memory = memory_of(flat_buffer)
    pieces = rng.choice([flat_buffer.cut.main_numel, 8, 3])
    for _ in range(40):
        if gradients.state is State.IDLE:
            event = rng.choice(["own", "slot", "hold", "zero_grad"])
        else:
            event = rng.choice(["add", "add", "add", "reduce", "drop", "forget", "leave_slot", "zero one"])
        record = rng.choice(flat_buffer.records)
        if event == "own":
            gradients.sum_in_own()
        elif event in ("slot", "hold") and strategy.shards_grads:
            gradients.sum_in(memory) if event == "slot" else gradients.hold()
        elif event == "add":
            gradient = torch.randn(SHAPES[record.name])
            gradients.add(record, gradient.clone())
            plain.add(record.name, gradient)
        elif event == "drop":
            gradients.drop()
            plain.local = {}
        elif event == "forget":
            gradients.forget(record)
            plain.local.pop(record.name, None)
        elif event == "leave_slot" and gradients.state is State.SLOT:
            gradients.leave_slot()
        elif event == "zero_grad":
            for one in flat_buffer.records:
                if one.main is not None:
                    one.main.grad = None
            plain.main = {}
        elif event == "zero one" and record.main is not None:
            record.main.grad = None
            plain.main.pop(record.name, None)
        elif event == "reduce":
            fill = rng.random() < 0.5
            names = list(SHAPES) if fill else list(plain.local)
            reduce_in_pieces(flat_buffer, fill, pieces)
            plain.reduce(names)
        for one in flat_buffer.records:
            assert gradients.filled(one) == (one.name in plain.local), (seed, event)
            if one.main is not None:
                expected = plain.main.get(one.name)
                if expected is None:
                    assert one.main.grad is None, (seed, event, one.name)
                else:
                    assert torch.equal(one.main.grad.view(-1), main_part(flat_buffer, one, expected)), (seed, event)


def reduce_in_pieces(flat_buffer, fill: bool, width: int) -> None:
    """This rank's own part of its own gradients, ``width`` columns at a time."""
    gradients, cut = flat_buffer.gradients, flat_buffer.cut
    taken = gradients.take(fill_zeros=fill)
    for start in range(0, cut.main_numel, width):
        stop = min(start + width, cut.main_numel)
        sent = torch.empty(cut.parts * (stop - start))
        gradients.stage(taken, start, stop, sent)
        total = gradients.result_place(taken, start, stop)
        total = torch.empty(stop - start) if total is None else total
        total.copy_(sent.view(cut.parts, -1)[cut.part])
        gradients.land(taken, total, start, stop)
    gradients.landed(taken)


@pytest.mark.parametrize("narrow", ["target", "addend"])
def test_adding_in_parts_has_the_bits_of_adding_at_once(narrow):
    target, addend = torch.randn(1000), torch.randn(1000)
    if narrow == "target":
        target = target.bfloat16()
    else:
        addend = addend.bfloat16()
    expected = target.clone().add_(addend)
    add_into(target, addend, torch.empty(64))
    assert torch.equal(target, expected)


def test_a_step_finds_narrow_gradients_in_main_dtype_and_they_are_narrow_again_after_it():
    flat_buffer = make_flat_buffer(rank=0, grad_dtype=torch.bfloat16)
    record = flat_buffer.records[0]
    flat_buffer.gradients.hold()
    flat_buffer.gradients.add(record, torch.full((5, 7), 1 / 3))
    land_all(flat_buffer, flat_buffer.gradients.take(fill_zeros=True))
    narrow = record.main.grad
    assert narrow.dtype is torch.bfloat16
    flat_buffer.gradients.main.widen()
    assert torch.equal(record.main.grad, torch.full((record.main.numel(),), 1 / 3).bfloat16().float())
    flat_buffer.gradients.main.narrow()
    assert record.main.grad is narrow


@pytest.mark.parametrize("what", ["clip", "divide"])
def test_narrow_main_gradients_are_scaled_by_a_number_that_is_not_rounded(what):
    net = nn.Linear(9, 7)
    model = FullyShardedDataParallel(net, mixed_precision=MixedPrecision(grad_dtype=torch.bfloat16))
    model(torch.randn(4, 9)).square().sum().backward()
    before = {name: main.grad.float() for name, main in model.main_parameters()}
    if what == "clip":
        norm = torch.stack([one.double().norm() for one in before.values()]).norm().float()
        assert torch.equal(model.clip_grad_norm_(0.7), norm)
        expected = {name: (one * torch.clamp(0.7 / (norm + 1e-6), max=1)).bfloat16() for name, one in before.items()}
    else:
        model.divide_gradients(3)
        expected = {name: (one / 3).bfloat16() for name, one in before.items()}
    for name, main in model.main_parameters():
        assert torch.equal(main.grad, expected[name])


def test_a_unit_whose_tensors_have_no_elements_trains():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(0, 4, bias=False), nn.Linear(4, 1))
    net.forward = lambda x: net[2](net[0](x) + net[1](x[:, :0]))
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[nn.Linear])
    model(torch.ones(2, 3)).sum().backward()
    assert {name for name, main in model.main_parameters() if main.grad is not None} >= {"0.weight", "2.weight"}


@pytest.mark.parametrize("offload", [False, True])
def test_a_closure_inside_the_step_finds_gradients_in_main_dtype(offload):
    """torch's AdamW raises for bf16 gradients of fp32 parameters."""
    net = nn.Linear(9, 7)
    model = FullyShardedDataParallel(
        net,
        mixed_precision=MixedPrecision(grad_dtype=torch.bfloat16),
        buffers=BufferConfig(offload=offload),
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)
    x = torch.randn(4, 9)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    if offload:  # takes no closure
        losses = []
        for _ in range(5):
            losses.append(float(closure()))
            optimizer.step()
    else:
        losses = [float(optimizer.step(closure)) for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert all(main.grad.dtype is torch.bfloat16 for _, main in model.main_parameters())


@pytest.mark.parametrize(
    ("make", "alive"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-2), 2),
        (lambda p: Mine(p, lr=1e-2), 6),  # of a user's optimizer nobody knows whether it steps each parameter by itself
    ],
)
def test_a_step_widens_the_narrow_gradients_of_one_unit_after_the_other(make, alive, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    model = FullyShardedDataParallel(
        net,
        fsdp_unit_modules=[nn.Linear],
        mixed_precision=MixedPrecision(grad_dtype=torch.bfloat16),
        buffers=BufferConfig(merge_bytes=None),
    )
    optimizer = fully_shard_optimizer(make(net.parameters()), model)
    mains = [main for _, main in model.main_parameters()]
    seen, plain = [], torch.optim.AdamW._init_group

    def look(self, group, *lists):
        seen.append([main.grad.dtype for main in mains].count(torch.float32))
        return plain(self, group, *lists)

    monkeypatch.setattr(torch.optim.AdamW, "_init_group", look)
    expected = [main.detach().clone().requires_grad_() for main in mains]
    oracle = torch.optim.AdamW(expected, lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        for one, main in zip(expected, mains, strict=True):
            one.grad = main.grad.float()
        optimizer.step()
        assert seen == [alive] * (6 // alive)
        assert all(main.grad.dtype is torch.bfloat16 for main in mains)
        oracle.step()
        seen.clear()
        assert all(torch.equal(one, main) for one, main in zip(expected, mains, strict=True))
        optimizer.zero_grad()


class Mine(torch.optim.AdamW):
    """A user's."""


@pytest.mark.parametrize("offload", [False, True])
def test_main_parameters_of_a_group_that_is_added_later_are_trained_from_narrow_gradients(offload):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    model = FullyShardedDataParallel(
        net,
        fsdp_unit_modules=[nn.Linear],
        mixed_precision=MixedPrecision(grad_dtype=torch.bfloat16),
        buffers=BufferConfig(offload=offload),
    )
    mains = dict(model.main_parameters())
    late = [mains[name] for name in ("1.weight", "1.bias", "3.weight")]
    first = [main for main in mains.values() if all(main is not one for one in late)]
    expected = {id(main): main.detach().clone().requires_grad_() for main in mains.values()}
    optimizer = fully_shard_optimizer(torch.optim.AdamW(first, lr=1e-2), model)
    oracle = torch.optim.AdamW([expected[id(main)] for main in first], lr=1e-2)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": late, "lr": 3e-2})
            oracle.add_param_group({"params": [expected[id(main)] for main in late], "lr": 3e-2})
        model(torch.randn(4, 5)).square().sum().backward()
        for main in mains.values():
            expected[id(main)].grad = main.grad.float()
        optimizer.step()
        oracle.step()
        assert [name for name, main in mains.items() if not torch.equal(main, expected[id(main)])] == []
        optimizer.zero_grad()
        for main in late:  # of the model, but of no group in the first steps
            main.grad = None


def counting(step, calls):
    @functools.wraps(step)
    def count(*args, **options):
        calls.append("step")
        return step(*args, **options)

    return count


@pytest.mark.parametrize("scheduled", ["no", "before", "after"])
def test_a_step_that_was_replaced_on_the_object_runs_with_narrow_gradients(scheduled):
    net = nn.Linear(9, 7)
    optimizer, calls = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    if scheduled == "before":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step = MethodType(counting(type(optimizer).step, calls), optimizer)
    if scheduled == "after":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model = FullyShardedDataParallel(net, mixed_precision=MixedPrecision(grad_dtype=torch.bfloat16))
    fully_shard_optimizer(optimizer, model)
    before = {name: main.detach().clone() for name, main in model.main_parameters()}
    model(torch.randn(4, 9)).square().sum().backward()
    optimizer.step()
    assert calls == ["step"]
    assert all(not torch.equal(main, before[name]) for name, main in model.main_parameters())
    assert all(main.grad.dtype is torch.bfloat16 for _, main in model.main_parameters())


def test_a_step_pre_hook_sees_narrow_gradients():
    net, seen = nn.Linear(9, 7), []
    model = FullyShardedDataParallel(net, mixed_precision=MixedPrecision(grad_dtype=torch.bfloat16))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)
    optimizer.register_step_pre_hook(lambda *_: seen.extend(main.grad.dtype for _, main in model.main_parameters()))
    model(torch.randn(4, 9)).square().sum().backward()
    optimizer.step()
    assert seen == [torch.bfloat16] * 2
