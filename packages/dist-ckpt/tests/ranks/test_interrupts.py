"""Ctrl-C at each step of a save, a worker that dies at each step of its own, ranks that are stopped in a call."""

import contextlib
import dis
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from dist_ckpt_helpers import names, state, value_of
from forked_worker import Forked

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import LostPeerError, ShardedTensor
from sixfold.dist_ckpt.background import lost_ranks, status_and_heartbeats, worker_process
from sixfold.dist_ckpt.background import saver as background
from sixfold.dist_ckpt.save_load import saving, writer
from sixfold.dist_ckpt.save_load.reader import Reader
from sixfold.dist_ckpt.storage import local as storage
from sixfold.dist_ckpt.stores import UrlStore
from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy

ODD_WORKER = Path(__file__).parents[1] / "odd_worker.py"


@pytest.fixture
def ctrl_c():
    """Python's own answer to Ctrl-C, also where the shell that runs the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def saver():
    with background.AsyncSaver(group=None, timeout_s=60) as made:
        yield made


def interrupt_at(patch, place, name, after):
    """Ctrl-C when ``place.name`` is called the next time, before it does anything or when it has ended.

    By this thread: that of a save which has begun calls some of these too, and its signal would come here later.
    """
    plain, left, me = getattr(place, name), [1], threading.get_ident()

    def call(*arguments, **options):
        if threading.get_ident() != me:
            return plain(*arguments, **options)
        if left.pop() if left and not after else False:
            signal.raise_signal(signal.SIGINT)
        found = plain(*arguments, **options)
        if left.pop() if left and after else False:
            signal.raise_signal(signal.SIGINT)
        return found

    patch.setattr(place, name, call)


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (saving, "describe"),
        (storage, "check_space"),
        (writer, "write"),
        (saving, "index_of"),
        (storage, "sync_folder"),
        (storage, "commit"),
    ],
)
@pytest.mark.slow
def test_ctrl_c_at_any_step_of_a_save_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path, monkeypatch, ctrl_c, place, name, after, exchange
):
    dist_ckpt.save(state(1), tmp_path / "c", group=None)
    with monkeypatch.context() as patch:
        if not exchange:
            patch.setattr(storage, "exchange", lambda a, b: False)
        interrupt_at(patch, place, name, after)
        with pytest.raises(KeyboardInterrupt):
            dist_ckpt.save(state(2), tmp_path / "c", group=None)
    assert value_of(tmp_path / "c") == (2 if (name, after) == ("commit", True) else 1)
    assert names(tmp_path) == ["c"]
    dist_ckpt.save(state(3), tmp_path / "c", group=None)
    assert value_of(tmp_path / "c") == 3


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("place", "name"), [(saving, "agree_on"), (background.AsyncSaver, "_copy"), (background, "_without_data")]
)
@pytest.mark.slow
def test_ctrl_c_in_the_call_of_a_background_save_leaves_nothing_and_the_next_one_runs(
    tmp_path, monkeypatch, ctrl_c, saver, place, name, after
):
    saver.save(state(1), tmp_path / "c").wait(60)
    with monkeypatch.context() as patch:
        interrupt_at(patch, place, name, after)
        with pytest.raises(KeyboardInterrupt):
            saver.save(state(2), tmp_path / "c")
    assert value_of(tmp_path / "c") == 1
    left = [name for name in names(tmp_path) if name != "c"]
    assert left == [] or (name, after) == ("agree_on", True), "between two statements nobody owns the folder yet"
    saver.save(state(3), tmp_path / "c").wait(60)
    assert value_of(tmp_path / "c") == 3
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("after", [False, True])
def test_ctrl_c_between_launch_and_handle_leaves_nothing_or_a_save_that_the_next_call_waits_for(
    tmp_path, monkeypatch, ctrl_c, saver, after
):
    pid = saver.save(state(1), tmp_path / "c").worker_pid
    saver._let_go()
    os.kill(pid, signal.SIGSTOP)  # so that the next call would copy over what it still has to write
    with monkeypatch.context() as patch:
        interrupt_at(patch, threading.Thread, "start", after)
        with pytest.raises(KeyboardInterrupt):
            saver.save(state(2), tmp_path / "c")
    flight = saver._flight  # of a thread that had begun; it may not have come so far
    assert flight is None or after
    os.kill(pid, signal.SIGCONT)
    if flight is not None:
        flight.wait()
    assert value_of(tmp_path / "c") == (1 if flight is None else 2)
    assert names(tmp_path) == ["c"]
    saver.save(state(3), tmp_path / "c").wait(60)
    assert value_of(tmp_path / "c") == 3


#: What the caller's thread runs until it has the handle, and what starts a worker.
BEGINNING = [
    background.AsyncSaver.save,
    background.AsyncSaver._begun,
    background.AsyncSaver._in_turn,
    background.AsyncSaver._let_go,
    background.AsyncSaver._hand_over,
    background.AsyncSaver._copy,
    background.AsyncSave.__init__,
    threading.Thread.start,
]
STARTING = [background.AsyncSaver._ready_worker, worker_process.Worker.__init__]


def windows(code):
    """Where Python looks for signals: behind a call, where a function begins or a generator goes on, in a loop."""
    steps = list(dis.get_instructions(code))
    looks = ("CALL", "RESUME", "JUMP_BACKWARD")
    return {after.offset for before, after in pairwise(steps) if before.opname.startswith(looks)}


def interrupted_at(number, functions, call):
    """``call`` with a KeyboardInterrupt in the n-th window of some functions that it comes to; which one, if it did."""
    codes = {function.__code__: windows(function.__code__) for function in functions}
    left, place = [number], []

    def trace(frame, event, _):
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in codes[frame.f_code] and not place:
            left[0] -= 1
            if left[0] < 0:
                place.append((frame.f_code.co_qualname, frame.f_lineno - frame.f_code.co_firstlineno))
                raise KeyboardInterrupt
        return trace

    sys._getframe().f_trace_opcodes = True  # in any frame: Python from 3.12 on looks for it when tracing begins
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert place
    finally:
        sys.settrace(None)
    return place[0] if place else None


def workers_of_this_process():
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(status.parent.name))
    return found


@pytest.mark.parametrize(
    ("functions", "place_at"),
    [(BEGINNING, Path), (STARTING, Path), (BEGINNING, lambda path: UrlStore(f"file://{path}"))],
    ids=["begin", "start", "begin at a store"],
)
@pytest.mark.slow
def test_an_interrupt_in_any_window_leaves_nothing_or_a_save_that_the_next_call_waits_for(
    tmp_path, monkeypatch, functions, place_at
):
    monkeypatch.setattr(worker_process, "_start_worker", Forked)
    monkeypatch.setattr(background, "_LATE_S", 0.1)
    target = place_at(tmp_path / "c")
    others, places, ends = workers_of_this_process(), [], set()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with background.AsyncSaver(group=None, timeout_s=60) as saver:
        for number in range(1000):
            saver.save(state(0), target).wait(60)
            assert value_of(target) == 0, places[-1]
            assert names(tmp_path) == ["c"], places[-1]
            saver._let_go()
            if functions is STARTING:
                saver._worker.stop()
            place = interrupted_at(number, functions, lambda: saver.save(state(1), target))
            if saver._flight is not None:
                saver._flight.wait(60)
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask, place
            value = value_of(target)
            assert value == (saver._flight is not None), place
            ends.add(value)
            if place is None:
                break
            places.append(place)
            # Between two statements nobody owns a folder that was made: it goes with the next save.
            assert names(tmp_path) == ["c"] or place[0] == "AsyncSaver._begun", place
    assert {where for where, _ in places} == {function.__qualname__ for function in functions}
    assert ends == {0, 1}
    deadline = time.monotonic() + 20  # one whose line was closed ends when it has looked
    while workers_of_this_process() - others and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_of_this_process() <= others, "no worker stays that nobody knows"


def test_an_interrupt_that_is_kept_holds_no_turn(tmp_path, saver):
    """As a notebook keeps the last exception, and with it all that stands in the frames of its traceback."""
    entering = [contextlib._GeneratorContextManager.__enter__, contextlib._GeneratorContextManager.__exit__]
    kept, number, takes = [], 0, []

    def call():
        try:
            saver.save(state(1), tmp_path / "c")
        except KeyboardInterrupt as error:
            kept.append(error)
            raise

    def take():
        takes.append(saver._turn.acquire(timeout=1) and saver._turn.release() is None)

    while (place := interrupted_at(number, entering, call)) is not None:
        other = threading.Thread(target=take)
        other.start()
        other.join()
        assert takes.pop(), (number, place)
        number += 1
    assert number > 3
    assert len(kept) == number
    saver.save(state(2), tmp_path / "c").wait(60)
    assert value_of(tmp_path / "c") == 2


def test_a_second_interrupt_while_the_first_is_met_leaves_no_save_that_the_next_call_waits_for_in_vain(
    tmp_path, monkeypatch, saver
):
    """A launcher passes Ctrl-C on that the terminal has sent to the whole process group."""
    saver._let_go()
    with monkeypatch.context() as patch:
        plain = background.AsyncSave._is_given_up

        def interrupted(*arguments):
            if arguments[1:] or plain(*arguments):
                raise KeyboardInterrupt

        patch.setattr(threading.Thread, "start", lambda thread: interrupted(thread, "before it starts"))
        patch.setattr(background.AsyncSave, "_is_given_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.save(state(2), tmp_path / "c")
    assert saver._flight.done(), "the next call would wait for ever"
    with pytest.warns(UserWarning, match="ended without an outcome"):
        saver.save(state(3), tmp_path / "c").wait(60)
    assert value_of(tmp_path / "c") == 3
    assert names(tmp_path) == ["c"]


def test_ctrl_c_in_wait_comes_at_once_and_the_save_goes_on(tmp_path, ctrl_c, saver):
    pid = saver.save(state(1), tmp_path / "c").worker_pid
    saver._let_go()
    os.kill(pid, signal.SIGSTOP)
    handle = saver.save(state(2), tmp_path / "c")
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert time.monotonic() - start < 5
    os.kill(pid, signal.SIGCONT)
    handle.wait(60)
    assert value_of(tmp_path / "c") == 2


STAGES = [
    ("save_load.writer.write:1", "old"),
    ("storage.frame_file._write_at:1", "old"),
    ("save_load.saving.index_of:1", "old"),
    ("storage.local.write_file:4", "old"),
    ("storage.local.commit:1", "old"),
    ("storage.local.sync_folder:2", "new"),  # of the parent, after the move
    ("storage.local.siblings:1", "new"),
]


@pytest.mark.slow
def test_a_worker_that_dies_at_any_stage_leaves_the_old_checkpoint_or_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "_start_worker", Forked)
    dist_ckpt.save(state(0), tmp_path / "c", group=None)
    with background.AsyncSaver(group=None, timeout_s=60) as saver:
        for value, (stage, expected) in enumerate(STAGES, 1):
            monkeypatch.setattr(worker_process, "_WORKER", (str(ODD_WORKER), f"dies:{stage}"))
            before = value_of(tmp_path / "c")
            handle = saver.save(state(value), tmp_path / "c")
            if expected == "old":
                with pytest.raises(LostPeerError, match=r"the worker of rank 0 died \(exit code -9\)"):
                    handle.wait(60)
                assert names(tmp_path) == ["c"], stage
            else:
                handle.wait(60)
            assert value_of(tmp_path / "c") == (before if expected == "old" else value), stage
            saver._worker.process.wait(10)
        monkeypatch.undo()
        saver.save(state(100), tmp_path / "c").wait(60)
    assert value_of(tmp_path / "c") == 100
    assert names(tmp_path) == ["c"]


def stop_in_a_call(rank, ranks, folder, call):
    """Rank 1 is stopped in the middle of a call and goes on after the deadline of the others."""
    whole = {"w": ShardedTensor.from_rank_offsets("w", torch.full((1 << 19,), 1.0), replica_id=rank)}
    dist_ckpt.save(whole | {"it": 1}, folder / "c")
    if rank == 1:
        place, name = (writer, "write") if call == "save" else (Reader, "run")
        plain = getattr(place, name)

        def stop(*arguments, **options):
            subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            return plain(*arguments, **options)

        setattr(place, name, stop)
    start = time.monotonic()
    try:
        if call == "save":
            dist_ckpt.save(whole | {"it": 2}, folder / "c", timeout_s=0.8)
        else:
            loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()) if call == "relay" else None
            dist_ckpt.load(whole, folder / "c", loader, timeout_s=0.8)
    except LostPeerError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("call", ["save", "load", "relay"])
@pytest.mark.slow
def test_a_rank_that_is_stopped_in_a_call_is_named_at_the_deadline(tmp_path, call):
    results = run_ranks(stop_in_a_call, 2, tmp_path, call, timeout=30)
    assert results[0][0].startswith("rank 1 of 2 is dead")
    assert results[0][1] < 1.4
    assert results[1][0].startswith("rank 0 of 2 is dead"), "it has lost the others too"
    assert dist_ckpt.load_common_state_dict(tmp_path / "c") == {"it": 1}
    assert names(tmp_path) == ["c"]


def test_a_control_folder_that_a_stopped_rank_never_leaves_goes_all_the_same(tmp_path):
    """The first rank's last wait, for the others to acknowledge the outcome."""
    left = status_and_heartbeats.FolderStatus(tmp_path / "c", "01", b"k" * 32, locks_work=False, stale_s=60.0)
    left.make()
    heartbeat = left.heartbeat(1)
    job = type("Job", (), {"ranks": 2, "look_s": 0.1})()
    start = time.monotonic()
    lost_ranks.remove(job, left)
    assert 1 < time.monotonic() - start < lost_ranks._ACKNOWLEDGED_S + 1
    assert not left.path.exists()
    heartbeat.close()
