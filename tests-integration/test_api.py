"""The public API of each package is the one that was reviewed last."""

import difflib
import importlib.util

import pytest
from repository_helpers import PACKAGE_NAMES, ROOT

specification = importlib.util.spec_from_file_location("api_snapshot", ROOT / "tools/api_snapshot.py")
api_snapshot = importlib.util.module_from_spec(specification)
specification.loader.exec_module(api_snapshot)


@pytest.mark.parametrize("package", PACKAGE_NAMES)
def test_public_api_is_the_reviewed_one(package):
    golden = api_snapshot.golden_path(package)
    assert golden.exists(), (
        f"no {golden.relative_to(ROOT)}; write it with `python tools/api_snapshot.py --write {package}`"
    )
    before, now = golden.read_text(), api_snapshot.snapshot(package)
    difference = "\n".join(
        difflib.unified_diff(before.splitlines(), now.splitlines(), "reviewed", "now", lineterm="", n=1)
    )
    assert not difference, (
        f"the public API of {package} has changed:\n{difference}\n"
        f"If that is meant: say it in packages/{package}/CHANGELOG.md, then "
        f"`python tools/api_snapshot.py --write {package}` and commit both."
    )


def test_the_snapshot_sees_fields_methods_and_inherited_ones(tmp_path, monkeypatch):
    source = """
class _Base:
    def inherited(self, x: int) -> int: ...
    def _hidden(self): ...
from dataclasses import dataclass
@dataclass(frozen=True)
class Thing(_Base):
    size_bytes: int = 3
    def resize(self, a, *, b: str = "c") -> None: ...
    @property
    def name(self) -> str: ...
def call(x: "int | None", *rest: str) -> None: ...
LIMIT = 4
__all__ = ["LIMIT", "Thing", "call"]
"""
    (tmp_path / "sixfold_snapshot_example.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("sixfold_snapshot_example")
    assert api_snapshot.describe_module(module).splitlines()[1:] == [
        "LIMIT: int",
        "@dataclass(frozen=True)",
        "class Thing(_Base)",
        "    size_bytes: int = 3",
        "    def inherited(self, x: int) -> int",
        "    @property def name(self) -> str",
        "    def resize(self, a, *, b: str='c') -> None",
        "def call(x: 'int | None', *rest: str) -> None",
    ]
