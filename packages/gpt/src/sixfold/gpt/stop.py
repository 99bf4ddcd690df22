"""SIGTERM, as a flag that the loop asks for between steps.

signal --> StopFlag (this file) --> step.py carries it to all ranks --> save, end
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any


class StopFlag:
    """SIGTERM asks for a stop after the step at hand; a second one ends the process at once.

    Armed after the first step: before it there is nothing to save, and the default action is right. Whoever signals a
    whole process group reaches a rank twice, directly and through its launcher: signals close together are one.
    """

    SAME_S = 1.0

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0
        self._armed = False
        self._old: Any = None

    def arm(self) -> None:
        """Take over SIGTERM, once. Python handles signals in the main thread only; elsewhere this does nothing."""
        if not self._armed and threading.current_thread() is threading.main_thread():
            self._armed, self._old = True, signal.signal(signal.SIGTERM, self._on_signal)

    def disarm(self) -> None:
        """Give SIGTERM back."""
        if self._armed:
            # None: the old handler was not Python's and cannot be put back from here.
            signal.signal(signal.SIGTERM, self._old if self._old is not None else signal.SIG_DFL)
            self._armed = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._since = True, now
        elif now - self._since > self.SAME_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
