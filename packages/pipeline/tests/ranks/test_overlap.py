"""Batches that overlap over real edges: the caller's collectives between steps, and a restart in the midst."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import layers, square_loss
from version_helpers import OPTIMIZERS, delayed, made_batches, same_weights

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, Stage, pipedream_2bw


def runner_of(rank, module, edges):
    stage = Stage(module, rank, optimizer=OPTIMIZERS["momentum"](list(module.parameters())))
    options = {"timeout_s": 20, "lookahead": 4, "edges": edges, "dynamic_shapes": edges == "groups"}
    return PipelineRunner(pipedream_2bw(3, 3), [stage], dist.group.WORLD, square_loss, **options)


def train(rank: int, ranks: int, edges: str | None) -> None:
    """Batches of several sizes, an all-reduce and an evaluation behind each, a restart, and a drain."""
    modules, oracle = layers(3), layers(3)
    batches = [made_batches(1, 3, rows=2 + t % 3, seed=t)[0] for t in range(6)]
    module, runner = modules[rank], runner_of(rank, modules[rank], edges)
    expected = delayed(oracle, batches, OPTIMIZERS["momentum"])
    for t, (inputs, targets) in enumerate(batches):
        losses = runner.step(inputs, targets).losses
        assert losses == (expected[t] if rank == 2 else [])
        norm = sum(p.detach().square().sum() for p in module.parameters())
        dist.all_reduce(norm)
        assert len(runner.evaluate(inputs, targets).losses) == (3 if rank == 2 else 0)
        if t == 2:
            file = io.BytesIO()
            torch.save(runner.state_dict(), file)
            file.seek(0)
            module = layers(1, seed=77)[0]
            runner = runner_of(rank, module, edges)
            runner.load_state_dict(torch.load(file, weights_only=True))
        if t == 4:
            runner.drain()
    runner.drain()
    assert same_weights([module], [oracle[rank]])


@pytest.mark.parametrize("edges", ["groups", None])
def test_2bw_with_collectives_between_steps_and_a_restart_in_the_midst(edges):
    run_ranks(train, 3, edges)
