"""The parts of an overlap on two streams of a device; a null object where work is done at once.

    OVERLAP_F_B, the calls of its parts --> fork, one part on each stream, join (this file) --> compile

[Note: the stream of a forward] Autograd runs a backward on the stream on which its forward ran, whichever is current.
So a forward that runs beside a backward takes the stream that the backward's own forward did not take. That is known
when the list is compiled. A backward that runs beside nothing is ordered by autograd, on either stream.

[Note: held until the join] Memory that is freed is given to the next tensor of the stream that it was made on, at once.
What a part takes from outside (inputs, gradients) may be of the other stream, so it is held until the two have met.
What a forward saves and its backward frees is of one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sixfold.pipeline.program.action import Action, Kind

if TYPE_CHECKING:
    from sixfold.pipeline.compiler.wiring import Call
    from sixfold.pipeline.stage.compute import StageRun

__all__ = ["SideStream", "make_side", "on_the_side", "side_by_side"]


class SideStream(Protocol):
    """A queue of device work beside the compute stream, which is the one that is current around a step."""

    def fork(self) -> object:
        """What is launched here from now on comes after all that the compute stream holds."""

    def run(self, call: Callable[[], object]) -> object:
        """``call``, whose work is launched here."""

    def join(self) -> object:
        """What the compute stream gets from now on comes after all that was launched here."""


class NullStream:
    """The host is the only queue: what is called is done when it returns."""

    def fork(self) -> None:
        """Nothing to wait for."""

    def run(self, call: Callable[[], object]) -> object:
        """``call``."""
        return call()

    def join(self) -> None:
        """Nothing to wait for."""


class CudaStream:
    """A CUDA stream; the two are ordered by events, and the host waits for none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fork(self) -> None:
        """See SideStream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def run(self, call: Callable[[], object]) -> object:
        """See SideStream."""
        with torch.cuda.stream(self._stream):
            return call()

    def join(self) -> None:
        """See SideStream."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def make_side(device: torch.device | None) -> SideStream:
    """A stream of ``device``, or the null object."""
    return CudaStream(device) if device is not None and device.type == "cuda" else NullStream()


def on_the_side(actions: Iterable[Action]) -> dict[Action, tuple[Action, ...]]:
    """Of each overlap of a forward with a backward the parts that run on the side stream.

    Others (two forwards, backwards of two microbatches) are not here: their parts run in order.
    [Note: the stream of a forward]

    Args:
        actions: a rank's list.
    """
    aside: set[tuple[int, int | None]] = set()  # whose graph is of the side stream
    found: dict[Action, tuple[Action, ...]] = {}
    for entry in actions:
        forwards = tuple(part for part in entry.each() if part.kind in (Kind.F, Kind.RECOMPUTE))
        backwards = tuple(part for part in entry.parts if part.kind is not Kind.F)
        of = {(part.stage, part.microbatch) for part in backwards}
        if len(forwards) == 1 and len(of) == 1:
            found[entry] = backwards if of <= aside else forwards
        for part in forwards:
            (aside.add if found.get(entry) == forwards else aside.discard)((part.stage, part.microbatch))
    return found


def side_by_side(
    entries: Sequence[Action],
    rows: list[list[Call]],
    runs: Mapping[int, StageRun],
    slots: int,
    side: SideStream,
    aside: Mapping[Action, tuple[Action, ...]],
) -> list[list[Call]]:
    """The calls of each entry, those of an overlap in ``aside`` on two streams.

    Both parts begin when the inputs of both are there (as the proof has it), and each sends its result from its own
    stream.

    Args:
        entries: a rank's list, in the order in which it is run.
        rows: the calls of each, sends of parts at their ends (``compile.handed_on``).
    """
    return [
        _forked(entry, row, aside[entry], runs, slots, side) if entry in aside else row
        for entry, row in zip(entries, rows, strict=True)
    ]


def _forked(
    entry: Action,
    row: list[Call],
    aside: tuple[Action, ...],
    runs: Mapping[int, StageRun],
    slots: int,
    side: SideStream,
) -> list[Call]:
    held: list[Any] = []  # [Note: held until the join]
    parts = [(runs[part.stage], (part.microbatch or 0) % slots) for part in entry.parts]
    there = {*aside, *(Action(a.stage, Kind.SEND_F if a.kind is Kind.F else Kind.SEND_B, a.microbatch) for a in aside)}

    def fork() -> None:
        held.extend(run.taken(k) for run, k in parts)
        side.fork()

    def join() -> None:
        side.join()
        held.clear()

    waits = [call for call in row if call.awaits is not None]
    others = [replace(call, side=call.action in there) for call in row if call.awaits is None]
    first, last = others[0], others[-1]
    begin = replace(first, run=fork, main=False, side=False)
    return [*waits, begin, *others, replace(last, run=join, main=False, side=False)]
