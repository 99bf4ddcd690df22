"""Rooms: the folders of a package. Imports go one way only, by the floors of rooms.toml.

A room's `__init__.py` says its duty in at most ten lines; where it has a line `From outside: a, b`, modules of other
rooms import only these of it.
"""

import ast
import functools
import graphlib
import re
import tomllib
from pathlib import Path

import pytest
from repository_helpers import PACKAGE_NAMES, ROOT

FLOORS: dict[str, list[list[str]]] = {
    name: table["floors"] for name, table in tomllib.loads((Path(__file__).parent / "rooms.toml").read_text()).items()
}
MOST_ROOM_LINES = 10
FROM_OUTSIDE = re.compile(r"^From outside: (.*?)(?:\.$|\n\n|\Z)", re.MULTILINE | re.DOTALL)

each_package = pytest.mark.parametrize("package", PACKAGE_NAMES)
with_floors = pytest.mark.parametrize("package", FLOORS)


def source_of(package: str) -> Path:
    return ROOT / "packages" / package / "src/sixfold" / package.replace("-", "_")


def name_of(path: Path, source: Path) -> str:
    """Of a module, below its package: ``engine.gather``; the package itself has the empty name."""
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def imported(path: Path, source: Path) -> list[tuple[int, str]]:
    """Line and name below the package of each module that is imported when the file is loaded or run."""
    prefix, found = f"sixfold.{source.name}", []
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
            continue
        if node.module != prefix and not (node.module or "").startswith(f"{prefix}."):
            continue
        base = (node.module or "").removeprefix(prefix).lstrip(".")
        for alias in node.names:
            whole = f"{base}.{alias.name}" if base else alias.name
            place = source / whole.replace(".", "/")
            found.append((node.lineno, whole if place.with_suffix(".py").exists() or place.is_dir() else base))
    return found


@functools.cache
def modules(package: str) -> dict[str, list[tuple[int, str]]]:
    """Each module of a package and what it imports of it."""
    source = source_of(package)
    return {name_of(path, source): imported(path, source) for path in sorted(source.rglob("*.py"))}


def floor_of(module: str, floors: list[list[str]]) -> int:
    for number, names in enumerate(floors):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    return len(floors)


def room_of(module: str, package: str) -> str:
    """The folder below the package, or the module itself at the top, or the part of a folder that has its own floor."""
    apart = {name for floor in FLOORS.get(package, []) for name in floor if "." in name}
    return next((name for name in apart if f"{module}.".startswith(f"{name}.")), module.partition(".")[0])


@with_floors
def test_a_module_imports_only_from_its_floor_and_below(package: str):
    floors = FLOORS[package]
    wrong = [
        f"{module} (line {line}) imports {other}"
        for module, found in modules(package).items()
        for line, other in found
        if floor_of(other, floors) > floor_of(module, floors)
    ]
    assert not wrong, "\n".join(wrong)


@with_floors
def test_every_name_of_the_floors_exists(package: str):
    known = {part for name in modules(package) for part in (name, *prefixes(name))}
    named = {name for floor in FLOORS[package] for name in floor}
    assert named <= known, f"not in {package}: {sorted(named - known)}"


def prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


@with_floors
def test_no_two_files_and_no_two_rooms_import_each_other(package: str):
    files = {module: {other for _, other in found if other != module} for module, found in modules(package).items()}
    rooms: dict[str, set[str]] = {}
    for module, others in files.items():
        if module:  # the package's own __init__ names what is public, and is above all
            room = room_of(module, package)
            rooms.setdefault(room, set()).update({room_of(other, package) for other in others if other} - {room})
    for graph in (files, rooms):
        try:
            graphlib.TopologicalSorter({k: v - {""} for k, v in graph.items()}).prepare()
        except graphlib.CycleError as error:
            pytest.fail(f"in a circle: {' -> '.join(error.args[1])}")


@with_floors
def test_a_room_says_its_duty_and_others_import_what_it_names(package: str):
    source, wrong = source_of(package), []
    named: dict[str, set[str]] = {}
    for init in sorted(source.glob("*/__init__.py")):
        text = init.read_text()
        duty = ast.get_docstring(ast.parse(text)) or ""
        lines = (duty if "\n__all__" in text else text).splitlines()  # a folder that users import names what is public
        if len(lines) > MOST_ROOM_LINES:
            wrong.append(f"{init.parent.name}/__init__.py has more than {MOST_ROOM_LINES} lines")
        if not duty:
            wrong.append(f"{init.parent.name}/__init__.py does not say its duty")
        if said := FROM_OUTSIDE.search(duty):
            named[init.parent.name] = set(re.split(r"[,\s]+", said.group(1)))
    for module, found in modules(package).items():
        for line, other in found:
            room, _, inner = other.partition(".")
            if room in named and inner and room_of(module, package) != room and inner not in named[room]:
                wrong.append(f"{module} (line {line}) imports {other}, which {room}/__init__.py does not name")
    assert not wrong, "\n".join(wrong)


def test_the_rules_see_an_import_that_goes_up_and_one_of_types(tmp_path: Path):
    source = source_of("dist-ckpt")
    (tmp_path / "x.py").write_text(
        "from sixfold.dist_ckpt.save_load import saving\nfrom sixfold.dist_ckpt import errors\n"
    )
    found = imported(tmp_path / "x.py", source)
    assert found == [(1, "save_load.saving"), (2, "errors")]
    assert [floor_of(module, FLOORS["dist-ckpt"]) for _, module in found] == [10, 0]
