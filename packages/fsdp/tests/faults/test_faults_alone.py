"""Waits, watchdog and signatures with fake Works: no process needed."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net
from torch.distributed import HashStore

from sixfold.fsdp import FsdpError, FullyShardedDataParallel, fully_shard_optimizer
from sixfold.fsdp.buffers.digest import tensor_digest
from sixfold.fsdp.collectives.comm import Launches
from sixfold.fsdp.engine.rank_agreement import OrderDigest
from sixfold.fsdp.faults import deadlines as faults
from sixfold.fsdp.faults import survivors as meeting
from sixfold.fsdp.faults.deadlines import Faults
from sixfold.fsdp.faults.disagreement import odd_ranks
from sixfold.fsdp.faults.heartbeat import contradict

pytestmark = pytest.mark.usefixtures("as_sharded")


class FakeWork:
    def __init__(self, fails=None, done=False):
        self.fails, self.done = fails, done

    def wait(self, timeout=None):
        if self.fails:
            self.done = True
            raise RuntimeError(self.fails)
        if not self.done:
            time.sleep(min(timeout.total_seconds(), 0.02))
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return self.done


def at_step(step, faults):
    faults.step = step
    return faults


def test_a_wait_ends_at_its_deadline_and_blames_the_other_of_a_pair():
    faults = at_step(7, Faults(0, 2, None, timeout_s=0.05))
    with pytest.raises(FsdpError, match=r"no answer within 0.05 s") as caught:
        faults.wait(FakeWork(), "blocks.1", "reduce")
    error = caught.value
    assert (error.unit, error.step, error.op, error.ranks) == ("blocks.1", 7, "reduce", (1,))


def test_a_failed_work_among_many_says_how_to_learn_the_rank():
    with pytest.raises(FsdpError, match=r"fault_store.*Connection closed") as caught:
        Faults(0, 4, None, timeout_s=5.0).wait(FakeWork(fails="Connection closed by peer. More"), "", "gather")
    assert caught.value.ranks == ()


class LateWork(FakeWork):
    """Ends well in the moment after its first wait gave up."""

    def wait(self, timeout=None):
        if not self.done:
            self.done = True
            raise RuntimeError("Operation timed out!")


def test_a_work_that_ends_just_after_its_wait_gave_up_is_no_fault():
    faults, work = Faults(0, 2, None, timeout_s=5.0), LateWork()
    faults.wait(work, "", "gather")
    assert work.done and faults.failed is None


class DeadStore:
    """A store whose process is gone."""

    def add(self, *args):
        raise RuntimeError("Connection reset by peer")

    set = check = get = add


def test_a_store_that_is_gone_is_said_and_nobody_is_blamed():
    with pytest.raises(FsdpError, match="fault_store does not answer") as caught:
        Faults(1, 3, DeadStore(), timeout_s=5.0).wait(FakeWork(), "", "gather")
    assert caught.value.ranks == ()


class SilentStore:
    """A store in which nobody leaves a sign."""

    def add(self, key, amount):
        return 0

    def set(self, key, value):
        pass

    def check(self, keys):
        return False


class Clock:
    """Time that only sleeping moves."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_blame_for_several_lost_ranks_comes_within_two_seconds_of_the_deadline(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(faults, "time", clock)
    monkeypatch.setattr(meeting, "time", clock)

    class StuckWork(FakeWork):
        def wait(self, timeout=None):
            clock.sleep(timeout.total_seconds())
            raise RuntimeError("Operation timed out!")

    with pytest.raises(FsdpError) as caught:
        Faults(0, 4, SilentStore(), timeout_s=60.0).wait(StuckWork(), "", "gather")
    assert caught.value.ranks == (1, 2, 3)
    assert 60.0 <= clock.now <= 62.0


class StreamWork:
    """A Work as NCCL's: wait() returns at once, done or not; an abort completes it although nothing came."""

    def __init__(self):
        self.done = False

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return self.done


class Device:
    """Stands in for CUDA: ``launch`` gives Works that never end by themselves, ``abort`` ends all of them."""

    def __init__(self, faults=None):
        self.works, self.faults, self.failed_at_abort = [], faults, "not aborted"

    def launch(self, *tensors):
        self.works.append(StreamWork())
        return self.works[-1]

    def abort(self):
        self.failed_at_abort = self.faults.failed
        for work in self.works:
            work.done = True


