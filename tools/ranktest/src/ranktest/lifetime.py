"""Ties a process's life to its parent's, by the kernel: a pytest that is killed cannot clean up after itself.

The server dies with pytest (preload.py), and each rank with the server (rank.py).
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process with SIGKILL when its parent ends, however it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)
