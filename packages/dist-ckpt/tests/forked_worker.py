"""Workers for tests, forked from their trainer: one that is started as a program imports torch for a second or two.

    process._start_worker --> Forked (this file) --> _worker.serve, or odd_worker.py

Tests of what starting a program brings (no ``__main__`` of the user, no memory of the trainer) start one.
"""

import os
import runpy
import sys

from sixfold.dist_ckpt import _worker
from sixfold.dist_ckpt.background import worker_process


class Forked(worker_process.ForkedWorker):
    """A fork, also of a rank that has threads; it becomes what ``_WORKER`` names."""

    def __init__(self, fds):
        arguments = [*worker_process._WORKER, *map(str, fds), str(os.getpid())]
        super().__init__(fds, lambda *numbers: _become_a_worker(arguments, numbers))


def fork_workers():
    """In this process, a rank of a test: workers are forked from it."""
    worker_process._start_worker = Forked


def _become_a_worker(arguments, numbers):
    """Never returns."""
    if arguments[0].endswith(".py"):
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    _worker.serve(*numbers)
