"""The pictures of schedules, data, gathers, shards and a step show what the packages compute."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["pipeline_gallery.py", "data_pictures.py", "training_pictures.py"])
def test_the_pictures_are_current(tool):
    done = subprocess.run([sys.executable, str(TOOLS / tool)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
