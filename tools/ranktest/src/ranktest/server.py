"""The forkserver: one process per pytest process, with torch loaded, that ranks are forked from.

    plugin.py, launch.py --> start_server (this file) --> preload*.py in the server

Starting it takes some seconds of CPU time, once, and nobody waits for it before the first job.
"""

import contextlib
import importlib
import multiprocessing
import os
import socket
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn

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
    "ranktest.preload_tested",
)
LOADED_HERE = PRELOAD[1:-1]  # by pytest itself, where the server is forked from it
LOAD_WAIT_S = 300.0  # for the server to load torch: 3 s on a quiet machine
LOADED: set[int] = set()  # the servers, by process id, that are known to have loaded everything
TESTED_MODULES = "RANKTEST_TESTED_MODULES"  # read by the server's preload_tested.py

# gloo would otherwise look up this machine's host name, which fails where there is no network.
RANK_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _EarlyServer:
    """A process forked from this one that is to be the server, and waits for the names of modules."""

    pid: int
    address: str
    alive: int  # the server ends when this end is closed
    names: int

    def go_on(self, names: list[str]) -> None:
        with open(self.names, "w") as file:
            file.write(",".join(names) + "\n")
        server: Any = forkserver._forkserver
        with server._lock:
            server._forkserver_address, server._forkserver_alive_fd = self.address, self.alive
            server._forkserver_pid = self.pid


EARLY: list[_EarlyServer] = []  # at most one


def fork_early() -> None:
    """Load torch in this process and fork the server from it, before pytest has begun: torch is loaded once, not twice.

    Nothing of pytest is in it by then but modules. Without ranks to come it ends with this process.
    """
    if EARLY or forkserver._forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
        return
    with _environment(RANK_ENVIRONMENT):
        for name in LOADED_HERE:
            importlib.import_module(name)
    address = arbitrary_address("AF_UNIX")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    os.chmod(address, 0o600)
    listener.listen()
    alive_r, alive_w = os.pipe()
    names_r, names_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive_w)
        os.close(names_w)
        _serve(listener, alive_r, names_r)
    os.close(alive_r)
    os.close(names_r)
    listener.close()
    EARLY.append(_EarlyServer(pid=pid, address=address, alive=alive_w, names=names_w))


def _serve(listener: socket.socket, alive: int, names: int) -> NoReturn:
    """The life of a server that is forked and not started."""
    try:
        importlib.import_module(PRELOAD[0])
        with open(names) as file:
            modules = file.read()
        if modules:
            sys.modules["__main__"] = types.ModuleType("__main__")
            os.environ.update({**RANK_ENVIRONMENT, TESTED_MODULES: modules.strip()})
            importlib.import_module(PRELOAD[-1])
            forkserver.main(listener.detach(), alive, [])
    finally:
        os._exit(0)


def start_server(also: Iterable[str] = ()) -> None:
    """Start the forkserver unless it runs. Returns at once; the first job waits until it has loaded torch.

    Of each package under test that this process has imported, the server loads all modules, so that no rank has to:
    what a test imports inside its function would otherwise cost every rank of every job. So it does with the modules of
    torch.distributed that this process has loaded, and with those of ``also``.
    """
    names = [*_tested_modules(), *sorted(name for name in sys.modules if name.startswith("torch.distributed.")), *also]
    if EARLY:
        EARLY.pop().go_on(names)
    forkserver.set_forkserver_preload(list(PRELOAD))
    with _environment({**RANK_ENVIRONMENT, TESTED_MODULES: ",".join(names)}), hidden_main():
        forkserver.ensure_running()


def wait_until_loaded() -> None:
    """Wait until the server has forked one process: it serves requests in turn, the first after its imports.

    Raises:
        TimeoutError: that took longer than ``LOAD_WAIT_S``.
    """
    server: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server in LOADED:
        return
    with hidden_main():
        probe = multiprocessing.get_context("forkserver").Process(target=_nothing, name="ranktest probe", daemon=True)
        probe.start()
    probe.join(LOAD_WAIT_S)
    if probe.exitcode is None:
        probe.kill()
        raise TimeoutError(f"the forkserver (pid {server}) has not loaded torch within {LOAD_WAIT_S:g} s")
    LOADED.add(server)


def _nothing() -> None:
    """What the probe does."""


def _tested_modules() -> list[str]:
    """Names of all modules of the packages below ``sixfold`` that are imported here; nothing is imported for it."""
    names = []
    for package in sorted(name for name in sys.modules if name.startswith("sixfold.") and name.count(".") == 1):
        for folder in map(Path, getattr(sys.modules[package], "__path__", ())):
            for file in sorted(folder.rglob("*.py")):
                parts = file.relative_to(folder).with_suffix("").parts
                if "__main__" not in parts:
                    names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return names


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
