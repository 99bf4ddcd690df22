"""Ctrl-C in a time in which nothing is half-made: the process ends, without a word.

    command.py, commands/cli.py --> end_at_once (this file)

Nothing is imported here that takes a moment.
"""

from __future__ import annotations

import os
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as a shell would say


def end_at_once(signum: int, frame: FrameType | None) -> NoReturn:
    """A signal handler, for a time in which nothing is half-made."""
    os._exit(128 + signum)
