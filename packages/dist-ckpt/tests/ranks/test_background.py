"""Background saves of several ranks: no collective meets the trainer's, and every rank hears the same end."""

import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from counted import LISTING, note_operations
from dist_ckpt_helpers import names
from forked_worker import Forked

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, ShardedTensor
from sixfold.dist_ckpt.background import lost_ranks, status_and_heartbeats, worker_process
from sixfold.dist_ckpt.background import saver as background
from sixfold.dist_ckpt.stores import LocalStore
from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy

ODD_WORKER = str(Path(__file__).parents[1] / "odd_worker.py")


def state(rank, ranks, value):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((30,), float(value)), (0, rank, ranks)), "it": value}


def first_save(rank, ranks, folder):
    """Save value 1 and return this rank's worker."""
    handle = dist_ckpt.async_save(state(rank, ranks, 1), folder / "c", timeout_s=60)
    handle.wait()
    return handle.worker_pid


def ending(handle, timeout_s=30):
    """How a save ended and how long that took."""
    return ending_of(lambda: handle.wait(timeout_s))


def ending_of(call):
    start = time.monotonic()
    try:
        call()
    except CheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "committed", "", time.monotonic() - start


def until(is_so, timeout_s=30):
    """Return once it is so."""
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, f"not so within {timeout_s} s"
        time.sleep(0.005)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


def loaded_value(path):
    loaded = dist_ckpt.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(60))}, path, group=None)
    assert bool((loaded["w"] == loaded["it"]).all())
    return loaded["it"]


def train_on(rank, ranks, folder, worker):
    """The trainer goes on with its collectives, one rank well ahead of its worker."""
    os.kill(worker, signal.SIGSTOP)
    saved = state(rank, ranks, 2)
    handle = dist_ckpt.async_save(saved, folder / "c")
    saved["w"].data.fill_(3)
    for step in range(20):
        total = torch.full((5,), float(step + rank))
        dist.all_reduce(total)
        assert total.tolist() == [2.0 * step + 1] * 5
    seen = handle.done()
    dist.barrier()
    time.sleep(0.1 * rank)
    os.kill(worker, signal.SIGCONT)
    handle.wait(30)
    value = loaded_value(folder / "c")
    dist.barrier()
    return seen, value, names(folder)


def lose_a_worker(rank, ranks, folder, victim, signals):
    worker = first_save(rank, ranks, folder)
    if rank == victim:
        os.kill(worker, signal.SIGSTOP)
    handle = dist_ckpt.async_save(state(rank, ranks, 2), folder / "c", timeout_s=3 if signals == "stop" else 60)
    if rank == victim and signals == "kill":
        os.kill(worker, signal.SIGKILL)
    kind, text, seconds = ending(handle)
    dist.barrier()
    left, old = names(folder), loaded_value(folder / "c")
    dist.barrier()
    refused = start_no_worker(rank, ranks, folder, victim)
    again = dist_ckpt.async_save(state(rank, ranks, 3), folder / "c", timeout_s=60)
    again.wait()
    return kind, text, seconds, left, old, loaded_value(folder / "c"), worker != again.worker_pid, refused


def fail_on_one_rank(rank, ranks, folder):
    first_save(rank, ranks, folder)
    saved = state(rank, ranks, float("nan") if rank == 1 else 2)
    saved["it"] = 2
    end = ending(dist_ckpt.async_save(saved, folder / "c", check_finite=True))
    dist.barrier()
    return (*end[:2], names(folder), loaded_value(folder / "c"))


def save_replicas_fully_parallel(rank, ranks, folder):
    """Every rank holds all; the wrapper shares the writing, the workers do it."""
    tensors = {f"t{i}": torch.full((500,), float(i)) for i in range(6)}
    replicas = {key: ShardedTensor.from_rank_offsets(key, t, replica_id=rank) for key, t in tensors.items()}
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), dist.group.WORLD)
    dist_ckpt.async_save(replicas, folder / "p", strategy).wait(60)
    dist.barrier()
    loaded = dist_ckpt.load_plain_tensors(folder / "p")
    sizes = sorted(path.stat().st_size for path in (folder / "p").glob("*.distcp"))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / "p")
    dist.barrier()
    return all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items()), sizes


