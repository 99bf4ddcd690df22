"""What goes wrong while snapshots are taken: a full tmpfs, peers that are gone or hang, a slow or full disk."""

import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from forked_worker import fork_workers
from memory_tier_helpers import (
    check_state,
    files_below,
    generations,
    lose,
    restores,
    saves,
    state_of,
    tier_of,
)

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CheckpointManager, LostPeerError, StorageError, retention
from sixfold.dist_ckpt.memory_tier import jobs


def fills(rank, ranks, shm, ballast_bytes):
    """The second snapshot of rank 1's domain finds no room; the third does again."""
    told = []
    with tier_of(shm, rank, ranks, ranks) as tier:
        tier.save(1, state_of(rank, ranks, 1)).wait()
        tier.wait()
        ballast = shm / "host1" / "ballast"
        if rank == 1:
            ballast.write_bytes(bytes(ballast_bytes))
        dist.barrier()
        handle = tier.save(2, state_of(rank, ranks, 2))
        for wait in (handle.wait, lambda: tier.save(3, state_of(rank, ranks, 3))):
            try:
                wait()
            except CheckpointError as error:
                told.append(f"{type(error).__name__} {getattr(error, 'errno', None)}: {error}")
        assert tier.steps() == [1]
        if rank == 1:
            ballast.unlink()
        dist.barrier()
        tier.save(3, state_of(rank, ranks, 3)).wait()
        tier.wait()
        assert tier.steps()[-1] == 3
    return told


def test_a_full_tmpfs_is_a_typed_error_of_its_rank_and_then_of_all_and_the_older_step_stays(small_tmpfs, shm):
    full = small_tmpfs("6m")
    for number in (0, 1):
        (shm / f"host{number}").symlink_to(full if number else shm / "real")
    (shm / "real").mkdir()
    free = os.statvfs(full)
    taken = free.f_bavail * free.f_frsize - 1_500_000  # two parts of the first step fit, no more
    found = run_ranks(fills, 2, shm, taken)
    assert all(any(text.startswith("StorageError 28: ENOSPC") for text in told) for told in found), found
    assert {found.step for found in run_ranks(restores, 2, shm, 2)} == {3}


def limited(rank, ranks, shm):
    """No file of rank 1's worker may be longer than 64 KiB."""
    with tier_of(shm, rank, ranks, ranks) as tier:
        tier.save(1, state_of(rank, ranks, 1)).wait()
        tier.wait()
        if rank == 1:
            resource.prlimit(tier._saver._worker.process.pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        handle = tier.save(2, state_of(rank, ranks, 2))
        own = ""
        try:
            handle.wait()
        except StorageError as error:
            own = str(error)
        with pytest.raises(StorageError, match="EFBIG") as caught:
            tier.wait()
        assert tier.steps() == [1]
        found = tier.restore(state_of(rank, ranks, 0, fill=False))
        check_state(found.state, rank, ranks, 1)
        return own, str(caught.value)


def test_no_room_for_a_file_is_told_by_the_handle_of_its_rank_and_by_wait_of_all(shm):
    (own_0, all_0), (own_1, all_1) = run_ranks(limited, 2, shm)
    assert own_0 == "" and own_1 == all_0 == all_1
    assert "this rank needs" in own_1 and "bytes" in own_1


def deaf(rank, ranks, shm, how):
    """Rank 1 takes no copies any more: nobody listens, or who listens does nothing."""
    with tier_of(shm, rank, ranks, ranks, timeout_s=4) as tier:
        tier.save(1, state_of(rank, ranks, 1)).wait()
        tier.wait()
        if rank == 1 and how == "closed":
            tier._server.close()
        if rank == 1 and how == "hangs":
            tier._server._take = lambda *_: time.sleep(60)
        if rank == 1 and how == "full":

            def full(*_):
                raise OSError(28, "No space left on device")

            tier._server._take = full
        dist.barrier()
        start = time.monotonic()
        handle = tier.save(2, state_of(rank, ranks, 2))
        handle.wait()
        took = time.monotonic() - start
        tier.wait()
        copies, known = handle.unreplicated, str(tier.unreplicated)
        tier.save(3, state_of(rank, ranks, 3)).wait()
        tier.wait()
        own = [int(path.name.split("-")[3]) for path in generations(shm, rank)]
        return took, type(copies).__name__, str(copies), own, known


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [("closed", "LostPeerError", "is dead, or gave nothing"), ("hangs", "LostPeerError", "gave nothing for 1 s"),
     ("full", "StorageError", "No space left on device")],
)  # fmt: skip
def test_a_peer_that_takes_no_copy_leaves_the_snapshot_whole_and_the_handle_says_why(shm, how, kind, text):
    """And the newest generation with all its copies stays: the first."""
    (took, found, told, own, known), (_, other, _, _, other_knows) = run_ranks(deaf, 2, shm, how)
    assert took < 4
    assert known == other_knows == told, "all ranks know"
    assert (found, other) == (kind, "NoneType") and text in told and "rank 1 of domain host1" in told
    assert own[0] == 1 and own[-1] == 3
    lose(shm, 1)
    for restored in run_ranks(restores, 2, shm, 2):
        assert restored.step in (1, 3)


