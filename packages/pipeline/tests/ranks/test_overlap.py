"""Batches that overlap over real edges: the caller's collectives between steps, and a restart in the midst."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import layers, square_loss
from torch.nn.parallel import DistributedDataParallel
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
@pytest.mark.slow
def test_2bw_with_collectives_between_steps_and_a_restart_in_the_midst(edges):
    run_ranks(train, 3, edges)


def train_replicas(rank: int, ranks: int, same: bool) -> None:
    """A pipeline of two stages in each process; DDP averages every stage over both, batch by batch."""
    modules, oracle, batches = layers(2), layers(2), made_batches(4, 2, seed=0 if same else rank)
    stages = []
    for s, module in enumerate(modules):
        optimizer = OPTIMIZERS["momentum"](list(module.parameters()))
        stages.append(Stage(DistributedDataParallel(module), s, optimizer=optimizer))
    runner = PipelineRunner(pipedream_2bw(2, 2), stages, loss_fn=square_loss, timeout_s=20)
    losses = [runner.step(inputs, targets).losses for inputs, targets in batches]
    runner.drain()
    expected = delayed(oracle, batches, OPTIMIZERS["momentum"])
    assert same == (losses == expected) == same_weights(modules, oracle)  # the average of equal gradients is theirs
    weights = torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])
    others = weights.clone()
    dist.broadcast(others, 0)
    assert torch.equal(weights, others)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.slow
def test_stages_that_are_distributed_data_parallel(same):
    run_ranks(train_replicas, 2, same)
