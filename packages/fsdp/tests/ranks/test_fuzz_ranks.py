"""Random programs on two and three ranks, bit by bit beside plain modules in one process.

    fsdp_random_helpers.draw --> run_programs on ranks --> Oracle (tests/fsdp_random_oracle_helpers.py)

nox -s "ranks(fsdp)" -- --random-programs 500
"""

from __future__ import annotations

import pytest
from fsdp_random_helpers import draw
from fsdp_random_oracle_helpers import Oracle
from fsdp_random_run_helpers import run_programs

from ranktest import run_ranks

PROGRAMS_PER_JOB = 50


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant checkpoint of frozen layers
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.slow
def test_random_programs_have_the_bits_of_plain_modules(ranks: int, random_programs: int) -> None:
    for first in range(0, random_programs, PROGRAMS_PER_JOB):
        programs = [draw(seed, ranks) for seed in range(first, min(first + PROGRAMS_PER_JOB, random_programs))]
        for program, *seen in zip(programs, *run_ranks(run_programs, ranks, programs), strict=True):
            problems = Oracle(program, seen).run()
            assert problems == [], f"{program}\n" + "\n".join(problems[:5])
