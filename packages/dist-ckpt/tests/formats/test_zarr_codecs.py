"""What a ``.zarray`` may name: a closed list of codecs, decoded without any library's registry; the rest is refused."""

import bz2
import gzip
import json
import lzma
import pickle
import sys
import types
import zlib

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, MismatchError, ShardedTensor, UnsafeError
from sixfold.dist_ckpt.tools import commands as tools

WHOLE = torch.arange(24, dtype=torch.int32).view(4, 6)


def folder_of(tmp_path, chunks, **header):
    """A zarr checkpoint with one array ``w`` of ``WHOLE``'s shape, its files given as bytes."""
    array = tmp_path / "c" / "w"
    array.mkdir(parents=True)
    content = {
        "chunks": [4, 3],
        "compressor": None,
        "dtype": "<i4",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": [4, 6],
        "zarr_format": 2,
    }
    (array / ".zarray").write_text(json.dumps(content | header))
    for name, data in chunks.items():
        (array / name).write_bytes(data)
    torch.save({}, tmp_path / "c" / "common.pt")
    config = {"common_backend": "torch", "common_backend_version": 1}
    config |= {"sharded_backend": "zarr", "sharded_backend_version": 1}
    (tmp_path / "c" / "metadata.json").write_text(json.dumps(config))
    return tmp_path / "c"


def values(part):
    return bytes(part.contiguous().view(torch.uint8).flatten().tolist())


def two_chunks(encode):
    return {"0.0": encode(values(WHOLE[:, :3])), "0.1": encode(values(WHOLE[:, 3:]))}


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


