"""Collectives and bytes of a step against the table of strategies, which is written out here by hand.

    a list of cases --> one process with a fake group of eight --> Sent per step --> the table

Units are made of different sizes, so that a collective's bytes say which unit it belongs to.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fsdp_count_helpers import Sent, Traffic, fake_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WIDTH, WORDS, RANKS = 128, 600, 8
WIDENED = (3, 4, 5, 6)  # hidden width of each block by WIDTH: units of 98 k to 197 k elements
# In multiples of the model's bytes per optimizer step, by micro-batches m (spec, section 2.1).
TABLE = {
    "no_shard": lambda m: {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 1},
    "optim": lambda m: {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 0},
    "optim_grads": lambda m: {"all_gather": 1, "reduce_scatter": m, "all_reduce": 0},
    "optim_grads_params": lambda m: {"all_gather": 2 * m, "reduce_scatter": m, "all_reduce": 0},
}


class Block(nn.Module):
    def __init__(self, hidden: int, recompute: str) -> None:
        super().__init__()
        self.norm, self.recompute = nn.LayerNorm(WIDTH), recompute
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute in ("inside", "reentrant"):
            return x + checkpoint(self.inner, x, use_reentrant=self.recompute == "reentrant")
        return x + self.inner(x)


class Net(nn.Module):
    """Embedding, four blocks, head: units; the norm is the root's."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(wider * WIDTH, recompute) for wider in WIDENED)
        self.head = nn.Linear(WIDTH, WORDS + 40, bias=False)
        self.around = recompute == "around"

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
        return self.head(self.norm(x)).square().mean()


@dataclass(frozen=True, kw_only=True)
class Case:
    strategy: str = "optim_grads_params"
    accumulate: int = 1
    way: str = "microbatch"  # "microbatch", "none", "no_sync", "evaluate"
    gathered: str | int = "double"
    recompute: str = "none"
    precision: dict[str, Any] = field(default_factory=dict)
    bucket: int | None = None
    replicas: int = 1
    granularity: str = "element"
    frozen: bool = False


class Result:
    """What one steady step sent, and the bytes of each unit's parameters at four bytes per element."""

    def __init__(self, sent: list[Sent], in_step: list[Sent], unit_bytes: dict[str, int]) -> None:
        self.sent, self.in_step, self.unit_bytes = sent, in_step, unit_bytes

    def calls(self, kind: str) -> int:
        return sum(sent.kind == kind for sent in self.sent)

    def nbytes(self, kind: str) -> int:
        return sum(sent.nbytes for sent in self.sent if sent.kind == kind)

    def of_unit(self, kind: str, unit: str) -> int:
        """Collectives of ``kind`` whose bytes are nearest to this unit's."""
        nearest = [
            min(self.unit_bytes, key=lambda u: abs(self.unit_bytes[u] - s.nbytes)) for s in self.sent if s.kind == kind
        ]
        return nearest.count(unit)


def count(rank: int, ranks: int, cases: list[Case]) -> list[Result]:
    group = fake_world(RANKS)
    return [count_case(case, group) for case in cases]


