"""Options of fsdp's large and randomised tests.

nox -s "ranks(fsdp)" -- --all-pairs                every pair of options with each strategy, on 2, 3, 4 and 8 ranks
nox -s "tests(fsdp)" -- --random-programs 500      random programs in one process, beside plain modules
nox -s "ranks(fsdp)" -- --random-programs 500      the same on 2 and 3 ranks
nox -s "tests(fsdp)" -- --fill-freed               every model fills with NaN what its units give up
"""

from __future__ import annotations

import os

import fsdp_fill_freed
import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--all-pairs", action="store_true", help="every pair of options with each strategy, not every option"
    )
    parser.addoption("--random-programs", type=int, default=6, help="on 1, 2 and 3 ranks each (6)")
    parser.addoption("--fill-freed", action="store_true", help="BufferConfig(fill_freed=True) is the default")


def pytest_configure(config):
    if config.getoption("--fill-freed"):
        os.environ[fsdp_fill_freed.VARIABLE] = "1"
        fsdp_fill_freed.apply()


@pytest.fixture
def random_programs(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--random-programs"))


@pytest.fixture
def as_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process does by default what several ranks do, in place of what costs it least."""
    from sixfold.fsdp.setup import build

    monkeypatch.setattr(build, "as_run", lambda options, groups: options)
