"""A worker with something odd about it, for tests.

python odd_worker.py slow:PAUSE_S <arguments of the worker>             each write of a file takes a while
python odd_worker.py held:PATH <arguments of the worker>                so does it; and it decides when PATH exists
python odd_worker.py late:SECONDS <arguments of the worker>             it takes so much processor time to start
python odd_worker.py dies:MODULE.FUNCTION:N <arguments of the worker>   SIGKILL instead of the n-th call
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

if kind == "late":
    _worker.main()
if kind == "held":
    path, decide = what, _worker.control.decide
    kind, what = "slow", "0.4"

    def held(*arguments):
        while not os.path.exists(path):
            time.sleep(0.01)
        return decide(*arguments)

    _worker.control.decide = held
place, _, count = (what if kind == "dies" else f"storage._write_at:{what}").partition(":")
module_name, name = place.split(".")
module = importlib.import_module(f"sixfold.dist_ckpt.{module_name}")
plain, calls = getattr(module, name), 0


def odd(*arguments, **options):
    global calls
    calls += 1
    if kind == "slow":
        time.sleep(float(count))
    elif calls == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments, **options)


setattr(module, name, odd)
_worker.main()
