"""The square sum of gradients with ``grad_sum="tree"``: one number for any ranks, strategy and mesh."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from fsdp_gradient_helpers import gradient_of, set_gradients
from fsdp_helpers import Block, make_net
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SUMS = ("tree", "backend")
EXPERTS = "blocks.1."  # on a mesh of their own, where the test says so


def numbers(model: FullyShardedDataParallel) -> list[float]:
    """Square sums of all and of some, and the norm; then of a NaN, an infinity, and of zeros."""
    found = []
    for change in ({}, {"blocks.1.up.weight": math.inf}, {"norm.bias": math.nan, "blocks.1.up.weight": math.inf}):
        set_gradients(model, make_net(), change)
        found.append(float(model.grad_square_sum()))
    set_gradients(model, make_net())
    found += [
        float(model.grad_square_sum(lambda name: name.endswith("weight"))),
        float(model.grad_square_sum(lambda name: False)),
        float(model.clip_grad_norm_(1e-3)),
        float(model.grad_square_sum()),
    ]
    model.scale_gradients(0.0)
    return [*found, float(model.grad_square_sum())]


def of_all_layouts(rank: int, ranks: int, grad_sum: str) -> dict[str, list[float]]:
    found = {}
    for strategy in STRATEGIES:
        for layout in ("plain", "pieces", *(("hybrid", "experts", "hybrid experts") if ranks == 4 else ())):
            hybrid = init_device_mesh("cpu", (2, 2)) if layout.startswith("hybrid") else None
            own = DeviceMesh("cpu", list(range(ranks))) if layout.endswith("experts") else None
            model = FullyShardedDataParallel(
                make_net(),
                **({"process_group": dist.group.WORLD} if hybrid is None else {"mesh": hybrid}),
                strategy=strategy,
                fsdp_unit_modules=[Block],
                granularity=(lambda name, parameter: 1) if layout == "pieces" else None,
                mesh_for=None if own is None else (lambda name, own=own: own if name.startswith(EXPERTS) else None),
                mixed_precision=MixedPrecision(grad_sum=grad_sum),
                buffers=BufferConfig(merge_bytes=None),
            )
            found[f"{strategy} {layout}"] = numbers(model)
    return found


def of_one_process(grad_sum: str) -> dict[str, list[float]]:
    model = FullyShardedDataParallel(
        make_net(), process_group=None, mixed_precision=MixedPrecision(grad_sum=grad_sum), fsdp_unit_modules=[Block]
    )
    return {"alone": numbers(model)}


def hexes(numbers: list[float]) -> list[str]:
    return [one.hex() for one in numbers]  # NaN is equal to itself so


@pytest.mark.slow
def test_the_norm_is_one_number_for_any_ranks_strategy_and_mesh_and_by_default_it_is_not():
    found = {grad_sum: {f"1 {k}": v for k, v in of_one_process(grad_sum).items()} for grad_sum in SUMS}
    for grad_sum in SUMS:
        for ranks in (2, 4):
            results = run_ranks(of_all_layouts, ranks, grad_sum)
            assert all(hexes(results[0][k]) == hexes(one[k]) for one in results for k in results[0])
            found[grad_sum] |= {f"{ranks} {layout}": one for layout, one in results[0].items()}
    tree, default = ({k: hexes(one) for k, one in found[grad_sum].items()} for grad_sum in SUMS)
    alone = tree["1 alone"]
    assert {k: one for k, one in tree.items() if one != alone} == {}
    assert len({one[0] for one in default.values()}) > 1
    whole = {name: gradient_of(name, parameter.shape) for name, parameter in make_net().named_parameters()}
    exact = sum(Fraction(x) ** 2 for one in whole.values() for x in one.reshape(-1).tolist())
    square, infinite, nan, _, nothing, norm, _, zero = found["tree"]["1 alone"]
    assert abs(Fraction(square) - exact) <= exact / 2**40
    assert norm == float(torch.tensor(square, dtype=torch.float64).sqrt().float())
    assert (infinite, nothing, zero) == (math.inf, 0.0, 0.0) and math.isnan(nan)


def beyond_the_mesh(rank: int, ranks: int, grad_sum: str) -> float:
    """Two stages of a pipeline with two ranks each: a rank of the other stage holds other gradients."""
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = FullyShardedDataParallel(
        make_net(),
        process_group=stages[rank // 2],
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(grad_sum=grad_sum),
    )
    set_gradients(model, make_net())
    mine = (lambda name: name.startswith("blocks")) if rank // 2 else (lambda name: not name.startswith("blocks"))
    return float(model.grad_square_sum(mine, lambda tensor, op: dist.all_reduce(tensor, op, group=across)))


@pytest.mark.slow
def test_beyond_adds_what_other_stages_hold():
    alone = of_one_process("tree")["alone"][0]
    assert [one.hex() for one in run_ranks(beyond_the_mesh, 4, "tree")] == [alone.hex()] * 4
    assert run_ranks(beyond_the_mesh, 4, "backend") == pytest.approx([alone] * 4, rel=1e-12)
