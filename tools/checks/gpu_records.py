"""A pytest plugin: what became of each test, written line by line, so that what ends pytest loses one test alone.

    pytest -p checks.gpu_records --records FILE --> a JSON object a line (this file) --> gpu_page.py

``{"collected": [node, ...]}``, then of each test ``{"begun": node}`` and of its parts that tell something
``{"node", "outcome", "seconds", "why"}``.
"""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--records", type=Path, help="write to this file what becomes of each test")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--records"):
        config.pluginmanager.register(Records(path), "gpu-records-writer")


class Records:
    """Appends to an empty file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(begun=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(node=report.nodeid, outcome=report.outcome, seconds=report.duration, why=why_of(report))

    def _write(self, **record: Any) -> None:
        with self._path.open("a") as out:
            out.write(json.dumps(record) + "\n")


def why_of(report: pytest.TestReport) -> str:
    """The reason of a skip, or the first line of what a failure says."""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return text.strip().partition("\n")[0]
