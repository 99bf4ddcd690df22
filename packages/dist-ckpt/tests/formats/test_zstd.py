"""zstd around frames: lengths and checksums that hold, and a module that may be missing."""

import random
import sys

import pytest
import torch
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CorruptError
from sixfold.dist_ckpt.formats import zstd


def test_a_save_without_the_module_is_told_what_to_install_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CheckpointError, match=r"pip install 'sixfold-dist-ckpt\[zstd\]'"):
        dist_ckpt.save({"w": one("w", torch.ones(4))}, tmp_path / "new" / "c", group=None, compress="zstd")
    assert not (tmp_path / "new").exists()


def test_a_frame_states_its_length_and_a_checksum_of_its_content():
    zstandard = pytest.importorskip("zstandard", reason="needs the module zstandard (extra zstd)")
    data = zstd.compress((b"head", b"values" * 1000, b"tail"))
    found = zstandard.get_frame_parameters(data)
    assert found.content_size == 6008 and found.has_checksum
    assert zstandard.decompress(data) == b"head" + b"values" * 1000 + b"tail"


def test_a_frame_is_decoded_whole_up_to_its_bound_or_refused():
    zstandard = pytest.importorskip("zstandard", reason="needs the module zstandard (extra zstd)")
    content, longer = b"values" * 20_000, b"values" * 40_000
    data = zstd.compress((content,))
    assert zstd.decompress(memoryview(data), len(content)) == content
    assert zstd.decompress(memoryview(data), len(longer)) == content
    streamed = zstandard.ZstdCompressor().compressobj()
    unstated = streamed.compress(longer) + streamed.flush()
    assert zstd.decompress(memoryview(unstated), len(longer)) == longer
    for damaged in (data[:-1], data[1:], data + b"\0", zstd.compress((longer,)), unstated, b"", data[:5]):
        with pytest.raises(CorruptError, match="zstd frame"):
            zstd.decompress(memoryview(damaged), len(content))


def test_the_begin_of_a_frame_is_compared_without_the_rest():
    pytest.importorskip("zstandard", reason="needs the module zstandard (extra zstd)")
    values = random.Random(0).randbytes(4 << 20)
    data = zstd.compress((b"head", values))
    half = memoryview(data[: len(data) // 2])
    assert zstd.begins_with(half, 4, values[:9000])
    assert not zstd.begins_with(half, 4, values[1:9000])
    assert not zstd.begins_with(memoryview(zstd.compress((b"he",))), 4, values[:9000])
