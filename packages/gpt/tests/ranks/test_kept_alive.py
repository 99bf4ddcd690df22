"""Runs that lose ranks and go on: real processes, faults at named instants, and the run that nothing happened to."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kept_alive_helpers import INSTANTS, Fault, assert_same_run, left_behind, pids, run_kept_alive
from gpt_helpers import tiny_config
from run_helpers import lines

from sixfold.gpt.launch.spawn import RankError

LAYOUTS = {
    "fsdp2": (2, "parallel.dp=2"),
    "dp2pp2": (4, "parallel.dp=2", "parallel.pp=2"),
    "fsdp4": (4, "parallel.dp=4"),
}
KEYS = (
    "train.steps=5", "checkpoint.every=1", "eval.every=3", "eval.batches=2", "elastic.hung_after_seconds=2.0",
    "optimizer.weight_decay=0.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The run that nothing happens to, once for each layout."""
    found = {}

    def of(layout):
        if layout not in found:
            ranks, *keys = LAYOUTS[layout]
            found[layout] = tiny_config(tmp_path_factory.mktemp(layout), *KEYS, *keys)
            run_kept_alive(found[layout], ranks)
        return found[layout]

    return of


def broken(folder, layout, *faults, **options):
    ranks, *keys = LAYOUTS[layout]
    config = tiny_config(folder, *KEYS, *keys)
    return config, run_kept_alive(config, ranks, *faults, **options)


IN_A_STEP = [name for name in INSTANTS if not name.startswith(("while", "when"))]
IN_A_RECOVERY = [name for name in INSTANTS if name not in IN_A_STEP]
# Each instant, with ranks, kinds of fault and layouts in turn; all of them by --every-case.
CELLS = [
    (layout, instant, action, rank)
    for layout, (ranks, *_) in LAYOUTS.items()
    for instant in IN_A_STEP
    for action in ("SIGKILL", "error", "SIGSTOP")
    for rank in range(ranks)
]


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "instant", "action", "rank"), CELLS)
def test_a_rank_that_is_lost_at_any_instant_changes_no_bit_of_the_run(
    tmp_path, unbroken, layout, instant, action, rank
):
    config, told = broken(tmp_path, layout, Fault(instant, rank, action))
    assert len(told) == 1 and f"rank {rank}" in told[0] and told[0].endswith("; generation 2 goes on"), told
    assert_same_run(config, unbroken(layout))
    first, second = pids(config)
    assert [a == b for a, b in zip(first, second, strict=True)] == [r != rank for r in range(len(first))]
    [recovery] = lines(config, "recovery")
    assert recovery["generation"] == 2 and [lost["rank"] for lost in recovery["lost"]] == [rank]
    assert recovery["step"] in (2, 3) and recovery["seconds"] < 30


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "instant", "rank"),
    [(layout, instant, rank) for layout in LAYOUTS for instant in IN_A_RECOVERY for rank in range(2)],
)
def test_a_rank_that_is_lost_during_a_recovery_changes_no_bit_either(tmp_path, unbroken, layout, instant, rank):
    faults = Fault("in a forward", 1, "SIGKILL"), Fault(instant, rank, "SIGKILL", generation=2, step=0)
    config, told = broken(tmp_path, layout, *faults)
    assert [line.rpartition("; ")[2] for line in told] == ["generation 2 goes on", "generation 3 goes on"], told
    assert_same_run(config, unbroken(layout))
