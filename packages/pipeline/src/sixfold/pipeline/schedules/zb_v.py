"""ZB-V: zero bubble within 1F1B's memory, two chunks per rank in a V (arXiv 2401.10241, section 6).

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, three microbatches; stages 0 and 3 are rank 0's, 1 and 2 rank 1's:

    0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

At F = I = W and m >= 2 p - 1 no rank idles between its first and last action
(span_over_ideal 0). From flush to flush (p - 1) F / 2 remains, bubble_over_ideal
(p - 1) / (6 m), which no V placement can beat. Every rank holds at most p microbatches;
messages are 4 m (p - 1), since the turn of the V stays within a rank.
"""

from __future__ import annotations

from sixfold.pipeline.program.placement import at_least_one, vee, wave
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.phases import numbered
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["zb_v"]


@schedule(placement=wave, chunks=2, split=True, aliases={"ZBVZeroBubble": ""})
def zb_v(ranks: int, microbatches: int) -> Program:
    """ZB-V's phases for max(m, 2p - 1) microbatches, without those beyond m.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches)
    p, m = int(ranks), max(microbatches, 2 * ranks - 1)
    rows = []
    for r in range(p):
        words = ["F0"] * (2 * (p - r) - 1) + ["F1", "F0"] * r + ["F1", "I1", "W1"] * (p - r)  # warm-up
        words += ["F0", "I0", "W0", "F1", "I1", "W1"] * (m - 2 * p + r + 1)
        words += ["I0", "W0", "F1", "I1", "W1"] * (p - r - 1)  # chunk 0 has no forward left
        words += ["I0", "I1"] * r + ["I0", "W0"] * (p - r) + ["W1"] * r + ["W0"] * r
        rows.append(numbered(words, (r, 2 * p - 1 - r), microbatches))
    return Program(tuple(rows), microbatches, vee(ranks), "zb_v")
