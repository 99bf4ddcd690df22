"""The gallery shows the schedules as they are."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "pipeline_gallery.py"


@pytest.mark.slow
def test_the_gallery_is_current():
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