def fills_first(rank, ranks, shm):
    """Rank 1 finds no room, and has given up before rank 0's worker begins."""
    inner = jobs.SnapshotJob.write

    def slow(self, arena, counter):
        time.sleep(0.5 * (1 - rank))
        return inner(self, arena, counter)

    jobs.SnapshotJob.write = slow
    with tier_of(shm, rank, ranks, 1) as tier:
        (shm / f"ballast-{rank}").write_bytes(bytes(2_900_000))
        dist.barrier()
        tier.save(1, state_of(rank, ranks, 1))
        with pytest.raises(StorageError) as told:
            tier.wait()
        dist.barrier()  # the first rank has removed it
        return str(told.value), [one.name for one in generations(shm, 0)]


def test_of_a_full_domain_all_ranks_hear_and_no_folder_stays(small_tmpfs):
    told = run_ranks(fills_first, 2, small_tmpfs("6m"))
    assert told[0] == told[1] and told[0][0].startswith("ENOSPC"), told
    assert told[0][1] == []


def fill(folder):
    """Takes all that is free; the file."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for piece in (bytes(2**16), bytes(2**12)):
            with suppress(OSError):
                while file.write(piece):
                    pass
    return ballast


def test_a_restore_in_full_memory_makes_room_by_what_is_older_than_the_step_that_it_loads(small_tmpfs):
    folder = small_tmpfs("6m")
    run_ranks(saves, 2, folder, 1, [1, 2], False)
    assert len(generations(folder, 0)) == 2
    fill(folder)
    assert {(found.step, found.skipped) for found in run_ranks(restores, 2, folder, 1)} == {(2, ())}
    (left,) = generations(folder, 0)
    assert "-step-00000002-" in left.name


def restores_nothing(rank, ranks, folder):
    tier = tier_of(folder, rank, ranks, 1)
    with pytest.raises(StorageError) as error:
        tier.restore(state_of(rank, ranks, 0, fill=False))
    tier.__exit__(StorageError, None, None)
    return str(error.value)


def test_a_restore_without_any_room_is_an_error_and_what_is_whole_stays(small_tmpfs):
    folder = small_tmpfs("6m")
    run_ranks(saves, 2, folder, 1, [1, 2])
    ballast = fill(folder)
    for text in run_ranks(restores_nothing, 2, folder):
        assert "No space left on device" in text or "ENOSPC" in text
    ballast.unlink()
    assert {found.step for found in run_ranks(restores, 2, folder, 1)} == {2}


def late(rank, ranks, shm):
    """A rank that comes later than the deadline is told of on those that wait, within seconds."""
    tier = tier_of(shm, rank, ranks, ranks, timeout_s=2)
    tier.save(1, state_of(rank, ranks, 1)).wait()
    start = time.monotonic()
    if rank == 1:
        time.sleep(4)
        tier.__exit__(ValueError, None, None)
        return None
    with pytest.raises(LostPeerError, match="rank 1 of 2 is dead, absent or later"):
        tier.save(2, state_of(rank, ranks, 2))
    tier.__exit__(ValueError, None, None)
    return time.monotonic() - start


def test_a_late_rank_is_named_at_the_deadline(shm):
    assert run_ranks(late, 2, shm)[0] < 4


def drains(rank, ranks, shm, disk, steps):
    """Each checkpoint has its time."""
    with tier_of(shm, rank, ranks, 1, drain_to=disk, drain_every=2) as tier:
        for step in range(1, steps + 1):
            tier.save(step, state_of(rank, ranks, step))
            if tier._drainer._flight is not None:
                tier._drainer._flight._ended.wait()
            dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_second_generation_becomes_the_checkpoint_that_a_save_writes(shm, tmp_path, ranks):
    run_ranks(drains, ranks, shm, tmp_path / "disk", 6)
    assert [step for step, _ in retention.checkpoints(tmp_path / "disk")] == [2, 4, 6]
    run_ranks(plain_save, ranks, tmp_path / "save", 4)
    drained, plain = tmp_path / "disk/step-00000004", tmp_path / "save"
    assert files_below(drained) == files_below(plain)
    for name in files_below(plain):
        if name.endswith(".distcp") or name in ("common.pt", "metadata.json"):
            assert (drained / name).read_bytes() == (plain / name).read_bytes(), name
    assert dist_ckpt.tools.verify(drained)["ok"]
    lose(shm, 0)
    for found in run_ranks(restores, ranks, shm, 1, {"drain_to": tmp_path / "disk"}):
        assert (found.step, found.place) == (6, str(tmp_path / "disk/step-00000006"))


def plain_save(rank, ranks, path, step):
    dist_ckpt.save(state_of(rank, ranks, step), path)


def slow_disk(rank, ranks, shm, disk):
    """The disk takes 4 s for each file; the snapshots of that time are taken all the same."""
    inner = jobs._copy

    def slow(path, file):
        time.sleep(4)
        inner(path, file)

    jobs._copy = slow
    with tier_of(shm, rank, ranks, 1, drain_to=disk, drain_every=1) as tier:
        tier.save(1, state_of(rank, ranks, 1)).wait()
        tier.save(2, state_of(rank, ranks, 2)).wait()  # the first is on its way to the disk now
        start = time.monotonic()
        for step in range(3, 8):
            tier.save(step, state_of(rank, ranks, step)).wait()
        took = time.monotonic() - start
        steps = tier.steps()
        assert tier._drainer.is_busy()
        return took, steps


def test_a_slow_disk_holds_up_no_snapshot_and_its_generation_stays_till_then(shm, tmp_path):
    for took, steps in run_ranks(slow_disk, 2, shm, tmp_path):
        assert took < 3.5
        assert steps == [1, 6, 7]
    assert [step for step, _ in retention.checkpoints(tmp_path)] == [1]


def slow_rank(rank, ranks, shm, with_restore):
    """Rank 1's worker takes a second longer than rank 0's."""
    inner = jobs.SnapshotJob.commit

    def slow(self, shares, counter):
        time.sleep(rank)
        return inner(self, shares, counter)

    jobs.SnapshotJob.commit = slow
    with tier_of(shm, rank, ranks, 1) as tier:
        tier.save(1, state_of(rank, ranks, 1)).wait()
        tier.save(2, state_of(rank, ranks, 2)).wait()
        if not with_restore:
            return tier.steps()
        return [tier.restore(state_of(rank, ranks, 0, fill=False)).step]


@pytest.mark.parametrize(("with_restore", "expected"), [(False, [1, 2]), (True, [2])])
def test_who_has_waited_for_its_own_part_finds_the_snapshot_of_all(shm, with_restore, expected):
    assert run_ranks(slow_rank, 2, shm, with_restore) == [expected, expected]


def no_disk(rank, ranks, shm, disk):
    with tier_of(shm, rank, ranks, 1, drain_to=disk, drain_every=1) as tier:
        tier.save(1, state_of(rank, ranks, 1)).wait()
        inner, told = jobs._copy, ""

        def fails(path, file):
            raise OSError(28, "No space left on device")

        jobs._copy = fails
        tier.save(2, state_of(rank, ranks, 2)).wait()
        jobs._copy = inner
        tier._drainer._flight._ended.wait()
        tier._drainer._worker.stop()  # the next one is forked without that
        dist.barrier()
        try:
            tier.save(3, state_of(rank, ranks, 3))
        except StorageError as error:
            told = str(error)
        tier.save(4, state_of(rank, ranks, 4)).wait()
        tier.wait()
        return told, tier.steps()


def test_a_full_disk_is_told_once_on_all_ranks_and_snapshots_go_on(shm, tmp_path):
    (told_0, steps), (told_1, _) = run_ranks(no_disk, 2, shm, tmp_path)
    assert told_0 == told_1 and told_0.startswith("ENOSPC")
    assert steps[-1] == 4


def manager_and_tier(rank, ranks, shm, disk):
    """A manager's checkpoints are found, where they are newer than what is in memory."""
    manager = CheckpointManager(disk, background=False)
    with tier_of(shm, rank, ranks, 1, drain_to=disk) as tier:
        tier.save(1, state_of(rank, ranks, 1))
        manager.save(2, state_of(rank, ranks, 2))
        found = tier.restore(state_of(rank, ranks, 0, fill=False))
        check_state(found.state, rank, ranks, 2)
        tier.save(3, state_of(rank, ranks, 3))
        tier.wait()
        again = tier.restore(state_of(rank, ranks, 0, fill=False))
        return found.place, again.place, again.step


