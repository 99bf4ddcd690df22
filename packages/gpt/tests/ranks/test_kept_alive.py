"""Runs that lose ranks and go on: real processes, faults at named instants, and the run that nothing happened to."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from kept_alive_helpers import (
    IN_A_RECOVERY,
    IN_A_STEP,
    INSTANTS,
    Fault,
    assert_same_run,
    left_behind,
    pids,
    run_kept_alive,
)
from run_helpers import lines

from sixfold.gpt.launch.spawn import RankError

LAYOUTS = {
    "fsdp2": (2, "parallel.dp=2"),
    "dp2pp2": (4, "parallel.dp=2", "parallel.pp=2"),
    "fsdp4": (4, "parallel.dp=4"),
    "dp2tp2": (4, "parallel.dp=2", "parallel.tp=2"),
}
KEYS = (
    "train.steps=5", "checkpoint.every=1", "eval.every=3", "eval.batches=2", "elastic.hung_after_seconds=2.0",
    "log.digest_every=1",
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


IN_MEMORY = "checkpoint.every=0"  # but at the end
ON_THE_LAST_STAGE = {("dp2pp2", "between two microbatches")}  # of ranks 2 and 3: there is the loss
MATRIX = [
    (layout, instant, action, number % 4 | 2 * ((layout, instant) in ON_THE_LAST_STAGE))
    for number, (layout, instant, action) in enumerate(
        itertools.product(
            ("fsdp4", "dp2pp2", "dp2tp2"), INSTANTS, ("SIGKILL", "SIGSTOP", "error", "flipped bit", "full memory")
        )
    )
]
random.Random(31).shuffle(MATRIX)  # a sample takes cases evenly between the first and the last


@pytest.mark.sampled(40)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "instant", "action", "rank"), MATRIX)
def test_a_fault_at_any_instant_changes_no_bit_of_the_run(
    tmp_path, unbroken, small_tmpfs, layout, instant, action, rank
):
    """At an instant of a recovery: after a first rank was killed. Memory that is full is so for a kill that follows."""
    _, *keys = LAYOUTS[layout]
    keys += ["elastic.compare_replicas_every=1"] * (instant == "in a comparison")
    keys += [f"elastic.memory_folder={small_tmpfs('16m')}"] * (action == "full memory")
    config = tiny_config(tmp_path, *KEYS, *keys)
    first = [Fault("in a forward", 1, "SIGKILL")] if instant in IN_A_RECOVERY else []
    fault = Fault(instant, rank, action, generation=1 + len(first), step=0 if first else 3)
    killed = [Fault("in a forward", 1, "SIGKILL", generation=1 + len(first), step=5)] * (action == "full memory")
    told = run_kept_alive(config, 4, *first, fault, *killed)
    assert [line.rpartition("; ")[2] for line in told] == [f"generation {n} goes on" for n in range(2, 3 + len(first))]
    assert_same_run(config, unbroken(layout))
    recovery = lines(config, "recovery")[-1]
    assert recovery["generation"] == 2 + len(first) and recovery["seconds"] < 30
    if action == "full memory":
        assert (Path(config.elastic.memory_folder) / "ballast").stat().st_size > 2**20
        return
    if not first:
        [lost] = [one["rank"] for one in recovery["lost"]]
        alike = action == "error" and instant in ("in a save", "in the copy of a snapshot")
        assert lost == rank or alike, "sixfold.dist_ckpt raises it on all ranks alike"
        assert f"rank {lost}" in told[0] and recovery["step"] in (1, 2, 3)[action != "flipped bit" :]
        before, after = pids(config)
        assert [a == b for a, b in zip(before, after, strict=True)] == [r != lost for r in range(4)]
    if action != "flipped bit":
        assert told_steps(config) == [1, 2, 3, 4, 5]


def told_steps(config):
    return [line["step"] for line in lines(config, "step")]


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "instant", "rank", "lazy"),
    [
        (layout, instant, rank, lazy)
        for layout, (ranks, *_) in LAYOUTS.items()
        for instant in IN_A_STEP
        if "save" not in instant and instant != "in a comparison"
        for rank in (0, ranks - 1)
        for lazy in ("false", "true")
    ],
)
def test_no_step_that_was_told_is_done_again_and_none_is_told_twice_or_never(
    tmp_path, unbroken, layout, instant, rank, lazy
):
    ranks, *keys = LAYOUTS[layout]
    config = tiny_config(tmp_path, *KEYS, *keys, IN_MEMORY, f"elastic.memory_lazy={lazy}")
    run_kept_alive(config, ranks, Fault(instant, rank, "SIGKILL"))
    assert told_steps(config) == [1, 2, 3, 4, 5]
    assert_same_run(config, unbroken(layout))


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "source", "step"), [([IN_MEMORY], "memory", 1), ([], "disk", 2)])
def test_a_flipped_bit_in_the_newest_snapshot_sends_all_ranks_back_to_what_is_whole(
    tmp_path, unbroken, keys, source, step
):
    config = tiny_config(tmp_path, *KEYS, "parallel.dp=2", *keys)
    run_kept_alive(config, 2, Fault("in a forward", 1, "flipped bit"))
    [recovery] = lines(config, "recovery")
    assert (recovery["source"], recovery["step"]) == (source, step)
    assert_same_run(config, unbroken("fsdp2"))


@pytest.mark.slow
def test_a_run_without_checkpoints_goes_on_from_memory(tmp_path, unbroken):
    config = tiny_config(tmp_path, *KEYS, "parallel.dp=2", IN_MEMORY)
    faults = [Fault("in a forward", 1, "SIGKILL", step=4), Fault("in a forward", 0, "SIGKILL", generation=2, step=5)]
    run_kept_alive(config, 2, *faults)
    assert [(one["source"], one["generation"]) for one in lines(config, "recovery")] == [("memory", 2), ("memory", 3)]
    assert [one["step"] for one in lines(config, "save")] == [5]
    assert_same_run(config, unbroken("fsdp2"))


@pytest.mark.slow
@pytest.mark.parametrize("instant", ["in a forward", "after the optimizer"])
@pytest.mark.parametrize("layout", ["fsdp2", "dp2pp2"])
def test_lazy_snapshots_hold_the_step_at_whose_end_they_began(tmp_path, unbroken, layout, instant):
    ranks, *keys = LAYOUTS[layout]
    config = tiny_config(tmp_path, *KEYS, *keys, IN_MEMORY, "elastic.memory_lazy=true")
    run_kept_alive(config, ranks, Fault(instant, 1, "SIGKILL", step=5))
    [recovery] = lines(config, "recovery")
    assert recovery["source"] == "memory" and recovery["step"] in ((3,) if instant == "in a forward" else (3, 4))
    assert_same_run(config, unbroken(layout))


@pytest.mark.slow
@pytest.mark.parametrize("action", ["worker", "stopped worker"])
def test_a_worker_that_dies_or_is_stopped_costs_a_snapshot_and_no_process(tmp_path, unbroken, action):
    config = tiny_config(tmp_path, *KEYS, "parallel.dp=2")
    start = time.monotonic()
    told = run_kept_alive(config, 2, Fault("after a snapshot", 1, action))
    assert time.monotonic() - start < 60, "not run.timeout_seconds"
    assert_same_run(config, unbroken("fsdp2"))
    first, *later = pids(config)
    assert all(one == first for one in later), told


NODE_LOST = Fault("in a forward", 2, "host", step=4), Fault("in a forward", 3, "host", step=4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp4", "dp2pp2"])
def test_a_node_whose_memory_is_lost_with_it_costs_no_more_than_its_ranks(tmp_path, unbroken, layout):
    ranks, *keys = LAYOUTS[layout]
    config = tiny_config(tmp_path, *KEYS, *keys, IN_MEMORY)
    told = run_kept_alive(config, ranks, *NODE_LOST, nodes=2)
    first, *_ = lines(config, "recovery")
    assert first["source"] == "memory" and first["step"] in (2, 3), told
    assert_same_run(config, unbroken(layout))
    alone = "elastic.memory_replicas is 1, and the run is on 1 node: copies of a snapshot on other nodes: 0"
    assert [line["why"] for line in lines(config, "no_replica")] == [alone] * len(lines(config, "recovery"))


@pytest.mark.slow
def test_a_node_without_room_for_copies_is_told_once_and_the_run_goes_on(tmp_path, unbroken):
    ranks, *keys = LAYOUTS["fsdp4"]
    config = tiny_config(tmp_path, *KEYS, *keys)
    faults = [Fault("after a snapshot", rank, "no room for copies", step=2) for rank in (2, 3)]
    assert run_kept_alive(config, ranks, *faults, nodes=2) == []
    [line] = lines(config, "no_replica")
    assert line["step"] in (3, 4) and "a snapshot lacks a copy on another node: rank 2 of domain" in line["why"]
    assert "No space left on device" in line["why"]
    assert_same_run(config, unbroken("fsdp4"))


@pytest.mark.slow
def test_without_copies_a_node_whose_memory_is_lost_takes_the_snapshots_with_it(tmp_path, unbroken):
    ranks, *keys = LAYOUTS["fsdp4"]
    config = tiny_config(tmp_path, *KEYS, *keys, IN_MEMORY, "elastic.memory_replicas=0")
    run_kept_alive(config, ranks, *NODE_LOST, nodes=2)
    assert lines(config, "recovery")[0]["source"] == "the start"
    assert_same_run(config, unbroken("fsdp4"))


@pytest.mark.slow
def test_full_memory_costs_the_snapshots_and_not_the_run(tmp_path, unbroken, small_tmpfs):
    small_memory = small_tmpfs("64k")  # in which no snapshot has room
    config = tiny_config(tmp_path, *KEYS, "parallel.dp=2", f"elastic.memory_folder={small_memory}")
    told = run_kept_alive(config, 2, Fault("in a forward", 1, "SIGKILL"))
    assert len(told) == 1, told
    [recovery] = lines(config, "recovery")
    assert (recovery["source"], recovery["step"]) == ("disk", 2)
    notes = lines(config, "no_snapshot")
    assert "ENOSPC" in notes[0]["why"] and len(notes) == 2, "once in each generation"
    assert "older checkpoint" not in notes[0]["why"]
    assert list(small_memory.iterdir()) == []
    assert_same_run(config, unbroken("fsdp2"))


@pytest.mark.slow
def test_an_error_that_would_come_again_ends_the_run_with_its_text_and_the_line_end(tmp_path):
    config = tiny_config(tmp_path, *KEYS, "parallel.dp=2", "optimizer.lr=1e30", "train.clip_grad=0.0")
    with pytest.raises(RankError) as error:
        run_kept_alive(config, 2)
    assert "not finite" in str(error.value) and error.value.final
    assert len(lines(config, "start")) == 1 and lines(config, "end")[-1]["reason"] == "error"


@pytest.mark.slow
def test_a_rank_that_dies_at_the_same_step_each_time_ends_the_run(tmp_path):
    config = tiny_config(tmp_path, *KEYS, "parallel.dp=2", "elastic.spares=0")
    faults = [Fault("in a forward", 1, "SIGKILL", generation=number) for number in (1, 2, 3)]
    with pytest.raises(RankError) as error:
        run_kept_alive(config, 2, *faults, attempts=2)
    text = "rank 1 was killed by SIGKILL; .*; the run was recovered 2 times and did no step beyond 2"
    assert error.match(text) and len(lines(config, "start")) == 3


# Below, the command as a user starts it.


def command(folder, *overrides):
    path = folder / "run.toml"
    (folder / "memory").mkdir()
    path.write_text(tiny_config(folder, *KEYS, *overrides, f"elastic.memory_folder={folder}/memory").to_toml())
    words = [sys.executable, "-m", "sixfold.gpt", "train", str(path), "--keep-alive"]
    (folder / "tmp").mkdir()
    environ = {**os.environ, "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True)


def wait_for_steps(config, count, kind="step", seconds=60.0):
    deadline = time.monotonic() + seconds
    path = Path(config.run.dir) / "metrics.jsonl"
    while not path.exists() or len(lines_so_far(path, kind)) < count:
        assert time.monotonic() < deadline, f"no {count} lines {kind} within {seconds} s"
        time.sleep(0.02)


def lines_so_far(path, kind):
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n") and f'"{kind}"' in line]


def all_have_left(session):
    """What is left of a session some seconds later: kernels take a moment to end a process."""
    deadline = time.monotonic() + 10
    while (found := left_behind(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_and_saves_also_while_ranks_are_being_replaced_and_nothing_is_left(tmp_path, number):
    overrides = ("train.steps=100000", "parallel.dp=2", "eval.every=0")
    config = tiny_config(tmp_path, *KEYS, *overrides)
    process = command(tmp_path, *overrides)
    try:
        wait_for_steps(config, 3)
        [[_, victim]] = pids(config)
        os.kill(victim, signal.SIGKILL)
        time.sleep(0.1)
        process.send_signal(number)
        error = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 143, error
    [end] = lines(config, "end")
    assert (end["reason"], end["step"]) == ("sigterm", lines(config, "save")[-1]["step"])
    assert error.count("asked to stop: finishing this step and saving it") == 1
    assert len(pids(config)) == 2
    assert all_have_left(process.pid) == []
    assert [one.name for one in (tmp_path / "tmp").iterdir() if not one.name.startswith("torchinductor_")] == []
    assert list((tmp_path / "memory").iterdir()) == []


@pytest.mark.slow
def test_members_end_with_a_killed_supervisor_and_so_do_workers_that_are_stopped(tmp_path):
    overrides = ("train.steps=100000", "parallel.dp=2", "elastic.spares=2")
    config = tiny_config(tmp_path, *KEYS, *overrides)
    process = command(tmp_path, *overrides)
    wait_for_steps(config, 1)
    for rank in pids(config)[0]:
        for worker in Path(f"/proc/{rank}/task/{rank}/children").read_text().split():
            os.kill(int(worker), signal.SIGSTOP)
    assert len(left_behind(process.pid)) >= 5  # itself, the server, two ranks, a spare at least
    process.kill()
    process.communicate(timeout=30)
    assert all_have_left(process.pid) == []


@pytest.mark.slow
def test_a_rank_of_an_older_generation_that_wakes_up_is_refused_and_ends(tmp_path, monkeypatch):
    """A SIGKILL that does not arrive, as on a host that was cut off: the rank goes on later, in a run that went on."""
    from sixfold.gpt.elastic import processes

    woken = []
    config = tiny_config(tmp_path, *KEYS, "parallel.dp=2", "train.steps=40", "eval.every=0")
    real = processes._kill

    def cut_off(one):
        if one.stopped_at is None or woken:
            real(one)
        else:
            woken.append(one.process.pid)

    monkeypatch.setattr(processes, "_kill", cut_off)

    def watch():
        if len(woken) == 1 and len(lines(config, "recovery")) == 1:
            os.kill(woken[0], signal.SIGCONT)
            woken.append(time.monotonic())

    run_kept_alive(config, 2, Fault("in a forward", 1, "SIGSTOP"), watch=watch)
    pid, _ = woken
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/task").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}/task").exists(), "the rank that woke up has ended"
    unhurt = tiny_config(tmp_path, *KEYS, "parallel.dp=2", "train.steps=40", "eval.every=0", run="unhurt")
    run_kept_alive(unhurt, 2)
    assert_same_run(config, unhurt)


TREE = ("parallel.grad_sum=tree", "train.global_batch_size=8", "train.micro_batch_size=1")


@pytest.mark.slow
def test_a_run_that_loses_all_but_one_rank_and_gets_them_back_has_the_bits_of_the_unbroken_one(tmp_path):
    """4 -> 3 (2 and a spare) -> 2 -> 1 -> 4 ranks."""
    keys = (*KEYS, *TREE, "train.steps=12", "parallel.dp=4", "elastic.replace=false", "elastic.spares=0", IN_MEMORY)
    config = tiny_config(tmp_path, *keys)
    faults = [
        Fault("in a forward", 1, "SIGKILL", step=2),
        Fault("after the optimizer", 0, "SIGKILL", generation=2, step=4),
        Fault("before the norm is summed", 1, "SIGKILL", generation=3, step=6),
    ]

    metrics, done = Path(config.run.dir) / "metrics.jsonl", []

    def asked():
        if done or not metrics.exists() or len(lines_so_far(metrics, "start")) < 4:
            return None
        done.extend([True] if any('"step": 8,' in line for line in lines_so_far(metrics, "step")) else [])
        return 4 if done else None

    told = run_kept_alive(config, 4, *faults, sizes=(4, 2, 1), asked_ranks=asked)
    assert [line.rpartition("; ")[2] for line in told] == [
        "generation 2 goes on with 2 ranks",
        "generation 3 goes on",
        "generation 4 goes on with 1 rank",
        "generation 5 goes on with 4 ranks",
    ], told
    assert [one["world"] for one in lines(config, "start")] == [4, 2, 2, 1, 4]
    first, second, third, fourth, fifth = pids(config)
    assert second == [first[0], first[2]] and third == [first[3], first[2]] and fourth == [first[3]]
    assert fifth[0] == fourth[0] and not {*fifth[1:]} & {*first}
    assert {one["source"] for one in lines(config, "recovery")} == {"memory"}
    unbroken = tiny_config(tmp_path, *keys, run="unbroken")
    run_kept_alive(unbroken, 4)
    assert_same_run(config, unbroken)


@pytest.mark.slow
def test_a_run_whose_ranks_are_not_replaced_ends_when_none_is_left(tmp_path):
    config = tiny_config(tmp_path, *KEYS, "parallel.dp=2", "elastic.replace=false", "elastic.spares=0")
    faults = [Fault("in a forward", 1, "SIGKILL"), Fault("in a forward", 0, "SIGKILL", generation=2, step=4)]
    with pytest.raises(RankError, match=r"no size of \[2\] ranks has a process for each \(elastic.replace is false\)"):
        run_kept_alive(config, 2, *faults)


@pytest.mark.slow
def test_the_command_resizes_a_run_and_its_loss_goes_on(tmp_path):
    overrides = ("train.steps=100000", "parallel.dp=2", "eval.every=0", *TREE, "log.digest_every=0", IN_MEMORY)
    config = tiny_config(tmp_path, *KEYS, *overrides)
    process = command(tmp_path, *overrides)
    try:
        wait_for_steps(config, 3)
        for ranks, generation in ((1, 2), (2, 3)):
            asked = subprocess.run(
                [sys.executable, "-m", "sixfold.gpt", "resize", config.run.dir, str(ranks)],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert asked.returncode == 0, asked.stderr
            wait_for_steps(config, generation, "start")
            wait_for_steps(config, len(lines(config, "step")) + 2)
        wrong = [sys.executable, "-m", "sixfold.gpt", "resize", config.run.dir, "3"]
        refused = subprocess.run(wrong, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2 and "this run can have 2, 1" in refused.stderr
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 143, error
    assert [one["world"] for one in lines(config, "start")] == [2, 1, 2]
    told = [line for line in error.splitlines() if line.startswith("sixfold:") and "goes on" in line]
    assert [line.partition("; ")[0] for line in told] == ["sixfold: it was asked for"] * 2, told
    steps = sorted({one["step"] for one in lines(config, "step")})
    assert steps == list(range(1, steps[-1] + 1))
    assert all_have_left(process.pid) == []
