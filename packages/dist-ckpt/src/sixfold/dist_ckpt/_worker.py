"""The worker process of a rank: ``python -m sixfold.dist_ckpt._worker``, started by background/worker_process.py.

    Job + arena --> run (this file) --> files, record, outcome --> the trainer's handle

It joins no process group, knows no device and never sees the user's ``__main__``. It serves one job after the other
and dies with its parent; only a snapshot in memory is written to its end first. (It does not die by PR_SET_PDEATHSIG:
the kernel sends that when the *thread* that started the worker ends, and a trainer may save from a thread.)
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from sixfold.dist_ckpt.background import lost_ranks
from sixfold.dist_ckpt.background.arena import MappedArena, ProgressCounter
from sixfold.dist_ckpt.background.fence import Fence, await_fence
from sixfold.dist_ckpt.background.lost_ranks import Job
from sixfold.dist_ckpt.collectives.exchange import Outcome
from sixfold.dist_ckpt.errors import StorageError, typed
from sixfold.dist_ckpt.save_load.writer import Written

_LOOK_S, _LAST_WORD_S = 0.2, 10.0


def run(job: Job, arena: MappedArena, counter: ProgressCounter) -> Outcome:
    """One rank's half of a background save: write its share; the first rank's worker commits."""
    counter.add(0)

    def written() -> Written:
        found = job.write(arena, counter)
        await_fence(counter, job.who, job.timeout_s)
        return found

    share = Outcome.of(lambda: typed(written), job.who)
    if share.error is not None:
        # A full disk must have room for the word that says so.
        for file in () if not job.ticket.save.staging else Path(job.ticket.save.staging).glob(f"__{job.rank}_*"):
            with suppress(OSError):
                file.unlink()
        return lost_ranks.fail(job, share.error, counter)
    if job.rank == 0:
        return lost_ranks.decide(job, share.value, counter)
    try:
        lost_ranks.status_of(job).put(f"rank-{job.rank}", share)
    except OSError as error:
        return lost_ranks.fail(job, StorageError(str(error), error.errno), counter)
    return lost_ranks.await_outcome(job, counter)


def _end_with(trainer: int, jobs: list[Job], counter: ProgressCounter) -> None:
    """Thread: end the process with its trainer, whose job goes on, or none.

    (A process that the trainer has forked may hold its end of the connection open.)
    """
    while os.getppid() == trainer:
        time.sleep(_LOOK_S)
    threading.Timer(_LAST_WORD_S, os._exit, (0,)).start()  # whatever a store that does not answer does
    for job in list(jobs):
        while job.outlives_trainer and jobs and counter.fence is not Fence.AWAITED:
            time.sleep(_LOOK_S / 10)
        if not job.outlives_trainer:
            lost_ranks.report_dead_trainer(job)
    os._exit(0)


def serve(connection_fd: int, arena_fd: int, trainer: int) -> None:
    """Serve jobs until the trainer, a process, ends or says so; never returns."""
    torch.set_num_threads(1)
    connection, counter, arena = Connection(connection_fd), ProgressCounter(arena_fd), MappedArena(arena_fd)
    jobs: list[Job] = []  # the one that is done
    threading.Thread(target=_end_with, args=(trainer, jobs, counter), daemon=True).start()
    while True:
        message = b""
        with suppress(OSError, EOFError):  # the trainer, or its saver, is gone
            message = connection.recv_bytes()
        if not message:
            os._exit(0)
        # A class in it that cannot be had ends the process, with the reason on stderr.
        jobs.append(pickle.loads(message))
        os.umask(jobs[0].umask)
        outcome = run(jobs[0], arena, counter)
        jobs.clear()
        with suppress(OSError):  # it has ended
            connection.send_bytes(outcome.encode())


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
