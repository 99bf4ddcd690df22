"""A store in the memory of this process: for tests, for pipelines within one process, and as an example of a store.

save(state, store) --> MemoryStore (this file) --> load(state, store)
"""

from __future__ import annotations

from typing import NoReturn

from sixfold.dist_ckpt.errors import StorageError
from sixfold.dist_ckpt.formats.integrity import crc32
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.frame_file import Sink


class MemoryStore(ByPointer):
    """One checkpoint as a dict of bytes. No other process sees it: saves and loads of it are by one rank alone.

    Attributes:
        files: content by name.
    """

    is_shared = False

    def __init__(self, name: str = "this store in memory") -> None:
        self._name = name
        self.files: dict[str, bytes] = {}

    @property
    def name(self) -> str:
        return self._name

    def list_files(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.files.items()}

    def marks(self) -> dict[str, object]:
        return {name: (len(data), crc32(data)) for name, data in self.files.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            return self.files[name][start:stop]
        except KeyError:
            raise FileNotFoundError(name) from None

    def create(self, name: str, nbytes: int) -> Sink:
        return _File(self.files, name)

    def delete(self, name: str) -> None:
        self.files.pop(name, None)

    def __reduce__(self) -> NoReturn:
        raise StorageError(f"{self._name} is memory of one process; save to a folder or a URL instead")


class _File:
    def __init__(self, files: dict[str, bytes], name: str) -> None:
        self._files, self._name, self._data = files, name, bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._data += data

    def close(self) -> None:
        self._files[self._name] = bytes(self._data)

    def discard(self) -> None:
        self._data.clear()
