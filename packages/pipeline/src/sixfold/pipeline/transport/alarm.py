"""How a rank that fails wakes those of its host that wait for somebody else.

    close(), a new program --> a datagram to every rank (this file) --> a wait that looks up now and then

Neighbours see the end of their edges at once. Further ranks would sit out their own deadlines where the rank between
is stopped. Looking costs nothing until a wait has lasted a quarter of a second.
"""

from __future__ import annotations

import os
import socket
from struct import Struct

from sixfold.pipeline.transport.call_count import CallCount

__all__ = ["LOOK_S", "Alarm"]

LOOK_S = 0.25
_CREDENTIALS = Struct("3i")  # process, user, group
_NEW = Struct("<iQ")  # rank, number of its call


class Alarm:
    """One rank's.

    Args:
        name: equal on the ranks of this runner and unlike any other's.
        calls: this rank's, which hear of those of others.
    """

    def __init__(self, name: str, rank: int, ranks: int, calls: CallCount | None = None) -> None:
        self._others = [f"\0{name}-{other}" for other in range(ranks) if other != rank]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{name}-{rank}")
        self._heard = False
        self._rank = rank
        self.calls = CallCount() if calls is None else calls

    def ring(self) -> None:
        """Tell all ranks of this host; never waits, never raises."""
        self._tell(b"!")

    def bring(self) -> None:
        """Tell all ranks of this host that this call is about something new (call_count.py)."""
        self._tell(_NEW.pack(self._rank, self.calls.made))

    def _tell(self, what: bytes) -> None:
        for other in self._others:
            try:
                self._socket.sendto(what, other)
            except OSError:
                pass  # on another host, gone, or deaf

    def heard(self) -> bool:
        """Whether a rank has rung; ``calls`` hears what else was told."""
        while not self._heard:
            try:
                told, credentials, _, _ = self._socket.recvmsg(_NEW.size, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                break
            if not any(
                kind == socket.SCM_CREDENTIALS and _CREDENTIALS.unpack(data)[1] == os.getuid()
                for _, kind, data in credentials
            ):
                continue
            if len(told) == _NEW.size:
                self.calls.hear(*_NEW.unpack(told))
            else:
                self._heard = True
        return self._heard
