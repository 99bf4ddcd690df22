"""An integer ``gathered_bytes``: gathers counted, bytes held and bits, under driven programs and plain training."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from torch import nn

from sixfold.fsdp import (
    BufferConfig,
    FsdpError,
    FullyShardedDataParallel,
    MixedPrecision,
    fully_shard_optimizer,
    residency,
)

WIDTH, UNITS, ROWS = 8, 3, 2
ONE_F_ONE_B = "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0F5 0B3 0B4 0B5"
INTERLEAVED = "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
ZB_V = "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3"


class Driver:
    """Stages of one rank under a program; what comes from other ranks is drawn from a seed."""

    def __init__(self, program, **buffers):
        self.actions = program.split()
        names = sorted({action[0] for action in self.actions})
        torch.manual_seed(0)
        self.net = nn.ModuleDict({name: nn.Sequential(*(Block(WIDTH) for _ in range(UNITS))) for name in names})
        torch.manual_seed(0)
        self.twin = nn.ModuleDict({name: nn.Sequential(*(Block(WIDTH) for _ in range(UNITS))) for name in names})
        self.model = FullyShardedDataParallel(
            self.net, fsdp_unit_modules=[Block], buffers=BufferConfig(**buffers), grad_divisor=1.0, grad_reduce="last"
        )
        self.optimizer = fully_shard_optimizer(torch.optim.SGD(self.net.parameters(), lr=1e-3), self.model)
        self.twin_optimizer = torch.optim.SGD(self.twin.parameters(), lr=1e-3)
        self.handles = {name: self.model.stage_handle(self.net[name], fused=True) for name in names}
        self.log = []
        pipeline = self.model._engine.gathering.pipeline
        gather = pipeline.gather
        returning = self.model._engine.gathering._returning  # whose bytes are here: no collective
        pipeline.gather = lambda unit: (unit in returning or self.log.append(unit), gather(unit))

    def run(self, call, actions):
        outputs = {}
        for action in actions:
            stage, kind, k = action[0], action[1], int(action[2])
            seed = torch.Generator().manual_seed(100 * int(stage) + k)
            if kind == "F":
                x = torch.randn(ROWS, WIDTH, generator=seed).requires_grad_()
                outputs[stage, k] = call(stage, x)
            elif kind in "BI":  # one fused backward; nothing needs weights at W
                outputs.pop((stage, k)).backward(torch.randn(ROWS, WIDTH, generator=seed.manual_seed(7)))

    def step(self, actions=None):
        """One optimizer step; returns the gathers of units that are not the root."""
        actions = self.actions if actions is None else actions
        self.log.clear()
        self.run(lambda stage, x: self.handles[stage].call(x), actions)
        for handle in self.handles.values():
            handle.reduce_grad()
        self.model.finish_grad_sync()
        gathers = [unit for unit in self.log if unit]
        self.run(lambda stage, x: self.twin[stage](x), actions)
        expected = {name: p.grad.view(-1) for name, p in self.twin.named_parameters()}
        assert same(expected, {name: main.grad for name, main in self.model.main_parameters()}) == []
        for optimizer in (self.optimizer, self.twin_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        return gathers


def uses_of(program):
    uses = []
    for action in program.split():
        names = [f"{action[0]}.{i}" for i in range(UNITS)]
        uses += names if action[1] == "F" else names[::-1] if action[1] in "BI" else []
    return uses


@functools.cache
def unit_bytes():
    return Driver("0F0 0B0", gathered_bytes="all").model.report()["units"]["0.0"]["gathered_bytes"]


TABLE = [  # program, units that the budget holds, the plan's gathers
    (ONE_F_ONE_B, 1, 29),
    (ONE_F_ONE_B, 2, 16),
    (ONE_F_ONE_B, 3, 3),
    (INTERLEAVED, 2, 34),
    (INTERLEAVED, 4, 18),
    (INTERLEAVED, 6, 6),
    (ZB_V, 2, 30),
    (ZB_V, 5, 10),
    (ZB_V, 6, 6),
]


@pytest.mark.parametrize(("program", "resident", "fewest"), TABLE)
@pytest.mark.slow
def test_a_step_gathers_as_few_units_as_the_plan(program, resident, fewest):
    size = unit_bytes()
    driver = Driver(program, gathered_bytes=resident * size + size // 2)
    counts = [len(driver.step()) for _ in range(4)]
    uses = uses_of(program)
    least = residency.solve(uses, dict.fromkeys(uses, size), budget_bytes=resident * size)
    assert least.gathers == fewest
    assert counts[1:] == [fewest] * 3
    plan = driver.model.report()["plan"]
    assert plan["gathers"] == plan["gathers_done"] == plan["least_gathers"] == fewest
    assert plan["least_is_proven"] and plan["gathers_in_ranges"] >= fewest
    assert plan["peak_bytes"] <= plan["budget_bytes"]


@pytest.mark.slow
def test_gathers_fall_from_every_use_to_each_unit_once_as_the_budget_grows():
    size = unit_bytes()
    for gathered, expected in ((size, 29), ("double", 18), (2 * size, 16), (3 * size, 3), ("all", 3)):
        driver = Driver(ONE_F_ONE_B, gathered_bytes=gathered)
        counts = [len(driver.step()) for _ in range(3)]
        assert counts[-1] == expected, gathered


@pytest.mark.slow
def test_another_order_heals_itself_and_comes_to_its_own_plan():
    size = unit_bytes()
    driver = Driver(ONE_F_ONE_B, gathered_bytes=2 * size)
    assert [len(driver.step()) for _ in range(3)][1:] == [16, 16]
    gpipe = [f"0F{k}" for k in range(4)] + [f"0B{k}" for k in range(4)]
    driver.step(gpipe)  # in the other order's ranges
    assert [len(driver.step(gpipe)) for _ in range(2)] == [driver.model.report()["plan"]["gathers"]] * 2
    driver.step()
    assert [len(driver.step()) for _ in range(2)] == [16, 16]
    assert driver.model.report()["plan"]["peak_bytes"] <= 2 * size


@pytest.mark.slow
def test_addresses_stay_while_the_order_stays():
    size = unit_bytes()
    driver = Driver(INTERLEAVED, gathered_bytes=3 * size)
    seen = []
    for _ in range(4):
        driver.step()
        seen.append([p.data_ptr() for p in driver.net.parameters()])
    assert seen[1] == seen[2] == seen[3]


def events_of(driver):
    """("gather" | "wait", unit) in the order in which they happen from now on."""
    events = []
    pipeline = driver.model._engine.gathering.pipeline
    gather, wait = pipeline.gather, pipeline.wait
    pipeline.gather = lambda unit: (events.append(("gather", unit)), gather(unit))
    pipeline.wait = lambda unit: (events.append(("wait", unit)), wait(unit))
    return events


@pytest.mark.parametrize(("resident", "ahead"), [(2, 1), (4, 2), (3, None), (3, 0)])
@pytest.mark.slow
def test_prefetched_bytes_stay_under_the_budget_and_run_ahead(resident, ahead):
    size = unit_bytes()
    ahead_bytes = ahead and ahead * size
    driver = Driver(INTERLEAVED, gathered_bytes=resident * size, prefetch_bytes=ahead_bytes)
    for _ in range(3):
        driver.step()
    events = events_of(driver)
    driver.step()
    early = sum(first[0] == "gather" and first[1] != then[1] for first, then in itertools.pairwise(events))
    plan = driver.model.report()["plan"]
    assert plan["peak_bytes"] <= resident * size
    assert sum(kind == "wait" for kind, _ in events) == sum(kind == "gather" for kind, _ in events)
    if ahead == 0:
        assert early == 0
    elif ahead is not None:
        assert plan["gathers_not_ahead"] == (0 if resident == 4 else 4)  # two slots cannot hold an odd circle
        assert early >= plan["gathers"] - plan["gathers_not_ahead"] - 1, "but the first of a step"


def train(budget, *, strategy="optim_grads_params", steps=3, hook=lambda model, step: None, **options):
    net = make_net(layers=4, **options)
    model = FullyShardedDataParallel(
        net, strategy=strategy, fsdp_unit_modules=[Block], buffers=BufferConfig(gathered_bytes=budget)
    )
    optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
    for step in range(steps):
        hook(model, step)
        for k in range(2):
            loss_of(model(batch(step, k, 0)), batch(step, k, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


VARIANTS = [{}, {"tied": True}, {"frozen": True}, {"unused": True}] + [
    {"recompute": kind} for kind in ("inside", "around", "reentrant")
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.slow
def test_every_budget_gives_the_bits_of_every_other_mode(options):
    reference = train("all", **options)
    units = reference.report()["units"]
    sizes = {name: unit["gathered_bytes"] for name, unit in units.items()}
    least, expected = sizes[""] + max(sizes.values()), reference.full_state_dict()
    for budget in (least, least + 3000, sum(sizes.values()) - 1, sum(sizes.values())):
        model = train(budget, **options)
        assert same(expected, model.full_state_dict()) == [], budget
        plan = model.report()["plan"]
        assert plan["gathers"] == plan["gathers_done"], budget
        assert plan["peak_bytes"] <= budget


@pytest.mark.slow
def test_recompute_gathers_nothing_more_whatever_the_budget():
    sizes = {name: unit["gathered_bytes"] for name, unit in train("all").report()["units"].items()}
    for budget in (sizes[""] + max(sizes.values()), sum(sizes.values()) - 1, "double", "all"):
        plain = train(budget).report()["gathers"]
        for kind in ("inside", "around", "reentrant"):
            assert train(budget, recompute=kind).report()["gathers"] == plain, (budget, kind)


class Outer(nn.Module):
    """A unit with units inside it, as a block with experts."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(Block(WIDTH, hidden=5 + 3 * i) for i in range(3))

    def forward(self, x):
        x = torch.tanh(self.before(x))
        for inner in self.inner:
            x = inner(x)
        return torch.tanh(self.after(x))


