"""Small units merged into one: which ones, and that fewer collectives bring the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_count_helpers import Traffic, fake_world
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same, train_steps
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, fully_shard_optimizer
from sixfold.fsdp.setup.unit_selection import find_units, merge_neighbours


def merged(module: nn.Module, selectors: list[Any], merge_bytes: int) -> dict[str, int]:
    specs = merge_neighbours(find_units(module, selectors), merge_bytes, 4)
    return {spec.name: 4 * sum(p.numel() for _, p in spec.parameters) for spec in specs}


def row(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, 1, bias=False) for width in widths))


def test_neighbours_are_one_unit_up_to_the_given_bytes() -> None:
    assert merged(row(5, 5, 5, 5, 5), [nn.Linear], 40) == {"": 0, "0 to 1": 40, "2 to 3": 40, "4": 20}
    assert merged(row(5, 5, 5), [nn.Linear], 39) == {"": 0, "0": 20, "1": 20, "2": 20}
    assert merged(row(5, 50, 5, 5), [nn.Linear], 60) == {"": 0, "0": 20, "1": 200, "2 to 3": 40}


def test_units_with_others_around_or_inside_are_merged_with_their_like_alone() -> None:
    net = nn.Sequential(nn.Linear(1, 1), Block(4), nn.Linear(1, 1), nn.Linear(1, 1))
    found = list(merged(net, [Block, nn.Linear], 10**6))
    assert found == ["", "0", "1", "1.up to 1.down", "2 to 3"]


def train(group: Any, options: dict[str, Any], **buffers: Any) -> tuple[dict[str, Tensor], list[tuple[int, int]], int]:
    """Weights; calls and bytes of gathers and of reductions in the last step; units with parameters."""
    net = make_net(**options.get("net", {}))
    model = FullyShardedDataParallel(
        net,
        process_group=group,
        strategy=options.get("strategy", "optim_grads_params"),
        fsdp_unit_modules=[Block],
        buffers=BufferConfig(**buffers),
        initial="trust",
    )
    optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
    train_steps(model, optimizer, 0, steps=2, accumulate=2)
    with Traffic() as traffic:
        loss_of(model(batch(2, 0, 0)), batch(2, 0, 0)).backward()
    sent = [(traffic.calls(kind), traffic.nbytes(kind)) for kind in ("all_gather", "reduce_scatter")]
    optimizer.step()
    weights = model.full_state_dict() if group is None else {}
    return weights, sent, len(model.units)


OPTIONS = [
    *({"strategy": strategy} for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
    {"net": {"tied": True, "frozen": True}},
    {"net": {"recompute": "inside"}},
    {"net": {"recompute": "around"}},
]


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("merge_bytes", [6000, 10**6])
@pytest.mark.slow
def test_merged_units_give_the_bits_of_units_apart(options: dict[str, Any], merge_bytes: int) -> None:
    options = {**options, "net": {"layers": 5, **options.get("net", {})}}
    apart, _, units = train(None, options)
    together, _, fewer = train(None, options, merge_bytes=merge_bytes)
    assert fewer < units and same(apart, together) == []


def count(rank: int, ranks: int) -> list[tuple[list[tuple[int, int]], int]]:
    group, net = fake_world(2), {"net": {"layers": 6}}
    return [train(group, net, **buffers)[1:] for buffers in ({}, {"merge_bytes": 10**6}, {"merge_bytes": 10**4})]


@pytest.mark.slow
def test_merged_units_are_gathered_and_reduced_by_one_collective() -> None:
    found = run_ranks(count, 1)[0]
    for (gathers, reductions), units in found:
        assert reductions[0] == units
        assert gathers[0] <= 2 * units
    assert [units for _, units in found] == [7, 2, 4]
    apart, *together = [reductions for (_, reductions), _ in found]
    assert all(0.95 * apart[1] <= one[1] <= apart[1] for one in together), "less padding, and no other bytes"


def test_microbatches_in_flight_and_evaluation_find_a_merged_unit() -> None:
    def weights(**buffers: Any) -> tuple[dict[str, Tensor], Tensor]:
        net = make_net(layers=4)
        model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], buffers=BufferConfig(**buffers))
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
        for step in range(3):
            losses = [loss_of(model(batch(step, k, 0)), batch(step, k, 0)) for k in range(2)]
            losses[0].backward()
            losses[1].backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            return model.full_state_dict(), model(batch(9, 0, 0))

    (apart, before), (together, after) = weights(), weights(merge_bytes=10**6)
    assert same(apart, together) == [] and torch.equal(before, after)


def test_a_stage_that_holds_a_part_of_a_merged_unit_is_refused() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[nn.Linear], buffers=BufferConfig(merge_bytes=10**6))
    assert model.units == ("", "0.0 to 1.0")
    with pytest.raises(
        FsdpError, match=r"stage '0' holds a part of the merged unit '0.0 to 1.0'; use .*merge_bytes=None"
    ):
        model.stage_handle(net[0], fused=True)


class Nested(nn.Module):
    """A block with a layer of its own, and layers in a list inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def small_layers(blocks: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *(Nested() for _ in range(blocks)), nn.Linear(4, 4), nn.Linear(4, 4))


