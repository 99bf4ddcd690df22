"""Programs whose batches overlap, over processes: what users do between steps deadlocks nobody and changes no bit."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from pipeline_helpers import batch, layers, square_loss
from version_helpers import OPTIMIZERS, delayed, made_batches, same_weights

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, Stage, one_f_one_b, pipedream_2bw


def with_much_between(rank: int, ranks: int, edges: str | None) -> bool:
    """2BW, and between its steps a collective, an evaluation, and a second runner on the same group."""
    modules, oracle, batches = layers(ranks), layers(ranks), made_batches(5, 4)
    optimizer = OPTIMIZERS["momentum"](list(modules[rank].parameters()))
    stage = Stage(modules[rank], rank, optimizer=optimizer)
    runner = PipelineRunner(
        pipedream_2bw(ranks, 4), [stage], dist.group.WORLD, square_loss, timeout_s=20, edges=edges, lookahead=8
    )
    other = PipelineRunner(
        one_f_one_b(ranks, 3),
        [Stage(layers(ranks)[rank], rank)],
        dist.group.WORLD,
        square_loss,
        timeout_s=20,
        edges=edges,
    )
    losses = []
    for inputs, targets in batches:
        losses.append(runner.step(list(inputs), list(targets)).losses)
        dist.barrier()
        runner.evaluate(*batch(6), program=one_f_one_b(ranks, 3))
        other.step(*batch(6))
        dist.barrier()
    runner.drain()
    expected = delayed(oracle, batches, OPTIMIZERS["momentum"])
    return (rank != ranks - 1 or losses == expected) and same_weights([modules[rank]], [oracle[rank]])


@pytest.mark.parametrize("edges", ["groups", None])
@pytest.mark.slow
def test_what_is_done_between_the_steps_of_2bw_deadlocks_nobody(edges):
    assert run_ranks(with_much_between, 3, edges) == [True] * 3
