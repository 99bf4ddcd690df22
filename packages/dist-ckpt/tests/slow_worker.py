"""A worker whose disk is slow: each write of a file takes a while.

python slow_worker.py PAUSE_S <arguments of the worker>
"""

import sys
import time

from sixfold.dist_ckpt import _worker, storage

plain_write = storage._write_at


def slow_write(handle, data, at):
    time.sleep(pause_s)
    plain_write(handle, data, at)


pause_s = float(sys.argv.pop(1))
storage._write_at = slow_write
_worker.main()
