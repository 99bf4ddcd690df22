"""fp8 parameters on 1, 2 and 3 ranks: the bits of one process that emulates them, and what travels."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fp8_oracle import is_fp8, seen
from fsdp_count_helpers import gathers
from fsdp_helpers import Block, batch, emulate, loss_of, make_adamw, make_net, same
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def train(rank, ranks, strategies, options, mesh_shape=None, steps=2, few=False):
    results = []
    for strategy in strategies:
        net = make_net(**options)
        place = {"process_group": dist.group.WORLD}
        if mesh_shape is not None:
            place = {"mesh": init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))}
        chosen = (lambda name: name == "blocks.1.up.weight") if few else is_fp8
        model = FullyShardedDataParallel(
            net,
            **place,
            strategy=strategy,
            fsdp_unit_modules=[Block],
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, grad_sum="rank_order", fp8=chosen),
        )
        optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
        for step in range(steps):
            for k in range(2):
                with model.microbatch(last=k == 1):
                    loss_of(model(batch(step, k, rank)), batch(step, k, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.full_state_dict())
    return results


def expected(ranks, strategy, options, few=False, steps=2):
    def chosen(name, main):
        return seen(name, main) if not few or name == "blocks.1.up.weight" else main

    return emulate(
        ranks=ranks,
        steps=steps,
        accumulate=2,
        net_options=options,
        per_microbatch=strategy in ("optim_grads", "optim_grads_params"),
        param_dtype=torch.bfloat16,
        seen=chosen,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.slow
def test_every_number_of_ranks_equals_the_definition(ranks):
    results = run_ranks(train, ranks, STRATEGIES, {})
    for at, strategy in enumerate(STRATEGIES):
        wanted = expected(ranks, strategy, {})
        assert [same(wanted, result[at]) for result in results] == [[]] * ranks, strategy


@pytest.mark.slow
def test_tied_and_frozen_ones_too_and_where_few_are_fp8():
    for options in ({"tied": True}, {"frozen": True}):
        result = run_ranks(train, 2, ["optim_grads_params"], options)[1][0]
        assert same(expected(2, "optim_grads_params", options), result) == [], options
    result = run_ranks(train, 2, ["optim_grads_params"], {}, None, 2, True)[0][0]
    assert same(expected(2, "optim_grads_params", {}, few=True), result) == []


@pytest.mark.slow
def test_hybrid_sharding_equals_the_definition():
    """Two replicas of one shard each, and of two: sums over replicas come last, so the order of ranks is the mesh's."""
    results = run_ranks(train, 2, ["optim_grads_params"], {}, (2, 1))
    wanted = expected(2, "optim_grads_params", {})
    assert [same(wanted, result[0]) for result in results] == [[], []]
    results = run_ranks(train, 4, ["optim_grads_params"], {}, (2, 2))
    assert [same(results[0][0], result[0]) for result in results] == [[]] * 4


def nan_on_one_rank(rank, ranks):
    net = make_net()
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(fp8=is_fp8, param_dtype=torch.bfloat16),
    )
    name = "blocks.0.up.weight"
    held = [record for record in model.state_records() if record.name == name]
    if held and held[0].start == 0:
        held[0].tensor[1] = float("nan")
    model.refresh()
    found = []
    net.blocks[0].up.register_forward_hook(lambda module, *_: found.append(module.weight.isnan().all().item()))
    net.blocks[1].up.register_forward_hook(lambda module, *_: found.append(module.weight.isnan().any().item()))
    model(batch(0, 0, rank))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.slow
def test_a_nan_on_one_rank_is_seen_on_all(ranks):
    assert run_ranks(nan_on_one_rank, ranks) == [[True, False]] * ranks


