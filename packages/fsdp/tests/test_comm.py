"""The thread that waits for gloo's sums: it has ended when its owner is gone, as at the end of a process."""

import threading
import time

from sixfold.fsdp.comm import _Waiter


class SlowToFree:
    """As a Work: letting go of it takes a moment in which other threads run."""

    def __init__(self, ran):
        self.ran = ran

    def __call__(self):
        self.ran.set()

    def __del__(self):
        time.sleep(0.02)


def test_the_thread_that_waits_has_let_go_of_its_last_work_when_its_owner_ends():
    before, ran = set(threading.enumerate()), threading.Event()
    waiter = _Waiter()
    (thread,) = set(threading.enumerate()) - before
    waiter.hand(SlowToFree(ran))
    assert ran.wait(5)
    del waiter
    assert not thread.is_alive(), "a process that ends here is aborted by torch's C++"
