"""Making, lowering and proving programs of 16k, 65k and 262k compute actions, beside PyTorch's own.

    pytest benchmarks/bench_programs.py --benchmark-timer time.process_time

The time of the process is the fair one on a busy machine. PyTorch's part is its interleaved 1F1B's generator, its
validation, ``_add_reduce_grad`` and ``_add_send_recv``; its ``_add_unshard_reshard`` is left out, since with fewer
than three chunks per rank it looks through the rest of the list at every action.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sixfold.pipeline import Costs, hanayo, interleaved, simulate, v_min, verify, zb_v
from sixfold.pipeline.passes import lower

RANKS, CHUNKS = 8, 2
SIZES = [16_384, 65_536]
ROUNDS = {16_384: 5, 65_536: 3, 262_144: 1}


def microbatches_of(benchmark, actions: int, kinds: int = 2) -> int:
    """m of a program of ``actions`` compute actions, noted as the scale of the benchmark."""
    m = actions // (kinds * RANKS * CHUNKS)
    benchmark.extra_info.update(ranks=RANKS, chunks=CHUNKS, microbatches=m, compute_actions=kinds * RANKS * CHUNKS * m)
    return m


@pytest.mark.parametrize("actions", [*SIZES, 262_144])
def test_generate_lower_verify(benchmark, actions):
    m = microbatches_of(benchmark, actions)
    benchmark.pedantic(lambda: verify(lower(interleaved(RANKS, m, CHUNKS))), rounds=ROUNDS[actions])


@pytest.mark.parametrize("actions", SIZES)
def test_torch_generate_validate_lower(benchmark, actions):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="the peer")
    m = microbatches_of(benchmark, actions)
    sizes = SimpleNamespace(
        pp_group_size=RANKS,
        n_local_stages=CHUNKS,
        number_of_rounds=m // RANKS,
        microbatches_per_round=RANKS,
        _n_microbatches=m,
        _num_stages=RANKS * CHUNKS,
        microbatch_count=m,
    )

    def make():
        generate = theirs.ScheduleInterleaved1F1B._calculate_single_rank_operations
        compute = {r: [a for a in generate(sizes, r) if a is not None] for r in range(RANKS)}
        theirs._validate_schedule(compute, RANKS, RANKS * CHUNKS, m)
        reduced = {r: theirs._add_reduce_grad(row, m) for r, row in compute.items()}
        return theirs._add_send_recv(reduced, lambda stage: stage % RANKS, RANKS * CHUNKS)

    benchmark.pedantic(make, rounds=ROUNDS[actions])


@pytest.mark.parametrize("actions", SIZES)
def test_verify_of_compute_actions(benchmark, actions):
    program = interleaved(RANKS, microbatches_of(benchmark, actions), CHUNKS)
    benchmark.pedantic(verify, (program,), rounds=ROUNDS[actions])


@pytest.mark.parametrize("actions", SIZES)
def test_verify_of_the_lowered_program(benchmark, actions):
    program = lower(interleaved(RANKS, microbatches_of(benchmark, actions), CHUNKS))
    benchmark.pedantic(verify, (program,), rounds=ROUNDS[actions])


@pytest.mark.parametrize("make", [zb_v, hanayo, v_min], ids=lambda make: make.__name__)
def test_generate(benchmark, make):
    m = microbatches_of(benchmark, 16_384, kinds=2 if make is hanayo else 3)
    benchmark.pedantic(make, (RANKS, m), rounds=3)


def test_simulate(benchmark):
    program = interleaved(RANKS, microbatches_of(benchmark, 16_384), CHUNKS)
    benchmark.pedantic(simulate, (program, Costs.per_rank(program)), rounds=5)
