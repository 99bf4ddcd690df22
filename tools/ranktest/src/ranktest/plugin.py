"""pytest's side: the fixture ``ranks``, and a server that loads torch while the first tests run, or before them."""

import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ranktest.launch import JOBS, run_ranks
from ranktest.server import fork_early, start_server

EARLY_SERVER = "--early-server"
TEST_SECONDS = pytest.StashKey[list[float]]()


@pytest.fixture(scope="session")
def ranks() -> Callable[..., list[Any]]:
    """``ranks(function, 2, *args)``: see `ranktest.run_ranks`."""
    return run_ranks


@pytest.fixture
def small_tmpfs() -> Iterator[Callable[[str], Path]]:
    """``small_tmpfs("64k")``: the folder of a new file system of that size, in memory; skips where none may be made."""
    with ExitStack() as made:

        def make(size: str) -> Path:
            folder = made.enter_context(tempfile.TemporaryDirectory(prefix="small-tmpfs-"))
            if subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], stderr=subprocess.DEVNULL
            ).returncode:
                pytest.skip("needs the right to mount a tmpfs")
            made.callback(subprocess.run, ["umount", "-l", folder], check=True)
            return Path(folder)

        yield make


def pytest_addoption(parser: pytest.Parser) -> None:
    """Also forks the server, if it is asked for: here pytest captures neither output nor warnings yet."""
    parser.addoption(EARLY_SERVER, action="store_true", help="load torch once, for pytest and the server of ranks")
    if EARLY_SERVER in sys.argv:
        fork_early()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server early, but only where a collected test is going to need it.

    What is loaded by now stays, and is kept from the garbage collector: the many ``gc.collect()`` of tests look at what
    tests made, 0.01 s for 0.3. The second collection tells the collector how little else there is, so that what a test
    leaves goes soon after it: it waits until a quarter of what it found last has come anew.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
    using = [item for item in session.items if _uses_ranks(item)]
    if using and not session.config.option.collectonly:
        start_server(sorted({name for item in using for name in _ranks_import(item)}))


def _ranks_import(item: pytest.Item) -> Sequence[str]:
    """``RANKS_IMPORT`` of a test file: what its ranks would import, each in each job, is loaded once by the server."""
    return getattr(item.module, "RANKS_IMPORT", ()) if isinstance(item, pytest.Function) else ()


def _uses_ranks(item: pytest.Item) -> bool:
    if "ranks" in getattr(item, "fixturenames", ()):
        return True
    names = vars(item.module) if isinstance(item, pytest.Function) else {}
    return any(str(getattr(value, "__module__", "")).startswith("ranktest.") for value in names.values())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note how long a test took, if it ran a job."""
    before, started = len(JOBS), time.perf_counter()
    try:
        return (yield)
    finally:
        if len(JOBS) > before:
            item.config.stash.setdefault(TEST_SECONDS, []).append(time.perf_counter() - started)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if seconds := config.stash.get(TEST_SECONDS, []):
        first, *others = seconds
        line = (
            f"ranktest: {len(seconds)} tests of several ranks; the first {first:.2f} s (it waits until torch is loaded)"
        )
        if others:
            line += f", the others {statistics.median(others):.2f} s in the median, at most {max(others):.2f} s"
        terminalreporter.write_line(line)