def count_case(case: Case, group: Any) -> Result:
    torch.manual_seed(0)
    net = Net(case.recompute)
    if case.frozen:
        net.blocks[1].up.requires_grad_(False)
    sizes = {f"blocks.{at}": sum(p.nbytes for p in block.parameters()) for at, block in enumerate(net.blocks)}
    sizes |= {name: net.get_submodule(name).weight.nbytes for name in ("embedding", "head")}
    sizes[""] = sum(p.nbytes for p in net.norm.parameters())
    mesh = None
    if case.replicas > 1:
        mesh = init_device_mesh("cpu", (case.replicas, RANKS // case.replicas), mesh_dim_names=("replicate", "shard"))
    model = FullyShardedDataParallel(
        net,
        mesh=mesh,
        process_group=None if mesh is not None else group,
        strategy=case.strategy,
        fsdp_unit_modules=[Block, nn.Embedding, net.head],
        mixed_precision=MixedPrecision(**case.precision),
        buffers=BufferConfig(gathered_bytes=case.gathered, bucket_bytes=case.bucket),
        granularity=lambda name, parameter: case.granularity,
        initial="trust",
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1), model)
    tokens = torch.arange(32).view(2, 16)
    for _ in range(3):
        step, whole = Traffic(), Traffic()
        with whole:
            for k in range(case.accumulate):
                last = k == case.accumulate - 1
                hint = model.microbatch(last=last) if case.way == "microbatch" else nullcontext()
                with model.no_sync() if case.way == "no_sync" and not last else hint:
                    if case.way == "evaluate":
                        with torch.no_grad():
                            model(tokens)
                    else:
                        model(tokens).backward()
        with step:
            if case.way != "evaluate":
                optimizer.step()
                optimizer.zero_grad()
    return Result(whole.sent, step.sent, sizes)


def run(cases: list[Case]) -> list[tuple[Case, Result]]:
    return list(zip(cases, run_ranks(count, 1, cases)[0], strict=True))


def table_cases() -> list[Case]:
    plain = [
        Case(strategy=strategy, accumulate=m, gathered=gathered)
        for strategy in STRATEGIES
        for m in (1, 3)
        for gathered in ("double", "all")
        if gathered == "double" or strategy != "no_shard"
    ]
    low = [Case(strategy=s, precision={"param_dtype": torch.bfloat16}) for s in STRATEGIES]
    return plain + low + [Case(accumulate=3, gathered=1_800_000), Case(accumulate=3, gathered=2_400_000)]


@pytest.fixture(scope="module")
def table() -> list[tuple[Case, Result]]:
    return run(table_cases())


@pytest.mark.slow
def test_calls_and_bytes_are_never_more_than_the_table(table: list[tuple[Case, Result]]) -> None:
    for case, found in table:
        units, whole = len(found.unit_bytes), sum(found.unit_bytes.values())
        for kind, models in TABLE[case.strategy](case.accumulate).items():
            wire = 0.5 if case.precision and kind == "all_gather" else 1.0  # bf16 weights travel in two bytes
            assert found.calls(kind) <= models * units, f"{case}: {kind}"
            assert found.nbytes(kind) <= models * whole * wire * 1.01, f"{case}: {kind}"
        assert found.calls("all_to_all") == found.calls("broadcast") == 0, case
        assert found.in_step == [], f"{case}: {found.in_step} were sent inside optimizer.step()"


def test_reductions_are_one_per_unit_and_all_bytes_travel(table: list[tuple[Case, Result]]) -> None:
    for case, found in table:
        kind, models = (
            ("all_reduce", 1)
            if case.strategy == "no_shard"
            else ("reduce_scatter", TABLE[case.strategy](case.accumulate)["reduce_scatter"])
        )
        for unit in found.unit_bytes:
            assert found.of_unit(kind, unit) == models, f"{case}: {unit}"
        assert found.nbytes(kind) >= models * sum(found.unit_bytes.values()), case


def test_the_root_stays_from_forward_to_backward(table: list[tuple[Case, Result]]) -> None:
    for case, found in table:
        if case.strategy == "optim_grads_params" and not case.precision:
            assert found.of_unit("all_gather", "") <= case.accumulate, case
            most = 1 if case.gathered == "all" else 2 * case.accumulate
            assert all(found.of_unit("all_gather", unit) <= most for unit in found.unit_bytes), case


@pytest.mark.slow
def test_recompute_adds_no_collective() -> None:
    cases = [
        Case(strategy=strategy, recompute=recompute)
        for strategy in STRATEGIES
        for recompute in ("none", "inside", "reentrant", "around")
    ]
    plain: list[Sent] = []
    for case, found in run(cases):
        if case.recompute == "none":
            plain = sorted(found.sent)
        assert sorted(found.sent) == plain, case


@pytest.mark.slow
def test_hints_postpone_and_no_hint_reduces_in_every_backward() -> None:
    cases = [Case(strategy=s, accumulate=3, way=way) for s in STRATEGIES for way in ("none", "no_sync")]
    for case, found in run(cases):
        units = len(found.unit_bytes)
        reductions = found.calls("all_reduce" if case.strategy == "no_shard" else "reduce_scatter")
        assert reductions == units * (3 if case.way == "none" else 1), case


def test_evaluation_gathers_each_unit_at_most_once_and_reduces_nothing() -> None:
    for case, found in run([Case(strategy=strategy, way="evaluate") for strategy in STRATEGIES]):
        assert found.calls("all_gather") <= len(found.unit_bytes), case
        assert {sent.kind for sent in found.sent} <= {"all_gather"}, case


@pytest.mark.slow
def test_rank_order_sends_the_bytes_of_a_reduce_scatter_by_all_to_all() -> None:
    cases = [
        Case(strategy=s, precision={"grad_sum": "rank_order", "reduce_dtype": wire})
        for s in STRATEGIES
        for wire in (None, torch.bfloat16)
    ]
    for case, found in run(cases):
        size = 4 if case.precision["reduce_dtype"] is None else 2
        units, whole = len(found.unit_bytes), sum(found.unit_bytes.values()) / 4 * size
        assert found.calls("all_to_all") == units, case
        assert whole <= found.nbytes("all_to_all") <= whole * 1.01, case
        assert found.calls("reduce_scatter") == found.calls("all_reduce") == 0, case


@pytest.mark.slow
def test_replicas_add_one_all_reduce_of_the_shard_per_unit() -> None:
    for case, found in run([Case(strategy=s, replicas=2, accumulate=2) for s in STRATEGIES[1:]]):
        units, whole, shards = len(found.unit_bytes), sum(found.unit_bytes.values()), RANKS // 2
        scatters = TABLE[case.strategy](2)["reduce_scatter"]
        assert found.calls("reduce_scatter") == scatters * units, case
        assert found.calls("all_reduce") == scatters * units, case
        assert whole / shards <= found.nbytes("all_reduce") / scatters <= whole / shards * 1.01, case


def test_row_blocks_pad_at_most_five_percent() -> None:
    ((_, found),) = run([Case(granularity="row")])
    assert found.nbytes("reduce_scatter") <= sum(found.unit_bytes.values()) * 1.05


def test_frozen_parameters_are_gathered_and_never_reduced() -> None:
    ((_, found),) = run([Case(frozen=True)])
    frozen = 4 * (WIDENED[1] * WIDTH) * (WIDTH + 1)
    whole = sum(found.unit_bytes.values())
    assert found.nbytes("reduce_scatter") <= (whole - frozen) * 1.01
    assert found.nbytes("all_gather") <= 2 * whole * 1.01
    assert found.calls("all_gather") <= 2 * len(found.unit_bytes), "one collective per unit and direction"
    assert found.calls("reduce_scatter") == len(found.unit_bytes)


def large(name: str) -> bool:
    return name.endswith(("up.weight", "down.weight"))


@pytest.mark.slow
def test_fp8_weights_travel_in_one_byte_beside_others_in_one_collective_per_unit() -> None:
    ((_, found),) = run([Case(precision={"param_dtype": torch.bfloat16, "fp8": large})])
    quantised = sum(2 * wider * WIDTH * WIDTH for wider in WIDENED)
    others = sum(found.unit_bytes.values()) // 4 - quantised
    assert found.calls("all_gather") <= 2 * len(found.unit_bytes)
    assert found.nbytes("all_gather") <= 2 * (quantised + 2 * others) * 1.01
    assert found.calls("all_reduce") == 1 and found.nbytes("all_reduce") < 2048, "the largest value of each tensor"


@pytest.mark.slow
def test_pieces_add_reductions_and_no_bytes() -> None:
    (_, whole), (_, pieces) = run([Case(), Case(bucket=200_000)])
    assert pieces.calls("reduce_scatter") > whole.calls("reduce_scatter") == len(whole.unit_bytes)
    assert max(sent.nbytes for sent in pieces.sent if sent.kind == "reduce_scatter") <= 200_000 * 1.01
    assert pieces.nbytes("reduce_scatter") <= whole.nbytes("reduce_scatter") * 1.01
    assert pieces.calls("all_gather") == whole.calls("all_gather")
