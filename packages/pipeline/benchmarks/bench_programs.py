"""Making, proving and timing a program of 16k compute actions, beside PyTorch's lowering and checks."""

from __future__ import annotations

import pytest

from sixfold.pipeline import Costs, one_f_one_b, simulate, verify
from sixfold.pipeline.passes import lower

RANKS, MICROBATCHES = 8, 1024


@pytest.fixture(scope="module")
def program():
    return one_f_one_b(RANKS, MICROBATCHES)


@pytest.fixture(autouse=True)
def scale(benchmark):
    benchmark.extra_info.update(ranks=RANKS, microbatches=MICROBATCHES, compute_actions=2 * RANKS * MICROBATCHES)


def test_lower(benchmark, program):
    benchmark.pedantic(lower, (program,), rounds=5)


def test_verify(benchmark, program):
    benchmark.pedantic(verify, (lower(program),), rounds=5)


def test_simulate(benchmark, program):
    benchmark.pedantic(simulate, (program, Costs.per_rank(program)), rounds=5)


def test_torch_lower_and_validate(benchmark, program):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="the peer")
    rows = {r: [theirs._Action.from_str(str(a)) for a in row] for r, row in enumerate(program.ranks)}

    def both(compute):
        theirs._validate_schedule(compute, RANKS, RANKS, MICROBATCHES)
        return theirs._add_send_recv(compute, lambda stage: stage, RANKS)

    benchmark.pedantic(both, setup=lambda: (({r: list(row) for r, row in rows.items()},), {}), rounds=5)