@pytest.mark.slow
def test_units_inside_units_stay_beside_those_around_them_under_every_budget():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Outer(), Outer(), Outer())

    def run(model, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if model is not module:
            fully_shard_optimizer(optimizer, model)
        for step in range(3):
            for k in range(2):
                x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + k))
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    twin = make()
    run(twin, twin)
    for budget in ("double", "all", 0, 900, 2500, 6000):
        net = make()
        if isinstance(budget, int):
            with pytest.raises(FsdpError, match="those around it included, need") as caught:
                FullyShardedDataParallel(net, fsdp_unit_modules=[Outer, Block], buffers=BufferConfig(gathered_bytes=1))
            budget += int(str(caught.value).split("need ")[1].split()[0])
        model = FullyShardedDataParallel(
            net, fsdp_unit_modules=[Outer, Block], buffers=BufferConfig(gathered_bytes=budget)
        )
        run(model, net)
        assert same(twin.state_dict(), model.full_state_dict()) == [], budget
        plan = model.report()["plan"]
        assert plan.get("gathers") == (plan["gathers_done"] if isinstance(budget, int) else None)


def test_a_budget_too_small_for_what_must_be_here_at_once_is_refused():
    with pytest.raises(
        FsdpError, match=r"gathered_bytes is 100; the root unit \(\d+ bytes\) and the largest unit"
    ) as e:
        train(100)
    needed = int(str(e.value).split("need ")[1].split()[0])
    train(needed, steps=1)
    with pytest.raises(FsdpError, match=f"need {needed}"):
        train(needed - 1)
    with pytest.raises(FsdpError, match="strategy 'optim' keeps all weights"):
        train(needed, strategy="optim")


