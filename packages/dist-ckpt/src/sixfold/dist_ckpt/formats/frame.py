"""Frames: one tensor as the bytes that ``torch.load`` reads, made and parsed without copying data.

    tensor --> frame.py (this file) --> file of frames        (save)
    file of frames --> frame.py --> where the raw bytes lie   (load)

A frame is a stored (uncompressed) zip: ``archive/data.pkl``, ``archive/byteorder``, ``archive/version``, and last the
raw bytes ``archive/data/0``. These start at an aligned place of the *file*, so that they can be mapped. The real
CRC-32 is filled in, so unzip tools verify the file. Pure bytes: no files, no ranks.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections import OrderedDict
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import CorruptError
from sixfold.dist_ckpt.formats.integrity import crc32

_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64, _LOCATOR64, _DESCRIPTOR = b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08"
_DESCRIBED = 8  # the flag of a record whose descriptor follows its data
_LIMIT32 = 0xFFFFFFFF
_PADDING_ID = 0x4246  # torch's own id for alignment padding
_DATE_1980 = 0x21  # 1 January 1980: equal input gives equal bytes
LARGE_ALIGNMENT, SMALL_ALIGNMENT = 4096, 64  # O_DIRECT and mmap need the first
LARGE_BYTES = 1 << 18


class Frame(NamedTuple):
    """A frame around raw bytes that lie elsewhere: write ``head``, the raw bytes, ``tail``."""

    head: bytes
    tail: bytes


class Layout(NamedTuple):
    """What the zip directory of a frame says: places are relative to the start of the frame."""

    pickle: bytes
    data_start: int
    data_bytes: int
    data_crc32: int


class _StoragePickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj  # its methods carry no types
            return ("storage", getattr(torch, typed._pickle_storage_type()), "0", "cpu", typed._size())
        if isinstance(obj, torch.UntypedStorage):
            return ("storage", torch.UntypedStorage, "0", "cpu", obj.nbytes())
        return None


@lru_cache(maxsize=4096)
def data_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """``data.pkl`` of a contiguous CPU tensor, byte for byte what ``torch.save`` writes.

    Cached, because pickling for every tensor costs the peers 400 us each.
    """
    # Reserves address space only: no page of it is touched.
    model = torch.empty(shape, dtype=dtype, device="cpu")
    buffer = io.BytesIO()
    _StoragePickler(buffer, protocol=2).dump(model)
    return buffer.getvalue()


@lru_cache(maxsize=256)
def has_form(dtype: torch.dtype) -> bool:
    """Whether torch has a saved form of a dtype."""
    try:
        data_pickle(dtype, ())
    except (KeyError, RuntimeError):  # of torch's storages
        return False
    return True


class Template(NamedTuple):
    """A frame whose CRC-32 is not known yet: it stands between the parts of head and of tail."""

    head: tuple[bytes, ...]
    tail: tuple[bytes, ...]
    head_bytes: int
    nbytes: int  # of the whole frame

    def fill(self, data_crc32: int) -> Frame:
        """The frame around raw bytes with this CRC-32."""
        crc = data_crc32.to_bytes(4, "little")
        return Frame(crc.join(self.head), crc.join(self.tail))


def template(dtype: torch.dtype, shape: tuple[int, ...], at: int, *, streamed: bool = False) -> Template:
    """The frame of a contiguous tensor that starts at byte ``at`` of its file, made once for equal ones.

    ``streamed``: the head needs no CRC-32, for a file that is written from start to end.
    """
    data_bytes = prod(shape) * dtype.itemsize
    alignment = LARGE_ALIGNMENT if data_bytes >= LARGE_BYTES else SMALL_ALIGNMENT
    return _template(dtype, shape, at % alignment, streamed)


@lru_cache(maxsize=4096)
def _template(dtype: torch.dtype, shape: tuple[int, ...], at: int, streamed: bool) -> Template:
    return open_template(data_pickle(dtype, shape), prod(shape) * dtype.itemsize, at, streamed=streamed)


def open_template(
    pickled: bytes, data_bytes: int, at: int, *, streamed: bool = False, limit: int = _LIMIT32
) -> Template:
    """``build`` with the places of the CRC-32 left open.

    They are counted, never looked for: a size may hold the bytes of a signature.
    """
    head, tail = build(pickled, data_bytes, 0, at, streamed=streamed, limit=limit)
    records, directory = _small_records(pickled, limit)
    in_head = len(records) + 14  # where the zip format has the CRC-32
    in_tail = sum(len(_central_header(*entry, limit)) for entry in directory) + 16
    if streamed:
        in_tail += len(_descriptor(data_bytes, 0, limit))
    return Template(
        (head,) if streamed else (head[:in_head], head[in_head + 4 :]),
        (tail[:4], tail[8:in_tail], tail[in_tail + 4 :]) if streamed else (tail[:in_tail], tail[in_tail + 4 :]),
        len(head),
        len(head) + data_bytes + len(tail),
    )


def build(
    pickled: bytes, data_bytes: int, data_crc32: int, at: int, *, streamed: bool = False, limit: int = _LIMIT32
) -> Frame:
    """The bytes before and after the raw data of a frame that starts at byte ``at`` of its file.

    Sizes and places from ``limit`` on go to zip64 fields; tests lower it. ``streamed``: a data descriptor behind the
    raw data holds the CRC-32, as in the files that torch writes, and the head holds none.
    """
    parts, directory = _small_records(pickled, limit)
    alignment = LARGE_ALIGNMENT if data_bytes >= LARGE_BYTES else SMALL_ALIGNMENT
    bare = len(_local_header("data/0", data_bytes, data_crc32, b"", limit)) + 4  # 4: header of the padding field
    padding = -(at + len(parts) + bare) % alignment
    descriptor = _descriptor(data_bytes, data_crc32, limit) if streamed else b""
    central = b"".join(_central_header(*entry, limit) for entry in directory)
    central += _central_header("data/0", data_bytes, data_crc32, len(parts), limit, _DESCRIBED if streamed else 0)
    extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    parts += _local_header("data/0", data_bytes, data_crc32, extra, limit, streamed)
    end = _end(len(directory) + 1, len(central), len(parts) + data_bytes + len(descriptor), limit)
    return Frame(bytes(parts), descriptor + central + end)


def _small_records(pickled: bytes, limit: int) -> tuple[bytearray, list[tuple[str, int, int, int]]]:
    """The records before the raw data, and their entries of the directory: name, size, CRC-32, place."""
    parts, directory = bytearray(), []
    for name, content in (("data.pkl", pickled), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
        directory.append((name, len(content), crc32(content), len(parts)))
        parts += _local_header(name, len(content), crc32(content), b"", limit) + content
    return parts, directory


def _local_header(name: str, size: int, crc: int, extra: bytes, limit: int, streamed: bool = False) -> bytes:
    full = f"archive/{name}".encode()
    flags, known, known_crc = (_DESCRIBED, 0, 0) if streamed else (0, size, crc)
    version, size32 = 20, known
    if size >= limit:
        extra, version, size32 = struct.pack("<HHQQ", 1, 16, known, known) + extra, 45, _LIMIT32
    lengths = len(full), len(extra)
    fixed = struct.pack("<4s5H3I2H", _LOCAL, version, flags, 0, 0, _DATE_1980, known_crc, size32, size32, *lengths)
    return fixed + full + extra


def _descriptor(size: int, crc: int, limit: int) -> bytes:
    return struct.pack("<4sIQQ" if size >= limit else "<4sIII", _DESCRIPTOR, crc, size, size)


def _central_header(name: str, size: int, crc: int, offset: int, limit: int, flags: int = 0) -> bytes:
    full = f"archive/{name}".encode()
    extra, version, size32 = b"", 20, size
    if size >= limit:
        extra, version, size32 = struct.pack("<HHQQ", 1, 16, size, size), 45, _LIMIT32
    fixed = struct.pack("<4s6H3I", _CENTRAL, version, version, flags, 0, 0, _DATE_1980, crc, size32, size32)
    return fixed + struct.pack("<5H2I", len(full), len(extra), 0, 0, 0, 0, offset) + full + extra


def _end(count: int, central_bytes: int, central_at: int, limit: int) -> bytes:
    if central_at < limit:
        return struct.pack("<4s4H2IH", _END, 0, 0, count, count, central_bytes, central_at, 0)
    end64 = struct.pack("<4sQ2H2I4Q", _END64, 44, 45, 45, 0, 0, count, count, central_bytes, central_at)
    locator = struct.pack("<4sIQI", _LOCATOR64, 0, central_at + central_bytes, 1)
    return end64 + locator + struct.pack("<4s4H2IH", _END, 0, 0, count, count, central_bytes, _LIMIT32, 0)


def parse(frame: memoryview) -> Layout:
    """Find the records of a frame by its zip directory.

    Raises:
        CorruptError: no such zip, a compressed record, a record that leaves the frame.
    """
    try:
        records = _directory(frame)
        pickled = next((name for name in records if name.endswith("/data.pkl")), None)
        if pickled is None:
            raise CorruptError(f"the frame holds {sorted(records)}, no data.pkl")
        start, size, _ = _record(frame, *records[pickled])
        data = records.get(pickled.removesuffix("data.pkl") + "data/0")
        data_start, data_bytes, crc = _record(frame, *data) if data else (0, 0, 0)
        return Layout(bytes(frame[start : start + size]), data_start, data_bytes, crc)
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptError(f"the frame is no readable zip: {error}") from error


def plain_start(frame: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    """Where the raw bytes of a contiguous tensor begin in its frame; None if the frame has another form.

    Raises: CorruptError: as ``parse``.
    """
    layout = parse(frame)
    is_plain = layout.data_bytes == prod(shape) * dtype.itemsize and layout.pickle == data_pickle(dtype, shape)
    return layout.data_start if is_plain else None


def check_records(frame: memoryview) -> None:
    """Compare each record with its CRC-32, which ``torch.load`` never looks at; 0 stands for none.

    Raises:
        CorruptError: another CRC-32, or no readable zip. What does not begin as a zip is left alone.
    """
    if bytes(frame[:4]) != _LOCAL:
        return
    try:
        records = _directory(frame)
        if sum(size for _, size, _ in records.values()) > len(frame):
            raise CorruptError(f"the frame of {len(frame)} bytes has records that lie in one another")
        for name, place in records.items():
            start, size, crc = _record(frame, *place)
            if crc and (found := crc32(frame[start : start + size])) != crc:
                raise CorruptError(f"record {name}: CRC-32 is {found:08x}, saved was {crc:08x}")
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptError(f"no readable zip: {error}") from error


def _directory(frame: memoryview) -> OrderedDict[str, tuple[int, int, int]]:
    """Records by name: (place of the local header, size, CRC-32)."""
    end = len(frame) - 22
    if end < 0 or bytes(frame[end : end + 4]) != _END:
        raise CorruptError("the frame does not end as a zip does")
    count, _, central_at = struct.unpack_from("<HII", frame, end + 10)
    if end >= 20 and bytes(frame[end - 20 : end - 16]) == _LOCATOR64:
        (end64,) = struct.unpack_from("<Q", frame, end - 12)
        if bytes(frame[end64 : end64 + 4]) != _END64:
            raise CorruptError("the frame's zip64 locator points at no directory")
        count, _, central_at = struct.unpack_from("<QQQ", frame, end64 + 32)
    records: OrderedDict[str, tuple[int, int, int]] = OrderedDict()
    at = central_at
    for _ in range(min(count, 1 << 16)):
        if bytes(frame[at : at + 4]) != _CENTRAL:
            raise CorruptError(f"the frame's directory is damaged at byte {at}")
        method, crc, packed, size = struct.unpack_from("<H4xIII", frame, at + 10)
        name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", frame, at + 28)
        (local_at,) = struct.unpack_from("<I", frame, at + 42)
        name = bytes(frame[at + 46 : at + 46 + name_bytes]).decode()
        extra = bytes(frame[at + 46 + name_bytes : at + 46 + name_bytes + extra_bytes])
        size, packed, local_at = _wide(extra, size, packed, local_at)
        if method != 0 or size != packed:
            raise CorruptError(f"record {name} is compressed; frames are stored")
        records[name] = (local_at, size, crc)
        at += 46 + name_bytes + extra_bytes + comment_bytes
    return records


def _wide(extra: bytes, *fields: int) -> tuple[int, ...]:
    """Replace fields of 0xFFFFFFFF by their zip64 values, in the order of the format."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            return tuple(next(wide, field) if field == _LIMIT32 else field for field in fields)
        at += 4 + length
    return fields


def _record(frame: memoryview, local_at: int, size: int, crc: int) -> tuple[int, int, int]:
    if bytes(frame[local_at : local_at + 4]) != _LOCAL:
        raise CorruptError(f"no record starts at byte {local_at} of the frame")
    name_bytes, extra_bytes = struct.unpack_from("<HH", frame, local_at + 26)
    start = local_at + 30 + name_bytes + extra_bytes
    if start + size > len(frame):
        raise CorruptError(f"a record at byte {local_at} leaves the frame of {len(frame)} bytes")
    return start, size, crc