def save_where_one_rank_sees_another_file_system(rank, ranks, folder):
    """The text that both kinds of save raise behind the path, and what they leave."""
    sees, seen = Path.is_dir, []
    if rank == 1:
        Path.is_dir = lambda path: sees(path) and ".tmp-" not in str(path)
    try:
        for save in (dist_ckpt.save, dist_ckpt.async_save):
            try:
                save(state(rank, ranks, 2), folder / "c")
            except CheckpointError as error:
                seen.append((type(error).__name__, str(error).partition(" was made")[2]))
    finally:
        Path.is_dir = sees
    dist.barrier()
    return seen, names(folder), loaded_value(folder / "c")


def start_no_worker(rank, ranks, folder, victim):
    """One rank has lost its worker and may start no process."""
    start = worker_process._start_worker

    def refuse(fds):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    if rank == victim:
        worker_process._start_worker = refuse
    try:
        return ending_of(lambda: dist_ckpt.async_save(state(rank, ranks, 2), folder / "c", timeout_s=20))
    finally:
        worker_process._start_worker = start


def save_to_a_store_without_a_place_beside(rank, ranks, folder):
    store = Plain()
    return ending_of(lambda: dist_ckpt.async_save(state(rank, ranks, 2), store))[:2], store.calls


class Plain:
    """A store of a user's that has all methods of one, and derives from none of the package's."""

    name, calls, local_folder, is_shared, streams = "plain", 0, None, True, 1

    def list_files(self):
        self.calls += 1
        return {}

    def read(self, *_):
        raise FileNotFoundError

    read_ranges = marks = patient = begin = join = write_part = take_over = prepare = write = read
    commit = abandon = holds = delete = read


LOSSES = [(0, "kill"), (1, "kill"), (0, "stop"), (1, "stop")]


def live_through_everything(rank, ranks, folder):
    """One job for all that a job survives: a worker takes a second to start."""
    worker = first_save(rank, ranks, folder)
    seen = {
        "parallel": save_replicas_fully_parallel(rank, ranks, folder),
        "train": train_on(rank, ranks, folder, worker),
        "error": fail_on_one_rank(rank, ranks, folder),
        "no place": save_to_a_store_without_a_place_beside(rank, ranks, folder),
        "unshared": save_where_one_rank_sees_another_file_system(rank, ranks, folder),
    }
    worker_process._start_worker = Forked
    for victim, signals in LOSSES:
        dist.barrier()
        seen[victim, signals] = lose_a_worker(rank, ranks, folder, victim, signals)
    return seen


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """What each rank saw."""
    return run_ranks(live_through_everything, 2, tmp_path_factory.mktemp("lives"), timeout=100)


@pytest.mark.slow
def test_replicas_are_shared_among_the_workers(lives):
    for is_equal, sizes in (life["parallel"] for life in lives):
        assert is_equal
        assert len(sizes) == 2
        assert sizes[1] < 1.1 * sizes[0]


def test_the_trainers_collectives_run_on_while_the_workers_save(lives):
    for life in lives:
        assert life["train"] == (False, 2, ["c"])


@pytest.mark.parametrize(("victim", "signals"), LOSSES)
def test_a_dead_or_stopped_worker_raises_on_every_rank_and_is_replaced(lives, victim, signals):
    results = [life[victim, signals] for life in lives]
    for rank, (kind, text, seconds, left, old, new, is_fresh, _) in enumerate(results):
        assert kind == "LostPeerError"
        assert text == results[0][1], "the same text on every rank"
        assert f"rank {victim}" in text or f"ranks [{victim}]" in text
        assert seconds < (3.5 if signals == "stop" else 10)
        assert (left, old, new) == (["c"], 1, 3)
        assert is_fresh == (rank == victim)


def test_an_error_of_one_worker_is_raised_on_every_rank(lives):
    for life in lives:
        assert life["error"] == ("ShardingError", "w[30] is nan on rank 1, and check_finite is set", ["c"], 1)


def test_a_worker_that_one_rank_cannot_start_is_told_by_the_call_on_every_rank(lives):
    for life in lives:
        for loss in LOSSES:
            assert life[loss][-1][:2] == ("StorageError", "Resource temporarily unavailable")


