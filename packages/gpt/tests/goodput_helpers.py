"""A run under failures, stepped through event by event. It shares nothing with the formula but the names of costs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sixfold.gpt.plan.goodput import FailureCosts


@dataclass
class SimulatedRun:
    """A clock, the next failure, and how far the run has come.

    Attributes:
        done: updates. safe: updates of the newest whole checkpoint.
        writing: (updates of the checkpoint that is being written, when it will be whole).
        spent: seconds by cause.
    """

    costs: FailureCosts
    interval: int
    seed: int
    clock: float = 0.0
    failures: int = 0
    done: int = 0
    safe: int = 0
    writing: tuple[int, float] | None = None
    spent: dict[str, float] = field(default_factory=lambda: {"work": 0.0, "detection": 0.0, "recovery": 0.0})

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.next_failure = self.random.expovariate(1 / self.costs.mtbf_s)

    def survives(self, seconds: float, cause: str = "work") -> bool:
        """Let time pass, up to the next failure."""
        if self.clock + seconds < self.next_failure:
            self.clock += seconds
            self.spent[cause] += seconds
            return True
        self.spent[cause] += self.next_failure - self.clock
        self.clock = self.next_failure
        self.next_failure += self.random.expovariate(1 / self.costs.mtbf_s)
        self.failures += 1
        return False

    def until(self, failures: int) -> float:
        """Go on until there were so many failures; the goodput."""
        while self.failures < failures:
            if not self.survives(self.costs.step_s + self.costs.snapshot_s):
                self.come_back()
                continue
            self.done += 1
            while self.done % self.interval == 0 and self.safe < self.done and not self.is_writing(self.done):
                if not self.save():
                    self.come_back()
        return self.done * self.costs.step_s / self.clock

    def is_writing(self, updates: int) -> bool:
        """A checkpoint becomes whole when its time has come."""
        if self.writing and self.writing[1] <= self.clock:
            self.safe, self.writing = self.writing[0], None
        return self.writing is not None and self.writing[0] == updates

    def save(self) -> bool:
        """Wait for the checkpoint before, then block for this one."""
        if self.writing and not self.survives(max(0.0, self.writing[1] - self.clock)):
            return False
        self.is_writing(self.done)
        began = self.clock
        if not self.survives(self.costs.save_s):
            return False
        self.writing = self.done, max(began + self.costs.written_s, self.clock)
        self.is_writing(self.done)
        return True

    def come_back(self) -> None:
        """From a failure to the next update; another failure meanwhile may be of the worse kind."""
        costs, worse = self.costs, False
        while True:
            worse = worse or self.random.random() < costs.from_checkpoint
            if worse:
                self.is_writing(0)
                self.done, self.writing = self.safe, None
            recover_s = costs.recover_s if not worse or costs.restart_s is None else costs.restart_s
            if self.survives(costs.detect_s, "detection") and self.survives(recover_s, "recovery"):
                return
