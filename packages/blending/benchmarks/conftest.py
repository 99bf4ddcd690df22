"""Benchmarks at their full size on demand, and one line of result per comparison at the end.

nox -s "bench(blending)"                        # small sizes, under two minutes
nox -s "bench(blending)" -- --full-size         # the sizes of docs/design: minutes, up to 9 GB of memory

CPU time of one thread unless a line says otherwise; both sides in turn, in one run.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "tests"))  # megatron_peer
LINES: list[str] = []


def pytest_addoption(parser):
    parser.addoption("--full-size", action="store_true", help="run blending's benchmarks at the sizes of its targets")


@pytest.fixture(scope="session")
def full_size(request) -> bool:
    return bool(request.config.getoption("--full-size"))


@pytest.fixture
def say() -> Callable[[str], None]:
    """Print a line behind the table of all benchmarks."""
    return LINES.append


def pytest_terminal_summary(terminalreporter):
    for line in LINES:
        terminalreporter.write_line(line)
