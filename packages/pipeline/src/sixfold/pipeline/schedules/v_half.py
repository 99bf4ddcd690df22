"""V-Half: two chunks per rank in a V, within about half of 1F1B's memory (arXiv 2405.15362).

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, three microbatches:

    0: 0F0 0F1 3F0 3I0 3F1 3W0 0F2 3I1 0I0 0W0 3F2 3I2 0I1 3W1 0I2 0W1 3W2 0W2
    1: 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

Every rank holds at most p / 2 + 1 microbatches. The bubble has no closed form here. Five patterns of one microbatch
are repeated (``list_scheduling``), and the best is taken: the shortest at F = I = W, of equally short ones the
shortest at 1 : 1.6 : 0.6 with hops of 0.1. At F = I = W the steady state has no bubble. What warm-up and drain leave
is (3 p - 7) / (6 m) if 4 divides p and m >= 2 p. That is 0.104 at (p, m) = (4, 8), the optimum, and 0.107 at (16, 64).
One order cannot serve all ratios of costs: at 1 : 1.6 : 0.6 each microbatch takes up to a sixth longer than the work
(0.356 at (16, 64)); ``plan`` makes orders for given costs. The patterns were chosen at p = 4 to 32.
Messages are 4 m (p - 1).
"""

from __future__ import annotations

from collections.abc import Callable

from sixfold.pipeline.job_shop.list_scheduling import best_v
from sixfold.pipeline.program.placement import at_least_one, wave
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["v_half"]

# A microbatch goes down at half the speed at which it goes up, so that the operations of a rank never collide where the
# gaps are right; which are right depends on the ranks. Chosen at p = 4 to 32 among 96 by bubble at both ratios.
_DOWN_SLOWLY = (2.0, 1.0, 2.0, 1.0)
_TRIES = (
    *((_DOWN_SLOWLY, gaps, 0.5) for gaps in ((1.0, 5.0, 1.0), (0.0, 3.0, 0.0), (1.0, 4.0, 2.0))),
    *((_DOWN_SLOWLY, gaps, 0.0) for gaps in ((0.0, 3.0, 1.0), (1.0, 4.0, 3.0))),
)


def _search(
    ranks: int, microbatches: int, memory_cap: float | None = None, *, go_on: Callable[[], bool] | None = None
) -> Program | None:
    at_least_one(ranks=ranks, microbatches=microbatches)
    return best_v(ranks, microbatches, _TRIES, (ranks + 2) / 2, memory_cap, "v_half", go_on)


@schedule(placement=wave, chunks=2, split=True, search=_search)
def v_half(ranks: int, microbatches: int, memory_cap: float | None = None) -> Program:
    """The best of five patterns within p / 2 + 1 microbatches of memory, or ``memory_cap``.

    Raises:
        ScheduleError: an argument is below one.
    """
    program = _search(ranks, microbatches, memory_cap)
    assert program is not None, "nothing told it to stop"
    return program
