"""Whose turn it is in a worker: that of its commit, or of the thread that takes all away when the trainer has died.

    control.commit --> commit (this file) <-- take <-- _Parent.listen

Both at once could lose two checkpoints: the commit removes the older one, the other thread the newer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_COMMIT_S = 8.0  # less than the trainer's last word may take


class Turn:
    """Who begins first goes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def commit(self) -> Iterator[bool]:
        """The commit's turn; False if the trainer has died, and no commit may begin any more."""
        may_begin = self._lock.acquire(blocking=False)
        try:
            yield may_begin
        finally:
            if may_begin:
                self._lock.release()

    def take(self) -> bool:
        """The last turn of this process; False if a commit does not end in time: a kill leaves it whole or unseen."""
        return self._lock.acquire(timeout=_COMMIT_S)
