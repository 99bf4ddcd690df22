"""Frames of sizes whose zip fields look like signatures, against zipfile and the zip format's own places."""

import struct
import zipfile
from zlib import crc32

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt.formats import frame

SIGNATURES = [b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08"]
CRC = 0x89ABCDEF


def sizes_with(signature):
    """Sizes whose field, or two of them side by side, holds the signature at any byte; 4 bytes wide, then 8."""
    for turn in range(4):
        yield int.from_bytes(signature[turn:] + signature[:turn], "little")
    for turn in range(3):
        yield int.from_bytes(bytes(turn) + signature + bytes(4 - turn), "little") + (1 << 32)
    for turn in range(1, 4):  # the end of one field of 8 and the begin of the next
        yield int.from_bytes(signature[turn:] + bytes(4) + bytes(4 - turn) + signature[:turn], "little") % (1 << 42)


@pytest.mark.parametrize("streamed", [False, True], ids=["seekable", "streamed"])
@pytest.mark.parametrize("limit", [0xFFFFFFFF, 8], ids=["zip32", "zip64"])
def test_the_crc_stands_where_zip_has_it_whatever_the_size_looks_like(tmp_path, streamed, limit):
    pickled = frame.data_pickle(torch.uint8, (1,))
    for size in (size for signature in SIGNATURES for size in sizes_with(signature)):
        head, tail = frame.open_template(pickled, size, 0, streamed=streamed, limit=limit).fill(CRC)
        path = tmp_path / "frame.zip"  # a hole stands for the data
        with path.open("wb") as file:
            file.write(head)
            file.seek(len(head) + size)
            file.write(tail)
        with zipfile.ZipFile(path) as archive:
            found = archive.infolist()
        assert [(entry.filename, entry.file_size) for entry in found[3:]] == [("archive/data/0", size)], size
        assert found[3].CRC == CRC, size
        local = head[found[3].header_offset :]
        flags, crc = struct.unpack_from("<H", local, 6)[0], struct.unpack_from("<I", local, 14)[0]
        assert (flags & 8, crc) == ((8, 0) if streamed else (0, CRC)), size
        if streamed:
            assert tail[:8] == b"PK\x07\x08" + struct.pack("<I", CRC)
        path.unlink()


@pytest.mark.parametrize("size", [33_639_248, 67_324_752], ids=["central", "local"])
@pytest.mark.slow
def test_a_chunk_whose_size_is_a_signature_is_read_by_torch_and_zipfile(tmp_path, size):
    pytest.importorskip("numpy", reason="needs numpy, through which a tensor shows its bytes")
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor[::4097] = 7
    dist_ckpt.save({"w": dist_ckpt.ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / "c", group=None)
    with (tmp_path / "c" / "__0_0.distcp").open("rb") as file, zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert crc32(memoryview(tensor.numpy())) == archive.infolist()[3].CRC
        assert archive.infolist()[3].file_size == size
    assert torch.equal(torch.load(tmp_path / "c" / "__0_0.distcp", weights_only=True), tensor)
