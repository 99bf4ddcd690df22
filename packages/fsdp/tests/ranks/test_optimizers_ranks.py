"""torch's optimizers over shards, clipped and scaled per token, against one process that emulates the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, Net, batch, loss_of, resumed, same

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

STEPS, TOKENS, MAX_NORM = 3, 7.0, 0.05


def whole(name, parameter):
    return "tensor"


def rows(name, parameter):
    return "row"


CASES = {
    "adamw fused": (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True), None),
    "adamw foreach": (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True), None),
    "adamw one by one": (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False), rows),
    "adam fused amsgrad": (lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True), rows),
    "sgd fused": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True), None),
    "adagrad fused": (lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True), None),
    "adamw offload": (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), None),
    "adafactor offload": (lambda p: torch.optim.Adafactor(p, lr=1e-2), whole),
    "adafactor": (lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1), whole),
    "adafactor foreach": (lambda p: torch.optim.Adafactor(p, lr=1e-2, foreach=True), whole),
}


def make_net():
    torch.manual_seed(0)
    return Net(width=13, layers=2)


def emulate(ranks, make, totals):
    """Sums from left to right, a true division by the tokens; ``totals`` are the norms that the ranks clipped by."""
    net = make_net()
    optimizer = make(list(net.parameters()))
    norms = []
    for step in range(STEPS):
        sums = None
        for rank in range(ranks):
            net.zero_grad()
            loss_of(net(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            mine = [p.grad.clone() for p in net.parameters()]
            sums = mine if sums is None else [a + b for a, b in zip(sums, mine, strict=True)]
        for p, gradient in zip(net.parameters(), sums, strict=True):
            p.grad = gradient / torch.tensor(TOKENS)
        norms.append(torch.stack([p.grad.double().square().sum() for p in net.parameters()]).sum().sqrt())
        factor = torch.clamp(MAX_NORM / (totals[step] + 1e-6), max=1.0)
        for p in net.parameters():
            p.grad *= factor
        optimizer.step()
    state = {name: optimizer.state[p] for name, p in net.named_parameters()}
    return net.state_dict(), state, norms


def train(rank, name):
    make, granularity = CASES[name]
    net = make_net()
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(grad_sum="rank_order"),
        buffers=BufferConfig(offload="offload" in name),
        granularity=granularity,
        grad_divisor=1.0,
    )
    optimizer = fully_shard_optimizer(make(list(net.parameters())), model)
    totals = []
    for step in range(STEPS):
        loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
        model.divide_gradients(TOKENS)
        totals.append(model.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    records = [r for r in model.state_records(optimizer) if r.key != "param"]
    kept = [(r.name, r.key, r.global_shape, r.start, r.stop, r.replica, r.tensor.clone()) for r in records]
    return totals, model.full_state_dict(), kept


def train_all(rank, ranks, names):
    return [train(rank, name) for name in names]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.slow
def test_weights_and_state_are_bitwise_those_of_one_process(ranks):
    results = run_ranks(train_all, ranks, list(CASES))
    for at, name in enumerate(CASES):
        totals = results[0][at][0]
        weights, state, norms = emulate(ranks, CASES[name][0], totals)
        assert [float(one) for one in totals] == pytest.approx([float(one) for one in norms], rel=1e-6), name
        covered = {}
        for result in results:
            assert all(torch.equal(a, b) for a, b in zip(result[at][0], totals, strict=True)), name
            assert same(weights, result[at][1]) == [], name
            for of, key, shape, start, stop, replica, tensor in result[at][2]:
                whole_state = state[of][key]
                assert replica == 0 and shape == tuple(whole_state.shape), (name, of, key)
                assert torch.equal(tensor, whole_state.reshape(-1)[start:stop]), (name, of, key)
                covered[of, key] = covered.get((of, key), 0) + stop - start
        expected = {
            (of, key): value.numel()
            for of, kept in state.items()
            for key, value in kept.items()
            if isinstance(value, torch.Tensor) and key != "step"
        }
        assert covered == expected, name


def resume(rank, ranks, name):
    make, granularity = CASES[name]

    def build():
        net = make_net()
        model = FullyShardedDataParallel(
            net,
            process_group=dist.group.WORLD,
            fsdp_unit_modules=[Block],
            buffers=BufferConfig(offload="offload" in name),
            granularity=granularity,
        )
        return model, fully_shard_optimizer(make(list(net.parameters())), model)

    def steps_done(optimizer):
        for state in optimizer.state.values():
            state["step"].fill_(1.0)

    return resumed(build, rank, steps_done)


@pytest.mark.parametrize("name", ["adamw fused", "adafactor", "adafactor offload"])
@pytest.mark.slow
def test_state_is_saved_and_loaded_by_records(name):
    assert run_ranks(resume, 2, name) == [([], []), ([], [])]
