"""What is above the executor needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sixfold.pipeline


def test_schedules_proofs_and_drawings_work_without_importing_torch():
    code = (
        "import sys, sixfold.pipeline as p; from sixfold.pipeline import passes\n"
        "program = passes.lower(p.interleaved(2, 4)); p.verify(program)\n"
        "p.draw(p.simulate(program, p.Costs.per_rank(program)))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_and_others_are_not():
    for name in sixfold.pipeline.__all__:
        assert getattr(sixfold.pipeline, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'pipedreams'"):
        _ = sixfold.pipeline.pipedreams
