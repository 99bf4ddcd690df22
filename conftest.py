"""Of tests with many dear cases the default command runs a sample, `nox -s full` all: `pytest --every-case`.

    @pytest.mark.sampled      each row of each `parametrize` in one case at least, and not each combination of them
    @pytest.mark.sampled(4)   four cases, the first, the last and others evenly between: where each says the same

A test whose cases assert different things is not to be sampled by number. A case that is asked for by its id runs.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="all cases of the tests that are marked `sampled`")


@pytest.hookimpl(tryfirst=True)  # before tools/once leaves out what passed: else others would come in its place
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--every-case"):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.split("[", 1)[0], []).append(item)
    left_out = {id(item) for cases in tests.values() for item in cases} - {
        id(item) for cases in tests.values() for item in sample(cases)
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def sample(cases: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of one test that are to run."""
    mark = cases[0].get_closest_marker("sampled")
    assert mark is not None, f"{cases[0].nodeid} is not marked"
    if mark.args:
        count, last = min(mark.args[0], len(cases)), len(cases) - 1
        return [cases[place * last // max(1, count - 1)] for place in range(count)]
    # One id of each parametrize, in their order; callspec.id has them joined, its indices count cases.
    values = [set(enumerate(case.callspec._idlist)) for case in cases]  # type: ignore[attr-defined]
    wanted, used = set().union(*values), Counter[tuple[int, str]]()
    chosen: list[int] = []
    while wanted:
        # Of those with most values that none has yet, the one whose others were taken least: along the diagonal.
        best = max(
            range(len(cases)),
            key=lambda place: (len(values[place] & wanted), -sum(used[value] for value in values[place]), -place),
        )
        wanted -= values[best]
        used.update(values[best])
        chosen.append(best)
    return [cases[place] for place in sorted(chosen)]


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> Callable[..., list[tuple[Any, ...]]]:
    """``chosen("ranks", "layout")``: values of these parameters in the tests of this file that are going to run.

    For a fixture that does the work of all cases in one job.
    """

    def values(*names: str) -> list[tuple[Any, ...]]:
        cases = [
            item.callspec.params
            for item in request.session.items
            if item.path == request.path and hasattr(item, "callspec")
        ]
        return [tuple(case[name] for name in names) for case in cases if case.keys() >= set(names)]

    return values