def test_single_layers_of_a_block_are_merged_unasked_and_nothing_that_was_named_or_limited() -> None:
    def units(selectors: list[Any], **buffers: Any) -> list[str]:
        net = small_layers()
        chosen = [net[one] if isinstance(one, int) else one for one in selectors]
        model = FullyShardedDataParallel(
            net, process_group=None, fsdp_unit_modules=chosen, buffers=BufferConfig(**buffers)
        )
        return list(model.units)

    classes = [nn.Linear, nn.LayerNorm]
    apart = ["", "0", "1.norm", "1.mlp.0", "1.mlp.2", "2.norm", "2.mlp.0", "2.mlp.2", "3", "4"]
    assert units(classes) == ["", "0", "1.norm to 1.mlp.2", "2.norm to 2.mlp.2", "3 to 4"]
    assert units(classes, merge_bytes=None) == units(classes, gathered_bytes=10**6) == apart
    assert units([Nested]) == ["", "1", "2"]
    assert units([*classes, 3])[-2:] == ["3", "4"]


def test_single_layers_larger_than_four_mebibytes_together_stay_apart() -> None:
    net = nn.Sequential(*(nn.Linear(700, 700, bias=False) for _ in range(4)))
    model = FullyShardedDataParallel(net, process_group=None, fsdp_unit_modules=[nn.Linear])
    assert model.units == ("", "0 to 1", "2 to 3")
    found = model.report()["units"]
    assert max(one["gathered_bytes"] for one in found.values()) <= 4 << 20


def train_layers(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    found = []
    for merge_bytes in ("auto", None):
        torch.manual_seed(0)
        net = small_layers()
        model = FullyShardedDataParallel(
            net,
            process_group=dist.group.WORLD,
            fsdp_unit_modules=[nn.Linear, nn.LayerNorm],
            buffers=BufferConfig(merge_bytes=merge_bytes),
        )
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.full_state_dict())
    return found


def test_layers_merged_unasked_train_to_the_bits_of_layers_apart_on_two_ranks() -> None:
    for together, apart in run_ranks(train_layers, 2):
        assert same(together, apart) == []


def test_a_stage_of_whole_blocks_parts_nothing_that_was_merged_unasked() -> None:
    net = small_layers()
    model = FullyShardedDataParallel(net, process_group=None, fsdp_unit_modules=[nn.Linear, nn.LayerNorm])
    for block in net[1:3]:
        assert model.stage_handle(block, fused=True) is not None


def test_options_that_cannot_merge_are_refused() -> None:
    with pytest.raises(FsdpError, match="merge_bytes is 0; it is >= 1, 'auto' or None"):
        BufferConfig(merge_bytes=0)
    with pytest.raises(FsdpError, match=r"merge_bytes is 5 and mesh_for is set.*leave merge_bytes None"):
        FullyShardedDataParallel(row(3), mesh_for=lambda name: None, buffers=BufferConfig(merge_bytes=5))
