"""What the default command leaves out of the tests that take long; every other command runs it.

    @pytest.mark.sampled      each row of each `parametrize` in one case at least, and not each combination of them
    @pytest.mark.sampled(4)   four cases, the first, the last and others evenly between: where each says the same
    @pytest.mark.slow         0.3 s of CPU or more, or all cases 0.5 s: `nox` runs a part of these where cores are few

`pytest --every-case` and `nox -s full` run all cases of the sampled tests. A test whose cases assert different things
is not to be sampled by number. A case that is asked for by its id runs. `pytest --turn 2/4` runs of the slow tests the
part with number 2 of 0 to 3; without it, and in every session but `ci`, all of them run.
"""

import os
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="all cases of the tests that are marked `sampled`")
    told = os.environ.get("SIXFOLD_TURN", "")  # by ci, for all its sessions
    parser.addoption(
        "--turn", default=told, metavar="K/N", help="of the tests marked `slow` part K of 0 to N - 1; or all"
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    turn = config.getoption("--turn")
    return f"slow tests: part {turn}; all of them with --turn ''" if turn else None


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
    leave_out(config, items, left_out)
    now = of_turn(config.getoption("--turn"), items)
    leave_out(config, items, set(map(id, items)) - set(map(id, now)))


def leave_out(config: pytest.Config, items: list[pytest.Item], which: set[int]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if id(item) in which])
    items[:] = [item for item in items if id(item) not in which]


def of_turn(turn: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """All but the slow tests of other turns. A test's turn is that of its name, whatever else is collected."""
    if not turn:
        return items
    part, parts = map(int, turn.split("/"))
    if not 0 <= part < parts:
        raise pytest.UsageError(f"--turn {turn}: a turn is K/N with K from 0 to N - 1, as 2/4")
    return [
        item
        for item in items
        if not item.get_closest_marker("slow") or zlib.crc32(item.nodeid.encode()) % parts == part
    ]


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