# ---- use_plan


def planned(driver, program, resident):
    uses = uses_of(program)
    size = unit_bytes()
    actions = residency.plan(uses, dict.fromkeys(uses, size), budget_bytes=resident * size)
    driver.model.use_plan(actions)
    return actions


@pytest.mark.slow
def test_a_given_plan_is_followed_from_the_first_step_on():
    size = unit_bytes()
    for program, resident in ((ONE_F_ONE_B, 2), (INTERLEAVED, 3), (ZB_V, 6)):
        driver = Driver(program, gathered_bytes=resident * size)
        actions = planned(driver, program, resident)
        asked = sum(action.kind == "gather" for action in actions)
        counts = [len(driver.step()) for _ in range(3)]
        plan = driver.model.report()["plan"]
        assert counts == [asked] * 3 == [plan["gathers"]] * 3
        assert plan["order"] == "given" and plan["steps_off_plan"] == 0


def test_a_given_plans_gathers_and_frees_happen_where_they_stand():
    size = unit_bytes()
    driver = Driver("0F0 0B0", gathered_bytes=3 * size)
    text = """gather 0.0, use 0.0, gather 0.1, use 0.1, free 0.0, gather 0.2, use 0.2,
              use 0.2, free 0.2, use 0.1, gather 0.0, use 0.0"""
    driver.model.use_plan([residency.Action(*one.split()) for one in text.split(",")])
    for _ in range(2):
        assert driver.step() == ["0.0", "0.1", "0.2", "0.0"], "everything fits, and still the plan is followed"


def test_a_step_that_leaves_the_plan_gathers_at_its_uses_and_the_next_one_follows_it_again():
    size = unit_bytes()
    driver = Driver(ONE_F_ONE_B, gathered_bytes=2 * size)
    planned(driver, ONE_F_ONE_B, 2)
    first = len(driver.step())
    driver.step([f"0F{k}" for k in range(3)] + [f"0B{k}" for k in range(3)])
    assert driver.model.report()["plan"]["steps_off_plan"] == 1
    assert len(driver.step()) == first
    assert driver.model.report()["plan"]["peak_bytes"] <= 2 * size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("use 0.0", r"action 0, use 0\.0: '0\.0' is not gathered there"),
        ("gather 0.0, gather 0.0", r"action 1, gather 0\.0: '0\.0' is gathered already"),
        ("gather 0.0, gather 0.1, gather 0.2", r"action 2, gather 0\.2: '0\.2' makes \d+ bytes, and gathered_bytes is"),
        ("free 0.1", r"action 0, free 0\.1: '0\.1' is not gathered there"),
        ("gather 5.5", r"'5\.5' is no unit of this model"),
    ],
)
def test_an_illegal_plan_is_refused_at_its_action(text, says):
    driver = Driver("0F0 0B0", gathered_bytes=2 * unit_bytes())
    with pytest.raises(FsdpError, match=says):
        driver.model.use_plan([residency.Action(*one.split()) for one in text.split(",")])
    for mode in ("double", "all"):
        with pytest.raises(FsdpError, match="a plan is for a byte budget"):
            Driver("0F0 0B0", gathered_bytes=mode).model.use_plan([])


