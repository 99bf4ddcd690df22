"""Waits, watchdog and signatures with fake Works: no process needed."""

from __future__ import annotations

import time

import pytest
import torch

from sixfold.fsdp import FsdpError, faults
from sixfold.fsdp.checks import OrderDigest, odd_ranks, tensor_digest
from sixfold.fsdp.faults import Faults, Watchdog


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


def test_a_wait_ends_at_its_deadline_and_blames_the_other_of_a_pair():
    faults = Faults(0, 2, None, timeout_s=0.05)
    with pytest.raises(FsdpError, match=r"no answer within 0.05 s") as caught:
        faults.wait(FakeWork(), "blocks.1", 7, "reduce")
    error = caught.value
    assert (error.unit, error.step, error.op, error.ranks) == ("blocks.1", 7, "reduce", (1,))


def test_a_failed_work_among_many_says_how_to_learn_the_rank():
    with pytest.raises(FsdpError, match=r"fault_store.*Connection closed") as caught:
        Faults(0, 4, None, timeout_s=5.0).wait(FakeWork(fails="Connection closed by peer. More"), "", 0, "gather")
    assert caught.value.ranks == ()


class LateWork(FakeWork):
    """Ends well in the moment after its first wait gave up."""

    def wait(self, timeout=None):
        if not self.done:
            self.done = True
            raise RuntimeError("Operation timed out!")


def test_a_work_that_ends_just_after_its_wait_gave_up_is_no_fault():
    Faults(0, 2, None, timeout_s=5.0).wait(LateWork(), "", 0, "gather")


class DeadStore:
    """A store whose process is gone."""

    def add(self, key, amount):
        raise RuntimeError("Connection reset by peer")

    def set(self, key, value):
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_is_said_and_nobody_is_blamed():
    with pytest.raises(FsdpError, match="fault_store does not answer") as caught:
        Faults(1, 3, DeadStore(), timeout_s=5.0).wait(FakeWork(), "", 0, "gather")
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


def test_blame_for_several_lost_ranks_comes_within_five_seconds_of_the_deadline(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(faults, "time", clock)

    class StuckWork(FakeWork):
        def wait(self, timeout=None):
            clock.sleep(timeout.total_seconds())
            raise RuntimeError("Operation timed out!")

    with pytest.raises(FsdpError) as caught:
        Faults(0, 4, SilentStore(), timeout_s=60.0).wait(StuckWork(), "", 0, "gather")
    assert caught.value.ranks == (1, 2, 3)
    assert 60.0 <= clock.now <= 65.0


def test_the_watchdog_reports_a_late_work_once_and_forgets_finished_ones():
    late = []
    dog = Watchdog(0.03, late.append, poll_s=0.01)
    dog.watch(FakeWork(done=True), "finished")
    dog.watch(FakeWork(), "stuck")
    deadline = time.monotonic() + 5.0
    while not late and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    dog.close()
    assert late == ["stuck"]


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
