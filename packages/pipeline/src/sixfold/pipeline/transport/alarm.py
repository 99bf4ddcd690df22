"""How a rank that fails wakes those of its host that wait for somebody else.

    close() --> a datagram to every rank (this file) --> a wait that looks up now and then

Neighbours see the end of their edges at once. Further ranks would sit out their own deadlines where the rank between
is stopped. Looking costs nothing until a wait has lasted a quarter of a second.
"""

from __future__ import annotations

import os
import socket
from struct import Struct

__all__ = ["LOOK_S", "Alarm"]

LOOK_S = 0.25
_CREDENTIALS = Struct("3i")  # process, user, group


class Alarm:
    """One rank's.

    Args:
        name: equal on the ranks of this runner and unlike any other's.
    """

    def __init__(self, name: str, rank: int, ranks: int) -> None:
        self._others = [f"\0{name}-{other}" for other in range(ranks) if other != rank]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{name}-{rank}")
        self._heard = False

    def ring(self) -> None:
        """Tell all ranks of this host; never waits, never raises."""
        for other in self._others:
            try:
                self._socket.sendto(b"!", other)
            except OSError:
                pass  # on another host, gone, or deaf

    def heard(self) -> bool:
        """Whether a rank has rung."""
        while not self._heard:
            try:
                _, credentials, _, _ = self._socket.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                break
            self._heard = any(
                kind == socket.SCM_CREDENTIALS and _CREDENTIALS.unpack(data)[1] == os.getuid()
                for _, kind, data in credentials
            )
        return self._heard
