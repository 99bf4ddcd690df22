"""DualPipeV: the V form of DualPipe, which pairs a forward with a backward (arXiv 2412.19437; "cut in half").

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, four microbatches, the first overlap of rank 0:

    0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 (1F3;2B1)OVERLAP_F_B 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

In the steady phase a forward of the first chunk and a backward of the second are one
OVERLAP_F_B, so that the messages of one hide behind the other's computation
(``Costs.overlap`` prices what that wins). DeepSeek and PyTorch pair the other two as well;
that ties a forward to a backward which is still waited for, and doubles the bubble
where overlap wins nothing. Here it is (p - 1) / (6 m) at F = I = W and m >= 2 p. At most
p + 1/2 microbatches are held; messages are 4 m (p - 1).
"""

from __future__ import annotations

from sixfold.pipeline.program.placement import at_least_one, vee, wave
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.phases import numbered
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["dualpipe_v"]


@schedule(placement=wave, chunks=2, split=True, aliases={"DualPipeV": "more pairs overlap; m >= 2 ranks"})
def dualpipe_v(ranks: int, microbatches: int) -> Program:
    """DualPipeV's phases for max(m, 2p) microbatches, without those beyond m.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches)
    p, m = int(ranks), max(microbatches, 2 * ranks)
    rows = []
    for r in range(p):
        up, paired = p - 1 - r, m - 2 * p + r + 1
        words = ["F0"] * (2 * up) + ["F0", "F1"] * (r + 1) + ["I1", "W1", "F1"] * up
        steady = ["F0+B1", "F1", "B0"] * paired
        # The last rank turns around at once: its first pair would hold up everybody's first backward.
        words += ["F0", "B1", *steady[1:]] if r == p - 1 else steady
        words += ["B1", "F1", "B0"] * up
        drain = [f"{'B' if turn <= r else 'I'}{1 - turn % 2}" for turn in range(2 * r + 2)]
        late = [f"W{word[1]}" for word in drain if word[0] == "I"] + ["W0"] * up
        words += drain + [word for w in late[:up] for word in (w, "I0")] + late[up:]
        rows.append(numbered(words, (r, 2 * p - 1 - r), microbatches))
    return Program(tuple(rows), microbatches, vee(ranks), "dualpipe_v")
