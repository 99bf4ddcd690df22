"""Frames against torch.save, torch.load and zipfile."""

import io
import weakref
import zipfile
from zlib import crc32

import pytest
import torch

from sixfold.dist_ckpt import CorruptError
from sixfold.dist_ckpt.formats import frame
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16]
SHAPES = [(), (1,), (3, 4), (0, 3), (2, 1, 5)]


def built(tensor, at=0, limit=0xFFFFFFFF):
    raw = tensor_bytes(tensor)
    made = frame.build(frame.data_pickle(tensor.dtype, tuple(tensor.shape)), len(raw), crc32(raw), at, limit=limit)
    return made.head + bytes(raw) + made.tail


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_pickle_is_the_one_that_torch_save_writes(dtype, shape):
    buffer = io.BytesIO()
    torch.save(torch.zeros(shape).to(dtype), buffer)
    assert frame.data_pickle(dtype, shape) == zipfile.ZipFile(buffer).read("archive/data.pkl")


@pytest.mark.parametrize("limit", [0xFFFFFFFF, 8], ids=["zip32", "zip64"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_and_zipfile_read_a_frame(dtype, shape, limit):
    tensor = torch.randn(shape).to(dtype)
    data = built(tensor, at=100, limit=limit)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert bytes(tensor_bytes(loaded)) == bytes(tensor_bytes(tensor))
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None


@pytest.mark.parametrize("at", [0, 1, 63, 4095, 5000])
@pytest.mark.parametrize(("elements", "alignment"), [(10, 64), (1 << 16, 4096)])
def test_raw_bytes_start_at_an_aligned_place_of_the_file(at, elements, alignment):
    layout = frame.parse(memoryview(built(torch.zeros(elements), at=at)))
    assert (at + layout.data_start) % alignment == 0


@pytest.mark.parametrize("limit", [0xFFFFFFFF, 8], ids=["zip32", "zip64"])
def test_parse_finds_what_was_built(limit):
    tensor = torch.arange(7.0)
    data = built(tensor, limit=limit)
    layout = frame.parse(memoryview(data))
    raw = bytes(tensor_bytes(tensor))
    assert data[layout.data_start : layout.data_start + layout.data_bytes] == raw
    assert (layout.data_crc32, layout.pickle) == (crc32(raw), frame.data_pickle(torch.float32, (7,)))


def test_parse_reads_what_torch_save_writes():
    buffer = io.BytesIO()
    tensor = torch.randn(5, 2)
    torch.save(tensor, buffer)
    layout = frame.parse(memoryview(buffer.getvalue()))
    found = buffer.getvalue()[layout.data_start : layout.data_start + layout.data_bytes]
    assert found == bytes(tensor_bytes(tensor))
    assert layout.data_crc32 == crc32(found)


def test_no_damage_of_a_frame_makes_parse_fail_in_another_way():
    data = built(torch.arange(6.0))
    for position in range(len(data)):
        for value in (0x00, 0xFF):
            damaged = bytearray(data)
            damaged[position] = value
            try:
                frame.parse(memoryview(bytes(damaged)))
            except CorruptError:
                pass
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            frame.parse(memoryview(data[:length]))


def test_the_bytes_of_a_tensor_keep_it_alive():
    tensor = torch.arange(1 << 16)
    alive = weakref.ref(tensor)
    raw = tensor_bytes(tensor)[8:]
    del tensor
    assert alive() is not None
    assert bytes(raw[:8]) == (1).to_bytes(8, "little")
    del raw
    assert alive() is None
