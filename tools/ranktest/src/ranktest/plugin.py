"""pytest's side: the fixture ``ranks``, and a server that loads torch while the first tests run."""

from collections.abc import Callable
from typing import Any

import pytest

from ranktest.launch import run_ranks
from ranktest.server import start_server


@pytest.fixture(scope="session")
def ranks() -> Callable[..., list[Any]]:
    """``ranks(function, 2, *args)``: see `ranktest.run_ranks`."""
    return run_ranks


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server early, but only where a collected test is going to need it."""
    if not session.config.option.collectonly and any(_uses_ranks(item) for item in session.items):
        start_server()


def _uses_ranks(item: pytest.Item) -> bool:
    if "ranks" in getattr(item, "fixturenames", ()):
        return True
    names = vars(item.module) if isinstance(item, pytest.Function) else {}
    return any(str(getattr(value, "__module__", "")).startswith("ranktest.") for value in names.values())
