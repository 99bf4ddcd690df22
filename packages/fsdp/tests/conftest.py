"""Options of fsdp's large tests.

nox -s "ranks(fsdp)" -- --all-pairs      every pair of options with each strategy, on 2, 3, 4 and 8 ranks
"""

from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption(
        "--all-pairs", action="store_true", help="every pair of options with each strategy, not every option"
    )