class Forbidden(types.ModuleType):
    """A library that nothing may be asked of."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AssertionError(f"{self.__name__}.{name} was asked for")


HOSTILE = [
    {"compressor": {"id": "pickle"}},
    {"filters": [{"id": "pickle"}]},
    {"filters": [{"id": "zlib", "level": 1}, {"id": "pickle", "protocol": 5}]},
    {"filters": [{"id": "msgpack2"}]},
    {"filters": [{"id": "json2", "encoding": "utf-8"}]},
    {"filters": [{"id": "vlen-utf8"}]},
    {"filters": [{"id": "vlen-array", "dtype": "<f4"}]},
    {"compressor": {"id": "os.system"}},
    {"compressor": {"id": ["zlib"]}},
    {"compressor": {"name": "zlib"}},
    {"compressor": "pickle"},
    {"filters": [{"id": "delta", "dtype": "|O"}]},
    {"filters": [{"id": "delta", "dtype": "<i4", "astype": "|O"}]},
    {"filters": [{"id": "astype", "encode_dtype": "|O", "decode_dtype": "<i4"}]},
    {"filters": [{"id": "categorize", "labels": ["a"], "dtype": "|O"}]},
    {"filters": {"id": "pickle"}},
]


@pytest.mark.parametrize("header", HOSTILE, ids=lambda header: json.dumps(header)[:60])
def test_a_codec_outside_the_list_is_refused_by_name_before_any_library_is_asked(tmp_path, monkeypatch, header):
    for name in ("zarr", "numcodecs", "numcodecs.registry", "numcodecs.blosc"):
        monkeypatch.setitem(sys.modules, name, Forbidden(name))
    bomb = pickle.dumps(Bomb(tmp_path / "run"))
    folder = folder_of(tmp_path, {"0.0": bomb, "0.1": bomb}, **header)
    for look in (dist_ckpt.load_plain_tensors, dist_ckpt.load_tensors_metadata):
        with pytest.raises(UnsafeError, match=r"\.zarray.*(codec|delta)"):
            look(folder)
    report = tools.verify(folder)
    assert {problem["kind"] for problem in report["problems"]} == {"unsafe"}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", ["|O", "O", "<U4", "|S4", "<M8[s]", [["a", "<f4"]], "object", None])
def test_a_dtype_that_is_no_number_is_refused(tmp_path, dtype):
    bomb = pickle.dumps(Bomb(tmp_path / "run"))
    folder = folder_of(tmp_path, {"0.0": bomb, "0.1": bomb}, dtype=dtype, filters=None)
    with pytest.raises(MismatchError, match="dtype"):
        dist_ckpt.load_plain_tensors(folder)
    assert not (tmp_path / "run").exists()


def test_a_second_description_beside_zarray_is_not_asked(tmp_path):
    """zarr 3 prefers a ``zarr.json`` that lies beside a ``.zarray``; its codecs would go unseen."""
    folder = folder_of(tmp_path, two_chunks(zlib.compress), compressor={"id": "zlib", "level": 1})
    codecs = [{"name": "numcodecs.pickle", "configuration": {}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [4, 3]}}
    other = {"zarr_format": 3, "node_type": "array", "shape": [4, 6], "data_type": "int32", "chunk_grid": grid}
    other |= {"chunk_key_encoding": {"name": "v2"}, "fill_value": 0, "codecs": codecs, "attributes": {}}
    (folder / "w" / "zarr.json").write_text(json.dumps(other))
    assert torch.equal(dist_ckpt.load_plain_tensors(folder)["w"], WHOLE)


STANDARD = {
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "lzma": lzma.compress,
}


@pytest.mark.parametrize("name", STANDARD)
def test_codecs_of_the_standard_library_need_no_other(tmp_path, monkeypatch, name):
    for module in ("zarr", "numcodecs"):
        monkeypatch.setitem(sys.modules, module, None)
    folder = folder_of(tmp_path, two_chunks(STANDARD[name]), compressor={"id": name})
    assert torch.equal(dist_ckpt.load_plain_tensors(folder)["w"], WHOLE)


@pytest.mark.parametrize(
    "header", [{"dtype": ">i4"}, {"order": "F"}, {"dimension_separator": "/"}], ids=lambda header: next(iter(header))
)
def test_values_that_lie_otherwise_than_megatron_wrote_them_are_refused(tmp_path, header):
    folder = folder_of(tmp_path, two_chunks(bytes), **header)
    with pytest.raises(MismatchError, match=r"\.zarray: (dtype|zarr format 2, order)"):
        dist_ckpt.load_plain_tensors(folder)


def test_shuffled_bytes_are_put_back(tmp_path):
    def shuffled(data):
        return b"".join(data[at::4] for at in range(4))

    folder = folder_of(tmp_path, two_chunks(shuffled), filters=[{"id": "shuffle", "elementsize": 4}])
    assert torch.equal(dist_ckpt.load_plain_tensors(folder)["w"], WHOLE)


@pytest.mark.parametrize("name", STANDARD)
@pytest.mark.slow
def test_a_chunk_that_decompresses_to_more_than_its_shape_is_damage_and_is_not_decompressed(tmp_path, name):
    endless = STANDARD[name](bytes(1 << 26))
    folder = folder_of(tmp_path, {"0.0": endless, "0.1": endless}, compressor={"id": name})
    with pytest.raises(CorruptError, match=r"more than the 48 bytes"):
        dist_ckpt.load_plain_tensors(folder)


@pytest.mark.parametrize("name", STANDARD)
@pytest.mark.parametrize("damage", ["cut", "flipped", "short"])
def test_damaged_chunks_are_named(tmp_path, name, damage):
    good = two_chunks(STANDARD[name])
    broken = {
        "cut": good["0.1"][:-9],
        "flipped": bytes(byte ^ 0x55 for byte in good["0.1"]),
        "short": STANDARD[name](b"few"),
    }[damage]
    folder = folder_of(tmp_path, good | {"0.1": broken}, compressor={"id": name})
    with pytest.raises(CorruptError, match=r"w/0\.1"):
        dist_ckpt.load_plain_tensors(folder)


@pytest.mark.parametrize("header", [{"elementsize": 0}, {"elementsize": 5}, {}, {"elementsize": "4"}])
def test_a_filter_that_does_not_fit_is_damage(tmp_path, header):
    folder = folder_of(tmp_path, two_chunks(bytes), filters=[{"id": "shuffle", **header}])
    with pytest.raises(CorruptError, match="shuffle"):
        dist_ckpt.load_plain_tensors(folder)


CODECS = ["Blosc", "Zstd", "LZ4", "Zlib", "GZip", "BZ2", "LZMA"]


@pytest.mark.parametrize("name", CODECS)
def test_what_numcodecs_writes_is_read(tmp_path, name):
    numcodecs = pytest.importorskip("numcodecs", reason="needs the numcodecs library (extra zarr)")
    codec, shuffle = getattr(numcodecs, name)(), numcodecs.Shuffle(2)
    folder = folder_of(
        tmp_path,
        two_chunks(lambda data: bytes(codec.encode(shuffle.encode(data)))),
        compressor=codec.get_config(),
        filters=[shuffle.get_config()],
    )
    assert torch.equal(dist_ckpt.load_plain_tensors(folder)["w"], WHOLE)


@pytest.mark.parametrize("name", ["Blosc", "Zstd", "LZ4"])
def test_what_numcodecs_decompresses_is_bounded_by_the_shape(tmp_path, name):
    numcodecs = pytest.importorskip("numcodecs", reason="needs the numcodecs library (extra zarr)")
    codec = getattr(numcodecs, name)()
    for nbytes in (1 << 26, 4):
        long = bytes(codec.encode(bytes(nbytes)))
        folder = folder_of(tmp_path / str(nbytes), {"0.0": long, "0.1": long}, compressor=codec.get_config())
        with pytest.raises(CorruptError, match=r"the 48 bytes"):
            dist_ckpt.load_plain_tensors(folder)
    cut = two_chunks(lambda data: bytes(codec.encode(data))[:-3])
    with pytest.raises(CorruptError, match=r"w/0\.0"):
        dist_ckpt.load_plain_tensors(folder_of(tmp_path / "cut", cut, compressor=codec.get_config()))


@pytest.mark.parametrize("name", ["blosc", "zstd", "lz4"])
def test_without_the_library_its_codecs_say_what_to_install(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, f"numcodecs.{name}", None)
    folder = folder_of(tmp_path, two_chunks(bytes), compressor={"id": name})
    with pytest.raises(MismatchError, match=rf"{name}.*sixfold-dist-ckpt\[zarr\]"):
        dist_ckpt.load_plain_tensors(folder)


def with_an_absent_chunk(path, dtype, **header):
    """Two chunks of four elements, of which the second was never written."""
    parts = [ShardedTensor.from_rank_offsets("w", torch.ones(4, dtype=dtype), (0, i, 2)) for i in range(2)]
    dist_ckpt.save({"w": parts}, path, ("zarr", 1))
    content = json.loads((path / "w/.zarray").read_text()) | header
    (path / "w/.zarray").write_text(json.dumps(content))
    (path / "w/1").unlink()
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fill", [None, 0.0, "NaN"])
def test_a_chunk_that_is_absent_is_damage_and_no_fill_value(tmp_path, fill):
    with pytest.raises(CorruptError, match=r"names 2 chunks|w/1 is missing"):
        dist_ckpt.load_plain_tensors(with_an_absent_chunk(tmp_path / "c", torch.float32, fill_value=fill))


@pytest.mark.filterwarnings("ignore")
def test_a_chunk_that_claims_more_than_its_array_is_not_decompressed(tmp_path):
    """A file of some kilobytes must not take gigabytes: what is decompressed is bounded by the array."""
    path = with_an_absent_chunk(tmp_path / "c", torch.float32, chunks=[1 << 28], compressor={"id": "zlib"})
    with pytest.raises(CorruptError, match="larger than the array"):
        dist_ckpt.load_plain_tensors(path)
    (path / "w/0").write_bytes(zlib.compress(bytes(400)))
    header = json.loads((path / "w/.zarray").read_text()) | {"chunks": [100]}
    (path / "w/.zarray").write_text(json.dumps(header))
    assert dist_ckpt.load_plain_tensors(path)["w"].tolist() == [0.0] * 8  # padded, as zarr writes small arrays
