"""Options of fsdp's large tests.

nox -s "tests(fsdp)" -- --full-matrix      every cell in one process
nox -s "ranks(fsdp)" -- --full-matrix      every cell of every option on 2, 3, 4 and 8 ranks
"""

from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption("--full-matrix", action="store_true", help="every pair of options for each strategy")
