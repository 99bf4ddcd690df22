"""Checksums: CRC-32 by the fastest library at hand, and ``integrity.json``, one digest per file and block of 4 MiB.

    bytes as they are written --> integrity.py (this file) --> integrity.json
    integrity.json + touched byte ranges --> integrity.py --> CorruptError, or nothing

DCP and megatron check nothing at load: flipped bytes, zeroed pages and a shard file of another step
load silently there (pytorch#126952, torchtitan#4011).

zlib itself does 3 to 7 GB/s on one core, less than a disk or the page cache gives. Two system libraries
compute the same CRC-32 with carry-less multiplication at 12 to 20: libdeflate, and liblzma from 5.6 on.
One of them is used where the loader finds it and it agrees with zlib on trial; nothing depends on it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from sixfold.dist_ckpt.errors import CorruptError, UnsafeError
from sixfold.dist_ckpt.geometry.manifest import ByteRange

FILE_NAME = "integrity.json"
BLOCK_BYTES = 4 * 2**20
_ALGORITHMS = ("crc32", "sha256")
_MOST_BLOCK_BYTES = 2 * BLOCK_BYTES  # one is read at once
_POLYNOMIAL = 0xEDB88320
_WORTH_BYTES = 1 << 14  # below, the call by ctypes costs more than it saves
_LZMA_WITH_CLMUL = 50060000
_Function = Callable[[int, int, int], int]  # value so far, address, bytes --> value


#: The content of a file: its bytes, or what gives them piece by piece, each time that it is called.
Content = bytes | Callable[[], Iterable[bytes]]
Contents = dict[str, dict[str, str]]


class FileDigest(NamedTuple):
    """Size of a file and a digest of each of its blocks, the last one shorter."""

    size: int
    digests: tuple[str, ...]


class Block(NamedTuple):
    """Block ``number`` of a file, counted from 0."""

    file: str
    number: int


class Span(NamedTuple):
    """Blocks ``first`` to ``stop - 1`` of a file. ``alone``: wanted by one rank of a host only."""

    file: str
    first: int
    stop: int
    alone: bool = False

    def blocks(self) -> Iterator[Block]:
        """One by one."""
        return (Block(self.file, number) for number in range(self.first, self.stop))


@dataclass(frozen=True, kw_only=True, slots=True)
class Integrity:
    """What every file of a checkpoint must be, this one apart.

    ``in_common``: names of tensors whose values are in ``common.pt`` too, for megatron-core.
    ``contents``: digests of what frames of linked files hold, by file and start; see save_load/unchanged.py.
    """

    save_id: str
    files: dict[str, FileDigest]
    in_common: tuple[str, ...] = ()
    contents: Contents = field(default_factory=dict)
    algorithm: str = "crc32"
    block_bytes: int = field(default_factory=lambda: BLOCK_BYTES)

    def encode(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, with a digest of the rest under ``self``."""
        rest = {
            "algorithm": self.algorithm,
            "block_bytes": self.block_bytes,
            "files": {name: {"size": file.size, "digests": file.digests} for name, file in self.files.items()},
            "save_id": self.save_id,
        }
        for name, value in (("in_common", self.in_common), ("contents", self.contents)):
            if value:
                rest[name] = value
        return _canonical({**rest, "self": digest(self.algorithm, _canonical(rest))})

    def all_spans(self) -> list[Span]:
        """Every block of every file."""
        return [Span(name, 0, len(file.digests)) for name, file in sorted(self.files.items())]

    def all_blocks(self) -> set[Block]:
        """Every block of every file."""
        return {block for span in self.all_spans() for block in span.blocks()}

    def check_sizes(self, folder: Path) -> None:
        """CorruptError for the first file that is missing, short or long."""
        for name, expected in sorted(self.files.items()):
            try:
                size = (folder / name).stat().st_size
            except FileNotFoundError:
                raise CorruptError(f"{folder / name} is missing; {expected.size} bytes were saved") from None
            if size != expected.size:
                raise CorruptError(f"{folder / name} has {size} bytes; {expected.size} were saved")

    def check_file_bytes(self, path: Path, data: bytes) -> None:
        """CorruptError unless ``data`` is the whole content of the file."""
        for index in range(max(1, -(-len(data) // self.block_bytes))):
            start = index * self.block_bytes
            self.compare(path, index, digest(self.algorithm, data[start : start + self.block_bytes]))

    def check_blocks(self, folder: Path, blocks: Iterable[Block]) -> int:
        """Read and hash ``blocks``; CorruptError names the first that differs. Returns the bytes read."""
        total = 0
        for name, same in groupby(sorted(blocks), lambda block: block.file):
            with (folder / name).open("rb") as file:
                for block in same:
                    file.seek(block.number * self.block_bytes)
                    data = file.read(self.block_bytes)
                    total += len(data)
                    self.compare(folder / name, block.number, digest(self.algorithm, data))
        return total

    def hasher(self) -> Hasher:
        """For one block."""
        return Hasher(self.algorithm)

    def compare(self, path: Path, index: int, found: str) -> None:
        """CorruptError unless ``found`` is the digest of block ``index``."""
        file = self.files.get(path.name, FileDigest(0, ()))
        if index >= len(file.digests) or found != file.digests[index]:
            start = index * self.block_bytes
            stop = min(start + self.block_bytes, max(file.size, start))
            raise CorruptError(f"{path}: bytes {start}:{stop} are not those that were saved ({self.algorithm} differs)")


def spans_of(ranges: Iterable[ByteRange], block_bytes: int) -> list[Span]:
    """The blocks of a size that hold any byte of ``ranges``, as few sorted spans."""
    size, spans = block_bytes, list[Span]()
    for file, offset, length in sorted(r for r in ranges if r.length):
        first, stop = offset // size, -(-(offset + length) // size)
        if spans and spans[-1].file == file and spans[-1].stop >= first:
            first, stop = spans[-1].first, max(stop, spans.pop().stop)
        spans.append(Span(file, first, stop))
    return spans


def cut_at_blocks(data: memoryview, start: int) -> Iterator[memoryview]:
    """``data``, which will lie at byte ``start`` of its file, in parts that lie in one block each."""
    while len(data):
        take = min(len(data), BLOCK_BYTES - start % BLOCK_BYTES)
        yield data[:take]
        data, start = data[take:], start + take


class Hasher:
    """The digest of one block, taken piece by piece."""

    def __init__(self, algorithm: str) -> None:
        self._crc = 0
        self._sha = hashlib.sha256() if algorithm == "sha256" else None

    def update_at(self, address: int, nbytes: int) -> None:
        """Add the next bytes, which lie in memory."""
        if self._sha is None:
            self._crc = crc32_at(address, nbytes, self._crc)
        else:
            self._sha.update((ctypes.c_char * nbytes).from_address(address))

    def hexdigest(self) -> str:
        """As it stands in ``integrity.json``."""
        return f"{self._crc:08x}" if self._sha is None else self._sha.hexdigest()


class BlockHasher:
    """CRC-32 per block of a stream of bytes, updated as it is written."""

    def __init__(self) -> None:
        self.size = 0
        self._digests: list[str] = []
        self._crc = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the file."""
        for piece in cut_at_blocks(memoryview(data), self.size):
            self._close_block_after(crc32(piece, self._crc), len(piece))

    def add(self, pieces: Iterable[Piece]) -> None:
        """Add bytes, cut at blocks for this place of the file, that are hashed already."""
        for piece in pieces:
            self._close_block_after(shift(self._crc, piece.length) ^ piece.crc, piece.length)

    def _close_block_after(self, crc: int, nbytes: int) -> None:
        self._crc = crc
        self.size += nbytes
        if self.size % BLOCK_BYTES == 0:
            self._digests.append(f"{crc:08x}")
            self._crc = 0

    def finish(self) -> FileDigest:
        """Size and digests of all that was added; an empty file has one digest."""
        rest = (f"{self._crc:08x}",) if self.size % BLOCK_BYTES or not self.size else ()
        return FileDigest(self.size, (*self._digests, *rest))


def digest(algorithm: str, data: bytes | memoryview) -> str:
    """Lower-case hex digest."""
    return f"{crc32(data):08x}" if algorithm == "crc32" else hashlib.sha256(data).hexdigest()


def digest_of(data: Content, write: Callable[[bytes], object] | None = None) -> FileDigest:
    """The entry of a file with this content, whose pieces are given to ``write`` on the way."""
    hasher = BlockHasher()
    for piece in pieces_of(data):
        if write is not None:
            write(piece)
        hasher.update(piece)
    return hasher.finish()


def pieces_of(data: Content) -> Iterable[bytes]:
    """The bytes of a file, piece by piece."""
    return (data,) if isinstance(data, bytes) else data()


def decode(path: Path, data: bytes) -> Integrity:
    """Read ``integrity.json``; CorruptError if one character of it has changed."""
    try:
        content = json.loads(data)
        claimed = content.pop("self")
        algorithm, block_bytes = content["algorithm"], content["block_bytes"]
        if algorithm not in _ALGORITHMS or type(block_bytes) is not int or not 0 < block_bytes <= _MOST_BLOCK_BYTES:
            raise CorruptError(f"{path}: algorithm {algorithm!r} with blocks of {block_bytes!r} bytes is unknown")
        if _canonical({**content, "self": claimed}) != data or digest(algorithm, _canonical(content)) != claimed:
            raise CorruptError(f"{path} is damaged: it does not match its own digest")
        files = {name: FileDigest(file["size"], tuple(file["digests"])) for name, file in content["files"].items()}
        for name, file in files.items():
            _check_entry(path, name, file, block_bytes)
        in_common = tuple(content.get("in_common", ()))
        if not {*map(type, in_common)} <= {str}:
            raise CorruptError(f"{path}: names of tensors are texts, and one is none")
        contents = {name: {**known} for name, known in content.get("contents", {}).items()}
        return Integrity(
            save_id=content["save_id"],
            files=files,
            in_common=in_common,
            contents=contents,
            algorithm=algorithm,
            block_bytes=block_bytes,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _check_entry(path: Path, name: str, file: FileDigest, block_bytes: int) -> None:
    """Refuse what no save wrote, though its digest is right: whoever made the file can make that too."""
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise UnsafeError(f"{path}: the file name {name!r} leaves the folder; it is a bare file name")
    fits = type(file.size) is int and 0 <= file.size < 2**63
    if not fits or len(file.digests) != max(1, -(-file.size // block_bytes)):
        raise CorruptError(
            f"{path}: {name} of {file.size!r} bytes has {len(file.digests)} digests of {block_bytes} bytes"
        )


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC-32 of ``data`` after bytes whose CRC-32 is ``value``; exactly ``zlib.crc32``."""
    nbytes = len(data)
    if nbytes < _WORTH_BYTES or _fastest() is None:
        return zlib.crc32(data, value)
    if isinstance(data, bytes):
        return crc32_at(ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0, nbytes, value)
    view = memoryview(data)
    if view.readonly:
        return zlib.crc32(view, value)
    return crc32_at(ctypes.addressof(ctypes.c_char.from_buffer(view)), nbytes, value)


def crc32_at(address: int, nbytes: int, value: int = 0) -> int:
    """The same of ``nbytes`` bytes of memory, which the caller keeps alive. Releases the GIL."""
    fast = _fastest()
    if fast is None:
        return zlib.crc32((ctypes.c_char * nbytes).from_address(address), value)
    return fast[1](value, address, nbytes)


@cache
def _fastest() -> tuple[str, _Function] | None:
    """The first candidate that loads and computes what zlib does, with its name."""
    for name, load in _CANDIDATES.items():
        try:
            function = load(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
        if function is not None and _agrees(function):
            return name, function
    return None


def library() -> str:
    """Which library computes; for reports of benchmarks."""
    fast = _fastest()
    return "zlib" if fast is None else fast[0]


def _from_libdeflate(found: ctypes.CDLL) -> _Function | None:
    function = found.libdeflate_crc32
    function.restype, function.argtypes = ctypes.c_uint32, (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    result: _Function = function
    return result


def _from_liblzma(found: ctypes.CDLL) -> _Function | None:
    if found.lzma_version_number() < _LZMA_WITH_CLMUL:
        return None
    function = found.lzma_crc32
    function.restype, function.argtypes = ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
    return lambda value, address, nbytes: int(function(address, nbytes, value))


_CANDIDATES = {"libdeflate.so.0": _from_libdeflate, "liblzma.so.5": _from_liblzma}


def _agrees(function: _Function) -> bool:
    whole = bytes(range(256)) * 17
    sample = ctypes.create_string_buffer(whole)
    cases = ((0, 4099), (1, 4095), (3, 67), (5, 0))  # odd starts and lengths
    return all(function(9, ctypes.addressof(sample) + at, n) == zlib.crc32(whole[at : at + n], 9) for at, n in cases)


class Piece(NamedTuple):
    """A run of bytes: its CRC-32 and its length."""

    crc: int
    length: int


def join_pieces(pieces: Iterable[Piece]) -> int:
    """CRC-32 of the pieces end to end."""
    crc = 0
    for piece in pieces:
        crc = shift(crc, piece.length) ^ piece.crc
    return crc


def shift(crc: int, nbytes: int) -> int:
    """``crc`` times x to the ``8 * nbytes`` modulo the polynomial: what zlib's crc32_combine does."""
    return _multiply(_power(nbytes), crc) if crc else 0


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """x to the ``8 * nbytes``, bits reflected: 1 is 1 << 31."""
    result, exponent = 1 << 31, 0
    while nbytes >> exponent:
        if nbytes >> exponent & 1:
            result = _multiply(_square(exponent), result)
        exponent += 1
    return result


@lru_cache(maxsize=64)
def _square(times: int) -> int:
    """x to the 8, squared ``times`` times."""
    return 1 << 23 if times == 0 else _multiply(_square(times - 1), _square(times - 1))


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials over GF(2) modulo CRC-32's, bits reflected."""
    product = 0
    while a:
        if a >> 31:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