def load_at_once(rank, ranks, folder):
    """Rank 1's worker goes on later than rank 0's."""
    worker_process._start_worker = Forked
    worker = first_save(rank, ranks, folder)
    os.kill(worker, signal.SIGSTOP)
    handle = dist_ckpt.async_save(state(rank, ranks, 2), folder / "c", timeout_s=60)
    threading.Timer(0.2 + 0.2 * rank, os.kill, (worker, signal.SIGCONT)).start()
    loaded = dist_ckpt.load(state(rank, ranks, 0), folder / "c", timeout_s=20)
    return loaded["it"], loaded["w"].unique().tolist(), handle.done()


def test_a_load_waits_on_all_ranks_for_their_background_save_to_the_same_folder(tmp_path):
    assert run_ranks(load_at_once, 2, tmp_path) == [(2, [2.0], True)] * 2


def test_a_store_without_a_place_for_a_board_is_refused_before_it_is_looked_at(lives):
    for life in lives:
        (kind, text), calls = life["no place"]
        assert (kind, calls) == ("CheckpointError", 0)
        assert text.startswith("plain does not derive from stores.ByPointer")


def test_a_folder_that_the_ranks_do_not_share_is_told_by_the_call(lives):
    text = " by the first rank and is not visible here; a checkpoint needs one file system that all ranks share. "
    text += "Save to a path on one, or save one folder per rank with group=None"
    for life in lives:
        assert life["unshared"] == ([("StorageError", text)] * 2, ["c"], 1)


