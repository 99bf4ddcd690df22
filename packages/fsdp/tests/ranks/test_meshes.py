"""Parameters on meshes of their own, in one unit with those on the main mesh: bits, norms, records, start values."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fsdp_count_helpers import Traffic
from fsdp_helpers import batch, loss_of, make_adamw, same, train_steps
from fsdp_mesh_helpers import MoeBlock, MoeNet, emulate_meshes, kind_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS, ACCUMULATE = 2, 2
# Replicas of the main mesh, and by rank which expert it has: ranks of one expert are its mesh.
LAYOUTS = {
    "2 ranks": (1, (0, 1)),
    "3 ranks uneven": (1, (0, 1, 0)),
    "4 ranks": (1, (0, 1, 0, 1)),
    "4 ranks hsdp": (2, (0, 1, 0, 1)),
    "4 ranks one expert": (2, (0, 0, 0, 0)),
}


def meshes(rank, layout):
    """Main mesh, that of this rank's expert, and one of this rank alone."""
    replicas, experts = LAYOUTS[layout]
    ranks = len(experts)
    main = init_device_mesh("cpu", (replicas, ranks // replicas) if replicas > 1 else (ranks,))
    own = [DeviceMesh("cpu", [r for r in range(ranks) if experts[r] == expert]) for expert in sorted(set(experts))]
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("all", "alone"))["alone"]
    return main, own[experts[rank]], alone


def net_of(rank, layout):
    return MoeNet(LAYOUTS[layout][1][rank], rank, uneven=True)


def make(rank, layout, net=None, **options):
    main, expert, alone = meshes(rank, layout)
    net = net_of(rank, layout) if net is None else net
    model = FullyShardedDataParallel(
        net,
        mesh=main,
        fsdp_unit_modules=[MoeBlock],
        mesh_for=lambda name: {"shared": None, "expert": expert, "own": alone}[kind_of(name)],
        mixed_precision=MixedPrecision(grad_sum="rank_order"),
        **options,
    )
    return net, model


def groups_of(layout):
    replicas, experts = LAYOUTS[layout]
    ranks = len(experts)
    width = ranks // replicas

    def groups(kind, rank):
        if kind == "shared":
            return [range(at, at + width) for at in range(0, ranks, width)]
        return [[rank]] if kind == "own" else [[r for r in range(ranks) if experts[r] == experts[rank]]]

    return groups


def train(rank, ranks, layout, strategies):
    found = []
    for strategy in strategies:
        checks = "unit" if strategy == "optim_grads_params" else "order"
        net, model = make(rank, layout, strategy=strategy, checks=checks)
        optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
        train_steps(model, optimizer, rank, steps=STEPS, accumulate=ACCUMULATE)
        records = [(r.name, r.key, r.start, r.stop, r.replica) for r in model.state_records(optimizer)]
        found.append((model.full_state_dict(), records, model.report()["own_meshes"]))
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_weights_on_three_meshes_equal_one_process_bit_for_bit(layout):
    experts = LAYOUTS[layout][1]
    ranks = len(experts)
    expected = {
        per_microbatch: emulate_meshes(
            [net_of(rank, layout) for rank in range(ranks)],
            groups_of(layout),
            steps=STEPS,
            accumulate=ACCUMULATE,
            per_microbatch=per_microbatch,
        )
        for per_microbatch in (False, True)
    }
    results = run_ranks(train, ranks, layout, STRATEGIES)
    for at, strategy in enumerate(STRATEGIES):
        for rank, result in enumerate(results):
            weights, _, own = result[at]
            assert same(expected[at >= 2][rank], weights) == [], f"{strategy}, rank {rank}"
            assert own["blocks.0.expert.weight"] == experts.count(experts[rank])
            assert own["blocks.0.own.weight"] == 1
            assert not any(kind_of(name) == "shared" for name in own)
        _check_records([result[at][1] for result in results], layout, expected[False])


def _check_records(records_R, layout, weights_R):
    """Each element of each key lies in exactly one record with replica 0, of all ranks that hold that parameter."""
    count: Counter = Counter()
    for rank, records in enumerate(records_R):
        owner = {"shared": 0, "expert": LAYOUTS[layout][1][rank], "own": rank}
        for name, key, start, stop, replica in records:
            if replica == 0:
                count.update((name, owner[kind_of(name)], key, i) for i in range(start, stop))
    assert set(count.values()) == {1}
    numel = {}
    for rank, weights in enumerate(weights_R):
        owner = {"shared": 0, "expert": LAYOUTS[layout][1][rank], "own": rank}
        numel |= {(name, owner[kind_of(name)]): value.numel() for name, value in weights.items()}
    tied = "blocks.1.expert_tied.weight"  # has its first name alone
    expected = sum(one for (name, _), one in numel.items() if name != tied)
    assert sum(1 for entry in count if entry[2] == "param") == expected


def norms(rank, ranks, layout, strategies):
    found = []
    for strategy in strategies:
        _, model = make(rank, layout, strategy=strategy)
        loss_of(model(batch(0, 0, rank)), batch(0, 0, rank)).backward()
        squares = float(model.grad_square_sum()), float(model.grad_square_sum(lambda name: kind_of(name) == "expert"))
        found.append((*squares, float(model.clip_grad_norm_(1e-3)), float(model.grad_square_sum())))
    return found


@pytest.mark.parametrize("layout", ["3 ranks uneven", "4 ranks hsdp"])
@pytest.mark.slow
def test_the_norm_counts_experts_of_all_peers_once(layout):
    ranks = len(LAYOUTS[layout][1])
    nets = [net_of(rank, layout) for rank in range(ranks)]
    for rank, net in enumerate(nets):
        loss_of(net(batch(0, 0, rank)), batch(0, 0, rank)).backward()
    groups, squares, seen = groups_of(layout), Counter(), set()
    for rank, net in enumerate(nets):
        for name, parameter in net.named_parameters():
            kind = kind_of(name)
            sharing = [member for group in groups(kind, rank) for member in group]
            if parameter.grad is None or (name, tuple(sharing)) in seen:
                continue
            seen.add((name, tuple(sharing)))
            total = sum(dict(nets[member].named_parameters())[name].grad for member in sharing) / ranks
            squares[kind] += float(total.double().square().sum())
    results = run_ranks(norms, ranks, layout, ["no_shard", "optim_grads_params"])
    assert all(result == results[0] for result in results), "the same on all ranks"
    for everything, experts, total, after in results[0]:
        assert everything == pytest.approx(sum(squares.values()), rel=1e-6)
        assert experts == pytest.approx(squares["expert"], rel=1e-6)
        assert total == pytest.approx(sum(squares.values()) ** 0.5, rel=1e-6)
        assert after**0.5 == pytest.approx(1e-3, rel=1e-3)


MEMORY = ({}, {"gathered_bytes": "all"}, {"gathered_bytes": 12_000}, {"reduce_buffers": 1})


def train_in(rank, ranks, memories):
    found = []
    for memory in memories:
        net, model = make(rank, "2 ranks", buffers=BufferConfig(**memory))
        optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
        for step in range(3):
            with model.no_sync():
                loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            loss_of(model(batch(step, 1, rank)), batch(step, 1, rank)).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.full_state_dict())
    return found


