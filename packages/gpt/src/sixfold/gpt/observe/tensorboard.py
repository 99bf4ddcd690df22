"""TensorBoard of a run, on request.

curves.py --> TensorBoardSink (this file) --> RUN/tensorboard
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError


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


class TensorBoardSink:
    """Writes events into ``folder``. What is taken back is hidden, as TensorBoard does it: by a new file."""

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

    def add(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """See CurveSink."""
        if self._writer is None:
            self._open(None)
        self._hides = None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def flush(self) -> None:
        """See CurveSink."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, failed: bool) -> None:
        """See CurveSink."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, hides: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer, self._hides = SummaryWriter(str(self._folder), purge_step=hides), hides