def lose_a_rank(rank, ranks, folder, victim, start_worker=Forked):
    worker_process._start_worker = start_worker
    worker = first_save(rank, ranks, folder)
    if rank == victim:
        os.kill(worker, signal.SIGSTOP)  # so that its share is not written before it dies
    handle = dist_ckpt.async_save(state(rank, ranks, 2), folder / "c", timeout_s=60)
    if rank == victim:
        handle._watch._heartbeat.beat(0)  # its last one is from now, however late this machine made the one before
        (folder / "worker").write_text(str(worker))
        # With its trainer: the kernel wakes a stopped process whose parent dies, and a hang-up ends no worker.
        os.kill(worker, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return (*ending(handle), loaded_value(folder / "c"))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.slow
def test_a_dead_rank_raises_on_every_other_within_seconds(tmp_path, victim):
    results = run_ranks(lose_a_rank, 2, tmp_path, victim, allow_exit=(victim,), timeout=60)
    kind, text, seconds, value = results[1 - victim]
    assert kind == "LostPeerError"
    assert f"rank {victim}" in text
    assert seconds < 10
    assert value == 1


def lose_the_first_rank_before_its_worker_writes(rank, ranks, folder):
    orphan = folder / "orphan"
    worker_process._WORKER = (ODD_WORKER, f"orphan:{orphan}" if rank == 0 else "slow:0.4")
    worker_process._start_worker = Forked
    first_save(rank, ranks, folder)
    orphan.touch()
    saved = state(rank, ranks, 2)
    saved["large"] = ShardedTensor.from_rank_offsets("large", torch.ones(6 << 20), (0, rank, ranks))
    handle = dist_ckpt.async_save(saved, folder / "c", TorchDistSaveShardedStrategy(thread_count=1), timeout_s=60)
    if rank == 0:
        time.sleep(1.0)  # its worker has the job
        os.kill(os.getpid(), signal.SIGKILL)
    return (*ending(handle)[:2], loaded_value(folder / "c"))


@pytest.mark.slow
def test_a_worker_without_a_trainer_is_not_told_as_another_save_to_the_folder(tmp_path):
    """It writes on when its trainer is dead."""
    results = run_ranks(lose_the_first_rank_before_its_worker_writes, 2, tmp_path, allow_exit=(0,), timeout=60)
    kind, text, value = results[1]
    assert (kind, value) == ("LostPeerError", 1), text
    assert "rank 0 died" in text


def lose_a_rank_without_locks(rank, ranks, folder):
    status_and_heartbeats.is_locked = lambda _: (
        False
    )  # this rank says so before the save, and no rank relies on locks then
    status_and_heartbeats.STALE_S = 1.5
    found = lose_a_rank(rank, ranks, folder, 0, worker_process._start_worker)  # a forked one would say so, too
    return found, time.time() - (folder / "worker").stat().st_mtime  # since the death


@pytest.mark.slow
def test_where_locks_do_not_work_a_still_counter_tells_of_a_death(tmp_path):
    """The workers do have working locks here; what they are told is not to believe a free one alone."""
    _, (found, since_s) = run_ranks(lose_a_rank_without_locks, 2, tmp_path, allow_exit=(0,), timeout=60)
    kind, text, seconds, value = found
    assert (kind, value) == ("LostPeerError", 1)
    assert "rank 0 died" in text
    assert since_s > 1.2
    assert seconds < 10


def slow_saves(rank, ranks, folder):
    """One rank's disk is slow, and takes longer than the deadline; then that rank is stopped, and its worker too."""
    worker_process._WORKER = (ODD_WORKER, "slow:0.4" if rank == 1 else "slow:0")
    worker_process._start_worker = Forked
    seen, saver = {}, background.AsyncSaver(timeout_s=60)
    one_thread = TorchDistSaveShardedStrategy(thread_count=1)

    def save(value, elements, timeout_s):
        saver._timeout_s = timeout_s
        w = torch.full((elements,), float(value))
        saved = {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, ranks)), "it": value}
        return saver.save(saved, folder / "c", one_thread)

    save(1, 30, 60).wait(60)
    handle = save(2, 6 << 20, 2.0)
    seen["slow"] = (*ending(handle)[:2], handle.total_s)
    dist.barrier()
    if rank == 1:  # all of a rank stands still for a while
        os.kill(handle.worker_pid, signal.SIGSTOP)
    handle = save(3, 30, 1.6)
    if rank == 1:
        rouse = f"sleep 2.5; kill -CONT {os.getpid()} {handle.worker_pid}"
        subprocess.Popen(["sh", "-c", rouse], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    seen["stopped"] = ending(handle)
    dist.barrier()
    seen["after"] = dist_ckpt.load_common_state_dict(folder / "c")["it"], names(folder)
    dist.barrier()
    saver.close()
    return seen


@pytest.mark.slow
def test_a_slow_rank_keeps_a_save_alive_and_a_stopped_one_ends_it(tmp_path):
    results = run_ranks(slow_saves, 2, tmp_path, timeout=90)
    for seen in results:
        kind, text, seconds = seen["slow"]
        assert (kind, text) == ("committed", "")
        assert seconds > 2.0, "longer than the deadline"
        assert seen["after"] == (2, ["c"])
        assert seen["stopped"][0] == "LostPeerError"
        assert "rank 1" in seen["stopped"][1] or "ranks [1]" in seen["stopped"][1]
    assert results[0]["stopped"][2] < 1.6 + lost_ranks._ACKNOWLEDGED_S


def a_first_rank_that_is_stopped_while_its_worker_goes_on(rank, ranks, folder):
    given_up = folder / "given-up"
    worker_process._WORKER = (ODD_WORKER, f"held:{given_up}" if rank == 0 else "slow:0")
    worker_process._start_worker = Forked
    saver = background.AsyncSaver(timeout_s=60)
    given_up.touch()
    start = time.monotonic()
    saver.save(state(rank, ranks, 1), folder / "c").wait(60)
    usual_s = time.monotonic() - start
    dist.barrier()
    given_up.unlink(missing_ok=True)
    dist.barrier()
    saver._timeout_s = 1.6
    w = torch.full((6 << 20,), 2.0)
    saved = {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, ranks)), "it": 2}
    handle = saver.save(saved, folder / "c", TorchDistSaveShardedStrategy(thread_count=1))
    if rank == 0:  # until a second after the other gave up, when its worker has decided
        watch = handle._watch
        until(lambda: watch._counter.moves != watch._idle_moves)  # it has its job, which a thread hands over
        rouse = f"while [ ! -e '{given_up}' ]; do sleep 0.1; done; sleep 1; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", rouse], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    end = ending(handle)
    given_up.touch()  # by the second rank: however slow the machine, it gives up before the first one's worker decides
    dist.barrier()
    time.sleep(0.5)  # for a worker that would commit
    return (*end, dist_ckpt.load_common_state_dict(folder / "c")["it"], usual_s)


