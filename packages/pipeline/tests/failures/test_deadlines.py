"""The deadline of waits that do not block the host, with works that a test ends."""

from __future__ import annotations

import threading
import time

import pytest

from sixfold.pipeline import Action
from sixfold.pipeline.failures.deadlines import PeerLost, StreamWait


class FakeWork:
    """A work that is done when its event is set; waiting for it blocks nobody."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1

    def is_completed(self) -> bool:
        return self.done.is_set()


class Owner:
    """Has communicators that can be aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


def test_works_that_end_in_time_pass():
    owner, works = Owner(), [FakeWork() for _ in range(3)]
    wait = StreamWait(0.2, owner.abort)
    for work in works:
        wait(work, Action.parse("0RECV_B0"))
        work.done.set()
    time.sleep(0.4)
    wait.check()
    assert not owner.aborted.is_set()
    assert [work.waited for work in works] == [1, 1, 1]


def test_an_overdue_work_aborts_and_is_named_at_the_next_wait():
    owner = Owner()
    wait = StreamWait(0.1, owner.abort)
    wait(FakeWork(), Action.parse("0RECV_B3"))
    assert owner.aborted.wait(2)
    with pytest.raises(PeerLost) as caught:
        wait(FakeWork(), Action.parse("0RECV_B4"))
    assert str(caught.value.action) == "0RECV_B3"


def test_to_settle_is_to_wait_until_all_is_there_or_overdue():
    owner, work = Owner(), FakeWork()
    wait = StreamWait(20, owner.abort)
    wait(work, Action.parse("0RECV_B3"))
    threading.Timer(0.1, work.done.set).start()
    wait.settle()
    assert work.done.is_set() and not owner.aborted.is_set()
    late = StreamWait(0.1, owner.abort)
    late(FakeWork(), Action.parse("0RECV_B4"))
    with pytest.raises(PeerLost, match="0RECV_B4"):
        late.settle()


def test_the_thread_ends_with_its_owner():
    owner = Owner()
    wait = StreamWait(60, owner.abort)
    wait(FakeWork(), None)
    thread = wait._thread
    del owner
    thread.join(2)
    assert not thread.is_alive()
