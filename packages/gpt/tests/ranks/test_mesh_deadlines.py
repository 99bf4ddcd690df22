"""Groups of a mesh end a wait for a rank that does not come within the run's deadline, not torch's of 30 minutes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_helpers import world_of
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import ranktest
from sixfold.gpt.config.train_config import ParallelConfig
from sixfold.gpt.engine import step, weight_versions
from sixfold.gpt.engine.rank_model import TIED
from sixfold.gpt.engine.weight_versions import StageWeights
from sixfold.gpt.errors import TrainError
from sixfold.gpt.model import moe
from sixfold.gpt.model.loss import token_losses
from sixfold.gpt.observe.straggler import Clock
from sixfold.gpt.parallel import lost_ranks
from sixfold.gpt.parallel.axes import ALONE, Axes, Axis
from sixfold.gpt.parallel.context_parallel import RingPlan, ring
from sixfold.gpt.parallel.mesh import make_mesh, pair_group
from sixfold.gpt.parallel.sequence_parts import SequencePart, key_blocks

DEADLINE_S = 77.0
SHORT_S = 1.0


def deadlines(rank: int, ranks: int, degrees: dict[str, int]) -> dict[str, float]:
    """Seconds by group of this rank's mesh, as gloo has them."""
    mesh = make_mesh(ParallelConfig(**degrees), world_of(rank, ranks), torch.device("cpu"), DEADLINE_S)
    axes, hybrid, experts = mesh.axes, mesh.hybrid, mesh.expert_data
    groups = {
        "pipeline": mesh.pipeline, "data": mesh.data, "statistics": mesh.statistics, "control": mesh.control,
        "tp": axes.tp.group, "cp": axes.cp.group, "ep": axes.ep.group, "exchange": axes.exchange.group,
        "experts": experts and experts.get_group(), "pair": pair_group(mesh, 0, mesh.pp - 1),
        "copies": hybrid and hybrid.get_group(0), "shards": hybrid and hybrid.get_group(1),
    }  # fmt: skip
    for name, group in groups.items():
        if group is not None:
            dist.barrier(group)  # all of its members made it
            assert group.size() > 1 or name == "experts", f"{name} is a group of one"
    return {
        name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for name, group in groups.items()
        if group is not None
    }


@pytest.mark.slow
def test_every_group_of_a_mesh_has_the_deadline_of_the_run():
    seen = set()
    for degrees in ({"dp": 2, "dp_replicate": 2, "cp": 2, "ep": 2}, {"pp": 2, "dp": 1, "tp": 2}):
        for found in ranktest.run_ranks(deadlines, 4, degrees):
            assert set(found.values()) == {DEADLINE_S}, found
            seen |= set(found)
    assert seen == {
        "pipeline", "data", "statistics", "control", "tp", "cp", "ep", "exchange", "experts", "pair", "copies", "shards"
    }  # fmt: skip


def alone_in_the_ring(rank: int, ranks: int) -> tuple[float, str]:
    """Of two rings the second rank stays away, from a forward and from a backward: seconds that the first one waits."""
    mesh = make_mesh(
        ParallelConfig(dp=2, cp=2, cp_comm_type="p2p"), world_of(rank, ranks), torch.device("cpu"), SHORT_S
    )
    store, axis = ranktest.store(), mesh.axes.cp
    store.set(f"up{rank}", "")
    store.wait([f"up{other}" for other in range(ranks)])
    sees = torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)
    plan = RingPlan(axis, key_blocks(SequencePart(axis.rank, axis.size), 16), *sees)
    rows = [torch.ones(1, 8, 2, 4, requires_grad=True) for _ in range(3)]
    out = ring(*rows, plan).sum()
    if axis.rank == 1:
        store.wait(["done0", "done1"], timedelta(seconds=30))
        return 0.0, ""
    begin = time.monotonic()
    with pytest.raises(TrainError) as caught:
        out.backward() if mesh.dp_rank else ring(*rows, plan)
    waited = time.monotonic() - begin
    store.set(f"done{mesh.dp_rank}", "")
    return waited, str(caught.value)


def test_a_ring_in_a_run_waits_for_the_runs_deadline_and_no_longer():
    found = ranktest.run_ranks(alone_in_the_ring, 4)
    assert all(0.8 * SHORT_S < seconds < 10 for seconds, _ in found[::2]), found
    assert re.match(
        r"ring of keys and values over cp of ranks 0, 1: rank 0 waited \d+\.\d s .* process of rank 1", found[0][1]
    )
    assert re.match(
        r"ring of .*keys and values over cp of ranks 2, 3: rank 2 waited \d+\.\d s .* process of rank 3", found[2][1]
    )


class Away(Exception):
    """What the second rank raises where it stays away."""


