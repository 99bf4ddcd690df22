"""The curves of a run as events of TensorBoard.

curves.py --> TensorBoardSink (this file) --> RUN/tensorboard
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError

EVENTS = "events.out.tfevents."


def check_tensorboard(wanted: bool) -> None:
    """Refuse ``log.tensorboard`` where TensorBoard is not installed.

    Raises:
        ConfigError: with what to install.
    """
    if wanted and find_spec("tensorboard") is None:
        raise ConfigError(
            "log.tensorboard is true and tensorboard is not installed: pip install 'sixfold-gpt[tensorboard]', "
            "or set log.tensorboard = false"
        )


def _second_of(path: Path) -> int:
    """The Unix second in the name of an event file; 0 for another file."""
    second = path.name.removeprefix(EVENTS).partition(".")[0]
    return int(second) if second.isdecimal() else 0


class TensorBoardSink:
    """Writes events into ``folder``. TensorBoard hides steps that are taken back by a new file with ``purge_step``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._hides: int | None = None  # the first step that the newest file hides, while it is empty

    def take_back(self, step: int) -> None:
        """See CurveSink."""
        if self._hides is not None and self._hides <= step + 1:
            return
        if self._writer is not None:
            self._writer.close()
        self._open(step + 1)

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """See CurveSink."""
        if self._writer is None:
            self._open(None)
        self._hides = None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)

    def flush(self) -> None:
        """See CurveSink."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, failed: bool) -> None:
        """See CurveSink."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, hides: int | None) -> None:
        """Begin a file. TensorBoard reads files in the order of the seconds in their names, so no two have one."""
        from torch.utils.tensorboard import SummaryWriter

        while (newest := max(map(_second_of, self._folder.glob(f"{EVENTS}*")), default=0)) == int(time.time()):
            time.sleep(max(0.0, newest + 1 - time.time()))
        self._writer, self._hides = SummaryWriter(str(self._folder), purge_step=hides), hides
