"""Programs in processes that are forked from one with torch loaded: four seconds of CPU less than a start of Python.

    test_docs.py, torchrun_helpers.py --> start_warm (this file) --> ranktest's server --> runpy, as `python` does
    torchrun, started so --> ranks that are forked from it: _Nursery

The programs find their variables, arguments, folder and files as started ones do, but modules that another program
would have to load. That those are asked for is seen where Python is started: in the blocks of the READMEs,
test_two_nodes.py, and by ``nox -s full`` everywhere.
"""

import atexit
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ranktest.lifetime import die_with_parent
from ranktest.server import hidden_main, start_server, wait_until_loaded

TORCHRUN = "torch.distributed.run"


class Program:
    """What the tests use of ``subprocess.Popen``."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None, "it was not started"
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a warm program", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_warm(
    arguments: Sequence[str], *, folder: Path, environment: dict[str, str], output: Path, errors: Path | None = None
) -> Program:
    """What ``python *arguments`` would start: a script or ``-m`` and a module, and their arguments.

    ``errors=None``: to ``output`` as well.
    """
    start_server()
    wait_until_loaded()
    with hidden_main():
        process = multiprocessing.get_context("forkserver").Process(
            target=_run_from_the_server, args=(list(arguments), str(folder), environment, output, errors or output)
        )
        process.start()
    return Program(process)


def _run_from_the_server(
    arguments: list[str], folder: str, environment: dict[str, str], output: Path, errors: Path
) -> None:
    die_with_parent()
    os.chdir(folder)
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    if arguments[:2] == ["-m", TORCHRUN]:
        from torch.distributed.elastic.multiprocessing import subprocess_handler

        subprocess_handler.SubprocessHandler._popen = _forking(_Nursery())  # type: ignore[method-assign]
    _become(arguments, environment)


def _become(arguments: list[str], environment: dict[str, str]) -> None:
    """Do what ``python *arguments`` does from its command line to its end. Never returns."""
    status = 1
    try:
        atexit._clear()  # what this process was forked from is to do
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # where what is spawned from here looks for the script
        status = _run(arguments)
    finally:
        with suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
        with suppress(Exception):
            multiprocessing.util._exit_function()  # ends what the program started by multiprocessing, as atexit would
        os._exit(status)


def _run(arguments: list[str]) -> int:
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            # What a script finds in a package depends on which of its modules were loaded before.
            for name in [name for name in sys.modules if name.partition(".")[0] == "sixfold"]:
                del sys.modules[name]
            sys.path.insert(0, str(Path(arguments[0]).parent))
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class _Nursery:
    """Forks an agent's ranks in a process with one thread: any of the agent's may hold a lock of libc just then."""

    def __init__(self) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self._ended: dict[int, int] = {}
        if os.fork() == 0:
            self._ours.close()
            _fork_ranks(theirs)
        theirs.close()

    def start(self, command: Sequence[str], environment: dict[str, str]) -> int:
        self._ours.send((command, environment))
        while True:
            pid, status = self._ours.recv()
            if status is None:
                return pid
            self._ended[pid] = status

    def status(self, pid: int) -> int | None:
        while self._ours.poll():
            ended, status = self._ours.recv()
            self._ended[ended] = status
        return self._ended.get(pid)


def _fork_ranks(line: Connection) -> None:
    """Never returns: ends with the agent."""
    die_with_parent()
    try:
        while True:
            if line.poll(0.02):
                command, environment = line.recv()
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    line.close()
                    _become(command, environment)
                line.send((pid, None))
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    line.send((ended[0], os.waitstatus_to_exitcode(ended[1])))
    finally:
        os._exit(0)


class _Rank:
    """What torchrun's agent uses of ``subprocess.Popen``."""

    def __init__(self, nursery: _Nursery, command: Sequence[str], environment: dict[str, str]) -> None:
        self._nursery = nursery
        self.pid = nursery.start(command, environment)

    def poll(self) -> int | None:
        return self._nursery.status(self.pid)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            time.sleep(0.01)
        return status


def _forking(nursery: _Nursery) -> Callable[..., _Rank]:
    """For ``SubprocessHandler._popen``; its files are left unset, so that the ranks write where torchrun does."""

    def popen(handler: object, command: tuple[str, ...], environment: dict[str, str]) -> _Rank:
        python, *arguments = command
        assert python == sys.executable, command
        return _Rank(nursery, [word for word in arguments if word != "-u"], environment)

    return popen
