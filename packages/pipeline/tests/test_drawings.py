"""Every schedule looks as its golden drawing does."""

import importlib.util
from pathlib import Path

import pytest

from sixfold.pipeline import schedules

GOLDEN = Path(__file__).parent / "golden"
spec = importlib.util.spec_from_file_location("make_drawings", GOLDEN / "make_drawings.py")
make_drawings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_drawings)


@pytest.mark.parametrize("name", schedules.__all__)
def test_a_schedule_looks_as_it_did(name):
    assert make_drawings.drawing(name) == (GOLDEN / "drawings" / f"{name}.txt").read_text()
