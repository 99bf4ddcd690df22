"""The board of a background save to a store: as board.py, of objects in a folder at the checkpoint.

    worker's share --> record -->  StoreBoard (this file)  --> outcome --> every rank

The folder has the number of the save; what a killed one leaves goes with the next save, or with the step.
No lock, no rename, no listing: each name is known. A sign of life is an object that its trainer writes anew every few
seconds; a rank is dead when it has stood still for a quarter of ``timeout_s``, since a store that asks to slow down
may keep a living one from writing for a while. The verdict, and what is put first,
are objects that are created only if they are not there, in one act where the store has that (S3, Google Cloud
Storage); on others by looking first, and there the order of the waits has to do, as in [Note: who gives up when].

[Note: not there yet] The call sends one request for the board, by the first rank while tensors are copied. Signs come
with the first beat, after it: one that was never seen is not there yet. A rank that leaves says so in its sign, which
goes with the board: a board that is looked at anew cannot tell a sign that is gone from one that never was.
"""

from __future__ import annotations

import errno
import hmac
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sixfold.dist_ckpt.background.bell import Bell
from sixfold.dist_ckpt.background.board import BEATS_BYTES, Life, State, Stillness
from sixfold.dist_ckpt.errors import CheckpointError, StorageError
from sixfold.dist_ckpt.ranks.exchange import Outcome
from sixfold.dist_ckpt.stores.by_pointer import ByPointer
from sixfold.dist_ckpt.stores.store import Save

_MARK = "board"  # there as long as the board is
_LEFT = b"left"  # the last sign of a rank that has heard the outcome


class StoreBoard:
    """A ``Board`` of objects.

    Args:
        store: of the checkpoint. key: signs what is put.
        timeout_s: of the save; for a quarter of it a store that does not answer is asked again, and a sign may stand
            still. beat_s: so long for one sign of life.
    """

    def __init__(self, store: ByPointer, save: Save, key: bytes, *, timeout_s: float, beat_s: float = 1.0) -> None:
        self._stale_s = timeout_s / 4
        self._objects, self._signs = (store.patient(limit_s).board(save) for limit_s in (timeout_s / 4, beat_s))
        self._key, self._seen = key, set[str]()
        self._still: dict[int, Stillness] = {}

    def make(self) -> None:
        """The first rank's, before any other asks."""
        self._objects.replace(_MARK, self._key[:0])

    def is_there(self) -> bool:
        try:
            self._objects.read(_MARK)
        except FileNotFoundError:
            return False
        except StorageError:
            return True
        return True

    def put(self, name: str, outcome: Outcome) -> None:
        data = outcome.encode()
        with _as_of_the_system():
            self._objects.create_new(name, hmac.digest(self._key, data, "sha256") + data)

    def get(self, name: str) -> Outcome | None:
        try:
            data = self._objects.read(name)
        except (FileNotFoundError, StorageError):
            return None
        if not hmac.compare_digest(hmac.digest(self._key, data[32:], "sha256"), data[:32]):
            raise CheckpointError(f"{name} was not written by this save; nothing of it was read")
        return Outcome.decode(data[32:])

    def has(self, name: str) -> bool:
        try:
            self._objects.read(name, 0, 1)
        except (FileNotFoundError, StorageError):
            return False
        return True

    def verdict(self, wanted: str) -> str:
        if not self.is_there():
            raise FileNotFoundError(_MARK)
        with _as_of_the_system():
            self._objects.create_new("verdict", wanted.encode())
            return self._objects.read("verdict").decode(errors="replace")

    def life(self, rank: int, with_moves: bool = True) -> Life:
        name = f"alive-{rank}"
        try:
            data = self._signs.read(name)
        except FileNotFoundError:
            return Life(State.LEFT if name in self._seen else State.UNSEEN)
        except StorageError:
            return Life(State.LIVES)
        self._seen.add(name)
        if data == _LEFT:
            return Life(State.LEFT)
        is_dead = self._still.setdefault(rank, Stillness()).of(data) > self._stale_s
        return Life(State.DEAD if is_dead else State.LIVES, data[BEATS_BYTES:])

    def sign(self, rank: int) -> StoreSign:
        return StoreSign(self._signs, rank)

    def leave(self, rank: int) -> None:
        with suppress(StorageError, OSError):
            self._objects.delete(f"rank-{rank}")

    def bell(self) -> Bell:
        return Bell(None)

    def remove(self) -> None:
        with suppress(StorageError, OSError):
            self._objects.delete(_MARK)
            for name in self._objects.list_files():
                self._objects.delete(name)


class StoreSign:
    """A ``Sign``: an object that is written anew."""

    def __init__(self, objects: ByPointer, rank: int) -> None:
        self._objects, self._name, self._beats = objects, f"alive-{rank}", 0

    def beat(self, moves: int) -> None:
        self._beats += 1
        with suppress(StorageError, OSError):
            self._objects.replace(self._name, f"{self._beats:>{BEATS_BYTES}}{moves:>20}".encode())

    def close(self) -> None:
        with suppress(StorageError, OSError):
            self._objects.replace(self._name, _LEFT)
            try:
                self._objects.read(_MARK)
            except FileNotFoundError:  # nobody else takes it away
                self._objects.delete(self._name)


@contextmanager
def _as_of_the_system() -> Iterator[None]:
    """A store that fails is told as a file system that does."""
    try:
        yield
    except StorageError as error:
        raise OSError(error.errno or errno.EIO, str(error)) from error
