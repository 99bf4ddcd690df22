"""Words between two nodes: whole, in order, and of this run; a peer that stops or lies costs nobody else anything.

    nodes.py --> Link.send --> bytes, as many as there is room for --> Link.receive (this file) --> words

A word is pickled. So nothing is unpickled before its code (HMAC-SHA256) is known to be right: the key is that of
terms.py, and each side adds a number of its own, so that a word of another connection, or one said twice, is wrong too.

No call here waits. Half a word stays in the buffer until the rest is there. What cannot be sent yet is sent later.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import pickle
import secrets
import socket
import struct
import time
from typing import Any

HELLO = b"sixfold1"
NONCE_BYTES, CODE_BYTES = 16, 32
MOST_BYTES = 1 << 24  # of a word: failures have tracebacks
_HEAD = struct.Struct("!I")


class Link:
    """One end of a connection.

    Attributes:
        why: it has ended, and how; empty while it lives.
        heard_at: when its peer was heard last, on ``time.monotonic``.
    """

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.why, self.heard_at = "", time.monotonic()
        self._socket, self._key = connection, key
        self._mine, self._theirs = secrets.token_bytes(NONCE_BYTES), b""
        self._out, self._in = bytearray(HELLO + self._mine), bytearray()
        self._unsent: list[bytes] = []  # words, until the peer's number is known
        self._sent = self._received = 0
        self._flush()

    def fileno(self) -> int:
        """For ``multiprocessing.connection.wait``."""
        return self._socket.fileno()

    def send(self, word: Any) -> None:
        """Give the peer a word, now or later; nothing happens if the connection has ended."""
        if self.why:
            return
        self._unsent.append(pickle.dumps(word))
        self._flush()

    def receive(self) -> list[Any]:
        """The words that are whole by now."""
        if self.why:
            return []
        self._flush()
        try:
            while data := self._socket.recv(1 << 16):
                self._in += data
                self.heard_at = time.monotonic()
            self._end("it has ended the connection")
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(f"the connection has ended ({error.strerror or error})")
        return self._words()

    def close(self) -> None:
        """Both sides see the end; what was given to ``send`` and fits goes first."""
        self._flush()
        self._end("the connection was closed")

    def _words(self) -> list[Any]:
        words: list[Any] = []
        if not self._theirs:
            if len(self._in) < len(HELLO) + NONCE_BYTES:
                return words
            if self._in[: len(HELLO)] != HELLO:
                self._end("it speaks of something else")
                return words
            self._theirs = bytes(self._in[len(HELLO) : len(HELLO) + NONCE_BYTES])
            del self._in[: len(HELLO) + NONCE_BYTES]
            self._flush()
        while len(self._in) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._in)
            if size > MOST_BYTES:
                self._end(f"it sends a word of {size} bytes")
                break
            if len(self._in) < _HEAD.size + CODE_BYTES + size:
                break
            code = bytes(self._in[_HEAD.size : _HEAD.size + CODE_BYTES])
            body = bytes(self._in[_HEAD.size + CODE_BYTES : _HEAD.size + CODE_BYTES + size])
            if not hmac.compare_digest(code, self._code(self._theirs, self._mine, self._received, body)):
                self._end("it does not know the key of this run")
                break
            del self._in[: _HEAD.size + CODE_BYTES + size]
            self._received += 1
            words.append(pickle.loads(body))
        return words

    def _flush(self) -> None:
        if self.why:
            return
        if self._theirs:
            for body in self._unsent:
                self._out += _HEAD.pack(len(body)) + self._code(self._mine, self._theirs, self._sent, body) + body
                self._sent += 1
            self._unsent.clear()
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(f"the connection has ended ({error.strerror or error})")

    def _code(self, sender: bytes, receiver: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, sender + receiver + number.to_bytes(8) + body, hashlib.sha256)

    def _end(self, why: str) -> None:
        if not self.why:
            self.why = why
            self._socket.close()
