"""Without a process group: the same code as on ranks, bit for bit what plain training gives."""

from __future__ import annotations

import gc

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from sixfold.fsdp import (
    BufferConfig,
    FsdpError,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    fully_shard_optimizer,
)
from sixfold.fsdp.optimizers import gradient_norms as norms

STRATEGIES = [strategy.value for strategy in ShardingStrategy]


def plain(steps=3, accumulate=2, **options):
    net = make_net(**options)
    optimizer = make_adamw(net.parameters())
    for step in range(steps):
        for k in range(accumulate):
            loss_of(net(batch(step, k, 0)), batch(step, k, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def sharded(strategy, steps=3, accumulate=2, gathered="double", units=(Block,), **options):
    net = make_net(**options)
    model = FullyShardedDataParallel(
        net, strategy=strategy, fsdp_unit_modules=units, buffers=BufferConfig(gathered_bytes=gathered)
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    for step in range(steps):
        for k in range(accumulate):
            loss_of(model(batch(step, k, 0)), batch(step, k, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"frozen": True}, {"unused": True}, {"recompute": "around"}])
def test_weights_equal_plain_training_bit_for_bit(strategy, options):
    model = sharded(strategy, **options)
    assert same(plain(**options), model.full_state_dict()) == []
    assert all(parameter.grad is None for parameter in model.parameters())


def test_units_inside_units_and_a_buffer_for_every_unit_give_the_same_bits():
    expected = plain()
    assert same(expected, sharded("optim_grads_params", units=(Block, nn.Linear)).full_state_dict()) == []
    assert same(expected, sharded("optim_grads_params", gathered="all").full_state_dict()) == []
    assert same(expected, sharded("optim_grads_params", units=()).full_state_dict()) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_keep_identity_shape_and_address(strategy):
    net = make_net()
    before = dict(net.named_parameters())
    model = FullyShardedDataParallel(net, strategy=strategy, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    seen = []
    for step in range(3):
        loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: (p.data_ptr(), p.shape) for name, p in net.named_parameters()})
    assert all(before[name] is parameter for name, parameter in net.named_parameters())
    assert seen[0] == seen[1] == seen[2]


def test_two_micro_batches_in_flight_share_a_slot_and_backward_still_sees_its_weights():
    net, twin = make_net(), make_net()
    model = fully_shard(net, strategy="optim_grads_params", fsdp_unit_modules=["Block"])
    losses = [loss_of(model(batch(0, k, 0)), batch(0, k, 0)) for k in range(3)]
    for loss in losses:
        loss.backward()
    for k in range(3):
        loss_of(twin(batch(0, k, 0)), batch(0, k, 0)).backward()
    model.finish_grad_sync()
    expected = {name: parameter.grad.view(-1) for name, parameter in twin.named_parameters()}
    assert same(expected, {name: main.grad for name, main in model.main_parameters()}) == []


def test_evaluation_leaves_no_trace():
    expected = sharded("optim_grads_params").full_state_dict()
    net = make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    for step in range(3):
        for k in range(2):
            loss_of(model(batch(step, k, 0)), batch(step, k, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        order, count = model._engine.gathering.order, model._engine.faults.step
        recorded = list(order._now)
        with torch.no_grad():
            model(batch(99, 0, 0))
            model.entry(net.blocks[0])(torch.zeros(1, 13))
        assert order._now == recorded and model._engine.faults.step == count
    assert same(expected, model.full_state_dict()) == []


def test_no_sync_and_hints_change_traffic_not_results():
    expected = plain(accumulate=3)
    for strategy in STRATEGIES:
        net = make_net()
        model = FullyShardedDataParallel(net, strategy=strategy, fsdp_unit_modules=[Block])
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
        for step in range(3):
            for k in range(3):
                with model.no_sync():
                    loss_of(model(batch(step, k, 0)), batch(step, k, 0)).backward()
            assert all(main.grad is None for _, main in model.main_parameters())
            optimizer.step()
            model.zero_grad()
        assert same(expected, model.full_state_dict()) == []
        assert model.report()["reductions"] == 3 * 4


def test_clipping_returns_the_norm_before_and_scales_all_gradients():
    net, twin = make_net(), make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    loss_of(model(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    loss_of(twin(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    squares = [float((p.grad.double() ** 2).sum()) for p in twin.parameters()]
    total = model.clip_grad_norm_(0.01)
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(sum(squares) ** 0.5, rel=1e-6)
    assert float(model.grad_square_sum()) ** 0.5 == pytest.approx(0.01, rel=1e-3)
    only = float(model.grad_square_sum(include=lambda name: name.startswith("head")))
    assert 0 < only < float(model.grad_square_sum())


def test_sums_are_divided_once_and_truly():
    net, twin = make_net(), make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], grad_divisor=1.0)
    loss_of(model(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    model.divide_gradients(torch.tensor(7.0))
    loss_of(twin(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    expected = {name: (p.grad / 7.0).view(-1) for name, p in twin.named_parameters()}
    assert same(expected, {name: main.grad for name, main in model.main_parameters()}) == []


def test_granularity_shapes_main_parameters():
    net = make_net(layers=1)
    chosen = {"blocks.0.up.weight": "row", "head.weight": "tensor", "blocks.0.down.weight": 13}
    model = FullyShardedDataParallel(
        net, fsdp_unit_modules=[Block], granularity=lambda name, parameter: chosen.get(name, "element")
    )
    shapes = {name: tuple(main.shape) for name, main in model.main_parameters()}
    assert shapes["blocks.0.up.weight"] == (19, 13)
    assert shapes["head.weight"] == (17, 13)
    assert shapes["blocks.0.down.weight"] == (13 * 19,)
    assert shapes["embedding.weight"] == (17 * 13,)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.low = nn.Linear(5, 5).to(torch.bfloat16)
        self.high = nn.Linear(5, 5)

    def forward(self, x):
        return self.high(self.low(x.to(torch.bfloat16)).float())


def test_a_unit_of_two_dtypes_travels_in_one_gather():
    torch.manual_seed(0)
    net = nn.Sequential(Mixed(), Mixed())
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Mixed], initial="trust")
    before = model.full_state_dict()
    x = torch.ones(2, 5)
    expected = x
    for i in range(2):
        low = torch.nn.functional.linear(
            expected.bfloat16(), before[f"{i}.low.weight"].bfloat16(), before[f"{i}.low.bias"].bfloat16()
        )
        expected = torch.nn.functional.linear(low.float(), before[f"{i}.high.weight"], before[f"{i}.high.bias"])
    assert torch.equal(model(x), expected)
    assert model.report()["gathers"] == 3  # root, two units
    model(x).sum().backward()
    model.finish_grad_sync()
    assert all(main.grad.dtype == torch.float32 for _, main in model.main_parameters())


def test_bf16_inputs_are_cast_unless_told_otherwise():
    seen = []

    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x, *, mask):
            seen.append((x.dtype, mask.dtype, self.w.dtype))
            return (x * self.w).sum()

    for cast in (True, False):
        precision = MixedPrecision(param_dtype=torch.bfloat16, cast_inputs=cast)
        FullyShardedDataParallel(Probe(), mixed_precision=precision)(
            torch.ones(3), mask=torch.ones(3, dtype=torch.long)
        )
    assert seen == [
        (torch.bfloat16, torch.int64, torch.bfloat16),
        (torch.float32, torch.int64, torch.bfloat16),
    ]


def test_a_container_without_parameters_is_legal():
    model = FullyShardedDataParallel(nn.ModuleDict({"0": nn.Identity()}))
    x = torch.ones(2, requires_grad=True)
    handle = model.stage_handle(model.module["0"], fused=True)
    handle.before_last_backward()
    handle.call(x).sum().backward()
    handle.after_backward(0)
    handle.reduce_grad()
    model.finish_grad_sync()
    assert float(model.grad_square_sum()) == 0.0
    assert list(model.main_parameters()) == [] and model.state_records() == []


def test_hooks_go_when_the_model_goes():
    net = make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    assert net.blocks[0]._forward_hooks
    del model
    gc.collect()
    assert not net.blocks[0]._forward_hooks


def test_a_unit_called_outside_a_root_call_is_refused():
    net = make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    with pytest.raises(FsdpError, match=r"model.entry\(child\)") as caught:
        net.blocks[0](torch.zeros(1, 13))
    assert caught.value.unit == "blocks.0"
    assert model.entry(net.blocks[0])(torch.zeros(1, 13)).shape == (1, 13)


class Borrower(nn.Module):
    """Calls a module that is not below it in the module tree."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.borrowed = []

    def forward(self, x):
        return self.own(self.borrowed[0](x))


def test_a_unit_that_runs_inside_a_stranger_with_its_slot_is_refused_not_corrupted():
    def run(gathered):
        torch.manual_seed(0)
        net = nn.ModuleList([Borrower(), nn.Linear(4, 4), nn.Linear(4, 4)])
        net[0].borrowed.append(net[2])
        units = [Borrower, net[1], net[2]]  # slots 0, 1, 0
        model = FullyShardedDataParallel(net, fsdp_unit_modules=units, buffers=BufferConfig(gathered_bytes=gathered))
        return model.entry(net[0])(torch.ones(1, 4)), model

    with pytest.raises(FsdpError, match='gathered_bytes="all"') as caught:
        run("double")
    assert caught.value.unit == "2"
    result, model = run("all")
    values = model.full_state_dict()
    inner = nn.functional.linear(torch.ones(1, 4), values["2.weight"], values["2.bias"])
    assert torch.equal(result, nn.functional.linear(inner, values["0.own.weight"], values["0.own.bias"]))


def test_from_the_second_step_on_the_next_unit_is_gathered_before_this_one_is_waited_for():
    net = make_net(layers=3)
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    pipeline = model._engine.gathering.pipeline
    log = []
    gather, wait = pipeline.gather, pipeline.wait
    pipeline.gather = lambda unit: (log.append(f"gather {unit}"), gather(unit))
    pipeline.wait = lambda unit: (log.append(f"wait {unit}"), wait(unit))
    forwards = []
    for step in range(2):
        log.clear()
        loss = loss_of(model(batch(step, 0, 0)), batch(step, 0, 0))
        forwards.append([move.replace("blocks.", "") for move in log])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert forwards[0] == ["gather ", "wait ", "gather 0", "wait 0", "gather 1", "wait 1", "gather 2", "wait 2"]
    assert forwards[1] == ["gather ", "gather 0", "wait ", "gather 1", "wait 0", "gather 2", "wait 1", "wait 2"]


@pytest.mark.usefixtures("as_sharded")
@pytest.mark.parametrize("part", [100, 1 << 16])
def test_the_norm_is_that_of_float64_and_makes_no_copy_of_a_gradient(part, monkeypatch):
    from torch.profiler import ProfilerActivity, profile

    monkeypatch.setattr(norms, "_PART_NUMEL", part)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(90, 130), nn.Linear(130, 70))
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[nn.Linear], strategy="optim_grads_params")
    model(torch.randn(3, 90) * 1e3).square().sum().backward()
    gradients = [main.grad for _, main in model.main_parameters()]
    exact = sum(float((one.detach().double() ** 2).sum()) for one in gradients)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        found = model.grad_square_sum()
    sizes = [event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert float(found) == pytest.approx(exact, rel=1e-13) and found.dtype == torch.float64
    assert sizes and max(sizes) < 1024
    gradients[1][3] = float("nan")
    assert model.grad_square_sum().isnan()


def test_steady_state_makes_no_buffer_however_unequal_the_units():
    from torch.profiler import ProfilerActivity, profile

    def large_allocations(step):
        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            step()
        return sum(
            1
            for event in recorded.profiler.kineto_results.events()
            if event.name() == "[memory]" and event.nbytes() >= 16384
        )

    widths = (100, 140, 60, 100, 300, 80, 100)

    def stepper(sharded_strategy):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(widths[i], widths[i + 1], bias=bool(i % 2)) for i in range(6)))
        x = torch.randn(2, 100)
        model, optimizer = net, torch.optim.SGD(net.parameters(), lr=0.1)
        if sharded_strategy:
            model = FullyShardedDataParallel(net, strategy=sharded_strategy, fsdp_unit_modules=[nn.Linear])
            fully_shard_optimizer(optimizer, model)

        def step():
            for _ in range(2):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    plain = large_allocations(stepper(None))
    assert plain >= 6, "the profiler sees the gradients of plain training"
    for strategy in STRATEGIES:
        assert large_allocations(stepper(strategy)) <= plain, strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("last", [False, True])
def test_a_step_that_is_given_up_leaves_nothing_in_the_next_one(strategy, last):
    net, twin = make_net(), make_net()
    model = FullyShardedDataParallel(net, strategy=strategy, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    with model.microbatch(last=last):  # reductions wait, or are in flight
        loss_of(model(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    optimizer.zero_grad()
    for one in (model, twin):
        loss_of(one(batch(1, 0, 0)), batch(1, 0, 0)).backward()
    model.finish_grad_sync()
    expected = {name: p.grad.view(-1) for name, p in twin.named_parameters()}
    assert same(expected, {name: main.grad for name, main in model.main_parameters()}) == []


def test_zero_grad_of_one_of_two_optimizers_forgets_its_own_gradients_only():
    net, twin = make_net(), make_net()
    model = FullyShardedDataParallel(net, strategy="optim")
    half, rest = list(net.blocks.parameters()), [*net.embedding.parameters(), *net.norm.parameters()]
    first = fully_shard_optimizer(make_adamw(half), model)
    fully_shard_optimizer(make_adamw(rest), model)
    for one in (model, twin):
        loss_of(one(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    with model.microbatch(last=False):
        loss_of(model(batch(1, 0, 0)), batch(1, 0, 0)).backward()
    loss_of(twin(batch(1, 0, 0)), batch(1, 0, 0)).backward()
    first.zero_grad()
    model.finish_grad_sync()
    mains = dict(model.main_parameters())
    for name, p in twin.named_parameters():
        found = mains[name].grad
        assert found is None if name.startswith("blocks") else torch.equal(found, p.grad.view(-1)), name


class Chain(nn.Module):
    """Seven linears; one is called twice; ``recompute`` wraps the first four in one checkpoint."""

    def __init__(self, recompute=None):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(7))
        self.recompute = recompute

    def head(self, x):
        for part in self.parts[:4]:
            x = torch.tanh(part(x))
        return x

    def forward(self, x):
        if self.recompute is None:
            x = self.head(x)
        else:
            x = checkpoint(self.head, x, use_reentrant=self.recompute == "reentrant")
        for i in (4, 5, 6, 4):
            x = torch.tanh(self.parts[i](x))
        return x


@pytest.mark.parametrize("recompute", [None, "non-reentrant", "reentrant"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_checkpoint_over_several_units_and_a_unit_called_twice_give_the_plain_gradients(recompute, strategy):
    torch.manual_seed(0)
    net = Chain(recompute)
    torch.manual_seed(0)
    twin = Chain(recompute)
    apart = BufferConfig(merge_bytes=None)
    model = FullyShardedDataParallel(net, strategy=strategy, fsdp_unit_modules=[nn.Linear], buffers=apart)
    for turn in range(3):
        x = torch.randn(3, 6, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        twin.zero_grad()
        twin(y).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        model.finish_grad_sync()
        expected = {name: p.grad.view(-1) for name, p in twin.named_parameters()}
        assert same(expected, {name: main.grad for name, main in model.main_parameters()}) == [], turn
        assert torch.equal(x.grad, y.grad)
    assert model.report()["reductions"] == 3 * 7, "a unit called twice is reduced once per backward"


def test_a_graph_that_is_kept_may_be_walked_twice():
    net, twin = make_net(), make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    for one in (model, twin):
        loss = loss_of(one(batch(0, 0, 0)), batch(0, 0, 0))
        loss.backward(retain_graph=True)
        if one is model:
            with torch.no_grad():
                model(batch(1, 0, 0))  # other units take the slots in between
        loss.backward()
    model.finish_grad_sync()
    expected = {name: p.grad.view(-1) for name, p in twin.named_parameters()}
    assert same(expected, {name: main.grad for name, main in model.main_parameters()}) == []


def test_a_backward_that_raises_leaves_a_model_that_can_go_on():
    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("boom")

    class Bomb(nn.Module):
        armed = True

        def forward(self, x):
            return Explode.apply(x) if self.armed else x

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Bomb(), nn.Linear(4, 4))
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[nn.Linear])
    with pytest.raises(ValueError, match="boom"):
        model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    net[1].armed = False
    model(torch.ones(1, 4)).sum().backward()
    model.finish_grad_sync()
    values = model.full_state_dict()
    twin = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))
    twin.load_state_dict(values)
    twin(torch.ones(1, 4)).sum().backward()
    expected = {name: p.grad.view(-1) for name, p in twin.named_parameters()}
    assert same(expected, {name: main.grad for name, main in model.main_parameters()}) == []
