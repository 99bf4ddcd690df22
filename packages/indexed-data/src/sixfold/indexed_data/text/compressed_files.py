"""Files of text, decompressed as they are read.

path --> open_text (this file) --> inputs.py
"""

from __future__ import annotations

import io
from typing import IO, Any

from sixfold.indexed_data.extras import extra
from sixfold.indexed_data.text.input_kinds import compression_of


def open_text(path: str) -> IO[bytes]:
    """The file ``path`` as it was before it was compressed."""
    compression = compression_of(path)
    if compression == "gzip":
        import gzip  # only here: most inputs are plain

        return gzip.open(path, "rb")  # type: ignore[return-value]  # a GzipFile reads like one
    if compression == "zstd":
        return io.BufferedReader(_ZstdFrames(path, extra("zstandard", f"{path}: reading zstd data")), 1 << 17)
    return open(path, "rb", buffering=1 << 20)


class _ZstdFrames(io.RawIOBase):
    """All frames of a .zst file, one after the other. A frame that is cut is an OSError: zstandard ends there in
    silence, as at an end."""

    def __init__(self, path: str, zstandard: Any) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with this object
        self._zstandard = zstandard
        self._frame: Any = None
        self._packed, self._plain = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        assert (offset, whence) == (0, 0), "only _without_mark seeks, to the beginning"
        self._file.seek(0)
        self._frame, self._packed, self._plain = None, b"", memoryview(b"")
        return 0

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            if not self._packed and not (packed := self._file.read(1 << 17)):
                if self._frame is not None:
                    raise OSError("its last zstd frame is not whole; the file was cut")
                return 0
            elif not self._packed:
                self._packed = packed
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._plain = memoryview(self._frame.decompress(self._packed))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        given = min(len(buffer), len(self._plain))
        buffer[:given] = self._plain[:given]
        self._plain = self._plain[given:]
        return given

    def close(self) -> None:
        self._file.close()
        super().close()