def stand_in(axis: Axis = ALONE.tp, **groups: dist.ProcessGroup) -> Any:
    """As much of a RankModel as sums of a step look at."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    mesh = {"axes": Axes(tp=axis), "data": None, "pipeline": None, "size": 2, "rank": 0, "pp_rank": 0}
    return SimpleNamespace(
        mesh=SimpleNamespace(**mesh | groups),
        model=SimpleNamespace(main_parameters=lambda: [(f"0.{name}", weight) for name in ("norm.weight", TIED)],
                              module=nn.Linear(1, 1)),
        config=SimpleNamespace(grad_sum="backend", model=SimpleNamespace(expert_layers=range(0), num_experts=0)),
        tied_group=groups.get("pipeline"),
        tied_here=None,
        device=torch.device("cpu"),
        clock=Clock(),
    )  # fmt: skip


def agreed(rank: Any) -> None:
    step._agree(rank, [], torch.ones(()), torch.zeros(()), step.Asks(), torch.zeros(4, 1))


def squares(rank: Any) -> None:
    rank.config.grad_sum = "tree"
    rank.counts_in_norm = lambda name: True
    model = SimpleNamespace(grad_square_sum=lambda include, beyond: beyond(torch.zeros(2), dist.ReduceOp.SUM))
    step._square_sum(rank, model)  # type: ignore[arg-type]


def cross_entropy(axis: Axis) -> None:
    token_losses(torch.ones(1, 4, 8), torch.zeros(1, 4, dtype=torch.int64), None, 16, axis)


def balance(axis: Axis) -> None:
    config = SimpleNamespace(router_aux_loss=0.1, num_experts=2)
    module = SimpleNamespace(config=config, axes=SimpleNamespace(statistics=axis))
    moe.MixtureOfExperts._balance(module, torch.ones(2))  # type: ignore[arg-type]


def awaited(group: dist.ProcessGroup) -> None:
    with step.group_collective(
        group, "sum of the number of targets over dp and cp"
    ):  # who stays away does not start it either
        _, counted = step._sum_targets(stand_in(data=group), [])
    step._await_targets(stand_in(data=group), counted)


def versions(group: dist.ProcessGroup, in_order: bool) -> None:
    StageWeights._summed(SimpleNamespace(_data=group, _in_rank_order=in_order), torch.ones(2))  # type: ignore[arg-type]


# What is done, and a call that does it between two ranks.
SUMS: list[tuple[str, Callable[[Axis, dist.ProcessGroup], object]]] = [
    ("largest logit of each token over tp", lambda axis, group: cross_entropy(axis)),
    ("sums of the cross entropy over tp", lambda axis, group: cross_entropy(axis)),
    ("count of each expert's tokens over cp and tp", lambda axis, group: balance(axis)),
    ("sum of gradients of whole weights over tp", lambda axis, group: step._sum_over_tensor_parallel(stand_in(axis))),
    ("sum of the tied embedding's gradient over its two stages",
     lambda axis, group: step._sum_tied_embedding(stand_in(pipeline=group))),
    ("sum of the number of targets over dp and cp", lambda axis, group: awaited(group)),
    ("sum of loss, norm and stop flag over dp and cp", lambda axis, group: agreed(stand_in(data=group))),
    ("sum of loss, norm and stop flag over tp", lambda axis, group: agreed(stand_in(axis))),
    ("sum of loss, norm and stop flag over pp", lambda axis, group: agreed(stand_in(pipeline=group))),
    ("sum of squares for the norm over tp", lambda axis, group: squares(stand_in(axis))),
    ("sum of squares for the norm over pp", lambda axis, group: squares(stand_in(pipeline=group))),
    ("sum of the evaluation's loss over dp and cp", lambda axis, group: step.evaluate(stand_in(data=group), [])),
    ("sum of the evaluation's loss over pp", lambda axis, group: step.evaluate(stand_in(pipeline=group), [])),
    ("sum of a stage's gradients over dp and cp", lambda axis, group: versions(group, in_order=False)),
]  # fmt: skip


def stay_away(patch: pytest.MonkeyPatch, where: str) -> None:
    """This rank goes no further than to the collective ``where``."""
    among = lost_ranks.group_collective

    def away(group: dist.ProcessGroup | None, what: str) -> AbstractContextManager[None]:
        if what == where:
            raise Away
        return among(group, what)

    for module in (lost_ranks, step, moe, weight_versions):
        patch.setattr(module, "group_collective", away)


def missed(rank: int, ranks: int) -> list[str]:
    """What the first rank of each pair says of the sums from which the second one stays away; pairs share the sums."""
    store, found = ranktest.store(), []
    pairs = [[0, 1] if number % 2 == 0 else [2, 3] for number in range(len(SUMS))]
    groups = [dist.new_group(pair) for pair in pairs]
    for number, ((what, call), pair, group) in enumerate(zip(SUMS, pairs, groups, strict=True)):
        if rank not in pair:
            continue
        # Of the cross entropy's sums the first one is to succeed, on a busy machine too.
        _set_pg_timeout(timedelta(seconds=2.0 if what.startswith("sums of the cross entropy") else 0.3), group)
        at = pair.index(rank)
        with pytest.MonkeyPatch.context() as patch:
            if at == 1:
                stay_away(patch, what)
            with pytest.raises(Away if at == 1 else TrainError) as caught:
                call(Axis(at, 2, group), group)
        if at == 1:
            store.wait([f"told{number}"], timedelta(seconds=60))
        else:
            store.set(f"told{number}", "")
            found.append(str(caught.value))
    return found


@pytest.mark.slow
def test_a_lost_rank_is_told_of_with_the_sum_from_which_it_stayed_away():
    first, _, second, _ = ranktest.run_ranks(missed, 4)
    assert len(first) + len(second) == len(SUMS)
    for texts, sums, (here, there) in ((first, SUMS[::2], (0, 1)), (second, SUMS[1::2], (2, 3))):
        for text, (what, _) in zip(texts, sums, strict=True):
            ranks = f"of ranks {here}, {there}: rank {here} waited"
            assert re.match(rf"{what} {ranks} \d+\.\d s .* process of rank {there}", text), text