@pytest.mark.slow
def test_a_worker_whose_trainer_is_stopped_does_not_commit_what_the_others_have_given_up(tmp_path):
    results = run_ranks(a_first_rank_that_is_stopped_while_its_worker_goes_on, 2, tmp_path, timeout=90)
    for kind, text, _, value, _ in results:
        assert (kind, value) == ("LostPeerError", 1)
        assert "rank 0" in text
    seconds, usual_s = results[1][2], results[1][4]  # the second: half a second where nothing else runs
    assert seconds < 2.0 + usual_s


def a_first_rank_whose_worker_is_stopped_before_it_moves(rank, ranks, folder):
    """The verdict is to commit, and then nothing of rank 0 goes on until the others have ended."""
    worker_process._WORKER = (ODD_WORKER, "stops:save_load.saving.commit" if rank == 0 else "slow:0")
    worker_process._start_worker = Forked
    saver = background.AsyncSaver(timeout_s=6)
    handle = saver.save(state(rank, ranks, 1), folder / "c")
    if rank == 0:
        # A thread of the trainer hands the worker its job: stopped at once, it may stop before that.
        until(lambda: is_stopped(handle.worker_pid))
        rouse = f"while [ ! -e '{folder}/ended' ]; do sleep 0.1; done; kill -CONT {os.getpid()} {handle.worker_pid}"
        subprocess.Popen(["sh", "-c", rouse], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    end = ending(handle)
    (folder / "ended").touch()
    dist.barrier()
    saver.close()
    return end


@pytest.mark.slow
def test_nobody_says_that_the_older_checkpoint_stays_once_the_first_rank_has_begun_to_move(tmp_path):
    results = run_ranks(a_first_rank_whose_worker_is_stopped_before_it_moves, 2, tmp_path, timeout=90)
    kind, text, _ = results[1]
    assert kind == "LostPeerError"
    assert "rank 0 stopped while it moved the checkpoint into place" in text and "it may still do so" in text


def a_first_rank_that_is_lost_at(rank, ranks, folder, where):
    """Worker and trainer of rank 0 die at once, when its worker comes to ``where``."""
    worker_process._WORKER = (ODD_WORKER, f"stops:{where}" if rank == 0 else "slow:0")
    worker_process._start_worker = Forked
    saver = background.AsyncSaver(timeout_s=60)
    handle = saver.save(state(rank, ranks, 1), folder / "c")
    if rank == 0:
        while Path(f"/proc/{handle.worker_pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.02)
        os.kill(handle.worker_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return ending(handle, 50)


@pytest.mark.parametrize(
    ("where", "kind", "said"),
    [
        ("save_load.saving.commit", "LostPeerError", "it may still do so"),
        ("background.lost_ranks.publish", "committed", ""),
    ],
)
def test_a_first_rank_that_dies_after_the_verdict_is_told_of_soon(tmp_path, where, kind, said):
    (found, text, seconds) = run_ranks(a_first_rank_that_is_lost_at, 2, tmp_path, where, timeout=90, allow_exit=(0,))[1]
    assert found == kind and said in text
    assert seconds < 20, "the save's own deadline is 60 s"


def lose_the_first_trainer_in_its_workers_commit(rank, ranks, folder, kind):
    """Its worker has the verdict, and moves the checkpoint into place when the trainer is dead, or never."""
    moving = folder / "moving"
    odd = f"moving:{moving}" if kind == "moves" else "stops:storage.local.commit"
    worker_process._WORKER = (ODD_WORKER, odd if rank == 0 else "slow:0")
    worker_process._start_worker = Forked
    dist_ckpt.save(state(rank, ranks, 1), folder / "c")
    moving.touch()
    dist.barrier()
    handle = dist_ckpt.async_save(state(rank, ranks, 2), folder / "c", timeout_s=60)
    if rank == 0:
        stat = Path(f"/proc/{handle.worker_pid}/stat")
        while moving.read_text() != "moves" and stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        (folder / "worker").write_text(str(handle.worker_pid))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        return (*ending(handle, 50), loaded_value(folder / "c"))
    finally:
        with suppress(ProcessLookupError):
            os.kill(int((folder / "worker").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("kind", "end", "value"), [("moves", "committed", 2), ("stops", "LostPeerError", 1)])
@pytest.mark.slow
def test_a_trainer_that_dies_in_its_workers_commit_is_waited_for_and_the_others_hear_the_true_end(
    tmp_path, kind, end, value
):
    """The worker of a dead trainer ends soon, but may move the checkpoint into place before it has seen that."""
    job = lose_the_first_trainer_in_its_workers_commit
    found, text, seconds, loaded = run_ranks(job, 2, tmp_path, kind, timeout=90, allow_exit=(0,))[1]
    assert (found, loaded) == (end, value), text
    assert end == "committed" or "it may still do so" in text
    assert seconds < 20, "the save's own deadline is 60 s"


def lose_the_first_worker_before_another_writes(rank, ranks, folder):
    """The first trainer takes away what was written; it tells of it when another worker has missed the files."""
    gone = folder / "gone"
    worker_process._WORKER = (ODD_WORKER, f"after:{gone}" if rank else "slow:0")
    worker_process._start_worker = Forked
    dist_ckpt.save(state(rank, ranks, 1), folder / "c")
    abandon = LocalStore.abandon

    def abandon_slowly(store, save):
        abandon(store, save)
        gone.touch()
        until((folder / "gone.tried").exists)
        time.sleep(1.0)  # in which the other trainer hears of its worker alone

    LocalStore.abandon = abandon_slowly
    handle = dist_ckpt.async_save(state(rank, ranks, 2), folder / "c", timeout_s=60)
    if rank == 0:
        os.kill(handle.worker_pid, signal.SIGKILL)
    return ending(handle, 50)


@pytest.mark.slow
def test_files_that_the_first_rank_takes_away_are_not_told_as_the_work_of_another_save(tmp_path):
    ends = run_ranks(lose_the_first_worker_before_another_writes, 2, tmp_path, timeout=90)
    assert {(kind, text) for kind, text, _ in ends} == {("LostPeerError", ends[0][1])}
    assert "the worker of rank 0 died" in ends[0][1]


def operations_of_a_wait(rank, ranks, folder):
    """What trainer and worker of each rank do in the file system while the other one's worker is stopped."""
    worker_process._WORKER = (ODD_WORKER, f"counts:{folder / f'worker-{rank}'}")
    worker_process._start_worker = Forked
    saver, found = background.AsyncSaver(timeout_s=60), {}
    worker = saver.save(state(rank, ranks, 1), folder / "c").worker_pid
    saver._let_go()
    note_operations(folder / f"trainer-{rank}")
    for victim in range(ranks):
        dist.barrier()
        if rank == victim:
            os.kill(worker, signal.SIGSTOP)
        handle = saver.save(state(rank, ranks, 2), folder / "c")
        dist.barrier()
        time.sleep(0.5)  # all is written
        job, start = saver._flight._watch._job, time.monotonic()
        time.sleep(3.0)
        stop = time.monotonic()
        dist.barrier()
        if rank == victim:
            os.kill(worker, signal.SIGCONT)
        handle.wait(30)
        notes = [(folder / f"{side}-{rank}").read_text().splitlines() for side in ("trainer", "worker")]
        seen = [line.split() for lines in notes for line in lines]
        # In 3 s one turn more may begin than there is time for, and one beat.
        operations = [name for at, name in seen if start < float(at) < stop]
        found[victim] = operations, 2 * (stop - start) * lost_ranks._LOOK_S / job.look_s + 5 + 2
    return found


@pytest.mark.slow
def test_waiting_ranks_look_at_the_file_system_twice_a_second_or_less(tmp_path):
    for found in run_ranks(operations_of_a_wait, 2, tmp_path, timeout=60):
        for operations, allowed in found.values():
            assert 0 < len(operations) <= allowed < 25
            assert not LISTING & {*operations}


def test_the_first_verdict_holds_for_all(tmp_path):
    ours, theirs = (status_and_heartbeats.FolderStatus(tmp_path / "c", "01", b"k" * 32) for _ in range(2))
    with pytest.raises(FileNotFoundError):
        ours.verdict(lost_ranks.COMMIT)
    ours.make()
    assert [
        theirs.verdict(lost_ranks.GIVE_UP),
        ours.verdict(lost_ranks.COMMIT),
        theirs.verdict(lost_ranks.GIVE_UP),
    ] == [lost_ranks.GIVE_UP] * 3