@pytest.mark.slow
def test_no_choice_of_memory_changes_a_bit():
    for first, *others in run_ranks(train_in, 2, MEMORY):
        assert [same(first, other) for other in others] == [[]] * len(others)


def count_step(rank, ranks):
    net, model = make(rank, "4 ranks", checks="off", buffers=BufferConfig(bucket_bytes=1 << 20))  # no pieces
    optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
    for step in range(2):
        with Traffic() as traffic:
            loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            optimizer.step()
    return Counter(sent.kind for sent in traffic.sent + traffic.control)


@pytest.mark.slow
def test_one_collective_for_each_unit_direction_and_mesh():
    # Of each block shared parameters and experts, of the root shared ones and the tied expert. Nobody takes the memory
    # of two blocks, so frozen experts stay. Rank-order sums are all-to-alls; a mesh of one rank sends nothing.
    calls = run_ranks(count_step, 4)[0]
    assert calls == {"all_gather": 2 * 2 + 2, "all_to_all": 2 * 2 + 2}


def start_values(rank, ranks, initial):
    net = MoeNet(rank % 2, rank)
    if rank == 2 and initial == "shape":
        net.blocks[1].expert = torch.nn.Linear(19, 13, bias=False)
    elif rank == 2:
        with torch.no_grad():
            net.blocks[1].expert.bias += 1
    try:
        _, model = make(rank, "4 ranks", net, initial=initial if initial != "shape" else "check")
    except FsdpError as error:
        return str(error), error.ranks
    return model.full_state_dict()["blocks.1.expert.bias"]


@pytest.mark.slow
def test_start_values_are_compared_within_a_mesh_and_peers_may_differ():
    for text, ranks in run_ranks(start_values, 4, "check"):
        assert ranks == (2,)
        assert "start values of blocks.1.expert.bias differ on rank 2 from those of its mesh, ranks [0, 2]" in text


@pytest.mark.slow
def test_models_are_compared_within_a_mesh():
    for text, ranks in run_ranks(start_values, 4, "shape"):
        assert ranks == (2,)
        assert "ranks [0, 2] share a mesh and wrap different models on it: blocks.1.expert.bias (13,)" in text


@pytest.mark.slow
def test_broadcast_gives_a_mesh_the_values_of_its_first_rank():
    found = run_ranks(start_values, 4, "broadcast")
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def wrap_wrongly(rank, ranks):
    flat, one, _ = meshes(rank, "2 ranks")
    both = init_device_mesh("cpu", (2, 1))
    found = []
    untied = lambda name: one if name == "blocks.1.expert_tied.weight" else None  # noqa: E731
    for choose in (lambda name: both, lambda name: one if rank else flat, lambda name: object(), untied):
        try:
            FullyShardedDataParallel(MoeNet(0, rank), mesh=flat, mesh_for=choose)
        except FsdpError as error:
            found.append((str(error), error.ranks))
    net = MoeNet(0, rank)
    if rank:
        net.blocks[0].expert = torch.nn.Linear(19, 13, bias=False)
    try:
        FullyShardedDataParallel(net, mesh=flat, mesh_for=lambda name: flat if kind_of(name) != "own" else one)
    except FsdpError as error:
        found.append((str(error), error.ranks))
    try:
        FullyShardedDataParallel(MoeNet(0, rank), mesh=flat, mesh_for=None if rank else lambda name: None)
    except FsdpError as error:
        found.append((str(error), error.ranks))
    return found


@pytest.mark.slow
def test_meshes_that_cannot_work_are_refused_on_all_ranks():
    first, second = run_ranks(wrap_wrongly, 2)
    says = [
        "a mesh of 2 dimensions",
        "ranks wrap different models: embedding.weight is ",
        "mesh_for gives embedding.weight object; it gives a 1-D DeviceMesh, or None",
        "mesh_for gives blocks.1.expert_tied.weight the ranks [0], and blocks.0.expert_tied.weight, which is the same",
        "ranks wrap different models: blocks.0.expert.bias ",
        "ranks wrap different models: mesh_for is given, on rank 1 None",
    ]
    assert len(first) == len(second) == len(says)
    for (text, _), (other, _), part in zip(first, second, says, strict=True):
        assert part in text and part in other
