"""Checksums: blocks, canonical JSON, and every changed character of it."""

import hashlib
import json
import tracemalloc
import zlib
from pathlib import Path

import pytest

from sixfold.dist_ckpt import CorruptError
from sixfold.dist_ckpt.formats.integrity import (
    BLOCK_BYTES,
    BlockHasher,
    FileDigest,
    Integrity,
    Piece,
    Span,
    cut_at_blocks,
    decode,
    join_pieces,
    spans_of,
)
from sixfold.dist_ckpt.geometry.manifest import ByteRange

PATH = Path("integrity.json")


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES])
def test_digests_do_not_depend_on_how_the_bytes_arrive(size):
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    hasher = BlockHasher()
    for start in range(0, size, 1_000_003):
        hasher.update(data[start : start + 1_000_003])
    blocks = [data[i : i + BLOCK_BYTES] for i in range(0, size, BLOCK_BYTES)] or [b""]
    assert hasher.finish() == FileDigest(size, tuple(f"{zlib.crc32(block):08x}" for block in blocks))


@pytest.mark.parametrize("start", [0, 1, BLOCK_BYTES - 3, BLOCK_BYTES])
@pytest.mark.parametrize("size", [0, 5, 1000, BLOCK_BYTES, 2 * BLOCK_BYTES + 77])
def test_one_pass_gives_the_crc_of_the_data_and_of_the_blocks(start, size):
    before, data, after = bytes(start), bytes(range(251)) * (size // 251 + 1), b"tail"
    data = data[:size]
    pieces = [Piece(zlib.crc32(part), len(part)) for part in cut_at_blocks(memoryview(data), start)]
    assert join_pieces(pieces) == zlib.crc32(data)
    mixed, plain = BlockHasher(), BlockHasher()
    mixed.update(before)
    mixed.add(pieces)
    mixed.update(after)
    plain.update(before + data + after)
    assert mixed.finish() == plain.finish()


def test_the_file_is_canonical_json_with_a_digest_of_the_rest():
    data = Integrity(save_id="ab", files={"f": FileDigest(1, ("00000000",))}).encode()
    content = json.loads(data)
    assert data == json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    claimed = content.pop("self")
    rest = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    assert claimed == f"{zlib.crc32(rest):08x}"


def test_every_changed_byte_is_seen():
    data = Integrity(save_id="ab", files={"f": FileDigest(1, ("00000000",))}).encode()
    assert decode(PATH, data).save_id == "ab"
    for position in range(len(data)):
        for bit in (1, 32):
            damaged = bytearray(data)
            damaged[position] ^= bit
            with pytest.raises(CorruptError, match=r"integrity\.json"):
                decode(PATH, bytes(damaged))
    for other in (data + b" ", b" " + data, data.replace(b",", b", ", 1), data[:-1], b"", b"[]", b"null"):
        with pytest.raises(CorruptError):
            decode(PATH, other)


def test_sha256_of_another_writer_is_checked_too(tmp_path):
    (tmp_path / "f").write_bytes(b"hello")
    digests = (hashlib.sha256(b"hell").hexdigest(), hashlib.sha256(b"o").hexdigest())
    made = Integrity(save_id="x", files={"f": FileDigest(5, digests)}, algorithm="sha256", block_bytes=4)
    read = decode(PATH, made.encode())
    assert read.check_blocks(tmp_path, read.all_blocks()) == 5
    (tmp_path / "f").write_bytes(b"hellO")
    with pytest.raises(CorruptError, match="bytes 4:5"):
        read.check_blocks(tmp_path, read.all_blocks())


@pytest.mark.parametrize("algorithm", ["crc32", "sha256"])
@pytest.mark.parametrize("block_bytes", [2 * BLOCK_BYTES, 1000])
def test_blocks_of_other_sizes_are_hashed_in_little_memory(tmp_path, algorithm, block_bytes):
    data = bytes(range(251)) * (20_000 if block_bytes > 1000 else 13)
    (tmp_path / "f").write_bytes(data)
    hashed = (lambda b: f"{zlib.crc32(b):08x}") if algorithm == "crc32" else (lambda b: hashlib.sha256(b).hexdigest())
    digests = tuple(hashed(data[i : i + block_bytes]) for i in range(0, len(data), block_bytes))
    files = {"f": FileDigest(len(data), digests)}
    read = decode(PATH, Integrity(save_id="x", files=files, algorithm=algorithm, block_bytes=block_bytes).encode())
    tracemalloc.start()
    try:
        assert read.check_blocks(tmp_path, read.all_blocks()) == len(data)
        assert tracemalloc.get_traced_memory()[1] < block_bytes + 2**20
    finally:
        tracemalloc.stop()
    (tmp_path / "f").write_bytes(data[:-1] + b"?")
    with pytest.raises(CorruptError, match=f":{len(data)} are not those"):
        read.check_blocks(tmp_path, read.all_blocks())


def test_blocks_of_byte_ranges_as_few_spans():
    ranges = [ByteRange("f", 30, 10), ByteRange("f", 9, 2), ByteRange("g", 5, 0), ByteRange("f", 15, 6)]
    assert spans_of(ranges, 10) == [Span("f", 0, 4)]
    assert spans_of([ByteRange("g", 0, 1), ByteRange("f", 0, 10), ByteRange("f", 20, 11)], 10) == [
        Span("f", 0, 1),
        Span("f", 2, 4),
        Span("g", 0, 1),
    ]
