"""Every invalid mutant of every schedule is rejected, and no valid one: the oracle is a machine that runs it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from machine_helpers import is_right, mutate
from schedule_helpers import ASYNCHRONOUS, SCHEDULES

from sixfold.pipeline import Program, ScheduleError, verify
from sixfold.pipeline.passes import lower, optimizer_step, split_backward, unshard

FORMS = {
    "as made": lambda program: program,
    "lowered": lower,
    "lowered with slots": lambda program: unshard(lower(program), max_active=2),
    "split": lambda program: lower(split_backward(program)),
}


def refusal(program: Program, transport: str = "rendezvous") -> ScheduleError | None:
    try:
        verify(program, transport=transport)
    except ScheduleError as error:
        return error
    return None


@pytest.mark.parametrize("name", SCHEDULES)
def test_mutants_are_accepted_exactly_when_they_run(name, pytestconfig):
    rng = random.Random(name)
    verdicts: Counter[bool] = Counter()
    for turn in range(pytestconfig.getoption("--mutants", 8)):
        base = SCHEDULES[name](rng.randint(1, 4), rng.randint(1, 6))
        if name not in ASYNCHRONOUS and turn % 3 == 0:
            base = optimizer_step(base, when=rng.choice(["flush", "post_validated"]))
        form = rng.choice(list(FORMS))
        base = FORMS[form](base)
        assert is_right(base), f"{form}\n{base}"
        assert refusal(base) is None, f"{form}\n{base}"
        what, mutant = mutate(base, rng)
        error = refusal(mutant)
        assert (error is None) == is_right(mutant), f"{form}, {what}: {error}\n{mutant}"
        buffered = refusal(mutant, "buffered")  # the weaker transport: what meets also passes there
        assert error is not None or buffered is None, f"{form}, {what}: {buffered}\n{mutant}"
        verdicts[error is None] += 1
        if error is not None:
            assert str(error).count("\n") < 60
            assert str(error.action) in str(error).splitlines()[0] or error.cycle
            assert ">>" in str(error), f"no cell is marked:\n{error}"
    assert verdicts[False] > verdicts[True]
