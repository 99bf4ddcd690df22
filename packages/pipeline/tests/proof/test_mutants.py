"""Every invalid mutant of every schedule is rejected, and no valid one: the oracle is a machine that runs it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from machine_helpers import is_right, mutate
from schedule_helpers import ASYNCHRONOUS, FLUSH, SCHEDULES

from sixfold.pipeline import Program, ScheduleError, verify
from sixfold.pipeline.passes import lower, optimizer_step, recompute, split_backward, unshard

FORMS = {
    "as made": lambda program: program,
    "lowered": lower,
    "lowered with slots": lambda program: unshard(lower(program), max_active=2),
    "split": lambda program: lower(split_backward(program)),
    "recomputed": lambda program: lower(recompute(program, microbatches=(program.microbatches + 1) // 2)),
    "recomputed with slots": lambda program: unshard(recompute(program), max_active=1),
}


def refusal(program: Program, transport: str = "rendezvous") -> ScheduleError | None:
    try:
        verify(program, transport=transport)
    except ScheduleError as error:
        return error
    return None


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.slow
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


def pytorch_accepts(program: Program) -> bool:
    """Whether PyTorch's validation and simulator, its only checks of a lowered table, let ``program`` through."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch's checks are the peer")
    try:
        rows = {r: [theirs._Action.from_str(str(a)) for a in row] for r, row in enumerate(program.ranks)}
        without = {r: [a for a in row if a.computation_type != theirs.REDUCE_GRAD] for r, row in rows.items()}
        theirs._validate_schedule(rows, len(rows), program.stages, program.microbatches)
        theirs._simulate_comms_compute(without, lambda stage: program.placement[stage], program.stages)
    except Exception:
        return False
    return True


def test_pytorchs_checks_accept_some_of_the_mutants_that_are_refused_here(pytestconfig):
    rng = random.Random(0)
    names = [name for name in FLUSH if name != "dualpipe_v"]  # PyTorch's simulator does not know OVERLAP_F_B
    wrong = accepted = 0
    while wrong < 10 * pytestconfig.getoption("--mutants", 8):  # pipeline-schedules.md quotes --mutants 80
        _, mutant = mutate(lower(FLUSH[rng.choice(names)](rng.randint(1, 4), rng.randint(1, 6))), rng)
        if not is_right(mutant):
            assert refusal(mutant) is not None, f"\n{mutant}"
            wrong += 1
            accepted += pytorch_accepts(mutant)
    assert 0.05 < accepted / wrong < 0.4, f"PyTorch accepts {accepted} of {wrong}"
