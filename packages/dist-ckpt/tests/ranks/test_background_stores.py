"""Background saves to an S3 server: as to a folder, whatever dies, stands still or asks to slow down."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_ckpt_helpers import one
from forked_worker import Forked
from s3_server import Fault, S3Server

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, LostPeerError, ShardedTensor
from sixfold.dist_ckpt.background import lost_ranks, worker_process
from sixfold.dist_ckpt.background import saver as background
from sixfold.dist_ckpt.background.saver import AsyncSaver
from sixfold.dist_ckpt.save_load import saving
from sixfold.dist_ckpt.stores import ByPointer, MemoryStore

RANKS_IMPORT = ("s3fs",)

ODD_WORKER = str(Path(__file__).parents[1] / "odd_worker.py")


def state(value, rank=0, ranks=1):
    w = torch.full((30,), float(value))
    return {"w": ShardedTensor.from_rank_offsets("w", w, (0, rank, ranks)), "it": 2 if value != value else value}


def value_of(url, ranks=1):
    loaded = dist_ckpt.load({"w": one("w", torch.zeros(30 * ranks))}, url, group=None)
    assert loaded["w"].unique().tolist() == [loaded["it"]]
    return loaded["it"]


def objects_beside(url):
    """Boards, and what lies beside the checkpoint: names below its parent that are not of it."""
    import fsspec

    parent, _, name = url.rpartition("/")
    fs, root = fsspec.core.url_to_fs(parent)
    fs.invalidate_cache()
    return [path for path in fs.find(root) if "/job-" in path or not path.startswith(f"{root}/{name}/")]


@pytest.fixture
def url(s3):
    import s3fs  # noqa: F401 - seconds, once here and not in each forked worker

    return f"s3://{s3.bucket()}/run/c"


@pytest.fixture
def saver(monkeypatch):
    monkeypatch.setattr(worker_process, "_start_worker", Forked)
    with AsyncSaver(group=None, timeout_s=60) as made:
        yield made


@pytest.mark.slow
def test_values_at_the_call_reach_the_store_past_errors_that_pass(s3, url, saver):
    saver.save(state(1), url).wait(60)
    s3.set(faults=[Fault(what="error", kind="put", times=2), Fault(what="reset", kind="get", times=1)])
    saved = state(2)
    handle = saver.save(saved, url)
    saved["w"].data.fill_(9)
    handle.wait(60)
    assert (handle.checkpoint_dir, handle.progress()) == (url, 1.0)
    assert value_of(url) == 2
    assert objects_beside(url) == []


@pytest.mark.slow
def test_a_worker_that_dies_or_stands_still_leaves_the_older_checkpoint_and_is_replaced(s3, url, saver):
    pid = saver.save(state(1), url).worker_pid
    saver._let_go()
    for number, reason, timeout_s in ((signal.SIGKILL, "died", 60), (None, "hangs and was killed", 2)):
        os.kill(pid, signal.SIGSTOP)
        saver._timeout_s = timeout_s
        handle = saver.save(state(2), url)
        if number is not None:
            os.kill(pid, number)
        with pytest.raises(LostPeerError, match=f"the worker of rank 0 {reason}"):
            handle.wait(20)
        assert value_of(url) == 1
        saver._timeout_s = 60
        pid = saver.save(state(1), url).worker_pid
        saver._let_go()
    assert pid != handle.worker_pid


@pytest.mark.slow
def test_a_store_that_stays_down_ends_the_save_with_one_error_within_its_deadline(s3, url, saver):
    saver.save(state(1), url).wait(60)
    saver._timeout_s = 3.0
    handle = saver.save(state(2), url)
    s3.set(faults=[Fault(what="error", kind="put")])
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=url):
        handle.wait(60)
    assert time.monotonic() - start < 30
    s3.set()
    assert value_of(url) == 1


class Mine(ByPointer):
    name = "mine"

    def list_files(self):
        return {}

    def read(self, *_):
        raise FileNotFoundError

    create = delete = read


def test_what_another_process_or_rank_cannot_see_is_refused_by_the_call(saver, monkeypatch):
    for place in ("memory://bucket/c", MemoryStore()):
        with pytest.raises(CheckpointError, match=r"of one process; .* save"):
            saver.save(state(1), place)
    monkeypatch.setattr(Mine, "__module__", "__main__")
    with pytest.raises(CheckpointError, match="mine/step-00000007 is a Mine of __main__"):
        dist_ckpt.async_save({"a": 1}, dist_ckpt.retention.step_path(Mine(), 7))
    with pytest.raises(CheckpointError, match="mine is a Mine of __main__"):
        saver.save(state(1), Mine())


def ended(handle, timeout_s=40):
    start = time.monotonic()
    try:
        handle.wait(timeout_s)
    except CheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "committed", "", time.monotonic() - start


LOSSES = [(0, signal.SIGKILL), (1, None)]


def live(rank, ranks, environment, url):
    """A commit, an error of one rank, and the loss of each rank's worker in two ways."""
    import s3fs  # noqa: F401 - not in each forked worker

    os.environ.update(environment)
    worker_process._start_worker = Forked
    saver, seen = AsyncSaver(timeout_s=24), {}

    def save(value, timeout_s=24, **options):
        saver._timeout_s = timeout_s
        return saver.save(state(value, rank, ranks), url, **options)

    handle = save(1)
    seen["first"] = (*ended(handle), handle.blocked_s)
    seen["late"] = time.monotonic() - handle._started - handle.total_s
    handle._thread.join()
    dist.barrier()
    seen["value"], seen["beside"] = value_of(url, ranks), objects_beside(url)
    dist.barrier()
    seen["nan"] = ended(save(float("nan") if rank else 2, check_finite=True))
    for victim, number in LOSSES:
        dist.barrier()
        pid = handle.worker_pid if rank == victim else None
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
        handle = save(2, 4 if number is None else 24)
        if pid is not None and number is not None:
            os.kill(pid, number)
        seen[victim, number] = ended(handle)
        dist.barrier()
        seen[victim, number, "value"] = value_of(url, ranks)
        dist.barrier()
        handle = save(1)
        handle.wait(60)
    handle._thread.join()
    dist.barrier()
    seen["left"] = objects_beside(url)
    dist.barrier()
    saver.close()
    return seen


