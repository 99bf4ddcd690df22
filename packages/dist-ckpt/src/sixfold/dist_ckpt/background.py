"""Background saves: the handle is final, the worker is not here yet.

state dict --> async_save (this file) --> AsyncSave
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt.saving import save


@dataclass(frozen=True, slots=True)
class AsyncSave:
    """Handle of a save that ``async_save`` started.

    In 0.1.0 the save is complete when this handle exists: ``done()`` is always True, ``wait()``
    returns at once, and ``blocked_s`` is the time of the whole save. Code written against it keeps
    working when a worker process does the writing, which comes with a later version.

    Attributes:
        checkpoint_dir: the folder, committed.
        blocked_s: how long the caller was blocked, seconds.
        worker_pid: process that writes for this rank; None, since there is none yet.
    """

    checkpoint_dir: Path
    blocked_s: float
    worker_pid: int | None = None

    def done(self) -> bool:
        """Whether the checkpoint is committed. Never blocks."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is committed: at once in 0.1.0. May be called again."""


def async_save(sharded_state_dict: Any, checkpoint_dir: str | Path, *args: Any, **options: Any) -> AsyncSave:
    """``save`` with the same arguments; returns a handle.

    In 0.1.0 it saves before it returns, and errors are raised here, not by ``wait``. It says so once
    per process. The values are those at the call, as they will be later.
    """
    _say_once()
    start = time.perf_counter()
    save(sharded_state_dict, checkpoint_dir, *args, **options)
    return AsyncSave(Path(checkpoint_dir), time.perf_counter() - start)


@cache
def _say_once() -> None:
    warnings.warn("async_save saves before it returns in sixfold-dist-ckpt 0.1.0", stacklevel=3)