def test_the_newest_step_is_taken_wherever_it_lies(shm, tmp_path):
    found = run_ranks(manager_and_tier, 2, shm, tmp_path)
    assert found == [(str(tmp_path / "step-00000002"), "memory", 3)] * 2


def two_runs(rank, ranks, shm):
    from sixfold.dist_ckpt import MemoryTier

    fork_workers()
    tiers = [MemoryTier(shm, run, domain="h", replicas=0, timeout_s=10) for run in ("one", "two")]
    for step in (1, 2):
        for tier in tiers:
            tier.save(step, state_of(rank, ranks, step)).wait()
    if rank == 0:
        (shm / "sixfold-memory-one/notes.txt").write_text("mine")
    dist.barrier()
    tiers[0].discard()
    found = tiers[1].restore(state_of(rank, ranks, 0, fill=False))
    check_state(found.state, rank, ranks, 2)
    tiers[1].wait()
    dist.barrier()
    modes = {oct(path.stat().st_mode & 0o777) for path in (shm / "sixfold-memory-two").rglob("*") if path.is_file()}
    folders = {oct(path.stat().st_mode & 0o777) for path in (shm / "sixfold-memory-two", *shm.glob("*two/attempt-*"))}
    dist.barrier()
    tiers[1].discard()
    with pytest.raises(CheckpointError, match="this MemoryTier is closed"):
        tiers[1].steps()
    return modes, folders


def test_two_runs_share_a_folder_and_each_removes_its_own_files_alone(shm):
    (shm / "other").write_text("of somebody else")
    for modes, folders in run_ranks(two_runs, 2, shm):
        assert (modes, folders) == ({"0o600"}, {"0o700"})
    assert files_below(shm) == ["other", "sixfold-memory-one/notes.txt"]


def test_nothing_is_left_in_the_system_when_a_tier_is_discarded(shm):
    assert run_ranks(leaves_nothing, 2, shm) == [[], []]
    assert files_below(shm) == []


def leaves_nothing(rank, ranks, shm):
    before = {*threads(), *sockets()}
    tier = tier_of(shm, rank, ranks, 2)
    for step in (1, 2):
        tier.save(step, state_of(rank, ranks, step))
    pid = tier._saver._worker.process.pid
    tier.discard()
    until = time.monotonic() + 5
    while (left := {*threads(), *sockets()} - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}") or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    return sorted(left)


def threads():
    return [thread.name for thread in threading.enumerate()]


def sockets():
    """Files that listen, as this process holds them."""
    listening = {
        line.split()[9] for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    }
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    return [link for link in links if link.startswith("socket:[") and link[8:-1] in listening]
