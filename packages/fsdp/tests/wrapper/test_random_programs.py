"""Random programs in one process, two models at a time, bit by bit beside plain modules.

    fsdp_random_helpers.draw --> run_programs --> Oracle (fsdp_random_oracle_helpers.py)

nox -s "tests(fsdp)" -- --random-programs 500
"""

from __future__ import annotations

import pytest
from fsdp_random_helpers import draw
from fsdp_random_oracle_helpers import Oracle
from fsdp_random_run_helpers import run_programs


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant checkpoint of frozen layers
@pytest.mark.slow
def test_random_programs_have_the_bits_of_plain_modules(random_programs: int) -> None:
    for first in range(0, random_programs, 2):
        programs = [draw(seed, 1) for seed in (first, first + 1)]
        for program, seen in zip(programs, run_programs(0, 1, programs), strict=True):
            problems = Oracle(program, [seen]).run()
            assert problems == [], f"{program}\n" + "\n".join(problems[:5])
