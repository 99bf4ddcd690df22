"""Options of pipeline's randomised and large tests.

nox -s "tests(pipeline)" -- --mutants 2000
nox -s "tests(pipeline)" -- --all-bubbles
nox -s "ranks(pipeline)" -- --all-exports
nox -s "tests(pipeline)" -- --random-runs 1000 --every-case
nox -s "tests(pipeline)" -- --full-matrix
nox -s "ranks(pipeline)" -- --debug-memory
"""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sixfold.pipeline.plan import search


@pytest.fixture(autouse=True)
def plans_in_time_of_their_own(monkeypatch):
    """A plan's time limit counts the CPU time of this process, so that other work on the machine changes no result."""
    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=time.process_time))


def pytest_addoption(parser):
    parser.addoption("--mutants", type=int, default=8, help="of each schedule that verify is tested with (8)")
    parser.addoption("--all-exports", action="store_true", help="run every flush schedule's CSV in PyTorch's runtime")
    parser.addoption("--all-bubbles", action="store_true", help="V-Half and V-Min beside the authors' at all 60 sizes")
    parser.addoption("--random-runs", type=int, default=60, help="of programs with random delays over threads (60)")
    parser.addoption("--full-matrix", action="store_true", help="every schedule at every m from 1 to 4p; and over gloo")
    parser.addoption(
        "--debug-memory", action="store_true", help="received memory that nobody holds is NaN in all tests"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """With ``--debug-memory`` ranks have it too: the server that they are forked from runs the file."""
    if config.getoption("--debug-memory"):
        import debug_memory_everywhere

        here = Path(__file__).parent
        for module in {item.module for item in items if here in item.path.parents and hasattr(item, "module")}:
            module.RANKS_IMPORT = (*getattr(module, "RANKS_IMPORT", ()), debug_memory_everywhere.__file__)