def wait_until(true, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert true()


def test_on_a_device_the_failure_is_noted_before_the_abort_and_told_once_by_check():
    device = Device()
    device.faults = faults = at_step(7, Faults(0, 2, None, timeout_s=0.06, host_waits=False, abort=device.abort))
    faults.check()
    faults.wait(device.launch(), "blocks.1", "reduce")  # a stream waits, the host goes on
    wait_until(lambda: device.failed_at_abort != "not aborted")
    error = device.failed_at_abort
    assert (error.unit, error.step, error.op, error.ranks) == ("blocks.1", 7, "reduce", (1,))
    with pytest.raises(
        FsdpError, match=r"earlier fault: no sign of life from rank 1 \(no answer within 0.06 s\)"
    ) as caught:
        faults.wait(device.launch(), "blocks.2", "gather")  # which returns normally after an abort
    assert (caught.value.unit, caught.value.step, caught.value.ranks) == ("blocks.1", 7, (1,))


def test_what_torchs_flight_recorder_holds_is_printed_before_the_abort(monkeypatch, capsys):
    entry = {
        "profiling_name": "nccl:all_gather", "collective_seq_id": 12, "process_group": ["sixfold.fsdp gathers", ""],
        "input_sizes": [[64]], "output_sizes": [[128]], "state": "started",
    }  # fmt: skip
    calls = []

    def dump(includeCollectives, onlyActive):
        calls.append((includeCollectives, onlyActive))
        return json.dumps({"version": "2.10", "entries": [entry] * 30}).encode()

    monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace_json", dump)
    device = Device()
    device.faults = faults = at_step(7, Faults(0, 2, None, timeout_s=0.06, host_waits=False, abort=device.abort))
    faults.wait(device.launch(), "blocks.1", "gather")
    wait_until(lambda: device.failed_at_abort != "not aborted")
    told = capsys.readouterr().out.splitlines()
    assert "no sign of life from rank 1" in told[0] and calls == [(True, True)]
    assert told[1:] == ["  nccl:all_gather number 12 of group sixfold.fsdp gathers , [[64]] -> [[128]], started"] * 16


def test_works_that_end_in_time_are_forgotten():
    device = Device()
    device.faults = faults = Faults(0, 2, None, timeout_s=0.2, host_waits=False, abort=device.abort)
    for _ in range(3):
        faults.wait(device.launch(), "", "gather")
        device.works[-1].done = True
    wait_until(lambda: not faults._watched)
    time.sleep(0.3)
    faults.check()
    faults.close()


def test_a_work_that_a_stream_waits_for_is_not_kept():
    device, done = Device(), threading.Event()
    faults = Faults(0, 2, None, timeout_s=5.0, host_waits=False, done_of=lambda work: done.is_set, abort=device.abort)
    faults.wait(device.launch(), "", "reduce")
    work = weakref.ref(device.works.pop())
    gc.collect()
    assert work() is None
    assert faults._watched
    done.set()
    wait_until(lambda: not faults._watched)
    faults.close()


@pytest.mark.parametrize("use", ["optimizer.step", "finish_grad_sync", "clip_grad_norm_", "state_records", "check"])
def test_after_a_missed_deadline_on_a_device_nothing_that_was_not_received_is_used(use):
    """Reductions of a wrapped model never come; the watchdog expires between backward and step()."""
    net = make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    before = {name: main.detach().clone() for name, main in model.main_parameters()}
    faults = model._engine.faults
    device = Device(faults)
    faults._host_waits, faults._abort, faults._done_of = False, device.abort, lambda work: work.is_completed
    model._engine.ranks.shard.reduce_scatter = device.launch
    loss_of(model(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    faults.timeout_s = faults.first_step_timeout_s = 0.06  # not before: the backward itself would meet it
    wait_until(lambda: device.failed_at_abort != "not aborted")
    action = {
        "optimizer.step": optimizer.step,
        "finish_grad_sync": model.finish_grad_sync,
        "clip_grad_norm_": lambda: model.clip_grad_norm_(1.0),
        "state_records": model.state_records,
        "check": model.check,
    }[use]
    with pytest.raises(FsdpError, match=r"earlier fault: .*no answer within 0.06 s") as caught:
        action()
    assert (caught.value.step, caught.value.op) == (0, "reduce") and caught.value.unit is not None
    assert all(torch.equal(before[name], main) for name, main in model.main_parameters())


def test_the_first_step_has_the_longer_deadline_and_the_next_one_has_not():
    faults = at_step(0, Faults(0, 2, None, timeout_s=0.05, first_step_timeout_s=0.4))
    began = time.monotonic()
    with pytest.raises(FsdpError, match=r"no answer within 0.4 s"):
        faults.wait(FakeWork(), "", "gather")
    assert time.monotonic() - began >= 0.4
    for step in (-1, 1):  # -1: while wrapping, where nothing is compiled
        faults = at_step(step, Faults(0, 2, None, timeout_s=0.05, first_step_timeout_s=0.4))
        with pytest.raises(FsdpError, match=r"no answer within 0.05 s") as caught:
            faults.wait(FakeWork(), "", "gather")
        assert caught.value.step == (None if step < 0 else step)
    with pytest.raises(FsdpError, match=r"no answer within 0.2 s"):
        at_step(0, Faults(0, 2, None, timeout_s=0.2, first_step_timeout_s=0.1)).wait(FakeWork(), "", "gather")


def test_a_fault_of_a_control_message_ends_what_streams_wait_for():
    device = Device()
    device.faults = faults = at_step(3, Faults(0, 2, None, timeout_s=0.1, host_waits=False, abort=device.abort))
    with pytest.raises(FsdpError, match=r"no answer within 0.1 s"):
        faults.wait(FakeWork(), None, "check", on_host=True)
    assert device.failed_at_abort is faults.failed and faults.failed.step == 3


def test_launches_are_told_consistently_to_another_thread():
    launches, stop, torn = Launches(), threading.Event(), []

    def read():
        while not stop.is_set():
            count, recent = launches.last()
            torn.extend([count] if recent != [(n % 7) << 3 | 1 for n in range(count - len(recent), count)] else [])

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(20_000):
        launches.add(1, torch.empty(n % 7))
    stop.set()
    reader.join()
    assert torn == [] and launches.last()[0] == 20_000


def wait_as(faults, place, found):
    unit, step, op = place
    try:
        at_step(step, faults).wait(FakeWork(), unit, op)
    except FsdpError as error:
        found[faults.rank] = error


def meet(places, timeout_s, launched=()):
    """Each rank of ``places`` waits, in a thread, for what never comes: the errors by rank, and the seconds it took."""
    store, found = HashStore(), {}
    all_faults = [
        Faults(rank, len(places), store, timeout_s, launched=lambda rank=rank: launched[rank] if launched else {})
        for rank in range(len(places))
    ]
    threads = [
        threading.Thread(target=wait_as, args=(one, place, found))
        for one, place in zip(all_faults, places, strict=True)
        if place is not None
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in all_faults:
        one.close()
    return found, time.monotonic() - began


def test_a_rank_that_lives_and_does_not_come_is_told_from_a_dead_one():
    found, _ = meet([("blocks.1", 3, "gather"), None, ("blocks.1", 3, "gather")], timeout_s=0.6)
    for rank in (0, 2):
        assert "rank 1 lives but did not come; it was last at no collective" in str(found[rank])
        assert (found[rank].unit, found[rank].step, found[rank].ranks) == ("blocks.1", 3, (1,))


class CountingStore:
    """A HashStore that notes what it is asked."""

    def __init__(self):
        self.store, self.asked = HashStore(), []

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.store, name)


def test_ranks_that_do_not_wait_ask_the_store_once_per_beat_and_write_nothing(monkeypatch):
    monkeypatch.setattr(faults, "_BEAT_S", 0.1)
    store = CountingStore()
    runs = Faults(0, 2, store, timeout_s=60.0)
    for _ in range(200):  # of a step: waits that end at once
        runs.wait(FakeWork(done=True), "blocks.1", "gather")
    time.sleep(0.5)
    runs.close()
    assert set(store.asked) == {"check"} and len(store.asked) <= 6


class SlowWork(FakeWork):
    """Ends well some time after it was made."""

    def __init__(self, seconds):
        super().__init__()
        self.ends = time.monotonic() + seconds

    def wait(self, timeout=None):
        self.done = time.monotonic() >= self.ends
        super().wait(timeout)


def test_a_rank_that_compiles_in_the_first_step_is_not_lost_and_one_without_beats_is():
    """Rank 1's heartbeat answers for longer than the deadline of later steps; then it is there no more."""
    store = HashStore()
    waits, compiles = (
        at_step(0, Faults(rank, 2, store, timeout_s=1.0, first_step_timeout_s=600.0)) for rank in range(2)
    )
    waits.wait(SlowWork(1.5), "blocks.1", "gather")
    compiles.close()
    began = time.monotonic()
    with pytest.raises(FsdpError, match=r"no sign of life from rank 1 \(no beat for") as caught:
        waits.wait(FakeWork(), "blocks.2", "gather")
    waits.close()
    assert time.monotonic() - began < 1.0 / 2 + 2.0
    assert (caught.value.unit, caught.value.step, caught.value.ranks) == ("blocks.2", 0, (1,))


def test_a_silent_rank_is_reported_before_the_deadline():
    store, found = HashStore(), {}
    faults = Faults(0, 2, store, timeout_s=1.2)  # and no rank 1
    began = time.monotonic()
    wait_as(faults, ("blocks.1", 3, "reduce"), found)
    faults.close()
    assert time.monotonic() - began < 1.2 / 2 + 2.0
    assert "no sign of life from rank 1 (no beat for" in str(found[0])
    assert (found[0].unit, found[0].step, found[0].op, found[0].ranks) == ("blocks.1", 3, "reduce", (1,))


@pytest.mark.parametrize(
    "launched",
    [
        [{"a": (5, [8, 9])}, {"a": (5, [8, 7])}, {"a": (5, [8, 9])}],  # another one at the same place
        [
            {"g gathers": (5, [8, 9]), "g reductions": (2, [1])},
            {"g gathers": (4, [8]), "g reductions": (3, [1, 6])},  # each waits for the other's next
            {"g gathers": (5, [8, 9]), "g reductions": (2, [1])},
        ],
    ],
)
def test_ranks_that_wait_for_different_collectives_are_told_long_before_the_deadline(launched):
    places = [("blocks.1", 3, "gather"), ("blocks.2", 3, "reduce"), ("blocks.1", 3, "gather")]
    found, seconds = meet(places, 4.0, launched)
    assert seconds < 2.0
    for rank, (unit, step, op) in enumerate(places):
        assert (found[rank].unit, found[rank].step, found[rank].op, found[rank].ranks) == (unit, step, op, (1,))
        assert "most wait for gather of blocks.1 in step 3, rank 1 waits for reduce of blocks.2 in step 3" in str(
            found[rank]
        )


@pytest.mark.parametrize(
    ("mine", "theirs", "blocked", "fault"),
    [
        ({"a": (3, [1, 2, 3])}, {"a": (3, [1, 2, 3])}, True, False),
        ({"a": (3, [1, 2, 3])}, {"a": (2, [1, 2])}, True, False),  # behind
        ({"g a": (3, [1, 2, 3]), "g b": (4, [])}, {"g a": (2, [1, 2]), "g b": (3, [])}, True, False),  # behind on both
        ({"a": (3, [1, 2, 3])}, {"a": (2, [1, 5])}, False, True),
        ({"a": (9, [1, 2])}, {"a": (4, [7, 7])}, True, False),  # nothing remembered in common
        ({"g a": (3, []), "g b": (4, [])}, {"g a": (4, []), "g b": (3, [])}, True, True),
        (
            {"g a": (3, []), "h b": (4, [])},
            {"g a": (4, []), "h b": (3, [])},
            True,
            False,
        ),  # replicas' sums have no place
        (
            {"g a": (3, []), "g b": (4, [])},
            {"g a": (4, []), "g b": (3, [])},
            False,
            False,
        ),  # hosts between two launches
        ({"a": (3, [1, 2, 3])}, {"b": (3, [1, 2, 4])}, True, False),  # ranks of different groups
    ],
)
def test_two_ranks_contradict_each_other_only_by_proof(mine, theirs, blocked, fault):
    assert contradict(mine, theirs, both_blocked=blocked) is fault
    assert contradict(theirs, mine, both_blocked=blocked) is fault


@pytest.mark.parametrize(
    ("rows", "common", "odd"),
    [
        ([[1], [1], [2]], (1,), (2,)),
        ([[2], [1], [1]], (1,), (0,)),
        ([[5], [4]], (5,), (1,)),  # a tie: the lowest rank's
        ([[3], [3]], (3,), ()),
    ],
)
def test_ranks_that_differ_from_the_most_common_row_are_odd(rows, common, odd):
    assert odd_ranks(rows) == (common, odd)


def test_the_order_digest_depends_on_order_and_starts_anew():
    a, b = OrderDigest(), OrderDigest()
    for unit in (1, 2):
        a.add(unit, 0)
    for unit in (2, 1):
        b.add(unit, 0)
    assert a.take() != b.take()
    assert a.take() == b.take()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_digest_sees_one_bit_and_a_swap(dtype):
    value = torch.arange(1000).to(dtype)
    digest = tensor_digest(value)
    assert digest == tensor_digest(value.clone())
    changed = value.clone()
    changed[998] += 8 if dtype == torch.bfloat16 else 1e-3
    swapped = value.clone()
    swapped[[3, 4]] = value[[4, 3]]
    assert len({digest, tensor_digest(changed), tensor_digest(swapped)}) == 3
