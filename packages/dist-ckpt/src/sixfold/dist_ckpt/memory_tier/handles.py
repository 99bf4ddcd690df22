"""What callers of a tier hold: a snapshot in flight, and what was restored.

MemoryTier.save --> Snapshot (this file);  MemoryTier.restore --> Restored (this file)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sixfold.dist_ckpt.background.handle import AsyncSave
from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError
from sixfold.dist_ckpt.memory_tier.peers import Address


class Snapshot:
    """Handle of a snapshot in flight.

    Attributes:
        step: as given. blocked_s: how long ``save`` took, seconds, the wait for the snapshot before it included.
    """

    def __init__(self, step: int, flight: AsyncSave, receivers: Sequence[Address], blocked_s: float) -> None:
        self.step, self.blocked_s = step, blocked_s
        self._flight, self._receivers = flight, receivers

    def done(self) -> bool:
        """Whether this rank's part has ended, well or not. Never blocks, no collective."""
        return self._flight.done()

    def fence(self) -> None:
        """As of ``AsyncSave``: for a snapshot with ``lazy=True``, before its tensors change."""
        self._flight.fence()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when this rank's part is in memory, and its copies are sent or given up. See ``unreplicated``.

        What became of other ranks' parts, ``MemoryTier.wait`` tells.

        Raises:
            LostPeerError: not ended within ``timeout_s`` seconds. Or the worker died, or stood still too long.
            CheckpointError: what went wrong on this rank, such as a StorageError of a full tmpfs.
        """
        self._flight.wait(timeout_s)

    @property
    def unreplicated(self) -> CheckpointError | None:
        """Why not all copies of this rank's part are in other domains; None if they are, or it has not ended."""
        if not self.done() or self._flight._error is not None:
            return None
        if self._flight._value is None:
            sent = "the worker of this rank ended before it had told that its copies were sent"
            return LostPeerError(sent) if self._receivers else None
        failed: list[CheckpointError] = self._flight._value[1]
        return failed[0] if failed else None

    def __repr__(self) -> str:
        return f"Snapshot(step={self.step}, {'done' if self.done() else 'in flight'})"


class Restored(NamedTuple):
    """What ``restore`` has loaded.

    Attributes:
        step: of the snapshot. state: what ``load`` returned; tensors are the caller's own.
        place: "memory", or the checkpoint that was loaded.
        sources: by domain that loaded, and by rank that had saved: the domain whose copy was read; {} for a checkpoint.
        skipped: what was newer and not used, and why.
    """

    step: int
    state: Any
    place: str
    sources: dict[str, dict[int, str]]
    skipped: tuple[str, ...]
