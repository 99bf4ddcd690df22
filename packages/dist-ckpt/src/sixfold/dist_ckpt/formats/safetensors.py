"""Headers of safetensors files, read and written by ourselves: 8 bytes of length, a JSON object, the tensors' bytes.

    head of a file --> parse_header (this file) --> where each tensor lies --> checkpoint/safetensors_folder.py
    model.safetensors.index.json --> parse_index (this file) --> which file has which tensor
    names, dtypes, shapes --> encode_header, encode_index (this file) --> hugging_face/model_files.py

Nothing read is believed. Lengths, names, dtypes, shapes and offsets are checked. The tensors fill the file to its
last byte without gap or overlap, as the format wants. The library (extra ``safetensors``) is needed for export only,
as a check.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import CorruptError, MismatchError, UnsafeError

SUFFIX = ".safetensors"
INDEX_SUFFIX = f"{SUFFIX}.index.json"
INDEX_NAME = f"model{INDEX_SUFFIX}"
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000  # the library's own limit
#: Names of dtypes, as the format spells them.
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_ALIGNMENT = 8  # of the first tensor
_PACKED = ("F6_E2M3", "F6_E3M2")  # of the format, and not read here
PAIRS = torch.float4_e2m1fn_x2  # two numbers a byte: torch's shape counts pairs, the format's counts numbers
_PARTS = "DCP_SHARDING_INFO"  # by which torch's writer says where each tensor lies in the one that it may be a part of


class Entry(NamedTuple):
    """A tensor of a file: its bytes are [start, stop) of the file.

    ``offset``: of a file that torch's writer has marked, where the tensor lies in the larger one that it is a part of.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: tuple[int, ...] | None = None


def encode_header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """All bytes of a file before those of its tensors, which are given in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        stop = at + prod(shape) * dtype.itemsize
        counted = [*shape[:-1], 2 * shape[-1]] if dtype is PAIRS else list(shape)
        header[name] = {"dtype": NAMES[dtype], "shape": counted, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def encode_index(places: Mapping[str, str], nbytes: int) -> bytes:
    """The content of an index: the file of each tensor, and the bytes of all values."""
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": places}, indent=2, sort_keys=True).encode()


def header_bytes(length: bytes, file_bytes: int) -> int:
    """Bytes of the header, from the first 8 bytes of a file.

    Raises:
        CorruptError: the file is too short for it, or it is longer than 100 MB.
    """
    number = int.from_bytes(length, "little")
    if len(length) < LENGTH_BYTES or number > file_bytes - LENGTH_BYTES:
        raise CorruptError(f"it has {file_bytes} bytes, too few for a header of {number}: it is no safetensors file")
    if number > MOST_HEADER_BYTES:
        raise CorruptError(f"its header claims {number} bytes; at most {MOST_HEADER_BYTES} are read")
    return number


def parse_header(header: bytes, file_bytes: int) -> dict[str, Entry]:
    """The tensors of a file, by name.

    Raises:
        CorruptError: it is no such header, or contradicts itself or the file's size.
        MismatchError: a dtype of less than a byte.
    """
    content = _object(header, "the header")
    extra = content.pop("__metadata__", {})
    if not isinstance(extra, dict):
        raise CorruptError(f"__metadata__ is a {type(extra).__name__}; it is an object of texts")
    first = LENGTH_BYTES + len(header)
    entries = {name: _entry(name, entry, first) for name, entry in content.items()}
    if _PARTS in extra:
        entries = _placed(entries, extra[_PARTS])
    at = first
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != at:
            wrong = "overlap others" if entry.start < at else f"leave a gap from byte {at} on"
            raise CorruptError(f"{name}: its bytes [{entry.start}, {entry.stop}) {wrong}")
        at = entry.stop
    if at != file_bytes:
        raise CorruptError(f"it has {file_bytes} bytes; its header speaks of {at}")
    return entries


def _entry(name: str, entry: Any, first: int) -> Entry:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptError(f"{name}: an entry has dtype, shape and data_offsets, not {_shown(entry)}")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _DTYPES:
        error = MismatchError if kind in _PACKED else CorruptError
        raise error(f"{name}: its dtype {_shown(kind)} is not read here; known are {', '.join(_DTYPES)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CorruptError(f"{name}: shape {_shown(shape)} and data_offsets {_shown(offsets)} are lists of counts")
    dtype, (start, stop) = _DTYPES[kind], offsets
    if dtype is PAIRS:
        if not shape or shape[-1] % 2:
            raise MismatchError(f"{name}: {kind} {_shown(shape)} is not read here: torch has pairs of them alone")
        shape = [*shape[:-1], shape[-1] // 2]
    if stop - start != prod(shape) * dtype.itemsize:
        raise CorruptError(f"{name}: {_shown(offsets)} are {stop - start} bytes; {kind} {_shown(shape)} has others")
    return Entry(dtype, tuple(shape), first + start, first + stop)


def _placed(entries: dict[str, Entry], text: Any) -> dict[str, Entry]:
    """The tensors of a file that torch's writer has marked, each with its place in a larger one."""
    places, found = _object(str(text).encode(errors="surrogatepass"), _PARTS), dict[str, Entry]()
    for name, entry in entries.items():
        place = places.get(name)
        offset: Any = place.get("saved_offsets") if isinstance(place, dict) else None
        if not _are_counts(offset) or len(offset) != len(entry.shape):
            raise CorruptError(f"{name}: saved_offsets {_shown(offset)} are no place in {len(entry.shape)} dimensions")
        found[name] = entry._replace(offset=tuple(offset))
    return found


def parse_index(data: bytes) -> dict[str, str]:
    """Which file has which tensor.

    Raises:
        CorruptError: it is no such index. UnsafeError: it names a file outside the folder.
    """
    places = _object(data, "the index").get("weight_map")
    if not isinstance(places, dict):
        raise CorruptError(f"weight_map is {_shown(places)}; it is an object of file names by tensor")
    for name, file in places.items():
        if not isinstance(file, str):
            raise CorruptError(f"{name} lies in the file {_shown(file)}; it is a text")
        if not file or "/" in file or "\\" in file or not file.isprintable():
            raise UnsafeError(f"{name}: the file name {file!r} leaves the folder; it is a bare file name")
        if not file.endswith(SUFFIX):
            raise CorruptError(f"{name} lies in {file!r}; names of such files end with {SUFFIX}")
    return places


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        content = json.loads(data.decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise CorruptError(f"{what} is no JSON: {type(error).__name__}: {_shown(error)}") from error
    if not isinstance(content, dict):
        raise CorruptError(f"{what} is a {type(content).__name__}, not an object")
    return content


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{name!r} stands there twice")
    return found


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 2**63 for number in value)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
