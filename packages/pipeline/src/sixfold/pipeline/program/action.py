"""One action of a schedule, and its text form.

    "3F0" <--> Action (this file) --> program.py --> everything else

Torch-free. The text form is torch's (``distributed/pipelining/schedules.py``,
``_Action``), with two kinds of our own: RECOMPUTE and STEP. Where torch's
parser takes what merely starts like an action (``1F0x``, a bare ``1F``), the
whole text must match here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sixfold.pipeline.errors import ScheduleError, whole

__all__ = ["BACKWARD_ENDS", "COMPUTE", "MESSAGES", "PER_STAGE", "WORK", "Action", "Kind"]


class Kind(StrEnum):
    """What an action does; the value is its spelling in text and CSV."""

    F = "F"  # forward of one microbatch on one stage
    B = "B"  # full backward
    I = "I"  # noqa: E741 - gradient of the stage's input; the field's name for it
    W = "W"  # gradients of the stage's weights that I deferred
    SEND_F = "SEND_F"  # carries the stage that sends
    RECV_F = "RECV_F"  # carries the stage that receives
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"  # gather the parameters of a sharded stage
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"  # reduce the stage's gradients over its replicas
    OVERLAP_F_B = "OVERLAP_F_B"  # a forward and a backward that run together
    RECOMPUTE = "RECOMPUTE"  # ours: run the forward again before the backward
    STEP = "STEP"  # ours: optimizer step of one stage; its number is the step

    __hash__ = str.__hash__  # Enum's own is a Python function, which every look-up by kind would call


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})
WORK = COMPUTE | {Kind.RECOMPUTE, Kind.STEP}  # what keeps a rank busy; the other kinds only wait or run beside it
MESSAGES = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
PER_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})  # kinds without a number
BACKWARD_ENDS = frozenset({Kind.B, Kind.W})  # after one of these a microbatch is done on its stage

# Longer spellings first, so that "F" does not end the match of a kind that starts with it.
_KINDS = "|".join(sorted((kind.value for kind in Kind if kind is not Kind.OVERLAP_F_B), key=len, reverse=True))
_NUMBER = "[0-9]{1,15}"
_SIMPLE = re.compile(rf"({_NUMBER})({_KINDS})({_NUMBER})?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """``<stage><KIND><microbatch>``, for example ``3F0``, or ``(0F4;7B0)OVERLAP_F_B``.

    ``microbatch`` is None for UNSHARD, RESHARD and REDUCE_GRAD and is the optimizer
    step for STEP. ``parts`` are the actions of an overlap, in execution order; its
    ``stage`` is then that of the first part. Numpy's integers and the spelling of a
    kind are taken, and held as ints and a Kind.

    Raises:
        ScheduleError: ``stage`` or ``microbatch`` is no whole number, or there is no such kind.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    # Programs have hundreds of thousands of actions: the __init__ that dataclass writes for a frozen class takes twice
    # as long, since it looks up each field by name.
    def __init__(self, stage: int, kind: Kind, microbatch: int | None = None, parts: tuple[Action, ...] = ()) -> None:
        if type(stage) is not int:
            stage = whole("stage", stage)
        if type(microbatch) is not int and microbatch is not None:
            microbatch = whole("microbatch", microbatch)
        if type(kind) is not Kind:
            kind = _kind(kind)
        _set_stage(self, stage)
        _set_kind(self, kind)
        _set_microbatch(self, microbatch)
        _set_parts(self, parts)

    @classmethod
    def overlap(cls, *parts: Action) -> Action:
        """The OVERLAP_F_B of ``parts``: two compute actions or more, in execution order."""
        if len(parts) < 2 or any(part.parts or part.kind not in COMPUTE for part in parts):
            raise ScheduleError(f"OVERLAP_F_B of {list(map(str, parts))}: its parts are two or more of F, B, I and W")
        return cls(parts[0].stage, Kind.OVERLAP_F_B, None, parts)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``text`` spells.

        Raises:
            ScheduleError: ``text`` is not one whole action, or its kind needs a microbatch and has none.
        """
        if overlap := _OVERLAP.fullmatch(text):
            return cls.overlap(*(cls.parse(part.strip()) for part in overlap[1].split(";")))
        if (found := _SIMPLE.fullmatch(text)) is None:
            slices = " (a dot after the microbatch is reserved for sequence slices)" if "." in text else ""
            raise ScheduleError(f"{text!r} is not an action; write <stage><KIND><microbatch>, such as 3F0{slices}")
        kind = Kind(found[2])
        if (kind in PER_STAGE) != (found[3] is None):
            rule = "takes no microbatch" if kind in PER_STAGE else "needs a microbatch"
            raise ScheduleError(f"{text!r}: {kind} {rule}")
        return cls(int(found[1]), kind, None if found[3] is None else int(found[3]))

    def each(self) -> Iterator[Action]:
        """The actions that this one runs: its parts, or itself."""
        return iter(self.parts or (self,))

    @property
    def peer_stage(self) -> int:
        """Stage at the other end of a message: of 1SEND_F3 it is 2, of 1RECV_F3 it is 0."""
        return self.stage + (1 if self.kind in (Kind.SEND_F, Kind.RECV_B) else -1)


def _kind(value: str) -> Kind:
    try:
        return Kind(value)
    except ValueError:
        raise ScheduleError(f"kind is {value!r}; it is one of {', '.join(Kind)}") from None


_set_stage, _set_kind, _set_microbatch, _set_parts = (
    getattr(Action, name).__set__ for name in ("stage", "kind", "microbatch", "parts")
)
