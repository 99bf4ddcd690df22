"""SIGKILL at named instants of a snapshot and of a restore: what the next job restores is one step, whole.

The step is never older than the last one that all ranks had settled. Kills hit one rank, or all of them at once.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from memory_tier_helpers import check_state, lose, restores, saves, state_of, tier_of

from ranktest import run_ranks
from sixfold.dist_ckpt import CheckpointError
from sixfold.dist_ckpt.background.arena import Arena
from sixfold.dist_ckpt.memory_tier import domain_folder, jobs, peers, restoring
from sixfold.dist_ckpt.memory_tier import tier as story
from sixfold.dist_ckpt.memory_tier.domain_folder import DomainFolder, DomainStore
from sixfold.dist_ckpt.mirror.mirror import Mirror
from sixfold.dist_ckpt.save_load import writer
from sixfold.dist_ckpt.save_load.reader import Reader
from sixfold.dist_ckpt.storage.frame_file import FrameFile

#: Instants: the process that dies is the trainer, and its worker with it.
INSTANTS = {
    "in the copy": (Arena, "take", "after"),
    "before the worker writes": (jobs.SnapshotJob, "write", "before"),
    "between generations": (DomainFolder, "remove", "before"),
    "when an older one is half removed": (domain_folder, "_rank_of", "before"),
    "in the frames": (FrameFile, "_write_now", "before"),
    "at the end of the frames": (FrameFile, "finish", "before"),
    "before the record": (DomainStore, "write_record", "before"),
    "behind the record": (DomainStore, "write_record", "after"),
    "when a copy begins": (peers.Peer, "put", "before"),
    "in a copy": (peers, "_send_file", "before"),
    "behind a copy": (peers.Peer, "put", "after"),
    "in what takes a copy": (peers, "_receive_file", "before"),
    "before a copy appears": (peers, "_receive_file", "after"),
    "before all is settled": (DomainFolder, "settle", "before"),
    "behind all is settled": (DomainFolder, "settle", "after"),
}
RESTORES = {
    "in the listing": (DomainFolder, "listing", "after"),
    "in the index": (story, "index_of", "before"),
    "when the mirror is made": (Mirror, "create", "after"),
    "before a block is fetched": (restoring.GenerationStore, "_fetched", "before"),
    "in what serves a block": (peers.Server, "_get", "before"),
    "in the tensors": (Reader, "run", "after"),
    "when others are removed": (DomainFolder, "keep", "before"),
}


def kill_here(owner, name, when, trainer):
    """Have this process and its workers die at an instant, at its second occurrence or later."""
    inner = getattr(owner, name)

    def dies(*arguments, **options):
        if when == "before":
            die(trainer)
        result = inner(*arguments, **options)
        die(trainer)
        return result

    setattr(owner, name, dies)


def die(trainer):
    os.kill(trainer, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank, ranks, shm, domains, instant, who):
    """Steps 1 and 2 are taken, the first is settled; step 3 is when ranks die, or ``close`` if they live that long."""
    tier = tier_of(shm, rank, ranks, domains, timeout_s=8)
    for step in (1, 2):
        tier.save(step, state_of(rank, ranks, step)).wait()
    tier.wait()
    tier._saver._worker.stop()  # a new one is forked, with what is patched
    if rank in who:
        kill_here(*INSTANTS[instant], os.getpid())
    with suppress(CheckpointError):
        tier.save(3, state_of(rank, ranks, 3)).wait()
        tier.wait()
        tier.save(4, state_of(rank, ranks, 4)).wait()
        tier.wait()
    tier.__exit__(ValueError, None, None)
    return "lives"


@pytest.mark.slow
@pytest.mark.parametrize("instant", INSTANTS)
@pytest.mark.parametrize(("ranks", "domains", "who"), [(2, 2, (1,)), (2, 2, (0, 1)), (4, 2, (0,))])
def test_a_kill_at_any_instant_of_a_snapshot_leaves_a_whole_step(shm, instant, ranks, domains, who):
    found = run_ranks(killed, ranks, shm, domains, instant, who, allow_exit={*who})
    if all(found[rank] == "lives" for rank in who):
        # Who writes no copy, or removes nothing, does not pass through some instants.
        assert (ranks, instant) in {(4, "in what takes a copy"), (4, "before a copy appears")}, instant
    for restored in run_ranks(restores, ranks, shm, domains):
        assert restored.step in (2, 3, 4)
        assert restored.place == "memory"


def killed_in_restore(rank, ranks, shm, domains, instant, who):
    if rank in who:
        kill_here(*RESTORES[instant], os.getpid())
    tier = tier_of(shm, rank, ranks, domains, timeout_s=8)
    with suppress(CheckpointError):
        found = tier.restore(state_of(rank, ranks, 0, fill=False))
        check_state(found.state, rank, ranks, found.step)
    tier.__exit__(ValueError, None, None)
    return "lives"


@pytest.mark.slow
@pytest.mark.parametrize("instant", RESTORES)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_a_kill_in_a_restore_leaves_the_step_for_the_next_one(shm, instant, who):
    """One domain has lost its memory, so that it fetches all."""
    run_ranks(saves, 2, shm, 2, [1, 2, 3], False)
    lose(shm, 1)
    found = run_ranks(killed_in_restore, 2, shm, 2, instant, who, allow_exit={*who})
    first_only, other_only = {"in the index", "in what serves a block"}, {"before a block is fetched"}
    expected = {0, 1} - ({1} if instant in first_only else {0} if instant in other_only else set())
    died, may_die = {rank for rank in who if found[rank] != "lives"}, expected & {*who}
    assert died <= may_die and bool(died) == bool(may_die)  # of two, one may hear of the other's death first
    for restored in run_ranks(restores, 2, shm, 2):
        assert restored.step == 3
    assert not list(shm.rglob("sixfold-mirror-*"))


def killed_worker(rank, ranks, shm, domains, name):
    """The worker of rank 1 dies; its trainer lives, and the next snapshot has a new worker."""
    tier = tier_of(shm, rank, ranks, domains, timeout_s=8)
    tier.save(1, state_of(rank, ranks, 1)).wait()
    tier.wait()
    if rank == 1:
        owner, method = {"write": (writer, "write"), "send": (peers.Peer, "put")}[name]
        inner = getattr(owner, method)
        tier._saver._worker.stop()
        setattr(owner, method, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    handle, told = tier.save(2, state_of(rank, ranks, 2)), ""
    if rank == 1:
        setattr(owner, method, inner)
    with suppress(CheckpointError):
        handle.wait()
    try:
        tier.wait()
    except CheckpointError as error:
        told = f"{type(error).__name__}: {error}"
    unreplicated = str(handle.unreplicated)
    tier.save(3, state_of(rank, ranks, 3)).wait()
    tier.wait()
    assert tier.steps()[-1] == 3
    tier.close()
    return told, unreplicated


def test_a_worker_that_dies_costs_its_snapshot_and_all_ranks_are_told(shm):
    found = run_ranks(killed_worker, 2, shm, 2, "write")
    assert all("LostPeerError: the worker of rank 1 died" in told for told, _ in found), found
    assert restored_steps(shm) == {3}


def test_a_worker_that_dies_when_it_sends_leaves_the_snapshot_whole_and_without_its_copy(shm):
    (told_0, copies_0), (told_1, copies_1) = run_ranks(killed_worker, 2, shm, 2, "send")
    assert (told_0, told_1, copies_0) == ("", "", "None")
    assert "ended before it had told that its copies were sent" in copies_1
    assert restored_steps(shm) == {3}


def restored_steps(shm):
    return {found.step for found in run_ranks(restores, 2, shm, 2)}


def slow_worker(rank, ranks, shm):
    """All trainers die when their workers have begun the second snapshot; those write a second later."""
    inner = jobs.SnapshotJob.write

    def slow(self, arena, counter):
        with suppress(PermissionError):
            os.setsid()  # else ranktest ends it with its rank
        (shm / f"begun-{rank}-{self.ticket.save.save_id}").touch()
        time.sleep(1)
        return inner(self, arena, counter)

    jobs.SnapshotJob.write = slow
    tier = tier_of(shm, rank, ranks, 2)
    tier.save(1, state_of(rank, ranks, 1)).wait()
    tier.save(2, state_of(rank, ranks, 2))
    pid = tier._saver._worker.process.pid
    (shm / f"pid-{rank}").write_text(str(pid))
    while len(list(shm.glob("begun-*"))) < 2 * ranks:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_snapshot_that_was_handed_over_becomes_whole_though_its_trainer_dies_and_no_process_stays(shm, ranks):
    run_ranks(slow_worker, ranks, shm, allow_exit={*range(ranks)})
    workers = [Path(f"/proc/{(shm / f'pid-{rank}').read_text()}/task") for rank in range(ranks)]
    deadline = time.monotonic() + 10
    while any(worker.exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(worker.exists() for worker in workers)
    assert {one.step for one in run_ranks(restores, ranks, shm, 2)} == {2}


def regroups(rank, ranks, shm):
    """Rank 2 is lost; the others go on with workers and tier that they have."""
    tier = tier_of(shm, rank, ranks, ranks, timeout_s=10)
    for step in (1, 2):
        tier.save(step, state_of(rank, ranks, step)).wait()
    dist.barrier()
    group = dist.new_group([0, 1])
    pid = tier._saver._worker.process.pid
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    tier.regroup(group)
    found = tier.restore(state_of(rank, 2, 0, fill=False))
    check_state(found.state, rank, 2, 2)
    tier.save(3, state_of(rank, 2, 3)).wait()
    tier.wait()
    again = tier.steps()
    same = tier._saver._worker.process.pid == pid
    tier.close()
    return found.step, again, same


def test_a_tier_goes_on_with_the_ranks_that_are_left(shm):
    assert run_ranks(regroups, 3, shm, allow_exit={2})[:2] == [(2, [2, 3], True)] * 2
    assert {one.step for one in run_ranks(restores, 2, shm, 3)} == {3}


def with_fewer_domains(rank, ranks, shm):
    """Of three domains two are left, then one: each time fewer copies are asked for, and nothing is warned of."""
    tier, found = tier_of(shm, rank, ranks, ranks, replicas=2, timeout_s=10), []
    tier.save(1, state_of(rank, ranks, 1)).wait()
    groups = [dist.new_group([*range(left)]) for left in (2, 1)]
    dist.barrier()
    for step, group in enumerate(groups, 2):
        left = dist.get_world_size(group) if rank <= 3 - step else 0
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        tier.regroup(group, replicas=left - 1)
        restored = tier.restore(state_of(rank, left, 0, fill=False))
        check_state(restored.state, rank, left, step - 1)
        handle = tier.save(step, state_of(rank, left, step))
        handle.wait()
        tier.wait()
        found.append((restored.step, handle.unreplicated, tier.unreplicated, len(handle._receivers)))
        dist.barrier(group)
    with pytest.raises(CheckpointError, match="replicas is -1; it is an integer >= 0"):
        tier.regroup(groups[1], replicas=-1)
    tier.close()
    return found


@pytest.mark.filterwarnings("error:replicas is")
def test_a_tier_goes_on_with_fewer_domains_and_as_many_copies_as_it_is_told(shm):
    assert run_ranks(with_fewer_domains, 3, shm, allow_exit={1, 2})[0] == [(1, None, None, 1), (2, None, None, 0)]
