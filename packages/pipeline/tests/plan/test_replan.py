"""A program is replaced by a better one for its costs, and by nothing else."""

from __future__ import annotations

import math

import pytest

from sixfold.pipeline import (
    Costs,
    ScheduleError,
    interleaved,
    naive,
    one_f_one_b,
    passes,
    pipedream_2bw,
    simulate,
    verify,
    zb_v,
)
from sixfold.pipeline.plan.replan import replan

UNEVEN = Costs([1.0, 1.0, 1.0, 1.6], [1.6, 1.6, 1.6, 2.2], [0.6, 0.6, 0.6, 1.0], hop=0.1, activation=[0.5] * 4)


def test_uneven_costs_get_a_better_program_with_its_stages_and_memory():
    before = interleaved(2, 6)
    found = replan(before, UNEVEN, time_limit_s=0.5)
    assert found.changed and found.program.placement == before.placement and found.program.microbatches == 6
    verify(found.program)
    now, then = simulate(before, UNEVEN), simulate(found.program, UNEVEN)
    assert (found.before, found.after) == (now.makespan, then.makespan)
    assert then.makespan < 0.99 * now.makespan
    assert max(then.peak_activations) <= max(now.peak_activations)


def test_a_program_that_cannot_be_beaten_by_the_margin_stays():
    program = zb_v(2, 6)
    costs = Costs.per_rank(program)  # its bubble is proven least
    found = replan(program, costs, time_limit_s=0.2)
    assert found.program is program and not found.changed and found.after == found.before
    kept = replan(interleaved(2, 6), UNEVEN, time_limit_s=0.5, margin=0.9)
    assert not kept.changed and kept.program == interleaved(2, 6)


def test_more_memory_is_taken_only_when_it_is_given():
    program = naive(3, 6)
    costs = Costs.per_rank(program)
    within = replan(program, costs, time_limit_s=0.2).program
    assert max(simulate(within, costs).peak_activations) == 1
    free = replan(program, costs, memory_cap=math.inf, time_limit_s=0.2)
    assert free.changed and max(simulate(free.program, costs).peak_activations) > 1


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (pipedream_2bw(2, 2), "0STEP0"),
        (passes.lower(one_f_one_b(2, 2)), "0SEND_F0"),
        (passes.recompute(one_f_one_b(2, 2), microbatches=1), "0RECOMPUTE"),
    ],
    ids=["steps", "messages", "recomputes"],
)
def test_what_a_plan_would_lose_is_refused(program, kind):
    with pytest.raises(ScheduleError, match=rf"{kind}.*: a plan has no"):
        replan(program, Costs.per_rank(program))
    with pytest.raises(ScheduleError, match="margin is 1; it is a part of the makespan"):
        replan(program, Costs.per_rank(program), margin=1)
