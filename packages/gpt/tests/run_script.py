"""Lines of metrics.jsonl as a run writes them, with times that are known beforehand."""

from __future__ import annotations

from typing import Any


class Script:
    """Lines of a run with a clock of its own: updates of 2 s, 0.25 s between them, a save of 0.5 s every 4th."""

    def __init__(self) -> None:
        self.clock = 1000.0
        self.lines: list[dict[str, Any]] = []

    def line(self, kind: str, **fields: Any) -> None:
        """Now."""
        self.lines.append({"kind": kind, "time": self.clock, **fields})

    def start(self, step: int, recovery: dict[str, Any] | None = None, world: int = 3) -> None:
        """A generation, or a first one."""
        self.line("start", step=step, world=world)
        if recovery:
            self.line("recovery", step=step, **recovery)

    def updates(self, first: int, last: int, every: int = 1, slow: float = 0.0) -> None:
        """Each with its line, where it has one, and its save; the first takes ``slow`` longer."""
        for step in range(first, last + 1):
            self.clock += 2.0 + slow
            if step % every == 0:
                self.line("step", step=step, seconds=2.0 + slow, loss=1.0, tokens=64 * step)
            slow = 0.0
            self.clock += 0.25
            if step % 4 == 0:
                self.clock += 0.5
                self.line("save", step=step, blocked_seconds=0.5, seconds=1.5)


def kept_alive(every: int = 1) -> list[dict[str, Any]]:
    """Lost 0.9 s into update 11, seen 0.3 s later; the update begins 3.1 s after that. The same in update 15."""
    run = Script()
    run.start(0)
    run.updates(1, 10, every)
    for lost_in, back in ((11, 8), (15, 12)):
        run.clock += 0.9 + 0.3 + 2.0
        run.start(back, {"source": "disk", "seconds": 2.0, "generation": 2, "lost": []})
        run.clock += 0.7
        run.updates(back + 1, lost_in + 3 if lost_in == 11 else 24, every, slow=0.4)
    run.line("end", step=24, reason="finished")
    return run.lines
