"""The worker of one process: values at the call, and what a dead, stopped or full worker leaves."""

import errno
import gc
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import types
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import names, one
from forked_worker import Forked

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, LostPeerError, ShardingError, StorageError
from sixfold.dist_ckpt.background import lost_ranks, status_and_heartbeats, worker_process, worker_watch
from sixfold.dist_ckpt.background import saver as background
from sixfold.dist_ckpt.collectives.exchange import Outcome


def state(value, elements=1000):
    return {"w": one("w", torch.full((elements,), float(value))), "v": one("v", torch.full((9,), value)), "it": value}


def loaded_value(path):
    loaded = dist_ckpt.load(state(0), path, group=None)
    assert bool((loaded["w"] == loaded["it"]).all())
    assert bool((loaded["v"] == loaded["it"]).all())
    return loaded["it"]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def shared_saver():
    """Workers take a second to start, so that most tests use one; those that take its place are forked."""
    with background.AsyncSaver(group=None, timeout_s=60) as saver, pytest.MonkeyPatch.context() as patch:
        saver._ready_worker()
        patch.setattr(worker_process, "_start_worker", Forked)
        yield saver


@pytest.fixture
def saver(shared_saver, tmp_path):
    """A saver whose worker is up and whose first save, of value 1, is in ``tmp_path / "c"``."""
    shared_saver.save(state(1), tmp_path / "c").wait(60)
    return shared_saver


@pytest.fixture
def stopped(saver, tmp_path):
    """The pid of the saver's worker, stopped; it goes on after the test if it still lives."""
    pid = saver.save(state(1), tmp_path / "c").worker_pid
    saver._let_go()
    os.kill(pid, signal.SIGSTOP)
    yield pid
    if is_running(pid):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_what_is_saved_are_the_values_at_the_call(saver, stopped, tmp_path):
    """The worker is stopped during call and change: only a copy made in the call can give the old values."""
    saved = state(7)
    saved["t"] = one("t", torch.arange(12.0).view(3, 4).t())
    handle = saver.save(saved, tmp_path / "c")
    for record in (saved["w"], saved["v"], saved["t"]):
        record.data.fill_(8)
    saved["it"] = 8
    assert not handle.done()
    os.kill(stopped, signal.SIGCONT)
    handle.wait(60)
    assert handle.done()
    assert loaded_value(tmp_path / "c") == 7
    assert torch.equal(
        dist_ckpt.load_plain_tensors(tmp_path / "c")["t"], torch.arange(12.0).view(3, 4).t().contiguous()
    )
    assert names(tmp_path) == ["c"]


def test_a_second_call_waits_until_the_first_has_let_go(saver, stopped, tmp_path):
    first = saver.save(state(2), tmp_path / "c")
    threading.Timer(0.3, os.kill, (stopped, signal.SIGCONT)).start()
    second = saver.save(state(3), tmp_path / "d")
    assert first.done()
    assert second.blocked_s > 0.25
    second.wait(60)
    assert (loaded_value(tmp_path / "c"), loaded_value(tmp_path / "d")) == (2, 3)
    assert first.worker_pid == second.worker_pid


def test_wait_with_a_deadline_says_that_the_save_goes_on(saver, stopped, tmp_path):
    handle = saver.save(state(2), tmp_path / "c")
    with pytest.raises(LostPeerError, match=r"has not ended within timeout_s=0\.05"):
        handle.wait(0.05)
    os.kill(stopped, signal.SIGCONT)
    handle.wait(math.inf)
    handle.wait()
    assert loaded_value(tmp_path / "c") == 2


