"""docs/design/<package>.md, the page to come in by, names what is there: rooms, arrows, the stops of a walk.

Its picture is a mermaid block of lines `room --> room`: what a room imports, arrows that follow from others left out or
not. Its walk names `room/file.py:function`, or `Class.method`. A package has the page when it has floors in rooms.toml.
"""

import ast
import re

import pytest
from repository_helpers import ROOT
from test_rooms import FLOORS, modules, room_of, source_of

MOST_STOPS = 12
NAMED = re.compile(r"`((?:[\w-]+/)*\w+\.(?:py|c|h))(?::([\w.]+))?`")  # a file, and perhaps something in it
ARROW = re.compile(r"^\s*([\w.]+)\s*-->\s*([\w.]+)\s*$", re.MULTILINE)
STOP = re.compile(r"`([\w./-]+\.py):([\w.]+)`")

WITH_PAGE = [package for package in FLOORS if (ROOT / f"docs/design/{package}.md").exists()]
each_page = pytest.mark.parametrize("package", WITH_PAGE)


def page_of(package: str) -> str:
    return (ROOT / f"docs/design/{package}.md").read_text()


def reached(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """All pairs that a way of arrows joins."""
    found = set(arrows)
    while more := {(a, d) for a, b in found for c, d in found if b == c} - found:
        found |= more
    return found


def rooms_of(package: str) -> set[str]:
    return {room_of(name, package) for name in modules(package) if "." in name}


@each_page
def test_the_arrows_of_the_picture_are_those_of_the_imports(package: str):
    rooms = rooms_of(package)
    drawn = {(a, b) for a, b in ARROW.findall(page_of(package)) if a in rooms and b in rooms}
    there = {
        (room_of(module, package), room_of(other, package))
        for module, found in modules(package).items()
        for _, other in found
    }
    there = {(a, b) for a, b in there if a != b and a in rooms and b in rooms}
    assert reached(drawn) == reached(there)


@each_page
def test_every_room_is_named_with_its_duty(package: str):
    text = page_of(package)
    missing = [room for room in rooms_of(package) if f"`{room.replace('.', '/')}" not in text]
    assert not missing, f"docs/design/{package}.md says nothing of {missing}"


@each_page
def test_every_stop_of_the_walk_is_there(package: str):
    stops, source = STOP.findall(page_of(package)), source_of(package)
    assert stops, f"docs/design/{package}.md has no walk"
    for path, name in stops:
        file = source / path
        assert file.exists(), f"docs/design/{package}.md names {path}, which is not there"
        assert name in names_in(ast.parse(file.read_text())), f"{path} has no {name}"


@each_page
def test_the_walk_has_at_most_twelve_stops(package: str):
    steps = re.findall(r"^(\d+)\. ", page_of(package), re.MULTILINE)
    assert 0 < len(steps) <= MOST_STOPS


# Folders whose files a page may name by the end of their path.
FOLDERS = {package: (f"packages/{package}",) for package in FLOORS} | {"repository": ("tools", "tests-integration")}
ROOM_PAGES = sorted((ROOT / "docs/design").glob("*/*.md"))


@pytest.mark.parametrize("page", ROOM_PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_every_file_that_a_page_of_a_room_names_is_there_and_has_what_it_names(page):
    there = [path for folder in FOLDERS[page.parent.name] for path in (ROOT / folder).rglob("*.[pch]*")]
    files = [path for path in there if ".egg-info" not in str(path)]
    wrong = []
    for name, inside in NAMED.findall(page.read_text()):
        found = [path for path in files if path.as_posix().endswith(f"/{name}")] or [*ROOT.glob(name)]
        if not found or (inside and not any(inside in names_in(ast.parse(path.read_text())) for path in found)):
            wrong.append(f"{name}:{inside}" if inside else name)
    assert not wrong, f"docs/design/{page.parent.name}/{page.name} names {wrong}, which is not there"


def names_in(tree: ast.Module) -> set[str]:
    """Functions and classes at the top, and ``Class.member``."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{inner.name}" for inner in node.body if hasattr(inner, "name")}
    return found


def test_what_follows_from_arrows_is_found():
    assert reached({("a", "b"), ("b", "c")}) == {("a", "b"), ("b", "c"), ("a", "c")}
