"""Final weights of every way to train, bit by bit those of one process that emulates the ranks.

    fsdp_matrix_helpers.Cell --> run_cells (this file), a list of cells in a job of ranks --> wrong(emulate(cell), ..)

Without ``--all-pairs`` every option occurs with every strategy; with it every pair of options does with each.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_matrix_helpers import (
    KINDS,
    PRECISIONS,
    WAYS,
    Block,
    Cell,
    Driven,
    Net,
    covering,
    drive,
    make_adamw,
    make_net,
)
from fsdp_matrix_oracle_helpers import emulate, wrong
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "strategy": STRATEGIES,
    "accumulate": (1, 3),
    "kind": tuple(KINDS),
    "gathered": ("double", "all", 0, 40),
    "prefetch": (None, 0, 100_000),
    "precision": tuple(PRECISIONS),
    "way": WAYS,
    "granularity": ("element", "row", "tensor", 4),
    "grad_sum": ("backend", "rank_order"),
    "bucket": (None, 300),
    "share": (False, True),
    "offload": (False, True),
    "ep": (1, 2),
    "clip": (None, 0.3),
}
CELLS_PER_JOB = 64


@functools.cache
def mesh_of(ranks: int, replicas: int) -> DeviceMesh | None:
    """Replicas outside, shards inside: (replicate, shard). None: one dimension, the world's group is given."""
    if replicas == 1:
        return None
    return init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


@functools.cache
def expert_mesh(ranks: int, ep: int, expert: int) -> DeviceMesh | None:
    """Of the ranks that hold the same experts: every ``ep``-th one. None: the main mesh."""
    if ep == 1:
        return None
    grid = init_device_mesh("cpu", (ranks // ep, ep), mesh_dim_names=("expert_data", "expert"))
    return grid["expert_data"]


def gathered_bytes(cell: Cell, rank: int) -> str | int:
    """What BufferConfig takes: an int cell's percent between what is needed in any case, and all weights."""
    if isinstance(cell.gathered, str):
        return cell.gathered
    probe = wrap(replace(cell, gathered="double"), make_net(cell, rank), rank)
    root, *sizes = (unit["gathered_bytes"] for unit in probe.report()["units"].values())
    least = root + 2 * max(sizes, default=0)
    return int(least + cell.gathered / 100 * max(0, root + sum(sizes) - least))


def wrap(cell: Cell, net: Net, rank: int) -> FullyShardedDataParallel:
    units = [*KINDS[cell.kind].get("units", ()), Block, nn.Embedding] if cell.kind != "no units" else []
    mesh = mesh_of(cell.ranks, cell.replicas)
    return FullyShardedDataParallel(
        net,
        mesh=mesh,
        process_group=None if mesh is not None else dist.group.WORLD,
        strategy=cell.strategy,
        fsdp_unit_modules=units,
        mixed_precision=MixedPrecision(**PRECISIONS[cell.precision], grad_sum=cell.grad_sum),
        buffers=BufferConfig(
            gathered_bytes=gathered_bytes(cell, rank),
            prefetch_bytes=cell.prefetch,
            bucket_bytes=cell.bucket,
            share_communicator=cell.share,
            offload=cell.offload,
        ),
        mesh_for=lambda name: expert_mesh(cell.ranks, cell.ep, rank % cell.ep) if ".extra." in name else None,
        granularity=lambda name, parameter: cell.granularity,
        timeout_s=20.0,
    )


def train(cell: Cell, rank: int) -> dict[str, Tensor]:
    net = make_net(cell, rank)
    model = wrap(cell, net, rank)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    handles = []
    if cell.way.startswith(("fused", "split")):
        fused = cell.way.startswith("fused")
        handles = [model.stage_handle(stage, fused=fused) for stage in net.stages.values()]
    driven = Driven(model, handles, lambda last: model.microbatch(last=last), model.no_sync)
    for step in range(cell.steps):
        drive(cell, net, driven, step, rank)
        if handles:
            model.finish_grad_sync()
        if cell.clip is not None:
            model.clip_grad_norm_(cell.clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


def digest(weights: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return total.hexdigest()


def run_cells(rank: int, ranks: int, cells: list[Cell]) -> list[tuple[str, dict[str, Tensor] | None]]:
    torch.set_num_threads(1)
    results: list[tuple[str, dict[str, Tensor] | None]] = []
    for cell in cells:
        try:
            weights = train(cell, rank)
        except Exception as error:
            raise AssertionError(f"cell {cell}") from error
        results.append((digest(weights), weights if rank < cell.ep else None))
    return results


@functools.cache
def right(cell: Cell) -> list[dict[str, Tensor]]:
    return emulate(cell)


def normal(cell: Cell) -> Cell:
    """The cell whose emulation is the same: what only moves bytes is left out."""
    same_rounds = "optim_grads" if cell.strategy in ("optim_grads", "optim_grads_params") else "optim"
    kind = "plain" if cell.kind in ("nested", "no units") else cell.kind
    return Cell(
        strategy=same_rounds,
        accumulate=cell.accumulate,
        kind=kind,
        precision=cell.precision,
        way=cell.way,
        grad_sum=cell.grad_sum,
        ranks=cell.ranks,
        replicas=cell.replicas,
        steps=cell.steps,
        ep=cell.ep,
        clip=cell.clip,
    )


def check(cells: list[Cell]) -> None:
    differ = []
    for first in range(0, len(cells), CELLS_PER_JOB):
        part = cells[first : first + CELLS_PER_JOB]
        results = run_ranks(run_cells, part[0].ranks, part)
        for at, cell in enumerate(part):
            for expert, expected in enumerate(right(normal(cell))):
                digests = {result[at][0] for result in results[expert :: cell.ep]}
                assert len(digests) == 1, f"ranks hold different weights: {cell}"
                if names := wrong(expected, results[expert][at][1]):
                    differ.append(f"{cell}: {names[:3]}")
    assert differ == [], f"{len(differ)} of {len(cells)} cells"


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--all-pairs"))


@pytest.mark.slow
def test_two_ranks(full: bool) -> None:
    if full:
        for strategy in STRATEGIES:
            check(covering({**OPTIONS, "strategy": (strategy,), "steps": (2, 4)}, every_pair=True))
    else:
        check(covering(OPTIONS, every_pair=False))


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.slow
def test_more_ranks_in_rank_order(ranks: int, full: bool) -> None:
    options = {**OPTIONS, "grad_sum": ("rank_order",), "ranks": (ranks,)}
    # Of the default run one cell per strategy: the kinds are told apart on two ranks already.
    cells = covering(options, every_pair=True) if full else covering(options, every_pair=False)[::14]
    check(cells)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (2, 1), (4, 2), (4, 4)])
@pytest.mark.slow
def test_hybrid_sharding(ranks: int, replicas: int, full: bool) -> None:
    """Shards are summed first. From three ranks of a dimension on in rank order; two in any order are the same bits."""
    options = {**OPTIONS, "ranks": (ranks,), "replicas": (replicas,)}
    if replicas > 2:
        options["grad_sum"] = ("rank_order",)
    check(
        covering(options, every_pair=True) if full else covering(options, every_pair=False)[:: 14 if ranks > 2 else 7]
    )


@pytest.mark.slow
def test_eight_ranks() -> None:
    eight = {"ranks": 8, "grad_sum": "rank_order"}
    check([Cell(**eight, kind="tied"), Cell(**eight, replicas=2, strategy="optim", precision="bf16", kind="unused")])