def test_a_killed_worker_raises_within_seconds_and_the_next_call_starts_a_fresh_one(saver, stopped, tmp_path):
    handle = saver.save(state(2), tmp_path / "c")
    start = time.monotonic()
    os.kill(stopped, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(LostPeerError, match=r"the worker of rank 0 died \(exit code -9\)"):
            handle.wait(60)
    assert time.monotonic() - start < 10
    assert handle.done()
    assert loaded_value(tmp_path / "c") == 1
    assert names(tmp_path) == ["c"]
    fresh = saver.save(state(3), tmp_path / "c")
    fresh.wait(60)
    assert fresh.worker_pid != stopped
    assert loaded_value(tmp_path / "c") == 3


def test_a_worker_that_is_killed_between_saves_is_replaced(saver, stopped, tmp_path):
    os.kill(stopped, signal.SIGKILL)
    while saver._worker.process.poll() is None:
        time.sleep(0.001)
    saver.save(state(3), tmp_path / "c").wait(60)
    assert loaded_value(tmp_path / "c") == 3


def test_a_stopped_worker_is_told_within_timeout_s_and_killed(saver, stopped, tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "_timeout_s", 1.0)
    handle = saver.save(state(2), tmp_path / "c")
    with pytest.raises(LostPeerError, match="the worker of rank 0 hangs and was killed"):
        handle.wait(1.5)
    assert not is_running(stopped)
    assert loaded_value(tmp_path / "c") == 1
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("midway", [False, True])
@pytest.mark.slow
def test_a_progress_that_ends_its_thread_fails_the_save_and_ends_the_worker(
    saver, stopped, tmp_path, monkeypatch, ending, midway
):
    """Python drops these two in silence on a thread; the worker, slow as it is, still reads the arena."""
    monkeypatch.setattr(worker_watch, "_GLANCE_S", 0.02)

    def bar(done, total):
        if done or not midway:
            raise ending(3)

    handle = saver.save(state(2), tmp_path / "c", progress=bar)
    saver._worker.counter.add(100)
    with pytest.raises(CheckpointError, match=rf"rank 0: progress\({100 * midway}, \d+\) raised {ending.__name__}: 3"):
        handle.wait(60)
    assert not is_running(stopped)
    assert loaded_value(tmp_path / "c") == 1
    assert names(tmp_path) == ["c"]
    saver.save(state(3), tmp_path / "c").wait(60)
    assert loaded_value(tmp_path / "c") == 3


def test_a_progress_that_ends_its_thread_after_the_commit_is_told_as_that(saver, tmp_path):
    def bar(done, total):
        if done == total:
            raise SystemExit(3)

    handle = saver.save(state(2), tmp_path / "c", progress=bar)
    with pytest.raises(CheckpointError, match=r"raised SystemExit: 3; .* The checkpoint is committed all the same"):
        handle.wait(60)
    assert loaded_value(tmp_path / "c") == 2


@pytest.mark.parametrize("place", [(worker_watch.WorkerWatch, "_moves_on"), (lost_ranks, "report_dead_worker")])
def test_a_watching_thread_without_an_outcome_is_an_error(saver, stopped, tmp_path, monkeypatch, place):
    def end(*arguments):
        raise SystemExit(3)

    def bar(done, total):
        raise LookupError("my bar broke")

    with monkeypatch.context() as patch:
        patch.setattr(worker_watch, "_GLANCE_S", 0.02)
        patch.setattr(*place, end)
        handle = saver.save(state(2), tmp_path / "c", progress=bar if place[0] is lost_ranks else None)
        with pytest.raises(CheckpointError, match="the thread that watches a background save: SystemExit: 3"):
            handle.wait(60)
    assert not is_running(stopped)
    assert loaded_value(tmp_path / "c") == 1
    saver.save(state(3), tmp_path / "c").wait(60)
    assert loaded_value(tmp_path / "c") == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_watching_thread_that_cannot_tidy_up_lets_wait_return(saver, tmp_path, monkeypatch):
    def end(*arguments):
        raise SystemExit(3)

    with monkeypatch.context() as patch:
        patch.setattr(worker_watch.WorkerWatch, "acknowledge", end)
        saver.save(state(2), tmp_path / "c").wait(10)
    assert loaded_value(tmp_path / "c") == 2


def test_a_worker_that_cannot_read_its_job_ends_at_once(saver, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(worker_watch, "pickle", types.SimpleNamespace(dumps=lambda *_, **__: b"cos\n_no_such_name\n."))
        handle = saver.save(state(2), tmp_path / "c")
        with pytest.raises(LostPeerError, match=r"died \(exit code 1\)"):
            handle.wait(10)
    assert loaded_value(tmp_path / "c") == 1
    saver.save(state(3), tmp_path / "c").wait(60)
    assert loaded_value(tmp_path / "c") == 3


def test_signals_that_reach_a_whole_process_group_do_not_end_the_worker(saver, stopped, tmp_path):
    """Ctrl-C, and the SIGTERM of a launcher, which a trainer answers with a last save."""
    handle = saver.save(state(2), tmp_path / "c")
    assert handle.progress() < 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        os.kill(stopped, number)
    handle.wait(60)
    assert handle.progress() == 1
    assert handle.total_s >= handle.blocked_s
    assert loaded_value(tmp_path / "c") == 2
    assert saver.save(state(3), tmp_path / "c").worker_pid == stopped


def test_an_error_that_nobody_waited_for_is_told_by_the_next_call(saver, tmp_path):
    saver.save({"w": one("w", torch.tensor([1.0, torch.inf]))}, tmp_path / "c", check_finite=True)
    with pytest.warns(UserWarning, match=r"nobody waited for it: w\[1\] is inf on rank 0"):
        saver.save(state(3), tmp_path / "c").wait(60)


def test_where_warnings_are_errors_the_next_call_raises_it_once(saver, tmp_path):
    saver.save({"w": one("w", torch.tensor([torch.inf]))}, tmp_path / "c", check_finite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="nobody waited for it"):
            saver.save(state(3), tmp_path / "c")
        saver.save(state(3), tmp_path / "c").wait(60)
    assert loaded_value(tmp_path / "c") == 3


@pytest.mark.slow
def test_threads_that_save_at_the_same_time_each_save_their_own_values(saver, tmp_path):
    """There is one arena: of two calls at a time the second would copy over the first one's values."""
    handles = {}

    def save(value):
        handles[value] = saver.save(state(value, 1 << 20), tmp_path / str(value))

    threads = [threading.Thread(target=save, args=(value,)) for value in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value in range(2, 8):
        handles[value].wait(60)
        loaded = dist_ckpt.load({"w": one("w", torch.zeros(1 << 20))}, tmp_path / str(value), group=None)
        assert (loaded["it"], loaded["w"].unique().tolist()) == (value, [value])


def test_a_signal_handler_that_saves_in_the_middle_of_a_save_is_refused(saver, tmp_path, monkeypatch):
    """It would copy its values over those that the interrupted save has copied already."""
    copy, refused = background.AsyncSaver._copy, []

    def interrupt(number, frame):
        with pytest.raises(CheckpointError, match="let the handler set a flag") as caught:
            saver.save(state(9), tmp_path / "d")
        refused.append(caught.value)

    def copy_and_be_interrupted(*arguments):
        found = copy(*arguments)
        signal.raise_signal(signal.SIGUSR1)
        return found

    before = signal.signal(signal.SIGUSR1, interrupt)
    monkeypatch.setattr(background.AsyncSaver, "_copy", copy_and_be_interrupted)
    try:
        saver.save(state(2), tmp_path / "c").wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1
    assert loaded_value(tmp_path / "c") == 2
    assert names(tmp_path) == ["c"]


def test_a_saver_that_nobody_keeps_lives_until_its_save_has_ended(saver, stopped, tmp_path):
    """The interpreter's end waits for the savers that live."""
    other, open_savers = background.AsyncSaver(group=None, timeout_s=60), background._open_savers(os.getpid())
    other._worker, other._arena = saver._worker, saver._arena  # a worker takes a second to start
    gc.collect()  # savers of other tests
    handle, count = other.save(state(2), tmp_path / "c"), len(open_savers)
    del other
    gc.collect()
    assert len(open_savers) == count
    os.kill(stopped, signal.SIGCONT)
    handle.wait(60)
    assert loaded_value(tmp_path / "c") == 2


def test_the_worker_of_a_saver_that_nobody_keeps_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "_start_worker", Forked)
    handle = background.AsyncSaver(group=None, timeout_s=60).save(state(2), tmp_path / "c")
    handle._thread.join()
    pid = handle.worker_pid
    del handle
    gc.collect()
    until = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(pid)


def test_a_disk_that_fills_in_the_worker_leaves_the_old_checkpoint(saver, tmp_path):
    pid = saver.save(state(1), tmp_path / "c").worker_pid
    saver._let_go()
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    try:
        handle = saver.save(state(2, 2**20), tmp_path / "c")
        with pytest.raises(StorageError, match=r"EFBIG: File too large: this rank needs \d+ bytes") as caught:
            handle.wait(60)
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert names(tmp_path) == ["c"]
    assert loaded_value(tmp_path / "c") == 1
    saver.save(state(3), tmp_path / "c").wait(60)  # by the same worker
    assert loaded_value(tmp_path / "c") == 3


def test_infinity_is_told_by_wait(saver, tmp_path):
    handle = saver.save({"w": one("w", torch.tensor([1.0, torch.inf]))}, tmp_path / "c", check_finite=True)
    with pytest.raises(ShardingError, match=r"w\[1\] is inf on rank 0"):
        handle.wait(60)
    assert loaded_value(tmp_path / "c") == 1


def test_a_bad_state_dict_is_told_by_the_call(saver, tmp_path):
    with pytest.raises(ShardingError, match="w"):
        saver.save({"w": one("w", torch.ones(3), replica_id=1)}, tmp_path / "c")
    with pytest.raises(StorageError, match="if_exists is 'error'"):
        saver.save(state(2), tmp_path / "c", if_exists="error")
    assert names(tmp_path) == ["c"]


def test_what_only_save_can_do_is_refused(saver, tmp_path):
    with pytest.raises(CheckpointError, match=r"of one process; .*; or use save"):
        saver.save(state(2), "memory://c")
    with pytest.raises(CheckpointError, match="save by themselves"):
        saver.save(state(2), tmp_path / "z", ("zarr", 1))
    saver.save(state(2), f"file://{tmp_path}/c").wait(60)
    assert loaded_value(tmp_path / "c") == 2
    assert names(tmp_path) == ["c"]


def test_plain_dcp_reads_it(saver, tmp_path):
    saver.save(state(2), tmp_path / "c").wait(60)
    target = {"w": torch.zeros(1000)}
    dcp.load(target, checkpoint_id=str(tmp_path / "c"))
    assert target["w"].unique().tolist() == [2.0]


def test_empty_scalar_and_bfloat16_tensors_pass_the_arena(saver, tmp_path):
    tensors = {
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(5, dtype=torch.int16),
        "bf16": torch.randn(33).bfloat16(),
        "f8": torch.randn(7, 5).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "conj": torch.randn(3, 2, dtype=torch.complex64).conj(),
    }
    saver.save({key: one(key, tensor) for key, tensor in tensors.items()}, tmp_path / "d").wait(60)
    loaded = dist_ckpt.load_plain_tensors(tmp_path / "d")
    for key, tensor in tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert torch.equal(loaded[key].float(), tensor.float()) if key != "conj" else torch.equal(loaded[key], tensor)


SCRIPT = """
import os, signal, sys, torch
from sixfold import dist_ckpt
print("main runs")
assert __name__ == "__main__"
w = dist_ckpt.ShardedTensor.from_rank_offsets("w", torch.full((50,), 2.0))
handle = dist_ckpt.async_save({"w": w, "it": 2}, sys.argv[1])
print(handle.worker_pid, flush=True)
"""


def script(tmp_path, ending):
    """Run a trainer without a guard around its code; returns its worker's pid and its exit status."""
    (tmp_path / "train.py").write_text(SCRIPT + ending)
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py", tmp_path / "c"], capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "main runs", done.stderr
    assert len(lines) == 2, "the worker ran the user's main"
    return int(lines[1]), done.returncode


AS_OF_PYTHON_3_12 = """
import atexit, threading
plain, ends = threading.Thread.start, []
threading.Thread.start = lambda thread: plain(thread) if not ends else os._exit(9)  # there begins none any more
atexit.register(ends.append, 1)
"""


@pytest.mark.slow
def test_an_interpreter_that_ends_by_an_exception_finishes_its_save(tmp_path):
    pid, returned = script(tmp_path, AS_OF_PYTHON_3_12 + "1 / 0")
    assert returned == 1
    assert not is_running(pid)
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].tolist() == [2.0] * 50


FAILING = """
import atexit, os, sys, torch
sys.path[:0] = [{tests!r}]
import forked_worker
from sixfold import dist_ckpt
from sixfold.dist_ckpt.background import worker_process
worker_process._start_worker = forked_worker.Forked
atexit.register(print, "others end in order")
w = dist_ckpt.ShardedTensor.from_rank_offsets("w", torch.full((5,), {value}))
handle = dist_ckpt.async_save({{"w": w}}, sys.argv[1], group=None, check_finite=True)
{then}
"""
CAUGHT = """
try:
    handle.wait()
except dist_ckpt.CheckpointError:
    print("told")
"""


@pytest.mark.parametrize(
    ("value", "then", "status"),
    [("1.0", "del handle", 0), ("torch.nan", "del handle", 1), ("torch.nan", CAUGHT, 0)],
    ids=["a good save", "nobody waits", "told"],
)
@pytest.mark.slow
def test_a_last_save_that_fails_with_its_handle_dropped_is_no_success(tmp_path, value, then, status):
    text = FAILING.format(tests=os.path.dirname(os.path.dirname(__file__)), value=value, then=then)
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, tmp_path / "train.py", tmp_path / "c"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert "others end in order" in done.stdout
    assert ("the last background save failed, and nobody waited for it: w[0] is nan" in done.stderr) == bool(status)
    assert (tmp_path / "c").exists() == (value == "1.0")


@pytest.mark.slow
def test_a_killed_trainer_takes_its_worker_with_it(tmp_path):
    dist_ckpt.save({"w": one("w", torch.ones(50)), "it": 1}, tmp_path / "c", group=None)
    pid, returned = script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert returned == -signal.SIGKILL
    until = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(pid)
    assert dist_ckpt.load_common_state_dict(tmp_path / "c")["it"] in (1, 2)
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].unique().tolist() in ([1.0], [2.0])


def test_async_save_keeps_one_worker_until_its_saver_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "_start_worker", Forked)
    pids = set()
    for value in (1, 2):
        handle = dist_ckpt.async_save(state(value), tmp_path / "c", group=None)
        handle.wait(60)
        pids.add(handle.worker_pid)
        assert loaded_value(tmp_path / "c") == value
    assert len(pids) == 1
    saver = background._saver_of(os.getpid())
    saver.close()
    saver.close()
    background._saver_of.cache_clear()
    assert not is_running(pids.pop())
    with pytest.raises(CheckpointError, match="this AsyncSaver is closed"):
        saver.save(state(3), tmp_path / "c")


def test_a_control_file_of_somebody_else_is_not_unpickled(tmp_path):
    ours, theirs = (status_and_heartbeats.FolderStatus(tmp_path / "c", "01", key * 32) for key in (b"k", b"x"))
    ours.make()
    ours.put("rank-1", Outcome(value=3))
    ours.put("rank-1", Outcome(value=5))
    assert ours.get("rank-1").value == 3, "what is there first stays"
    assert ours.get("rank-2") is None
    theirs.put("rank-2", Outcome(value=4))
    with pytest.raises(CheckpointError, match="not written by this save"):
        ours.get("rank-2")
