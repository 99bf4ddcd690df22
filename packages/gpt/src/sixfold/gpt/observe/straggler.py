"""Where each rank's time goes, and which rank the others wait for.

    Clock of a rank --> seconds by part --> gathered each log.straggler_every steps --> slow_ranks --> metrics.jsonl
                                                        (this file)                                `-> terminal

[Note: a rank's own time] A step takes all ranks equally long, because a fast rank waits in a message or in a sum. A
slow rank shows in the time that it does not wait for others: data, compute, optimizer, save. This time is compared with
the median of the other ranks of its pipeline stage, which do the same work. A rank alone in its stage is compared with
all others. Ranks that split a stage (tp, cp, ep) wait for each other within its computation. One slow rank makes
all of them slow, so they are named together.

[Note: clocks of the host] On a GPU the host runs ahead of the device, and waits for other ranks lie in the device's
queue. So compute is the time that the host took to fill the queue. The wait for the step's one host read counts as
communication. These times show a slow host, but not a slow device.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from sixfold.gpt.parallel.agreement import gather_objects
from sixfold.pipeline.program.action import MESSAGES

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import LogConfig
    from sixfold.gpt.engine.rank_model import RankModel
    from sixfold.pipeline import StepResult

OWN = ("data", "compute", "optimizer", "save")
PARTS = (*OWN, "communication")
LEAST_SHARE = 0.1  # of the step: what a rank takes longer by, below which nobody is told

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Parts = dict[str, float]  # seconds by part


class Clock:
    """Seconds of this rank by part. A part within another is taken off that one.

    Attributes:
        waits: seconds for which this host has waited for other ranks so far. What it grows by within a part is
            communication and not of that part; outside of all parts it is nothing.
    """

    def __init__(self) -> None:
        self.begin()
        self.waits: Callable[[], float] = lambda: 0.0
        self._open: list[str] = []
        self._since = 0.0, 0.0  # when the innermost part began or went on, and ``waits`` then

    def begin(self) -> None:
        """Forget what was counted."""
        self.seconds: Parts = dict.fromkeys(PARTS, 0.0)
        self.began = time.monotonic()
        self.steps = 0

    def enter(self, part: str) -> None:
        """From now on it is ``part``."""
        self._count()
        self._open.append(part)

    def leave(self) -> None:
        """The part that was entered last is over."""
        self._count()
        self._open.pop()

    def _count(self) -> None:
        """Up to now it was the innermost part."""
        (began, waited), self._since = self._since, (time.monotonic(), self.waits())
        if self._open:
            waited = self._since[1] - waited
            self.seconds["communication"] += waited
            self.seconds[self._open[-1]] += self._since[0] - began - waited

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """What runs inside is ``part``."""
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    def waited(self, seconds: float) -> None:
        """So much of what was counted as compute was a wait for other ranks, which ``waits`` does not know."""
        self.seconds["communication"] += seconds
        self.seconds["compute"] -= seconds

    def per_step(self) -> Parts:
        """Seconds of one step by part, and in all."""
        steps = max(self.steps, 1)
        parts = {part: round(seconds / steps, 6) for part, seconds in self.seconds.items()}
        return parts | {"seconds": round((time.monotonic() - self.began) / steps, 6)}


def communicates(
    function: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Count what ``function`` takes, whose first argument has the rank's clock, as communication."""

    @wraps(function)
    def counted(rank: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with rank.clock.part("communication"):
            return function(rank, *args, **kwargs)

    return counted


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRank:
    """A rank that the others wait for.

    Attributes:
        seconds, others_seconds: its own time of a step, and the median of the ranks that it is compared with.
        part: where the most of the difference lies; of it ``part_seconds`` and the others' median.
    """

    rank: int
    host: str
    seconds: float
    others_seconds: float
    part: str
    part_seconds: float
    others_part_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """What a rank tells: its stage in the pipeline, its host, and seconds of a step by part and in all."""

    stage: int
    host: str
    parts: Parts

    @property
    def own(self) -> float:
        """See [Note: a rank's own time]."""
        return sum(self.parts[part] for part in OWN)


def slow_ranks(times: Sequence[RankTimes], factor: float) -> list[SlowRank]:
    """Ranks whose own time is over ``factor`` times that of the others; the slowest first. Pure.

    Args:
        times: by rank.
    """
    found = []
    for rank, mine in enumerate(times):
        others = [one for at, one in enumerate(times) if at != rank]
        others = [one for one in others if one.stage == mine.stage] or others
        if not others:
            continue
        usual = statistics.median(one.own for one in others)
        if mine.own <= factor * usual or mine.own - usual < LEAST_SHARE * mine.parts["seconds"]:
            continue
        usual_parts = {part: statistics.median(one.parts[part] for one in others) for part in OWN}
        part = max(OWN, key=lambda part: mine.parts[part] - usual_parts[part])
        found.append(
            SlowRank(
                rank=rank,
                host=mine.host,
                seconds=mine.own,
                others_seconds=usual,
                part=part,
                part_seconds=mine.parts[part],
                others_part_seconds=usual_parts[part],
            )
        )
    return sorted(found, key=lambda slow: slow.others_seconds - slow.seconds)


class StragglerReport:
    """Takes the times of a run's steps and tells of them each ``log.straggler_every`` steps."""

    def __init__(self, rank: RankModel, log: LogConfig) -> None:
        self._rank, self._log = rank, log
        self._began = False
        rank.clock.waits = lambda: rank.model.waited_s
        for part in rank.optimizer.parts:
            part.register_step_pre_hook(lambda *_: rank.clock.enter("optimizer"))
            part.register_step_post_hook(lambda *_: rank.clock.leave())

    def after_step(self, step: int, ran: StepResult, note: Callable[..., None]) -> None:
        """Count a step; write the line when it is due. The first step of a process makes much and is left out.

        Args:
            step: updates done.
            ran: what the pipeline's messages took, where they were timed.
        """
        rank, log, clock = self._rank, self._log, self._rank.clock
        if rank.device.type == "cpu":  # else these are times of the device, of which the host's have none
            clock.waited(sum(end - begin for _, action, begin, end in ran.events if action.kind in MESSAGES))
        clock.steps += 1
        due = bool(log.straggler_every) and step % log.straggler_every == 0
        if due and self._began:
            mine = RankTimes(stage=rank.mesh.pp_rank, host=socket.gethostname(), parts=clock.per_step())
            times = gather_objects(rank.mesh.control, rank.mesh.size, mine)
            slow = [asdict(one) for one in slow_ranks(times, log.straggler_factor)]
            parts = {part: [one.parts[part] for one in times] for part in (*PARTS, "seconds")}
            note("straggler", step=step, steps=clock.steps, factor=log.straggler_factor, parts=parts, slow=slow)
        if due or not self._began:
            clock.begin()
        self._began = True
