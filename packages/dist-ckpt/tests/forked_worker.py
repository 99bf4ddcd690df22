"""Workers for tests, forked from their trainer: one that is started as a program imports torch for a second or two.

    process._start_worker --> Forked (this file) --> _worker.main, or odd_worker.py

Tests of what starting a program brings (no ``__main__`` of the user, no memory of the trainer) start one.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress

from sixfold.dist_ckpt import _worker
from sixfold.dist_ckpt.background import worker_process


class Forked:
    """What background.py uses of ``subprocess.Popen``."""

    def __init__(self, fds):
        self._status = None
        arguments = [*worker_process._WORKER, *map(str, fds), str(os.getpid())]
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become_a_worker(arguments, fds)

    def poll(self):
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout):
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked worker", timeout)
            time.sleep(0.002)
        return self._status

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_workers():
    """In this process, a rank of a test: workers are forked from it."""
    worker_process._start_worker = Forked


def _become_a_worker(arguments, fds):
    """Never returns. As behind exec no other file of the trainer is open, its own end of the line least of all."""
    try:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in fds:
                with suppress(OSError):
                    os.close(int(name))
        if arguments[0].endswith(".py"):
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        sys.argv = ["worker", *arguments[-3:]]
        _worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