class Count(TorchDispatchMode):
    """Sizes in bytes of each kind of collective; control messages (int64) apart."""

    def __init__(self):
        super().__init__()
        self.sizes = {"allgather": [], "allreduce": [], "alltoall": [], "reduce_scatter": []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("c10d"):
            leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            for kind in self.sizes:
                if kind in str(func) and leaves[0].dtype != torch.int64:
                    halves = 2 if kind == "alltoall" else 1  # two ranks swap what each lacks
                    found = "allgather" if gathers(args) else kind
                    self.sizes[found].append(max(leaf.nbytes for leaf in leaves) * halves)
        return func(*args, **(kwargs or {}))


def count(rank, ranks):
    net = make_net(width=64)
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(fp8=is_fp8, param_dtype=torch.bfloat16),
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    counts = []
    for step in range(3):
        here, inside = Count(), Count()
        with here:
            loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
        with inside:
            optimizer.step()
        optimizer.zero_grad()
        counts.append((here.sizes, inside.sizes))
    units = model.report()["units"]
    return counts[-1], {name: unit["wire_bytes"] for name, unit in units.items()}


@pytest.mark.slow
def test_one_gather_per_mixed_unit_and_one_small_all_reduce_per_step():
    (sizes, in_step), wire = run_ranks(count, 2)[0]
    assert sizes["allreduce"] == [4 * 6]
    assert not any(in_step.values())
    # Forward and backward of three blocks; the root stays, and so may the last block.
    assert len(sizes["allgather"]) <= 2 * 3 + 1
    assert set(sizes["allgather"]) == set(wire.values())
    assert len(sizes["alltoall"]) == 4 and not sizes["reduce_scatter"]
    for i in range(3):
        matrices, others = 2 * 64 * (19 + 4 * i), 2 * (2 * 64 + 19 + 4 * i)
        assert matrices + others <= wire[f"blocks.{i}"] <= matrices + others + 7 * 128


def refused(rank, ranks):
    net = make_net()
    try:
        FullyShardedDataParallel(
            net,
            process_group=dist.group.WORLD,
            fsdp_unit_modules=[Block],
            mixed_precision=MixedPrecision(fp8=is_fp8 if rank else lambda name: False),
        )
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_ranks_that_choose_other_fp8_parameters_are_told():
    results = run_ranks(refused, 2)
    assert {name for name, _ in results} == {"FsdpError"}
    assert all("fp8" in text and "blocks.0.up.weight" in text for _, text in results)


def load_and_look(rank, ranks):
    net = make_net()
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[Block],
        checks="unit",
        mixed_precision=MixedPrecision(fp8=is_fp8),
    )
    model(batch(0, 0, rank))
    whole = {name: value * -1.5 for name, value in make_net().state_dict().items()} if rank == 0 else None
    model.load_full_state_dict(whole)
    found = {}
    for i, block in enumerate(net.blocks):
        block.up.register_forward_hook(lambda module, *_, i=i: found.update({i: module.weight.detach().clone()}))
    with torch.no_grad():
        model(batch(0, 0, rank))
    return found


@pytest.mark.slow
def test_a_whole_state_that_is_loaded_is_quantised_anew_also_with_checks_and_in_evaluation():
    results = run_ranks(load_and_look, 2)
    for i, block in enumerate(make_net().blocks):
        wanted = seen(f"blocks.{i}.up.weight", block.up.weight.detach() * -1.5)
        assert all(torch.equal(found[i], wanted) for found in results)


def same_batch(rank, ranks, matmul):
    """Every rank has the same batch, so that the sum over two ranks divided by two is exact."""
    net = make_net()
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(fp8=is_fp8, fp8_matmul=matmul, param_dtype=torch.bfloat16),
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    for step in range(2):
        for k in range(2):
            loss_of(model(batch(step, k, 0)), batch(step, k, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


@pytest.mark.parametrize("matmul", ["scaled", "scaled_rows"])
@pytest.mark.slow
def test_products_of_bytes_do_not_depend_on_the_number_of_ranks(matmul):
    one = run_ranks(same_batch, 1, matmul)[0]
    assert [same(one, result) for result in run_ranks(same_batch, 2, matmul)] == [[], []]


def train_with(rank, ranks, configs):
    results = []
    for config in configs:
        net = make_net(frozen=True)
        model = FullyShardedDataParallel(
            net,
            process_group=dist.group.WORLD,
            fsdp_unit_modules=[Block],
            buffers=BufferConfig(**config),
            mixed_precision=MixedPrecision(fp8=is_fp8, param_dtype=torch.bfloat16),
        )
        optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
        for step in range(3):
            for k in range(2):
                loss_of(model(batch(step, k, rank)), batch(step, k, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.full_state_dict())
    return results


@pytest.mark.slow
def test_buckets_budgets_and_prefetching_change_no_bit():
    configs = [
        {},
        {"bucket_bytes": 1024},
        {"gathered_bytes": "all", "bucket_bytes": 512},
        {"gathered_bytes": 20_000},
        {"prefetch_bytes": 0},
        {"prefetch_bytes": 100_000, "reduce_buffers": 1},
    ]
    for results in run_ranks(train_with, 2, configs):
        assert [same(results[0], result) for result in results] == [[]] * len(configs)
