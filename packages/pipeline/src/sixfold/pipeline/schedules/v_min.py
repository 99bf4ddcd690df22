"""V-Min: two chunks per rank in a V, within about a third of 1F1B's memory (arXiv 2405.15362).

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, three microbatches:

    0: 0F0 0F1 3F0 3I0 3F1 3W0 0F2 3I1 0I0 0W0 3F2 3I2 0I1 3W1 0I2 0W1 3W2 0W2
    1: 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

Every rank holds at most (p + 4) // 3 microbatches. The bubble has no closed form here. Five patterns of one microbatch
are repeated (``list_scheduling``), and the best is taken: the shortest at F = I = W, of equally short ones the
shortest at 1 : 1.6 : 0.6 with hops of 0.1. At F = I = W the steady state has no bubble; 0.229 at (p, m) = (4, 8) is
the optimum in two microbatches, and (16, 64) has 0.154. A microbatch's operations follow each other without slack. At
other ratios all ranks go at the pace of the longest operation: at 1 : 1.6 : 0.6 each microbatch takes two thirds
longer than the work. ``plan`` finds better orders. With more memory (``memory_cap``) patterns do not use it as well as
it could be, 0.188 at (4, 8) in 2.5 microbatches; there the optimum, 0.167, is written down (``optima``), and elsewhere
``plan`` finds better orders. The patterns were chosen at p = 4 to 32. Messages are 4 m (p - 1).
"""

from __future__ import annotations

from collections.abc import Callable

from sixfold.pipeline.job_shop.list_scheduling import best_v
from sixfold.pipeline.program.placement import at_least_one, wave
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.optima import optimum
from sixfold.pipeline.schedules.registry import schedule
from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.simulate import simulate

__all__ = ["v_min"]

# A microbatch goes down and up without a pause; the gaps at its turns decide whether the operations of a rank collide.
# Chosen at p = 4 to 32 among 48 by bubble at both ratios.
_AT_ONCE = (1.0, 1.0, 1.0, 1.0)
_TRIES = tuple(
    (_AT_ONCE, gaps, 0.0)
    for gaps in ((0.0, 3.0, 2.0), (1.0, 3.0, 1.0), (0.0, 4.0, 3.0), (1.0, 1.0, 2.0), (0.0, 2.0, 3.0))
)


def _search(
    ranks: int, microbatches: int, memory_cap: float | None = None, *, go_on: Callable[[], bool] | None = None
) -> Program | None:
    at_least_one(ranks=ranks, microbatches=microbatches)
    found = best_v(ranks, microbatches, _TRIES, (ranks + 4) // 3, memory_cap, "v_min", go_on)
    known = None if memory_cap is None else optimum(ranks, microbatches, memory_cap, "v_min")
    if found is None or known is None:
        return found
    return min(found, known, key=lambda program: simulate(program, Costs.per_rank(program)).makespan)


@schedule(placement=wave, chunks=2, split=True, search=_search)
def v_min(ranks: int, microbatches: int, memory_cap: float | None = None) -> Program:
    """The best of five patterns within (p + 4) // 3 microbatches of memory, or ``memory_cap``.

    Raises:
        ScheduleError: an argument is below one.
    """
    program = _search(ranks, microbatches, memory_cap)
    assert program is not None, "nothing told it to stop"
    return program
