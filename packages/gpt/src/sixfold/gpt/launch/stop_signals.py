"""SIGTERM, SIGUSR1, SIGUSR2, Ctrl-C and a hang-up, as a flag that the loop asks for between steps.

signal --> StopFlag (this file) --> step.py carries it to all ranks --> save, end

[Note: what a signal does] The first asks for a stop: the step at hand is finished and saved. Signals within ``SAME_S``
of each other are one: whoever signals a whole process group reaches a rank twice, and a double Ctrl-C is one wish. A
later one ends the process at once, with a status that does not say "saved". SIGUSR1 and SIGUSR2 are what a cluster
sends ahead of its time limit (`sbatch --signal=USR1@300`). Before the first step there is nothing to save: the command
ends at once and says so (cli.py), a program that calls train() has Python's own action. A signal that comes during the
first step is kept until it is done.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from sixfold.gpt.launch.interrupt import end_at_once

SAME_S = 1.0
STOPPED = 143  # 128 + SIGTERM, as a shell would say: asked to stop, and every step that was done is saved
ENDED = 137  # 128 + SIGKILL: ended at once by a second signal, without a save
# What each signal does where nobody has said otherwise. A handler of the caller's own, or nohup's SIG_IGN, stays.
_DEFAULTS = {
    signal.SIGTERM: (signal.SIG_DFL,),
    signal.SIGHUP: (signal.SIG_DFL,),
    signal.SIGUSR1: (signal.SIG_DFL,),
    signal.SIGUSR2: (signal.SIG_DFL,),
    signal.SIGINT: (signal.SIG_DFL, signal.default_int_handler),
}
ASK_TO_STOP = frozenset(_DEFAULTS)
AT_ONCE = "sixfold: a second signal ends the run at once; what was done since the newest checkpoint is not saved\n"


def is_free(number: signal.Signals) -> bool:
    """Whether nobody has said what ``number`` does: neither by Python nor, as faulthandler.register, below it."""
    handler = signal.getsignal(number)
    if handler != signal.SIG_DFL:
        return handler is end_unsaved or handler in _DEFAULTS[number]
    try:
        status = Path("/proc/self/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    except (OSError, StopIteration, ValueError):
        return True
    return not caught >> (number - 1) & 1


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the step at hand was finished and saved."""


def end_unsaved(signum: int, frame: FrameType | None) -> NoReturn:
    """A signal handler of the command, for the time before the first step and after the last save."""
    text = f"sixfold: {signal.Signals(signum).name} while no step is at work; there is nothing to save\n"
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
    os._exit(STOPPED)


class Signals:
    """Counts what asks for a stop; signals within ``SAME_S`` of the one before are one."""

    def __init__(self) -> None:
        self.asked = 0
        self._last = -float("inf")

    def count(self) -> int:
        """One more signal has come; how many there were by now."""
        now = time.monotonic()
        if now - self._last > SAME_S:
            self.asked += 1
        self._last = now
        return self.asked


class StopFlag:
    """A signal asks for a stop after the step at hand; see [Note: what a signal does].

    Attributes:
        asked: this process was asked to stop.
        interrupted: by Ctrl-C, which whoever runs a script means to end it too.
    """

    def __init__(self) -> None:
        self.asked = False
        self.interrupted = False
        self._signals = Signals()
        self._old: dict[signal.Signals, Any] = {}

    def arm(self) -> None:
        """Take over the signals, once. Python handles them in the main thread only; elsewhere this does nothing."""
        if self._old or threading.current_thread() is not threading.main_thread():
            return
        for number in _DEFAULTS:
            if number == signal.SIGTERM or is_free(number):
                self._old[number] = signal.signal(number, self._on_signal)

    def disarm(self) -> None:
        """Give the signals back."""
        for number, old in self._old.items():
            # None: the old handler was not Python's and cannot be put back from here.
            signal.signal(number, old if old is not None else signal.SIG_DFL)
        self._old = {}

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True
        self.interrupted = self.interrupted or signum == signal.SIGINT
        if self._signals.count() > 1:
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, AT_ONCE.encode())
            os._exit(ENDED)


@contextmanager
def early_signals() -> Iterator[None]:
    """End with 143 on what asks for a stop, and with 130 on Ctrl-C, before the ranks, or the train loop, take it over.

    At once, not by an exception: C code that runs an import or a destructor may drop one (numpy's import does), and the
    run would go on. Nothing is half-made: a config is written and a checkpoint committed by one rename.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    old: dict[signal.Signals, Any] = {}
    for number in ASK_TO_STOP - {signal.SIGINT}:
        if number == signal.SIGTERM or is_free(number):
            old[number] = signal.signal(number, end_unsaved)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        old[signal.SIGINT] = signal.signal(signal.SIGINT, end_at_once)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
