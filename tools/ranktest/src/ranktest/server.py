"""The forkserver: one process per pytest process, with torch loaded, that ranks are forked from.

    plugin.py, launch.py --> start_server (this file) --> preload.py runs in the server

Starting it takes some seconds of CPU time, once, and nobody waits for it before the first job.
"""

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from multiprocessing import forkserver

# torch._dynamo is here because the first step of any optimizer imports it, which would cost each job 0.6 s.
PRELOAD = (
    "ranktest.preload",
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "pytest",
    "ranktest.rank",
)

# gloo would otherwise look up this machine's host name, which fails where there is no network.
RANK_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def start_server() -> None:
    """Start the forkserver unless it runs. Returns at once; the first job waits until it has loaded torch.

    Modules of the namespace under test that this process has imported already are loaded in the server too,
    so that no rank has to.
    """
    ours = sorted(name for name in sys.modules if name.split(".")[0] == "sixfold")
    forkserver.set_forkserver_preload([*PRELOAD, *ours])
    with _environment(RANK_ENVIRONMENT), hidden_main():
        forkserver.ensure_running()


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running this process's main script again in the child: it is pytest's."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
