"""Every schedule looks as its golden drawing does."""

import importlib.util
from pathlib import Path

import pytest

from sixfold.pipeline import schedules

GOLDEN = Path(__file__).parents[1] / "golden"
spec = importlib.util.spec_from_file_location("make_drawings", GOLDEN / "make_drawings.py")
make_drawings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_drawings)


@pytest.mark.parametrize("name", schedules.__all__)
def test_a_schedule_looks_as_it_did(name):
    assert make_drawings.drawing(name) == (GOLDEN / "drawings" / f"{name}.txt").read_text()


def test_the_names_that_type_checkers_see_are_those_that_are_found():
    assert make_drawings.STUB.read_text() == make_drawings.stub(), "run make_drawings.py"
