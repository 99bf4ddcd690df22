"""Processes of other ranks on this machine: which of them have ended, and which are stopped.

    /proc, one row of a control exchange --> LocalProcesses (this file) --> heartbeat.py, survivors.py

The kernel tells of a process what no store and no socket does: that it is no more, at once, and that it is stopped.
Ranks of other machines are watched by those beside them. Files are read only while a rank waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_process() -> list[int]:
    """Machine and PID namespace, PID, and when it started: a PID is given again. All 0 where there is no /proc."""
    try:
        where = _BOOT.read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return [0, 0, 0]
    pid = os.getpid()
    return [int.from_bytes(hashlib.sha256(where.encode()).digest()[:7], "little"), pid, _look(pid)[1]]


def _look(pid: int) -> tuple[str, int]:
    """State of a process as a letter, and when it started; ("", -1): there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return fields[0], int(fields[19])
    return "", -1


class LocalProcesses:
    """The other ranks on this machine.

    Args:
        rows: of all ranks what ``this_process`` gave, by position.
        rank: this one.
    """

    def __init__(self, rows: Sequence[Sequence[int]] = (), rank: int = 0) -> None:
        machine, mine = (rows[rank][0], rows[rank][1]) if rows else (0, 0)
        beside = {at: (pid, began) for at, (where, pid, began) in enumerate(rows) if machine == where != 0}
        # Watched only if seen alive once: /proc may hide the processes of others.
        self._pids = {at: one for at, one in beside.items() if one[0] != mine and _look(one[0])[1] == one[1]}

    def ended(self) -> tuple[int, ...]:
        """Ranks whose process is no more, or waits only for its parent to hear so."""
        looks = {rank: (_look(pid), began) for rank, (pid, began) in self._pids.items()}
        return tuple(rank for rank, ((state, now), began) in looks.items() if state in ("", "Z", "X") or now != began)

    def stopped(self) -> tuple[int, ...]:
        """Ranks whose process is stopped by a signal."""
        return tuple(rank for rank, (pid, began) in self._pids.items() if _look(pid) == ("T", began))