@pytest.mark.slow
def test_several_ranks_commit_to_a_store_and_hear_one_end_of_every_loss(s3, url):
    results = run_ranks(live, 2, s3.environment(), url, timeout=110)
    for seen in results:
        assert seen["first"][:2] == ("committed", "")
        assert seen["late"] < 1, "who waits hears of the commit, and not of what is tidied after it"
        assert seen["value"] == 1
        assert seen["beside"] == seen["left"] == []
        assert seen["nan"][:2] == ("ShardingError", "w[30] is nan on rank 1, and check_finite is set")
        for victim, number in LOSSES:
            kind, text, seconds = seen[victim, number]
            assert kind == "LostPeerError"
            assert text == results[0][victim, number][1], "one text"
            assert f"rank {victim}" in text or f"[{victim}]" in text
            assert seconds < 10
            assert seen[victim, number, "value"] == 1


def lose_a_rank(rank, ranks, environment, url, victim, with_worker):
    os.environ.update(environment)
    worker_process._WORKER = (ODD_WORKER, "slow:0")
    worker_process._start_worker = Forked
    saver = AsyncSaver(timeout_s=60)
    worker = saver.save(state(1, rank, ranks), url).worker_pid
    saver._let_go()
    dist.barrier()
    if rank == victim and with_worker:
        os.kill(worker, signal.SIGSTOP)
    saver._timeout_s = 6.0
    worker_process._WORKER = (ODD_WORKER, "slow:0")
    handle = saver.save(state(2, rank, ranks), url)
    if rank == victim:
        if with_worker:
            os.kill(worker, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return (*ended(handle), value_of(url, ranks))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.slow
def test_a_rank_that_dies_with_its_worker_is_told_within_the_deadline(s3, url, victim):
    results = run_ranks(lose_a_rank, 2, s3.environment(), url, victim, True, allow_exit=(victim,), timeout=60)
    kind, text, seconds, value = results[1 - victim]
    assert (kind, value) == ("LostPeerError", 1)
    assert f"rank {victim}" in text or f"[{victim}]" in text
    assert seconds < 6.0 + lost_ranks._ACKNOWLEDGED_S + 1


def asked(s3):
    """What the calls have asked of the server; heartbeats apart, which come after them. None: not answered yet."""
    return [(kind, status) for kind, key, _, _, status in s3.log() if "/alive-" not in key]


def wait_in_the_call(rank, ranks, environment, port, url):
    """What was asked when the ranks had agreed, when rank 0 had copied, and when the call returned."""
    os.environ.update(environment)
    worker_process._start_worker = Forked
    s3, seen = S3Server(port), []
    with AsyncSaver(timeout_s=60) as saver:
        worker = saver.save(state(1, rank, ranks), url).worker_pid
        saver._let_go()
        for thread in saver._leaving:
            thread.join()
        dist.barrier()
        if rank == 0:
            s3.set(latency_ms=100)
        dist.barrier()
        os.kill(worker, signal.SIGSTOP)
        agree_on, copy = saving.agree_on, saver._copy

        def agreed(*arguments, **options):
            found = agree_on(*arguments, **options)
            seen.append(asked(s3))
            return found

        def copied(content, request):
            until = time.monotonic() + 20
            while rank == 0 and len([status for _, status in asked(s3) if status]) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            seen.append(asked(s3))
            return copy(content, request)

        saving.agree_on, saver._copy = agreed, copied
        handle = saver.save(state(2, rank, ranks), url)
        seen.append(asked(s3))
        os.kill(worker, signal.SIGCONT)
        handle.wait(60)
    return seen


@pytest.mark.slow
def test_the_call_waits_for_no_request_but_those_that_run_beside_its_copies(s3, url):
    seen = run_ranks(wait_in_the_call, 2, s3.environment(), s3.port, url, timeout=110)[0]
    assert seen == [[], [("list", 200), ("put", 200)], [("list", 200), ("put", 200)]]
    assert value_of(url, 2) == 2
    assert objects_beside(url) == []


def refused(rank, ranks, environment, port, url):
    """The errors of calls that the store refuses."""
    os.environ.update(environment)
    worker_process._start_worker = Forked
    s3, parent = S3Server(port), url.rpartition("/")[0]
    down = [Fault(what="error", kind="list", status=403, code="AccessDenied")]
    errors = []

    def call(saver, place, **options):
        with pytest.raises(CheckpointError) as caught:
            saver.save(state(2, rank, ranks), place, **options)
        errors.append((type(caught.value).__name__, str(caught.value)))

    with AsyncSaver(timeout_s=60) as saver:
        call(saver, url, if_exists="error")
        call(saver, parent)
        call(saver, "s3://there-is-no-such-bucket/c")
        for faults in (down, []):
            dist.barrier()
            if rank == 0:
                s3.set(faults=faults)
            dist.barrier()
            if faults:
                call(saver, url)
        beside, value = objects_beside(url), value_of(url, ranks)
        dist.barrier()
        saver.save(state(3, rank, ranks), url).wait(60)
    return errors, beside, value


@pytest.mark.slow
def test_what_a_store_refuses_is_one_error_of_the_call_on_all_ranks_and_nothing_is_left(s3, url):
    dist_ckpt.save({"w": one("w", torch.ones(60)), "it": 1}, url, group=None)
    (errors, beside, value), (others, _, _) = run_ranks(refused, 2, s3.environment(), s3.port, url, timeout=110)
    assert errors == others
    assert [kind for kind, _ in errors] == ["StorageError"] * 4
    expected = ["is not empty", "no part of a checkpoint", "there-is-no-such-bucket", "PermissionError"]
    assert all(word in text for word, (_, text) in zip(expected, errors, strict=True)), errors
    assert (beside, value) == ([], 1)
    assert value_of(url, 2) == 3


def given_up(rank, ranks, environment, port, url):
    """A call that fails while the store is slow; what it leaves when the first rank's threads have ended."""
    os.environ.update(environment)
    worker_process._start_worker = Forked
    background._LATE_S = 0.1
    s3, seen = S3Server(port), []
    with AsyncSaver(timeout_s=60) as saver:
        copy = saver._copy
        saver.save(state(1, rank, ranks), url).wait(60)
        saver._let_go()
        for thread in saver._leaving:
            thread.join()
        for kind in ("list", "put"):  # before the save is begun, and while its status is made
            dist.barrier()
            if rank == 0:
                s3.set(latency_ms=2000)
            dist.barrier()
            before, start = set(threading.enumerate()), []

            def fail(content, request, kind=kind, start=start):
                if rank == 0:
                    s3.wait_for(kind, 1, 20)
                    start.append(time.monotonic())
                    raise CheckpointError("no room")
                return copy(content, request)

            saver._copy = fail
            with pytest.raises(CheckpointError, match=r"^no room$"):
                saver.save(state(2, rank, ranks), url)
            waited = time.monotonic() - start[0] if start else 0.0
            late = set(threading.enumerate()) - before if rank == 0 else ()
            for thread in late:
                thread.join(30)
            asked_for = [kind for kind, _ in asked(s3)][:2]
            dist.barrier()
            if rank == 0:
                s3.set()
            dist.barrier()
            seen.append((len(late), asked_for, objects_beside(url)))
            assert waited < 1.5, "an answer is not waited for"
        dist.barrier()
        saver._copy = copy
        saver.save(state(3, rank, ranks), url).wait(60)
    return seen


@pytest.mark.slow
def test_a_call_that_fails_does_not_wait_for_a_slow_store_and_leaves_nothing(s3, url):
    seen = run_ranks(given_up, 2, s3.environment(), s3.port, url, timeout=110)[0]
    assert seen == [(1, ["list", "put"], [])] * 2
    assert value_of(url, 2) == 3
