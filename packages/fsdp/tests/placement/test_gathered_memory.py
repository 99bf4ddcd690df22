"""Where gathered weights lie: every byte of it stated, the rule of "double", and evaluation's prefetch."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from fsdp_memory_helpers import storages
from fsdp_stream_helpers import StandInStream
from torch import nn
from torch.profiler import ProfilerActivity, profile

from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer
from sixfold.fsdp.placement.placement import double_ranges

pytestmark = pytest.mark.usefixtures("as_sharded")

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SCALAR_BYTES = 8  # divisors and step counters are not counted


def held_bytes() -> int:
    return sum(nbytes for nbytes in storages().values() if nbytes > SCALAR_BYTES)


def sizes_of(**options):
    model = FullyShardedDataParallel(make_net(**options), fsdp_unit_modules=[Block], initial="trust")
    return {name: unit["gathered_bytes"] for name, unit in model.report()["units"].items()}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow
def test_the_report_states_every_byte_in_every_mode(strategy, dtype):
    sizes = sizes_of()
    needed = sizes[""] + max(sizes.values())
    budgets = (needed, sum(sizes.values()) - 1) if strategy == "optim_grads_params" else (sum(sizes.values()),)
    for gathered in ("double", "all", *budgets):
        held_and_stated_bytes_agree(strategy, dtype, gathered)


def held_and_stated_bytes_agree(strategy, dtype, gathered):
    before = held_bytes()
    net = make_net()
    model = FullyShardedDataParallel(
        net,
        strategy=strategy,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(param_dtype=dtype),
        buffers=BufferConfig(gathered_bytes=gathered),
        initial="trust",
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    for step in range(3):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        tokens = batch(step, 0, 0)
        loss_of(model(tokens), tokens).backward()
    model.finish_grad_sync()
    state = sum(
        value.nbytes for values in optimizer.state.values() for value in values.values() if value.nbytes > SCALAR_BYTES
    )
    stated = model.report()["bytes"]
    held = held_bytes() - tokens.nbytes - before
    assert held == sum(stated.values()) + state, (gathered, stated)
    if strategy == "optim_grads_params" and isinstance(gathered, int):
        assert stated["kept_gathered"] + stated["gather_arena"] <= gathered
    if dtype is None:
        here = 4 * sum(p.numel() for p in net.parameters())
        units = model.report()["units"].values()
        assert model.report()["plan"]["padding_bytes"] == sum(u["gathered_bytes"] for u in units) - here


class Table(nn.Module):
    """A large table, blocks of unequal sizes, a large head."""

    def __init__(self, words=400, widths=(4, 9, 6, 12)):
        super().__init__()
        self.table = nn.Embedding(words, 8)
        self.blocks = nn.ModuleList(Block(8, hidden=width) for width in widths)
        self.head = nn.Linear(8, words, bias=False)

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_double_takes_the_larger_of_two_slots_and_the_largest_unit():
    for words in (400, 10):
        net = Table(words)
        buffers = BufferConfig(fill_freed=False)  # which would have memory for each unit
        units = [Block, net.table, net.head]
        model = FullyShardedDataParallel(net, fsdp_unit_modules=units, initial="trust", buffers=buffers)
        report = model.report()
        sizes = {name: unit["gathered_bytes"] for name, unit in report["units"].items()}
        blocks = [sizes[f"blocks.{i}"] for i in range(4)]
        if words == 400:
            assert sizes["table"] > sum(sorted(blocks)[-2:])
            assert report["bytes"]["gather_arena"] == sizes["table"] == sizes["head"]
            first = max(blocks[::2])
            assert [report["units"][f"blocks.{i}"]["range"][0] for i in range(4)] == [0, first, 0, first]
        else:
            assert report["bytes"]["gather_arena"] <= 2 * max(blocks)


@pytest.mark.parametrize("gathered", ["double", "budget"])
def test_a_step_with_a_large_table_allocates_nothing_for_gathers_and_keeps_every_bit(gathered):
    def make():
        torch.manual_seed(0)
        return Table()

    net, twin = make(), make()
    sizes = [p.numel() * 4 for p in (net.table.weight, net.head.weight)]
    budget = "double" if gathered == "double" else sizes[0] + 6000
    model = FullyShardedDataParallel(
        net, fsdp_unit_modules=[Block, net.table, net.head], buffers=BufferConfig(gathered_bytes=budget)
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    x = torch.arange(6).view(2, 3)

    def step(run, opt):
        for _ in range(2):
            run(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    def allocated(run, opt):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            step(run, opt)
        events = recorded.profiler.kineto_results.events()
        return sum(event.name() == "[memory]" and event.nbytes() >= 4096 for event in events)

    for _ in range(3):
        step(model, optimizer)
        step(twin, other)
    assert allocated(model, optimizer) <= allocated(twin, other)
    assert same(model.full_state_dict(), twin.state_dict()) == []


def test_slots_of_units_inside_units_lie_side_by_side():
    class Fake:
        def __init__(self, name, nbytes, depth, kind, large=False):
            self.name, self.gathered_bytes, self.around, self.large = name, nbytes, (None,) * depth, large
            self.module, self.turn_bytes = kind, nbytes

    units = [
        Fake("a", 3, 0, 1),
        Fake("a.x", 5, 1, "s"),
        Fake("b", 4, 0, 1),
        Fake("b.x", 7, 1, "s"),
        Fake("e", 20, 0, []),
    ]
    ranges = double_ranges(units)
    assert ranges == {"a": (0, 3), "b": (3, 4), "e": (0, 20), "a.x": (20, 5), "b.x": (25, 7)}


# ---- evaluation


def watched(model):
    events = []
    pipeline = model._engine.gathering.pipeline
    gather, wait = pipeline.gather, pipeline.wait
    pipeline.gather = lambda unit: (events.append(f"gather {unit}"), gather(unit))
    pipeline.wait = lambda unit: (events.append(f"wait {unit}"), wait(unit))
    return events


@pytest.mark.parametrize("trained", [False, True])
def test_evaluation_gathers_each_unit_once_and_ahead_of_its_use(trained):
    net = make_net(layers=4)
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    for step in range(2 if trained else 0):
        loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if trained:
        model(batch(9, 0, 0)).sum().backward()  # the order of the step before is known from here on
        optimizer.step()
    events = watched(model)
    for call in range(3):
        model.refresh()
        events.clear()
        with torch.no_grad():
            model(batch(call, 0, 0))
        gathers = [event for event in events if event.startswith("gather")]
        assert len(gathers) == len(set(gathers)) == len(model.units)
        late = [a for a, b in itertools.pairwise(events) if a.startswith("gather") and b == a.replace("gather", "wait")]
        if trained or call:  # never seen before: nothing is known
            assert len(late) <= 1, events


def test_evaluation_between_microbatches_changes_no_order_and_no_bit():
    def run(evaluate):
        net = make_net(layers=4)
        model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
        orders = []
        for step in range(4):
            for k in range(2):
                if evaluate:
                    with torch.no_grad():
                        model(batch(7, k, 0))
                        model.entry(net.blocks[1])(torch.zeros(1, 13))
                loss_of(model(batch(step, k, 0)), batch(step, k, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            orders.append(list(model._engine.gathering.order._now))
        return orders, model.full_state_dict()

    (plain, weights), (mixed, others) = run(False), run(True)
    assert plain == mixed
    assert same(weights, others) == []


# ---- streams: a stand-in that writes down what a device would be told


class LoggedStream(StandInStream):
    """A SideStream that does nothing and remembers."""

    def __init__(self, log):
        self._log, self._marks = log, 0

    @property
    @contextmanager
    def inside(self):
        self._log.append("enter")
        yield
        self._log.append("leave")

    def mark(self):
        self._marks += 1
        self._log.append(f"mark {self._marks}")
        return self._marks

    def join(self, event):
        self._log.append(f"join {event}")


def test_every_gather_under_a_budget_is_launched_beside_compute_and_joined_before_its_use():
    sizes = sizes_of(layers=4)
    net = make_net(layers=4)
    model = FullyShardedDataParallel(
        net, fsdp_unit_modules=[Block], buffers=BufferConfig(gathered_bytes=sizes[""] + 2 * max(sizes.values()))
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    log = watched(model)
    gathering = model._engine.gathering
    gathering._stream = LoggedStream(log)
    for step in range(4):
        log.clear()
        loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        launched = [event for event in log if event.startswith("gather")]
        assert launched
        for at, event in enumerate(log):
            if event.startswith("gather"):
                assert log[at + 1 : at + 3] == ["enter", "leave"], "the collective and its casts, beside compute"
            if event.startswith("wait"):
                mark = log[at + 2].split()[1]
                assert log[at + 1 : at + 5] == ["enter", f"mark {mark}", "leave", f"join {mark}"]
        assert sum(event.startswith("wait") for event in log) == len(launched)
        assert step == 0 or log.index("gather blocks.1") < log.index("wait blocks.0"), "ahead of the use before"
