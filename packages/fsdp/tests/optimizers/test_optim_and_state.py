"""fully_shard_optimizer, records, materialised state, start values."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from torch import nn

from sixfold.fsdp import FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
}


def train_step(model, optimizer, step):
    loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def make(net=None, make_optimizer=make_adamw, **options):
    net = net or make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], **options)
    return model, fully_shard_optimizer(make_optimizer(net.parameters()), model)


def test_groups_keep_their_options_and_hold_main_parameters():
    net = make_net()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in net.parameters() if p.dim() > 1]},
            {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        weight_decay=0.3,
    )
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    assert fully_shard_optimizer(optimizer, model) is optimizer
    mains = dict(model.main_parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in mains.values()}


def test_several_optimizers_may_share_a_model():
    net = make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    first = fully_shard_optimizer(torch.optim.AdamW(net.blocks.parameters(), lr=1e-2, weight_decay=0.1), model)
    rest = [p for name, p in net.named_parameters() if not name.startswith("blocks")]
    second = fully_shard_optimizer(torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1), model)
    expected, one = make()
    for step in range(2):
        loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        train_step(expected, one, step)
    assert same(expected.full_state_dict(), model.full_state_dict()) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_materialised_state_has_the_keys_and_shapes_of_the_first_step_and_moves_no_weight(name):
    model, optimizer = make(make_optimizer=OPTIMIZERS[name])
    before = model.full_state_dict()
    model.materialize_state(optimizer)
    assert same(before, model.full_state_dict()) == []
    twin, stepped = make(make_optimizer=OPTIMIZERS[name])
    train_step(twin, stepped, 0)

    def shapes(m, o):
        return {
            n: {k: getattr(v, "shape", None) for k, v in o.state.get(p, {}).items()} for n, p in m.main_parameters()
        }

    assert shapes(model, optimizer) == shapes(twin, stepped)
    for state in optimizer.state.values():
        assert all(float(torch.as_tensor(value).abs().sum()) == 0 for value in state.values() if value is not None)
    train_step(model, optimizer, 0)
    assert same(twin.full_state_dict(), model.full_state_dict()) == []


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_resume_through_records_is_bitwise(strategy, dtype):
    options = {"strategy": strategy, "mixed_precision": MixedPrecision(param_dtype=dtype)}
    model, optimizer = make(**options)
    for step in range(2):
        train_step(model, optimizer, step)
    saved = {(r.name, r.key, r.start): r.tensor.clone() for r in model.state_records(optimizer)}
    steps = {name: optimizer.state[main]["step"].clone() for name, main in model.main_parameters()}
    train_step(model, optimizer, 2)

    torch.manual_seed(5)
    fresh = make_net()
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    resumed, again = make(fresh, **options)
    resumed(batch(0, 0, 0))  # gathered copies of the wrong weights
    resumed.materialize_state(again)
    records = resumed.state_records(again)
    assert {(r.name, r.key, r.start) for r in records} == set(saved)
    for record in records:
        record.tensor.copy_(saved[record.name, record.key, record.start])
    for name, main in resumed.main_parameters():
        again.state[main]["step"].copy_(steps[name])
    resumed.refresh()
    train_step(resumed, again, 2)
    assert same(model.full_state_dict(), resumed.full_state_dict()) == []


def test_records_alias_live_values_and_cover_each_element_once():
    model, optimizer = make(make_net(tied=True, frozen=True))
    train_step(model, optimizer, 0)
    records = model.state_records(optimizer)
    sizes = {name: p.numel() for name, p in model.module.named_parameters()}
    params = [r for r in records if r.key == "param"]
    assert {r.name: (r.start, r.stop) for r in params} == {name: (0, size) for name, size in sizes.items()}
    assert all(r.tensor.dim() == 1 and r.tensor.numel() == r.stop - r.start and r.replica == 0 for r in records)
    mains = dict(model.main_parameters())
    assert all(r.tensor.data_ptr() == mains[r.name].data_ptr() for r in params)
    assert {r.name for r in records if r.key == "exp_avg"} == {n for n, p in mains.items() if p.requires_grad}
    assert not any(r.key == "step" for r in records)


@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
def test_the_state_of_a_parameter_without_dimensions_is_in_the_records(granularity):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.scale

    net = Scaled()
    model = FullyShardedDataParallel(net, granularity=lambda name, parameter: granularity)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters()), model)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert [(r.key, r.global_shape, r.stop) for r in model.state_records(optimizer)] == [
        ("param", (), 1),
        ("exp_avg", (), 1),
        ("exp_avg_sq", (), 1),
    ]
    assert net.scale.shape == ()


def test_frozen_parameters_have_no_gradient_and_no_state():
    model, optimizer = make(make_net(frozen=True))
    train_step(model, optimizer, 0)
    frozen = [main for name, main in model.main_parameters() if ".1.up." in name]
    assert len(frozen) == 2
    assert all(main.grad is None and not main.requires_grad and main not in optimizer.state for main in frozen)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_meta_model_starts_bitwise_as_the_real_one(strategy):
    expected = make_net()
    with torch.device("meta"):
        net = make_net()
    identities = [id(p) for p in net.parameters()]
    net.embedding.weight.note = "kept"
    optimizer = make_adamw(net.parameters())
    torch.manual_seed(0)
    model = FullyShardedDataParallel(net, strategy=strategy, fsdp_unit_modules=[Block])
    fully_shard_optimizer(optimizer, model)
    assert same(expected.state_dict(), model.full_state_dict()) == []
    assert [id(p) for p in net.parameters()] == identities and net.embedding.weight.note == "kept"
    real, other = make()
    if strategy == "optim_grads_params":
        train_step(model, optimizer, 0)
        train_step(real, other, 0)
        assert same(real.full_state_dict(), model.full_state_dict()) == []


def test_init_fn_fills_meta_modules_by_name():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    calls = []

    def fill(name, module):
        calls.append(name)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(len(calls))

    model = FullyShardedDataParallel(net, init_fn=fill)
    assert calls == ["0", "1"]
    values = model.full_state_dict()
    assert float(values["0.weight"].sum()) == 4.0 and float(values["1.running_mean"].sum()) == 4.0


def test_full_state_dict_loads_into_a_plain_model_under_all_names():
    model, optimizer = make(make_net(tied=True))
    train_step(model, optimizer, 0)
    plain = make_net(tied=True)
    plain.load_state_dict(model.full_state_dict(), strict=True)
    assert torch.equal(model(batch(1, 0, 0)), plain(batch(1, 0, 0)))
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_the_step_counts_from_zero_and_grows_with_the_first_forward_after_a_step():
    model, optimizer = make()
    seen = []
    for step in range(3):
        train_step(model, optimizer, step)
        seen.append(model._engine.faults.step)
    assert seen == [0, 1, 2]


def test_an_optimizer_that_was_not_wrapped_is_refused_at_its_step():
    net = make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    optimizer = make_adamw(net.parameters())
    loss_of(model(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    with pytest.raises(FsdpError, match=r"use fully_shard_optimizer"):
        optimizer.step()


def test_an_optimizer_with_state_or_foreign_parameters_is_refused():
    net = make_net()
    used = make_adamw(net.parameters())
    loss_of(net(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    used.step()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    with pytest.raises(FsdpError, match="state"):
        fully_shard_optimizer(used, model)
    with pytest.raises(FsdpError, match=r"\(7, 3\)"):
        fully_shard_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(7, 3))]), model)


def test_a_closure_optimizer_cannot_be_materialised_and_says_so():
    model, optimizer = make(make_optimizer=lambda p: torch.optim.LBFGS(list(p)))
    with pytest.raises(FsdpError, match="closure"):
        model.materialize_state(optimizer)
