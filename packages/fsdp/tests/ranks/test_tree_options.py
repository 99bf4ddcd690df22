"""``grad_sum="tree"`` with replicas, experts, narrow dtypes, compiled units, parked state; bytes; what is refused.

fsdp_tree_helpers.py (the oracle) --> this file
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_oracle import is_fp8, seen
from fsdp_count_helpers import Traffic
from fsdp_helpers import batch, loss_of, make_adamw, make_net
from fsdp_mesh_helpers import MoeBlock, MoeNet, kind_of
from fsdp_tree_helpers import (
    STRATEGIES,
    WAYS,
    Named,
    Run,
    differ,
    gradients_of,
    hint,
    plain_loss,
    plain_run,
    sharded_run,
    tree_of,
    wrap,
    wrong,
)
from fsdp_tree_worlds import unlike
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranktest import run_ranks
from sixfold.fsdp import (
    BufferConfig,
    FsdpError,
    FullyShardedDataParallel,
    MixedPrecision,
    fully_shard_optimizer,
)
from sixfold.fsdp.buffers.microbatch_tree import slots_for

BF16 = torch.bfloat16
MICROBATCHES = 8


# ---- replicas


def train_mesh(rank: int, ranks: int, shape: tuple[int, int], strategies: list[str]) -> list[Run]:
    return [
        sharded_run(
            rank, ranks, MICROBATCHES, way=WAYS[at % 3], strategy=strategy, steps=2,
            mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")),
            buffers=BufferConfig(bucket_bytes=None if at % 2 else 700),
        )
        for at, strategy in enumerate(strategies)
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (2, 1)], ids=str)
@pytest.mark.slow
def test_replicas_are_the_upper_of_the_levels_over_ranks(shape):
    expected, strategies = plain_run(MICROBATCHES, steps=2), list(STRATEGIES[1:])
    for rank, found in enumerate(run_ranks(train_mesh, shape[0] * shape[1], shape, strategies)):
        for strategy, one in zip(strategies, found, strict=True):
            assert wrong(expected, one) == [], f"{strategy}, rank {rank}"


# ---- experts


def moe(rank: int) -> MoeNet:
    """Ranks 0 and 2 have one expert, 1 and 3 the other."""
    return MoeNet(rank % 2, rank, uneven=True)


def train_experts(rank: int, ranks: int, strategies: list[str]) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    main = init_device_mesh("cpu", (ranks,))
    own = [DeviceMesh("cpu", list(range(expert, ranks, 2))) for expert in (0, 1)][rank % 2]
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("all", "alone"))["alone"]
    found = []
    for strategy in strategies:
        net = moe(rank)
        model = FullyShardedDataParallel(
            net,
            mesh=main,
            strategy=strategy,
            fsdp_unit_modules=[MoeBlock],
            mesh_for=lambda name: {"shared": None, "expert": own, "own": alone}[kind_of(name)],
            mixed_precision=MixedPrecision(grad_sum="tree"),
            grad_divisor=float(MICROBATCHES),
        )
        for g in range(rank, MICROBATCHES, ranks):
            loss_of(model(batch(0, g, 0)), batch(0, g, 0)).backward()
        mains = dict(model.main_parameters())
        gradients = {
            r.name: (r.start, r.stop, None if mains[r.name].grad is None else mains[r.name].grad.clone().view(-1))
            for r in model.state_records()
            if r.name in mains and r.stop > r.start and mains[r.name].requires_grad
        }
        found.append(gradients)
    return found


@pytest.mark.slow
def test_experts_have_a_tree_over_the_ranks_that_share_them():
    nets = [moe(rank) for rank in range(4)]
    leaves: list[Named] = []
    for g in range(MICROBATCHES):
        leaves.append(gradients_of(nets[g % 4], lambda g=g: plain_loss(nets[g % 4], 0, g)))
    found_R = run_ranks(train_experts, 4, list(STRATEGIES))
    for rank, found in enumerate(found_R):
        expected: dict[str, Tensor | None] = dict.fromkeys((name for name, _ in nets[rank].named_parameters()), None)
        for kind, step in (("shared", 1), ("expert", 2), ("own", 4)):
            mine = leaves[rank % step :: step]  # its own tree: what the ranks of its mesh have, in their order
            total = tree_of(mine, float(MICROBATCHES))
            expected |= {name: value for name, value in total.items() if kind_of(name) == kind}
        for strategy, one in zip(STRATEGIES, found, strict=True):
            assert unlike(expected, one) == [], f"{strategy}, rank {rank}"


# ---- dtypes


def narrow_loss(weights: Any, dtype: torch.dtype | None) -> Any:
    """The loss of a copy in the compute dtype, of weights as layers see them."""
    compute = make_net() if dtype is None else make_net().to(dtype)

    def loss(net: nn.Module, step: int, g: int) -> Tensor:
        with torch.no_grad():
            for (name, high), low in zip(net.named_parameters(), compute.parameters(), strict=True):
                low.copy_(weights(name, high))
        compute.zero_grad()
        plain_loss(compute, step, g).backward()
        # A stand-in with the gradients of the copy, in fp32.
        pairs = zip(net.parameters(), compute.parameters(), strict=True)
        return torch.stack([(high * low.grad.float()).sum() for high, low in pairs]).sum()

    return loss


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": BF16},
    "fp8": {"param_dtype": BF16, "fp8": is_fp8},
    "fp64 sums": {"main_dtype": torch.float64},
}


def train_precision(rank: int, ranks: int, name: str, strategies: list[str]) -> list[Run]:
    return [
        sharded_run(
            rank, ranks, MICROBATCHES, way=WAYS[at % 3], strategy=strategy, steps=2, precision=PRECISIONS[name],
            net=make_net().double() if name == "fp64 sums" else None,
        )
        for at, strategy in enumerate(strategies)
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
@pytest.mark.slow
def test_narrow_weights_are_summed_in_fp32(name, ranks):
    loss = narrow_loss(seen if name == "fp8" else lambda _, main: main, BF16)
    expected = plain_run(MICROBATCHES, steps=2, loss=loss)
    for rank, found in enumerate(run_ranks(train_precision, ranks, name, list(STRATEGIES))):
        for strategy, one in zip(STRATEGIES, found, strict=True):
            assert wrong(expected, one) == [], f"{strategy}, rank {rank}"


def train_narrow_gradients(rank: int, ranks: int, strategies: list[str]) -> list[Run]:
    return [
        sharded_run(
            rank, ranks, MICROBATCHES, way=way, strategy=strategy, steps=2, precision={"grad_dtype": BF16},
            make_optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )
        for strategy in strategies
        for way in WAYS
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.slow
def test_narrow_main_gradients_are_the_sum_rounded_once_a_batch(ranks):
    net, gradients = make_net(), []
    for step in range(2):
        leaves = [gradients_of(net, lambda step=step, g=g: plain_loss(net, step, g)) for g in range(MICROBATCHES)]
        total = {name: value.to(BF16) for name, value in tree_of(leaves, float(MICROBATCHES)).items()}
        gradients.append(total)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for name, p in net.named_parameters():
            p.grad = total[name].float()
        optimizer.step()
    weights = {name: value.detach().clone() for name, value in net.named_parameters()}
    expected = Run(weights=weights, gradients=gradients)
    for rank, found in enumerate(run_ranks(train_narrow_gradients, ranks, list(STRATEGIES))):
        for one in found:
            assert wrong(expected, one) == [], f"rank {rank}"


# ---- divisors, compiled units, parked weights


def train_others(rank: int, ranks: int) -> list[Run]:
    found = []
    for at, strategy in enumerate(STRATEGIES):
        found.append(sharded_run(rank, ranks, MICROBATCHES, way=WAYS[at % 3], strategy=strategy, grad_divisor=7.0))
    for strategy in STRATEGIES[2:]:
        found.append(
            sharded_run(
                rank, ranks, MICROBATCHES, strategy=strategy, grad_divisor=7.0, buffers=BufferConfig(offload=True)
            )
        )
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.slow
def test_a_divisor_that_is_no_power_of_two_divides_once(ranks):
    expected = plain_run(MICROBATCHES, divisor=7.0)
    for rank, found in enumerate(run_ranks(train_others, ranks)):
        for at, one in enumerate(found):
            assert wrong(expected, one) == [], f"case {at}, rank {rank}"


def train_compiled(rank: int, ranks: int) -> dict[str, Tensor]:
    net = make_net(width=8, layers=2)
    for block in net.blocks:
        block.compile(backend="eager")
    return sharded_run(rank, ranks, MICROBATCHES, net=net, steps=2).weights


@pytest.mark.slow
def test_compiled_units_have_the_bits_of_the_same_at_one_rank():
    (one,) = run_ranks(train_compiled, 1)
    for weights in run_ranks(train_compiled, 2):
        assert [name for name in one if differ(one[name], weights[name])] == []
    plain = plain_run(MICROBATCHES, steps=2, net=make_net(width=8, layers=2)).weights
    assert [name for name in plain if differ(plain[name], one[name])] == []


# ---- a scale of tokens


def per_token(rank: int, ranks: int, counts: list[int], strategy: str) -> dict[str, Any]:
    net = make_net()
    model = wrap(net, MICROBATCHES, strategy=strategy, grad_divisor=1.0)
    fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model)
    for g in range(rank, len(counts), ranks):
        with model.microbatch(last=g + ranks >= len(counts)):
            (plain_loss(model, 0, g) * counts[g]).backward()
    model.divide_gradients(sum(counts))
    mains = dict(model.main_parameters())
    return {
        r.name: (r.start, r.stop, mains[r.name].grad.detach().clone().view(-1))
        for r in model.state_records()
        if r.name in mains and r.stop > r.start
    }


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_sums_over_tokens_are_divided_once_by_their_number(strategy):
    counts = [3, 10, 7, 1, 5, 5, 9, 4]
    net = make_net()
    leaves = []
    for g, count in enumerate(counts):
        (plain_loss(net, 0, g) * count).backward()
        leaves.append({name: p.grad.clone() for name, p in net.named_parameters()})
        net.zero_grad()
    expected = tree_of(leaves, float(sum(counts)))
    for ranks in (1, 2):
        for found in run_ranks(per_token, ranks, counts, strategy):
            assert unlike(expected, found) == []


# ---- refusals


def refused(rank: int, ranks: int) -> str:
    try:
        wrap(make_net(), MICROBATCHES)
    except FsdpError as error:
        return str(error)
    return ""


def test_three_ranks_are_refused_on_all_with_the_numbers_that_can_be_used():
    for text in run_ranks(refused, 3):
        assert "summed over 3 ranks" in text and "use 2 or 4 ranks" in text


def test_a_narrow_sum_and_a_late_reduction_are_refused_with_what_to_use():
    for options, names in (
        ({"reduce_dtype": BF16}, "leave reduce_dtype None"),
        ({"reduce_dtype": torch.float16}, "grad_sum='rank_order'"),
        ({"main_dtype": BF16}, "main_dtype=torch.float32"),
    ):
        with pytest.raises(FsdpError, match=names):
            MixedPrecision(grad_sum="tree", **options)
    with pytest.raises(FsdpError, match="grad_reduce='auto'"):
        wrap(make_net(), MICROBATCHES, grad_reduce="last")
    for dtype in (None, torch.float32):
        MixedPrecision(grad_sum="tree", reduce_dtype=dtype)


# ---- memory and traffic


def memory(rank: int, ranks: int, strategies: list[str], microbatches: int, way: str) -> list[dict[str, Any]]:
    found = []
    for strategy in strategies:
        net = make_net()
        model = wrap(net, microbatches, strategy=strategy)
        optimizer, sizes = fully_shard_optimizer(make_adamw(net.parameters()), model), []
        for step in range(4):
            for g in range(rank, microbatches, ranks):
                with hint(model, way, g + ranks >= microbatches):
                    plain_loss(model, step, g).backward()
            sizes.append(model.report()["bytes"])
            optimizer.step()
            optimizer.zero_grad()
        trained = [one for unit in model._engine.units for one in unit.trained]
        shard = sum(one.cut.main_numel for one in trained) * 4
        found.append({"sizes": sizes, "shard": shard})
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_a_report_counts_the_slots_which_are_those_of_a_binary_counter(way):
    for microbatches in (2, 8, 12):
        for found in run_ranks(memory, 2, list(STRATEGIES), microbatches, way):
            for one in found:
                sizes = [size["main_gradients"] for size in one["sizes"]]
                assert sizes == [(1 + slots_for(microbatches // 2)) * one["shard"]] * 4, "from the first batch on"
                assert one["sizes"][1] == one["sizes"][2] == one["sizes"][3]


def count(rank: int, ranks: int, grad_sum: str) -> list[tuple[list[Any], ...]]:
    found = []
    for strategy in STRATEGIES:
        net = make_net()
        model = wrap(net, MICROBATCHES, strategy=strategy, precision={"grad_sum": grad_sum})
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
        for step in range(3):
            with Traffic() as traffic:
                for g in range(rank, MICROBATCHES, ranks):
                    plain_loss(model, step, g).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([(sent.kind, sent.nbytes) for sent in traffic.sent])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.slow
def test_what_travels_is_what_travels_in_rank_order(ranks):
    for tree, rank_order in zip(run_ranks(count, ranks, "tree"), run_ranks(count, ranks, "rank_order"), strict=True):
        for strategy, mine, other in zip(STRATEGIES, tree, rank_order, strict=True):
            assert mine, strategy
            if strategy != "no_shard":
                assert mine == other, strategy
                continue
            # Whole sums of rank order are gathered in each microbatch; of a tree, what a batch adds up to is: here
            # after each backward, for every one may be the last.
            sent, often = (sum(size for _, size in one) for one in (mine, other))
            assert sent <= often


@pytest.mark.slow
def test_whole_sums_of_a_tree_are_gathered_once_a_batch():
    for hinted, plain in zip(run_ranks(hinted_gathers, 4), run_ranks(count, 4, "tree"), strict=True):
        each = sum(size for kind, size in plain[STRATEGIES.index("no_shard")] if kind == "all_gather")
        assert hinted * (MICROBATCHES // 4) == each > 0


def hinted_gathers(rank: int, ranks: int) -> int:
    net = make_net()
    model = wrap(net, MICROBATCHES, strategy="no_shard")
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    for step in range(3):
        with Traffic() as traffic:
            for g in range(rank, MICROBATCHES, ranks):
                with hint(model, "last", g + ranks >= MICROBATCHES):
                    plain_loss(model, step, g).backward()
            optimizer.step()
            optimizer.zero_grad()
    return sum(sent.nbytes for sent in traffic.sent if sent.kind == "all_gather")
