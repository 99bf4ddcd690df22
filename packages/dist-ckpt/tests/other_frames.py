"""Frames as another writer may put them."""

import io

import torch

from sixfold.dist_ckpt.formats import frame as frames
from sixfold.dist_ckpt.formats.integrity import crc32


def of_another_form(data, frame, dtype, shape):
    """A frame of the same length whose zip has the version behind the values, as another writer may put it."""
    layout = frames.parse(data[frame.offset : frame.offset + frame.length])
    start = frame.offset + layout.data_start
    values = bytes(data[start : start + layout.data_bytes])
    records = [("data.pkl", layout.pickle), ("byteorder", b"little"), ("data/0", values), ("version", b"3\n")]
    directory, body = [], b""
    for name, content in records:
        extra = b""
        if name == "data/0":
            spent = sum(len(frames._local_header(n, 0, 0, b"", 1 << 32) + c) for n, c in records)
            spent += sum(len(frames._central_header(n, 0, 0, 0, 1 << 32)) for n, _ in records) + 22
            padding = frame.length - spent - 4
            extra = b"BF" + padding.to_bytes(2, "little") + bytes(padding)
        crc = crc32(content)
        directory.append(frames._central_header(name, len(content), crc, len(body), 1 << 32))
        body += frames._local_header(name, len(content), crc, extra, 1 << 32) + content
    central = b"".join(directory)
    made = body + central + frames._end(len(records), len(central), len(body), 1 << 32)
    assert len(made) == frame.length
    loaded = torch.load(io.BytesIO(made), weights_only=True)
    assert (loaded.dtype, loaded.shape) == (dtype, shape)
    assert made[layout.data_start :][: layout.data_bytes] != values, "they stand elsewhere"
    return made
