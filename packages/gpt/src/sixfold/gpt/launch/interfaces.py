"""Which network interface has an address of this machine.

host of --nodes --> interface_of (this file) --> GLOO_SOCKET_IFNAME, which ranks read
"""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_of(host: str) -> str:
    """The name of the interface with the IPv4 address of ``host``; empty if there is none, and then torch chooses."""
    try:
        wanted = {socket.gethostbyname(host)}
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asks.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(found[20:24]) in wanted:
                return name
    return ""
