"""V-Min: two chunks per rank in a V, within about a third of 1F1B's memory (arXiv 2405.15362).

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, three microbatches:

    0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
    1: 1F0 2F0 1F1 2F1 2I0 1I0 1W0 1F2 2I1 1I1 1W1 2F2 2W0 2W1 2I2 1I2 1W2 2W2

Every rank holds at most p / 3 + 1.5 microbatches. The bubble has no closed form here: five list
schedules of fixed preferences and paces of entry are made, and the shortest is taken. At F = I = W
bubble_over_ideal is 0.188 at (p, m) = (4, 8), 0.125 at (4, 12), 0.281 at (8, 16) and 0.141 at (8, 32).
The optimum at (4, 8) is 0.167, which ``plan`` finds. Messages are 4 m (p - 1).
"""

from __future__ import annotations

from sixfold.pipeline.placement import at_least_one, wave
from sixfold.pipeline.program import Program
from sixfold.pipeline.schedules.list_scheduling import best_v
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["v_min"]

# Of all 720 orders, without a pace, the two leave the smallest bubbles at 11 sizes of p <= 8 and m <= 4 p; a pace of
# half the time that a rank needs per microbatch wins a fifth on eight ranks.
_TRIES = (*(("I0 I1 F1 F0 W0 W1", pace) for pace in (0, 3, 4)), *(("I1 I0 F1 F0 W1 W0", pace) for pace in (2, 3)))


@schedule(placement=wave, chunks=2, split=True, searched=True)
def v_min(ranks: int, microbatches: int) -> Program:
    """The shortest of five list schedules within p / 3 + 1.5 microbatches of memory.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches)
    return best_v(ranks, microbatches, _TRIES, room=(2 * ranks + 9) // 3, name="v_min")
