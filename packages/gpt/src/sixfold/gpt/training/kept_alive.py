"""What a run does more when it is kept alive: it beats, it takes its state back, it says what was lost.

    elastic/member.py --> generation, heartbeat --> KeptAlive (this file) --> loop.py

The ranks of a generation are a run that resumes, as any other; the next one of the same process takes nothing from it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from sixfold.gpt.elastic.generation import Generation
from sixfold.gpt.elastic.heartbeat import Heartbeat
from sixfold.gpt.launch.stop_signals import StopFlag

if TYPE_CHECKING:
    from sixfold.gpt.training.loop import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptAlive:
    """One generation of a run, for this rank.

    Attributes:
        flag: of this process, through all generations: a signal between two of them counts in the next.
    """

    generation: Generation
    heartbeat: Heartbeat
    flag: StopFlag

    @classmethod
    def of(cls, generation: Generation, heartbeat: Heartbeat) -> KeptAlive:
        """This process in ``generation``."""
        flag = _flag()
        flag.arm()
        flag.asked = flag.asked or generation.stop
        return cls(generation=generation, heartbeat=heartbeat, flag=flag)

    def tell(self, run: Run) -> None:
        """A line of metrics.jsonl, when the state is there from which a later generation goes on."""
        if self.generation.number > 1:
            run.note(
                "recovery",
                step=run.progress.step,
                generation=self.generation.number,
                lost=[{"rank": one.rank, "why": one.why} for one in self.generation.lost],
                source="disk" if run.progress.step else "the start",
                seconds=time.monotonic() - self.generation.lost_at,
            )


@cache
def _flag() -> StopFlag:
    return StopFlag()
