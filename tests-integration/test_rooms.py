"""The rooms of dist-ckpt: imports go one way only, as docs/design/2026-11-23-dist-ckpt-second.md draws them."""

import ast
from pathlib import Path

import pytest
from repository_helpers import ROOT

SOURCE = ROOT / "packages/dist-ckpt/src/sixfold/dist_ckpt"
PREFIX = "sixfold.dist_ckpt"
# The lowest first. What is not named belongs to the last level: the doors.
LEVELS = (
    ("errors", "pause", "progress", "dict_utils", "recycled"),
    ("geometry",),
    ("state",),
    ("files",),
    ("plans",),
    ("stores",),
    ("ranks",),
    ("strategies.base",),
    ("road",),
    ("background", "_worker"),
)


def level_of(module: str) -> int:
    """The level of a module whose name begins below the package."""
    for number, names in enumerate(LEVELS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    return len(LEVELS)


def imported(path: Path) -> list[tuple[int, str]]:
    """Line and name below the package of each module that is imported when the file is loaded or run."""
    found = []
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types or not (node.module or "").startswith(PREFIX):
            continue
        base = node.module.removeprefix(PREFIX).lstrip(".")
        for alias in node.names:
            whole = f"{base}.{alias.name}" if base else alias.name
            is_module = (SOURCE / (whole.replace(".", "/") + ".py")).exists() or (
                SOURCE / whole.replace(".", "/")
            ).is_dir()
            found.append((node.lineno, whole if is_module else base))
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_what_stands_above_it(path: Path):
    own = str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".").removesuffix(".__init__")
    wrong = [
        f"{path.name}:{line}: {own} imports {module}"
        for line, module in imported(path)
        if level_of(module) > level_of(own)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_sees_an_import_that_goes_up(tmp_path: Path):
    (tmp_path / "x.py").write_text(f"from {PREFIX}.road import saving\nfrom {PREFIX} import errors\n")
    assert [level_of(module) for _, module in imported(tmp_path / "x.py")] == [8, 0]
