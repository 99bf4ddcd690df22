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
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proves", type=Path, help="write to this file which tests passed")
    parser.addoption("--proved", type=Path, help="leave out the tests that this file says passed")
    parser.addoption("--of", default="", help="what was tested, any text: a file of another is not believed")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--proves"):
        config.pluginmanager.register(Recorder(path, config.getoption("--of")), "once-recorder")
    if is_believed(config):  # else nothing is proved, and all run
        config.pluginmanager.register(Proof(config.rootpath, config.getoption("--proved")), "once-proof")


def is_believed(config: pytest.Config) -> bool:
    """Whether there is a proof, and of what is tested now."""
    path: Path | None = config.getoption("--proved")
    return path is not None and path.exists() and json.loads(path.read_text())["of"] == config.getoption("--of")


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
    """Writes a JSON object: nodes that passed --> names of modules looked for in vain; files whose nodes all passed."""

    def __init__(self, path: Path, of: str) -> None:
        self.path, self.of, self.absent = path, of, Absent()
        self.passed: dict[str, set[str]] = {}
        self.by_file: dict[Path, set[str]] = {}
        self.of_file: dict[str, set[str]] = {}  # collected nodes
        sys.meta_path.append(self.absent)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        self.absent.names = set()
        report = yield
        self.by_file.setdefault(collector.path, set()).update(self.absent.names)
        return report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.of_file.setdefault(file_of(item.nodeid), set()).add(item.nodeid)

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
        nodes = {node: sorted(names) for node, names in self.passed.items()}
        whole = sorted(file for file, collected in self.of_file.items() if collected <= nodes.keys())
        self.path.write_text(json.dumps({"of": self.of, "nodes": nodes, "files": whole}, indent=0))


class Proof:
    """What need not run here, by a recorder's file."""

    def __init__(self, root: Path, path: Path) -> None:
        said: dict[str, Any] = json.loads(path.read_text())
        nodes: dict[str, list[str]] = said["nodes"]
        found = {name: is_here(name) for name in {name for names in nodes.values() for name in names}}
        self.root = root
        self.nodes = {node for node, names in nodes.items() if not any(found[name] for name in names)}
        again = {file_of(node) for node in nodes.keys() - self.nodes}
        self.files = set(said["files"]) - again

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Not even imported: all its tests passed, and its collection missed nothing that is here."""
        inside = collection_path.is_relative_to(self.root)
        return True if inside and collection_path.relative_to(self.root).as_posix() in self.files else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        done = [item for item in items if item.nodeid in self.nodes]
        config.hook.pytest_deselected(items=done)
        gone = set(map(id, done))
        items[:] = [item for item in items if id(item) not in gone]


def file_of(node: str) -> str:
    return node.split("::", 1)[0]


def is_here(name: str) -> bool:
    """Whether an import would find it. Its parent was found when it was looked for, or it would not have been."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def pytest_report_header(config: pytest.Config) -> str | None:
    path: Path | None = config.getoption("--proved")
    if path is None:
        return None
    if is_believed(config):
        return f"once: without what passed in isolation, {path}"
    return f"once: all of it, as {path} is {'of other files' if path.exists() else 'not there'}"
