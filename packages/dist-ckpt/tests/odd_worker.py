"""A worker with something odd about it, for tests.

python odd_worker.py slow:PAUSE_S <arguments of the worker>             each write of a file takes a while
python odd_worker.py held:PATH <arguments of the worker>                so does it; and it decides when PATH exists
python odd_worker.py orphan:PATH <arguments of the worker>              once PATH exists it writes when its trainer is
                                                                        dead
python odd_worker.py after:PATH <arguments of the worker>               it writes once PATH exists, and says in
                                                                        PATH.tried that it did, or could not
python odd_worker.py late:SECONDS <arguments of the worker>             it takes so much processor time to start
python odd_worker.py dies:MODULE.FUNCTION:N <arguments of the worker>   SIGKILL instead of the n-th call
python odd_worker.py stops:MODULE.FUNCTION <arguments of the worker>    SIGSTOP before the first call
python odd_worker.py moving:PATH <arguments of the worker>              once PATH exists it says there that it is to
                                                                        move the checkpoint into place, does so when its
                                                                        trainer is dead, and looks for that 2 s later
python odd_worker.py counts:PATH <arguments of the worker>              it notes each operation of the file system
"""

import importlib
import os
import signal
import sys
import time

kind, _, what = sys.argv.pop(1).partition(":")
while kind == "late" and time.process_time() < float(what):
    pass

from sixfold.dist_ckpt import _worker  # noqa: E402 - as late as the worker
from sixfold.dist_ckpt.storage.local import LocalStore  # noqa: E402

if kind == "late":
    _worker.serve(*map(int, sys.argv[-3:]))
if kind == "counts":
    from counted import note_operations

    note_operations(what)
    _worker.serve(*map(int, sys.argv[-3:]))
if kind == "held":
    path, decide = what, _worker.lost_ranks.decide
    kind, what = "slow", "0.4"

    def held(*arguments):
        while not os.path.exists(path):
            time.sleep(0.01)
        return decide(*arguments)

    _worker.lost_ranks.decide = held
if kind == "moving":
    publish, trainer, path = LocalStore.publish, os.getppid(), what
    kind, what, _worker._LOOK_S = "slow", "0", 2.0

    def publish_as_an_orphan(*arguments, **options):
        if os.path.exists(path):
            with open(path, "w") as file:
                file.write("moves")
        while os.path.exists(path) and os.getppid() == trainer:
            time.sleep(0.01)
        return publish(*arguments, **options)

    LocalStore.publish = publish_as_an_orphan
if kind == "after":
    write, path, kind, what = _worker.lost_ranks.writer.write, what, "slow", "0"

    def write_after(*arguments):
        while not os.path.exists(path):
            time.sleep(0.01)
        try:
            return write(*arguments)
        finally:
            open(f"{path}.tried", "w").close()

    _worker.lost_ranks.writer.write = write_after
if kind == "orphan":
    write, trainer = _worker.lost_ranks.writer.write, os.getppid()
    path, kind, what = what, "slow", "0"

    def write_as_an_orphan(*arguments):
        while os.path.exists(path) and os.getppid() == trainer:
            time.sleep(0.01)
        time.sleep(0.3 if os.path.exists(path) else 0.0)
        return write(*arguments)

    _worker.lost_ranks.writer.write = write_as_an_orphan
place, _, count = (what if kind in ("dies", "stops") else f"storage.frame_file._write_at:{what}").partition(":")
module_name, _, name = place.rpartition(".")
module = importlib.import_module(f"sixfold.dist_ckpt.{module_name}")
plain, calls = getattr(module, name), 0


def odd(*arguments, **options):
    global calls
    calls += 1
    if kind == "slow":
        time.sleep(float(count))
    elif kind == "stops" and calls == 1:
        if os.getpid() != os.getpgrp():
            os.setsid()  # else the kernel wakes it, by SIGHUP and SIGCONT, when its trainer dies
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "dies" and calls == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments, **options)


setattr(module, name, odd)
_worker.serve(*map(int, sys.argv[-3:]))
