"""What ranks of different domains send each other: copies while training goes on, missing parts in a load.

    worker: Peer.put (this file) --> Server of another domain's rank (this file) --> its DomainFolder
    restore: Peer.get (this file) <-- Server <-- its DomainFolder

A rank of each domain listens in its trainer, in threads that mostly wait in the kernel. So nobody but the two that talk
is needed, and no message meets the trainer's own collectives.

    token (32 bytes), then any number of requests: length, JSON [, the bytes of the files], and a reply: length, JSON

[Note: a peer that is gone] Each wait for a byte has a deadline. So a rank that was killed or stopped costs the sender
one deadline, or nothing if the system tells that the connection is closed.

[Note: late copies] A copy that was sent before its generation was given up may arrive behind that. It would stay for
ever. So a server takes no generation that is older than the newest one that it was told of.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from sixfold.dist_ckpt.errors import (
    BY_NAME,
    CheckpointError,
    CorruptError,
    LostPeerError,
    StorageError,
    UnsafeError,
    at,
    typed,
)
from sixfold.dist_ckpt.formats.integrity import crc32
from sixfold.dist_ckpt.memory_tier.domain_folder import PUT, DomainFolder, is_own_name
from sixfold.dist_ckpt.memory_tier.generations import Generation
from sixfold.dist_ckpt.storage.local import full_disk_told

TOKEN_BYTES = 32
_LENGTH, _MOST_MESSAGE_BYTES = struct.Struct("<Q"), 1 << 24
_PIECE_BYTES = 1 << 22
_BACKLOG, _PAUSE_S = 128, 0.1


class Address(NamedTuple):
    """Where a rank listens."""

    rank: int
    domain: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} of domain {self.domain} ({self.host}:{self.port})"


class File(NamedTuple):
    """A file that is sent: its name, size and CRC-32."""

    name: str
    nbytes: int
    crc: int


class Server:
    """Serves the files of a domain, and takes copies of others.

    Args:
        host: to listen at; "" is all addresses of this host. io_s: see [Note: a peer that is gone].
    """

    def __init__(self, folder: DomainFolder, host: str, io_s: float) -> None:
        self._folder, self._io_s, self._pid, self._is_closed = folder, io_s, os.getpid(), False
        self.token = b""  # nobody is served without one
        self.oldest: tuple[int, int] = (0, 0)  # attempt and step; see [Note: late copies]
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = typed(
            lambda: socket.create_server((host, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        )
        self.port: int = self._socket.getsockname()[1]
        self._thread = Thread(target=self._accept, name="sixfold-memory-tier", daemon=True)
        typed(self._thread.start)

    def close(self) -> None:
        """Take no more."""
        self._is_closed = True
        if self._pid == os.getpid():
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_PAUSE_S)  # no file handle is free, say
                continue
            with suppress(RuntimeError):  # no thread: the peer's deadline tells
                Thread(target=self._serve, args=(connection,), name="sixfold-memory-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError, ValueError):
            _tune(connection, self._io_s)
            given = _receive(connection, TOKEN_BYTES)
            if not self.token or not hmac.compare_digest(given, self.token):
                return
            while True:
                request = _receive_message(connection)
                take = self._put if request.get("op") == "put" else self._get
                take(connection, request)

    def _get(self, connection: socket.socket, request: dict[str, Any]) -> None:
        name, start, nbytes = str(request["file"]), int(request["at"]), int(request["nbytes"])
        try:
            path = self._folder.path(_generation(request)) / _checked(name)
            with path.open("rb") as file:
                if start < 0 or nbytes < 0 or os.fstat(file.fileno()).st_size < start + nbytes:
                    raise CorruptError(f"{path} has fewer than {start + nbytes} bytes")
                _send_message(connection, {})
                _send_file(connection, file, start, nbytes, lambda _: None)
        except FileNotFoundError:
            _send_message(connection, _told(StorageError(f"{name} is gone")))
        except CheckpointError as error:
            _send_message(connection, _told(error))

    def _put(self, connection: socket.socket, request: dict[str, Any]) -> None:
        left = [File(str(name), int(nbytes), int(crc)) for name, nbytes, crc in request["files"]]
        try:
            typed(lambda: self._take(connection, _generation(request), left))
        except CheckpointError as error:
            _send_message(connection, _told(error))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(_PIECE_BYTES):  # else the reply is lost with the connection
                pass
            raise EOFError from error
        _send_message(connection, {})

    def _take(self, connection: socket.socket, generation: Generation, files: Sequence[File]) -> None:
        """Files of a copy, the record last. A file appears when all of it is there and matches its CRC-32."""
        if generation[:2] < self.oldest:
            raise StorageError(f"{generation.name} is older than what is kept here")
        folder = self._folder.path(generation)
        with full_disk_told(self._folder.root, sum(file.nbytes for file in files)):
            folder.mkdir(mode=0o700, exist_ok=True)
            for file in files:
                begun = folder / f"{PUT}{secrets.token_hex(8)}"
                try:
                    crc = _receive_file(connection, begun, file.nbytes)
                    if crc != file.crc:
                        raise CorruptError(f"{file.name} arrived damaged: CRC-32 {crc:08x} for {file.crc:08x}")
                    begun.rename(folder / _checked(file.name))
                except BaseException:
                    begun.unlink(missing_ok=True)
                    raise


class Peer:
    """A connection to the server of another domain. As a context it is closed.

    Raises:
        LostPeerError: nobody listens there, or the peer gives nothing for ``io_s``; so all that it does.
    """

    def __init__(self, address: Address, token: bytes, io_s: float) -> None:
        self._address, self._io_s = address, io_s
        with self._lost():
            self._socket = socket.create_connection((address.host, address.port), io_s)
            _tune(self._socket, io_s)
            self._socket.sendall(token)

    def put(self, generation: Generation, folder: Path, files: Sequence[File], moved: Callable[[int], object]) -> None:
        """Have a copy of files there.

        Raises:
            CheckpointError: what the peer says of it, such as a StorageError of a full tmpfs.
        """
        with self._lost():
            _send_message(self._socket, {"op": "put", "generation": generation.name, "files": [*map(list, files)]})
            try:
                for name, nbytes, _ in files:
                    with (folder / name).open("rb") as file:
                        _send_file(self._socket, file, 0, nbytes, moved)
            except (BrokenPipeError, ConnectionResetError):
                _raise_told(self._reply(), self._address)
                raise
            _raise_told(self._reply(), self._address)

    def get(self, generation: Generation, name: str, start: int, nbytes: int) -> bytes:
        """Bytes of a file there."""
        with self._lost():
            request = {"op": "get", "generation": generation.name, "file": name, "at": start, "nbytes": nbytes}
            _send_message(self._socket, request)
            _raise_told(self._reply(), self._address)
            return _receive(self._socket, nbytes)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reply(self) -> dict[str, Any]:
        return _receive_message(self._socket)

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """What goes wrong with the connection inside is a LostPeerError that names the peer."""
        try:
            yield
        except (OSError, EOFError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise LostPeerError(f"{self._address} is dead, or gave nothing for {self._io_s:g} s ({reason})") from error


def _tune(connection: socket.socket, io_s: float) -> None:
    connection.settimeout(io_s)
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _generation(request: dict[str, Any]) -> Generation:
    found = Generation.of_name(str(request.get("generation")))
    if found is None:
        raise UnsafeError(f"{request.get('generation')!r} is the name of no generation")
    return found


def _checked(name: str) -> str:
    if not is_own_name(name):
        raise UnsafeError(f"{name!r} is no file of a generation")
    return name


def _told(error: CheckpointError) -> dict[str, Any]:
    return {"error": [type(error).__name__, str(error), getattr(error, "errno", None)]}


def _raise_told(reply: dict[str, Any], address: Address) -> None:
    """The error of a reply that is one."""
    if "error" in reply:
        kind, text, code = reply["error"]

        def raised() -> None:
            raise StorageError(text, code) if kind == "StorageError" else BY_NAME.get(kind, CheckpointError)(text)

        at(address, raised)


def _send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive_message(connection: socket.socket) -> dict[str, Any]:
    (nbytes,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if nbytes > _MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {nbytes} bytes")
    found = json.loads(_receive(connection, nbytes))
    if not isinstance(found, dict):
        raise ValueError("a message that is no object")
    return found


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes. EOFError: the peer has closed the connection."""
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]
    return bytes(data)


def _send_file(connection: socket.socket, file: Any, start: int, nbytes: int, moved: Callable[[int], object]) -> None:
    """Bytes of a file, which the kernel copies, a piece at a time."""
    while nbytes:
        sent = connection.sendfile(file, start, min(nbytes, _PIECE_BYTES))
        if not sent:
            raise EOFError("the file is shorter than it was")
        start, nbytes = start + sent, nbytes - sent
        moved(0)


def _receive_file(connection: socket.socket, path: Path, nbytes: int) -> int:
    """Bytes into a new file; their CRC-32."""
    crc, memory = 0, memoryview(bytearray(min(nbytes, _PIECE_BYTES) or 1))
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while nbytes:
            count = connection.recv_into(memory[: min(nbytes, len(memory))])
            if not count:
                raise EOFError("the connection was closed")
            piece, nbytes = memory[:count], nbytes - count
            crc = crc32(piece, crc)
            while piece:
                piece = piece[os.write(handle, piece) :]
    finally:
        os.close(handle)
    return crc
