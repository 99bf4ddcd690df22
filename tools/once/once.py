"""A pytest plugin: what passed where the package stands alone need not run again where everything is installed.

    isolation --proves FILE --> nodes that passed, and the modules that each looked for in vain (this file)
                            --> tests --proved FILE: runs the others, and those whose modules are found here

A test that was skipped, failed or was not there alone runs here; so does one that looked for a module in vain, if that
module is here, as it may have done less. What the processes of a test look for is not seen: such a test says
`importorskip` itself. Imports nothing of the repository.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proves", type=Path, help="write to this file which tests passed")
    parser.addoption("--proved", type=Path, help="leave out the tests that this file says passed")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--proves"):
        config.pluginmanager.register(Recorder(path), "once-recorder")


class Absent:
    """The last finder: it is asked for the modules that no other has, and has none either.

    What third parties try to import for their own ends is not kept: hypothesis and torch look for a dozen in any test.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        asks = Path(frame.f_code.co_filename).parts
        if "site-packages" not in asks or "sixfold" in asks:
            self.names.add(name)


class Recorder:
    """Writes a JSON object of nodes: passed in full --> sorted names of modules looked for in vain."""

    def __init__(self, path: Path) -> None:
        self.path, self.absent = path, Absent()
        self.passed: dict[str, set[str]] = {}
        self.by_file: dict[Path, set[str]] = {}
        sys.meta_path.append(self.absent)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        self.absent.names = set()
        report = yield
        self.by_file.setdefault(collector.path, set()).update(self.absent.names)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.absent.names = set()
        self.passed[item.nodeid] = set()
        done = yield
        if item.nodeid in self.passed:
            self.passed[item.nodeid] = self.absent.names | self.by_file.get(item.path, set())
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.passed.pop(report.nodeid, None)

    def pytest_sessionfinish(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({node: sorted(names) for node, names in self.passed.items()}, indent=0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path: Path | None = config.getoption("--proved")
    if path is None or not path.exists():  # nothing is proved: all run
        return
    proved: dict[str, list[str]] = json.loads(path.read_text())
    found = {name: is_here(name) for name in {name for names in proved.values() for name in names}}
    done = [item for item in items if item.nodeid in proved and not any(found[n] for n in proved[item.nodeid])]
    config.hook.pytest_deselected(items=done)
    gone = set(map(id, done))
    items[:] = [item for item in items if id(item) not in gone]


def is_here(name: str) -> bool:
    """Whether an import would find it. Its parent was found when it was looked for, or it would not have been."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def pytest_report_header(config: pytest.Config) -> str | None:
    path: Path | None = config.getoption("--proved")
    return f"once: without what passed in isolation, {path}" if path and path.exists() else None
