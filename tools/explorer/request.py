"""What a reader asked for, and within which bounds.

    JSON of the page --> Request (this file) --> answer.py

The bounds are of the page alone: so that a picture stays one that a browser can draw and an eye can read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sixfold.pipeline import ScheduleError

__all__ = ["ACTIONS", "CSV", "LIMITS", "OWN", "PLAN", "Request"]

PLAN, OWN = "plan", "own"  # what the menu has beside the names of schedules: a search, and the reader's program
LIMITS: dict[str, tuple[float, float]] = {
    "ranks": (1, 16),
    "microbatches": (1, 64),
    "chunks": (1, 4),
    "waves": (1, 2),
    "steps": (1, 4),
    "forward": (0.1, 4),
    "backward_input": (0.1, 4),
    "backward_weight": (0, 4),
    "hop": (0, 2),
    "memory_cap": (0.25, 32),
}
ACTIONS = 8000  # of a program that is drawn
CSV = 200_000  # characters of a pasted program
_WHOLE = ("ranks", "microbatches", "chunks", "waves", "steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The page's controls.

    Attributes:
        schedule: a schedule's name, ``plan`` for a search, or ``own`` for the program in ``program``.
        chunks, waves, steps: used by schedules that take them; the search takes ``chunks``.
        forward, backward_input, backward_weight: time of F, I and W on a rank's whole share of the model.
        hop: time of a message.
        memory_cap: most activations of a rank, in microbatches; None for no cap.
        program: PyTorch's CSV, or this package's text.
    """

    schedule: str = "zb_v"
    ranks: int = 4
    microbatches: int = 8
    chunks: int = 2
    waves: int = 1
    steps: int = 2
    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    hop: float = 0.0
    memory_cap: float | None = None
    program: str = ""

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is None and name == "memory_cap":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ScheduleError(f"{name} is {value!r}; it is a number")
            if name in _WHOLE and value != int(value):
                raise ScheduleError(f"{name} is {value:g}; it is a whole number")
            if not least <= value <= most:
                raise ScheduleError(f"{name} is {value:g}; this page takes {least:g}..{most:g}")
            if name in _WHOLE:
                object.__setattr__(self, name, int(value))
        if not isinstance(self.schedule, str) or not isinstance(self.program, str):
            raise ScheduleError("schedule and program are text")
        if len(self.program) > CSV:
            rule = f"this page takes {CSV}; `sixfold-pipeline verify FILE` takes any"
            raise ScheduleError(f"the program has {len(self.program)} characters; {rule}")

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Request:
        """The request of a page's values; names that are not of this request are refused."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise ScheduleError(f"there is no setting {name!r}; there are {', '.join(sorted(known))}")
        return cls(**values)
