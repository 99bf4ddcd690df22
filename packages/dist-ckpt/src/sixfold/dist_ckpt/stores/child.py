"""A part of a store: what lies under one name of a run's store, as a store of its own.

store of a run --> ChildStore of a step (this file) --> one checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.stores.store import ByPointer
from sixfold.dist_ckpt.stores.stream import Sink


class ChildStore(ByPointer):
    """The files of ``parent`` whose names begin with ``folder`` and a slash.

    Args:
        parent: a store that derives from ``ByPointer``.
    """

    def __init__(self, parent: ByPointer, folder: str) -> None:
        self._parent, self._folder = parent, folder
        self.is_shared, self.streams = parent.is_shared, parent.streams

    @property
    def name(self) -> str:
        return f"{self._parent.name}/{self._folder}"

    def list_files(self) -> dict[str, int]:
        start = f"{self._folder}/"
        files = self._parent.list_files()
        return {name.removeprefix(start): size for name, size in files.items() if name.startswith(start)}

    def size(self, name: str) -> int | None:
        return self._parent.size(f"{self._folder}/{name}")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._parent.read(f"{self._folder}/{name}", start, stop)

    def read_ranges(self, ranges: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, bytes]]:
        start = f"{self._folder}/"
        for part, data in self._parent.read_ranges([part._replace(file=start + part.file) for part in ranges]):
            yield part._replace(file=part.file.removeprefix(start)), data

    def create(self, name: str, nbytes: int) -> Sink:
        return self._parent.create(f"{self._folder}/{name}", nbytes)

    def delete(self, name: str) -> None:
        self._parent.delete(f"{self._folder}/{name}")
