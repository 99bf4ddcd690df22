"""When each action of a step began and ended.

    calls --> timed calls, clocks (this file) --> events of simulate.measured

One pair of numbers per action, written into lists that are there before the step. On a CUDA device they are events
of its current stream, read when the step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import torch

from sixfold.pipeline.program.action import Action
from sixfold.pipeline.simulation.simulate import Event

__all__ = ["ActionTimer"]

Run = Callable[[], object]


class ActionTimer:
    """Takes the times of calls."""

    def __init__(self) -> None:
        self._on = True
        self._whose: list[tuple[int, Action]] = []
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._on_device: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._bases: dict[torch.device, torch.cuda.Event] = {}
        self._devices: dict[int, torch.device] = {}

    def timed(self, run: Run, rank: int, action: Action, device: torch.device | None) -> Run:
        """``run``, whose begin and end are those of ``action``; on ``device`` where that is a CUDA one."""
        at = len(self._whose)
        self._whose.append((rank, action))
        begins, ends = self._begins, self._ends
        begins.append(0)
        ends.append(0)
        if device is None or device.type != "cuda":

            def on_host() -> None:
                if not self._on:
                    run()
                    return
                begins[at] = perf_counter_ns()
                run()
                ends[at] = perf_counter_ns()

            return on_host
        begin, end = _event(), _event()
        self._on_device[at] = begin, end
        self._devices[at] = device
        self._bases.setdefault(device, _event())

        def on_device() -> None:
            if not self._on:
                run()
                return
            begin.record(torch.cuda.current_stream(device))
            run()
            end.record(torch.cuda.current_stream(device))

        return on_device

    def begin(self, on: bool = True) -> None:
        """A new step; without ``on`` no time of it is taken, and ``events`` has none and waits for nothing."""
        self._on = on
        for device, base in self._bases.items() if on else ():
            base.record(torch.cuda.current_stream(device))

    def events(self) -> tuple[Event, ...]:
        """What the step did, in seconds of ``perf_counter``; waits for the devices."""
        if not self._on:
            return ()
        for device, base in self._bases.items():
            last = _event()
            last.record(torch.cuda.current_stream(device))
            last.synchronize()
            base_ns = perf_counter_ns() - base.elapsed_time(last) * 1e6
            for at, (begin, end) in self._on_device.items():
                if self._devices[at] == device:
                    self._begins[at] = round(base_ns + base.elapsed_time(begin) * 1e6)
                    self._ends[at] = round(base_ns + base.elapsed_time(end) * 1e6)
        times = zip(self._whose, self._begins, self._ends, strict=True)
        return tuple((rank, action, begin * 1e-9, end * 1e-9) for (rank, action), begin, end in times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