# ---- ranges that move between steps


class Turned(nn.Module):
    """Blocks in order, from the third step on the odd ones first."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32 + 32 * (i % 3)), nn.Linear(32 + 32 * (i % 3), 32))
            for i in range(6)
        )
        self.turned = False

    def forward(self, x):
        for block in [*self.blocks[1::2], *self.blocks[::2], *self.blocks[1::2]] if self.turned else self.blocks:
            x = torch.tanh(block(x))
        return x


def low(name):
    return name.endswith((".1.weight", ".2.weight"))


PRECISIONS = [
    {},
    {"param_dtype": torch.bfloat16},
    {"param_dtype": torch.bfloat16, "fp8": low},
    {"param_dtype": torch.bfloat16, "fp8": low, "fp8_matmul": "scaled"},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda one: "-".join(one) or "fp32")
@pytest.mark.slow
def test_units_that_move_between_steps_keep_every_bit(precision):
    def train(gathered):
        torch.manual_seed(0)
        net = Turned()
        model = FullyShardedDataParallel(
            net,
            fsdp_unit_modules=list(net.blocks),
            buffers=BufferConfig(gathered_bytes=gathered),
            mixed_precision=MixedPrecision(**precision),
        )
        optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)
        ranges = []
        for step in range(6):
            net.turned = step >= 2
            for k in range(2):
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + k))
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ranges.append([unit["range"] for unit in model.report()["units"].values()])
            with torch.no_grad():
                model(x)  # gathered for an evaluation when they move
        return model, ranges

    reference, _ = train("all")
    sizes = [unit["gathered_bytes"] for unit in reference.report()["units"].values()]
    moved = 0
    for budget in (max(sizes), max(sizes) + min(sizes[1:]), sum(sizes) // 2):
        model, ranges = train(budget)
        assert same(reference.full_state_dict(), model.full_state_dict()) == []
        assert ranges[1] == ranges[2] and ranges[4] == ranges[5], "no unit moves while the order stays"
        moved += ranges[2] != ranges[3]
    assert moved, "another order, other ranges"


def test_a_graph_from_before_units_moved_is_refused():
    """A call without grad is no step, and a graph can grow in it all the same."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))

        def forward(self, x, order):
            with torch.enable_grad():
                for i in order:
                    x = self.blocks[i](x)
            return x

    size = unit_bytes()
    net = Graph()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], buffers=BufferConfig(gathered_bytes=2 * size))
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=1e-3), model)
    x = torch.randn(2, WIDTH)
    for _ in range(2):
        model(x, (0, 1, 2, 3, 0, 1, 2, 3, 2, 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [p.data_ptr() for p in net.parameters()]
    model(x, (0, 2, 1, 3, 1, 3, 2, 0, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        held = model(x, (0, 1, 2, 3))
    model(x, (0, 1, 2, 3)).sum().backward()
    assert [p.data_ptr() for p in net.parameters()] != before, "they moved"
    with pytest.raises(FsdpError, match="graph from before"):
        held.sum().backward()


class Turns(nn.Module):
    """Units of one size, the second one frozen, called in the order that is given."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.units[1].requires_grad_(False)

    def forward(self, x, order):
        for at in order:
            x = x + torch.tanh(self.units[at](x))
        return x.square().mean()


def test_a_frozen_unit_in_whose_memory_another_waited_is_gathered_again():
    torch.manual_seed(0)
    twin = Turns()
    net = copy.deepcopy(twin)
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[nn.Linear], buffers=BufferConfig(gathered_bytes=2 * 1024))
    optimizer = fully_shard_optimizer(torch.optim.SGD([net.units[0].weight, net.units[2].weight], lr=0.1), model)
    pair = (twin, torch.optim.SGD([twin.units[0].weight, twin.units[2].weight], lr=0.1)), (model, optimizer)
    for _ in range(3):
        losses = []
        for call, one in pair:
            for order in ((0, 1, 2), (0, 0), (2, 1, 1, 0)):
                losses.append(call(torch.ones(2, 16), order))
                losses[-1].backward()
            one.step()
            one.zero_grad()
        assert losses[:3] == losses[3:]
    assert model.report()["plan"]["copies_done"] > 0
