"""The compact manifest: what is written is read back, what is asked for is looked at, and nothing in it is believed."""

import json
import random
import struct
import zlib
from pathlib import Path

import pytest
import torch
from dist_ckpt_helpers import EXAMPLES, as_of_0_1_0, in_child, one, peak_growth_mib
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, UnsafeError
from sixfold.dist_ckpt.checkpoint import opening
from sixfold.dist_ckpt.formats import compact_manifest, dcp_pickle, metadata
from sixfold.dist_ckpt.formats.dcp_pickle import Index
from sixfold.dist_ckpt.geometry.box import Box
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, StoredChunk, StoredTensor
from sixfold.dist_ckpt.tools import commands as tools

SIZE = 1 << 50
FRAMES = st.builds(ByteRange, st.just("o.distcp"), st.integers(0, 99), st.integers(0, 99))
KEYS = st.text(st.characters(codec=None), max_size=6)


@st.composite
def grids(draw):
    """A tensor cut into a grid by places on each axis."""
    shape, cuts = [], []
    for _ in range(draw(st.integers(0, 4))):
        lengths = draw(st.lists(st.integers(1, 1 << 35), min_size=1, max_size=5))
        cuts.append([(sum(lengths[:i]), length) for i, length in enumerate(lengths)])
        shape.append(sum(lengths))
    boxes = [((), ())]
    for axis in cuts:
        boxes = [((*o, start), (*s, length)) for o, s in boxes for start, length in axis]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn]))
    if draw(st.booleans()):
        return StoredTensor(dtype, tuple(shape), ())
    frames = [ByteRange(f"__{n % 3}_0.distcp", 7 * n, draw(st.integers(0, 1 << 40))) for n in range(len(boxes))]
    return StoredTensor(dtype, tuple(shape), tuple(StoredChunk(Box(*b), f) for b, f in zip(boxes, frames, strict=True)))


def written(manifest):
    return bytearray(b"".join(compact_manifest.encode(Index.of(manifest))))


def read(data, check=lambda start, stop: None):
    return compact_manifest.read(memoryview(data), lambda name: SIZE, check)


def plain(manifest):
    """All of it, one by one."""
    tensors = {key: (t.dtype, tuple(t.shape), sorted(t.chunks)) for key, t in manifest.tensors.items()}
    return tensors, dict(manifest.objects), manifest.save_id


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.dictionaries(KEYS, grids(), max_size=6),
    st.dictionaries(
        KEYS, st.builds(ByteRange, st.just("o.distcp"), st.integers(0, 99), st.integers(0, 99)), max_size=3
    ),
    st.sampled_from(["", "0123456789abcdef"]),
    st.randoms(use_true_random=False),
)
@pytest.mark.slow
def test_what_is_written_is_read_back_and_a_box_finds_the_chunks_that_it_shares_elements_with(
    tensors, objects, id, rng
):
    manifest = Manifest(tensors, objects, id or None)
    found = read(written(manifest))
    assert plain(found) == plain(manifest)
    assert list(found.tensors) == sorted(tensors, key=lambda key: key.encode("utf-8", "surrogatepass"))
    assert "no such key" not in found.tensors and 5 not in found.tensors and len(found.tensors) == len(tensors)
    for key, stored in tensors.items():
        start = tuple(rng.randrange(n) for n in stored.shape)
        wanted = Box(start, tuple(rng.randint(1, n - at) for n, at in zip(stored.shape, start, strict=True)))
        shared = {
            chunk
            for chunk in stored.chunks
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(wanted.offset, wanted.size, chunk.box.offset, chunk.box.size, strict=True)
            )
        }
        for asked in (stored, found.tensors[key]):
            near = list(asked.near(wanted))
            assert shared <= set(near) and len(near) == len(set(near))


def cut(columns, *, axis, tensors=1):
    """Tensors of 8 by 8 for each of ``columns`` chunks, cut along one axis."""
    shape = tuple(8 * columns if axis == d else 8 for d in range(2))
    chunks = [
        StoredChunk(Box(tuple(8 * n if axis == d else 0 for d in range(2)), (8, 8)), ByteRange("f", 300 * n, 300))
        for n in range(columns)
    ]
    return Manifest({f"layer.{n:05}": StoredTensor(torch.int8, shape, tuple(chunks)) for n in range(tensors)}, {}, "id")


def test_an_open_file_makes_no_object_for_a_key_before_it_is_asked_for(monkeypatch):
    made, real = [], compact_manifest._Stored
    monkeypatch.setattr(compact_manifest, "_Stored", lambda key, *rest: made.append(key) or real(key, *rest))
    manifest = read(written(cut(2, axis=0, tensors=500)))
    assert len(manifest.tensors) == 500 and "layer.00501" not in manifest.tensors and made == []
    assert manifest.tensors["layer.00007"].chunk_count == 2 and made == ["layer.00007"]


def test_an_index_without_tensors_is_read_back_in_each_form():
    empty = Manifest({}, {"o/shard_0_1": ByteRange("g", 1, 5)}, "id")
    data = written(empty)
    assert plain(read(data)) == plain(empty)
    text = json.loads(bytes(data[24:])) | {"tensors": {}}  # as the second form has it
    text = json.dumps(text).encode()
    text += b" " * (-len(text) % 8)
    assert plain(read(bytearray(struct.pack("=8s2q", compact_manifest._MAGIC_2, 0, len(text)) + text))) == plain(empty)


@pytest.mark.parametrize(
    "columns",
    [
        [["a", "a"], ["int8"] * 2, [[4, 8]] * 2, [1, 1], [4, 4]],
        [["a", 5], ["int8"] * 2, [[4, 8]] * 2, [1, 1], [4, 4]],
        [["a", ["b"]], ["int8"] * 2, [[4, 8]] * 2, [1, 1], [4, 4]],
        [["a"], ["int8"] * 2, [[4, 8]] * 2, [1, 1], [4, 4]],
        [["a", "b"], ["int8"], [[4, 8]] * 2, [1, 1], [4, 4]],
        [["a", "b"], ["int8", ["int8"]], [[4, 8]] * 2, [1, 1], [4, 4]],
        [["a", "b"], ["int8"] * 2, [[4, 8]], [1, 1], [4, 4]],
        [["a", "b"], ["int8"] * 2, [[4, 8], [4, 8, 2]], [1, 1], [4, 4]],
        [["a", "b"], ["int8"] * 2, [[4, 8], [4, True]], [1, 1], [4, 4]],
        [["a", "b"], ["int8"] * 2, [[4, 8], "48"], [1, 1], [4, 4]],
        [["a", "b"], ["int8"] * 2, [[4, 8], 4], [1, 1], [4, 4]],
        [["a", "b"], ["int8"] * 2, [[4, 8]] * 2, [2], [4, 4]],
        [["a", "b"], ["int8"] * 2, [[4, 8]] * 2, [3, -1], [4, 4]],
        [["a", "b"], ["int8"] * 2, [[4, 8]] * 2, [1.0, 1.0], [4, 4]],
        [["a", "b"], ["int8"] * 2, [[4, 8]] * 2, [1, 2], [4, 4]],
        [["a", "b"], ["int8"] * 2, [[4, 8]] * 2, [1, 1], [4]],
        [["a", "b"], ["int8"] * 2, [[4, 8]] * 2, [1, 1], None],
        [["a", "b"], ["int8"] * 2, [[4, 8]] * 2, [1, 1]],
        5,
    ],
)
def test_columns_that_contradict_themselves_are_corrupt(columns):
    data = written(cut(1, axis=0, tensors=2))
    start = 24 + struct.unpack_from("=8s2q", data)[2]

    def with_columns(columns):
        text = json.dumps(json.loads(bytes(data[24:start])) | {"tensors": columns}).encode()
        text += b" " * (-len(text) % 8)
        return bytearray(struct.pack("=8s2q", compact_manifest.MAGIC, 0, len(text)) + text + data[start:])

    assert len(read(with_columns([["a", "b"], ["int8"] * 2, [[8, 8]] * 2, [1, 1], [4, 4]])).tensors["b"].chunks) == 1
    with pytest.raises(CorruptError):
        read(with_columns(columns))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_load_of_one_box_looks_at_a_few_rows_of_one_tensor(axis):
    looked = []
    data = written(cut(2000, axis=axis, tensors=20))
    manifest = read(data, lambda start, stop: looked.append(stop - start))
    near = manifest.tensors["layer.00007"].near(Box((0, 800) if axis else (800, 0), (8, 8)))
    assert [chunk.frame.offset for chunk in near] == [30_000]
    assert sum(looked) < (2000 * 7 * 8 if axis else 0) + 3000 < len(data) / 18


@pytest.mark.parametrize("form", [1, 2])
def test_earlier_forms_are_read_and_believed_as_little(form, mangled):
    """The files are what 1ae285f9 and e860af97 wrote of this manifest."""
    data = bytearray((Path(__file__).parents[1] / "golden" / f"shard_manifest_{form}.bin").read_bytes())
    column, row = (cut(33, axis=axis).tensors["layer.00000"] for axis in (1, 0))
    alone = StoredTensor(torch.bfloat16, (), (StoredChunk(Box((), ()), ByteRange("g", 7, 1 << 40)),))
    tensors = {"layer.00000": column, "r": row, "\ud800": alone, "": StoredTensor(torch.bool, (3, 0), ())}
    found = read(data)
    assert plain(found) == plain(Manifest(tensors, {"o/shard_0_1": ByteRange("g", 1, 5)}, "0123456789abcdef"))
    for key, place in (("layer.00000", (0, 84)), ("r", (84, 0))):
        assert 3000 in {chunk.frame.offset for chunk in found.tensors[key].near(Box(place, (2, 2)))}
    rng, refused = random.Random(5), 0
    for _ in range(mangled):
        twisted = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            twisted[rng.randrange(8, rng.choice((80, 600, len(data))))] = rng.choice((0, 1, 127, 255))
        try:
            looked_at(read(twisted))
        except (CorruptError, UnsafeError):
            refused += 1
    assert refused > mangled / 3


def looked_at(manifest):
    for key, stored in manifest.tensors.items():
        for chunk in stored.chunks:
            assert chunk.box.within(stored.shape) and chunk.box.volume
            place = chunk.frame
            assert place.file in manifest.files and 0 <= place.offset <= place.offset + place.length <= SIZE, key
        list(stored.near(Box((0,) * len(stored.shape), stored.shape)))
    dict(manifest.objects)


def test_a_mangled_manifest_whose_digest_is_right_gives_our_errors_or_what_lies_inside(mangled):
    whole = cut(30, axis=1, tensors=4)
    objects = {f"o/shard_{n}_3": ByteRange("g", n, 5) for n in range(3)}
    data = written(Manifest(whole.tensors, objects, "0123456789abcdef"))
    looked_at(read(data))
    rng, refused = random.Random(5), 0
    for _ in range(mangled):
        twisted = bytearray(data)
        for _ in range(rng.choice([1, 1, 4])):
            at = 8 * rng.randrange(len(data) // 8) if rng.random() < 0.5 else 8 * rng.randrange(120)
            value = rng.choice([-1, 0, 1, 2, 5, 255, 2**31, 2**62, 2**63 - 1, -(2**63), rng.randrange(2**63)])
            twisted[at : at + 8] = struct.pack("<q", value)
        if rng.random() < 0.1:
            twisted = twisted[: rng.randrange(len(twisted))]
        try:
            looked_at(read(twisted))
        except (CorruptError, UnsafeError):
            refused += 1
    assert refused > mangled / 4


@pytest.mark.parametrize("name", ["..", "a/b", "", "a\nb", "/etc/passwd"])
def test_a_file_name_that_leaves_the_folder_is_unsafe(name):
    chunk = StoredChunk(Box((0,), (4,)), ByteRange(name, 0, 9))
    with pytest.raises(UnsafeError, match="leaves the folder"):
        read(written(Manifest({"w": StoredTensor(torch.int8, (4,), (chunk,))}, {}, None)))


def test_a_dtype_that_is_none_is_corrupt():
    data = written(cut(1, axis=0))
    with pytest.raises(CorruptError, match="no dtype"):
        read(data.replace(b"int8", b"load"))


def test_an_empty_or_foreign_file_is_corrupt():
    for data in (b"", b"x" * 8, bytes(99), b"PK\x03\x04" + bytes(200)):
        with pytest.raises(CorruptError):
            read(bytearray(data))


@pytest.fixture
def folder(tmp_path):
    state = {f"w{n}": one(f"w{n}", torch.arange(4.0) + n) for n in range(3)}
    dist_ckpt.save({**state, "it": 3}, tmp_path / "c")
    return tmp_path / "c"


def load(folder, **options):
    return dist_ckpt.load({"w1": one("w1", torch.zeros(4))}, folder, **options)


def forge(folder, change):
    """Change the manifest and put all digests right."""
    path = folder / compact_manifest.FILE_NAME
    data = change(bytearray(path.read_bytes()))
    path.write_bytes(data)
    content = json.loads((folder / "integrity.json").read_bytes())
    del content["self"]
    content["files"][compact_manifest.FILE_NAME] = {"size": len(data), "digests": [f"{zlib.crc32(data):08x}"]}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["self"] = f"{zlib.crc32(text.encode()):08x}"
    (folder / "integrity.json").write_text(json.dumps(content, sort_keys=True, separators=(",", ":")))


def test_a_load_reads_the_manifest_and_decodes_no_metadata(folder, monkeypatch):
    monkeypatch.setattr(metadata, "decode", None)
    assert load(folder)["w1"].tolist() == [1, 2, 3, 4]
    assert list(dist_ckpt.load_tensors_metadata(folder)) == ["w0", "w1", "w2"]


def test_a_folder_without_it_loads_as_it_did(folder):
    as_of_0_1_0(folder)
    assert load(folder)["w1"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("verify", ["touched", "full", "off"])
def test_a_forged_manifest_is_refused_and_nothing_is_read_beyond_a_file(folder, verify):
    length = (folder / "__0_0.distcp").stat().st_size

    def change(data):
        struct.pack_into("<q", data, len(data) - 8 * (5 + 1), length)  # of the second chunk of three the length
        return data

    forge(folder, change)
    with pytest.raises(CorruptError, match=rf"w1: bytes .* which has {length}"):
        load(folder, verify=verify)
    assert not tools.verify(folder)["ok"]


@pytest.mark.parametrize("verify", ["touched", "full"])
def test_a_flipped_bit_of_the_manifest_is_found(folder, verify):
    path = folder / compact_manifest.FILE_NAME
    intact = path.read_bytes()
    for position in range(0, len(intact), 37):
        data = bytearray(intact)
        data[position] ^= 4
        path.write_bytes(data)
        with pytest.raises(CorruptError, match=r"shard_manifest\.pt"):
            load(folder, verify=verify)


def test_a_large_metadata_is_hashed_by_the_load_and_not_read_at_once(folder, monkeypatch):
    """Its blocks are shared out among the ranks as those of data are."""
    real, seen = opening.checks.Integrity.check_file_bytes, []

    def seen_bytes(self, path, data):
        seen.append(path.name)
        return real(self, path, data)

    monkeypatch.setattr(opening.checks.Integrity, "check_file_bytes", seen_bytes)
    integrity = opening.open_checkpoint(folder).integrity
    assert ".metadata" in seen and opening.open_checkpoint(folder).unread == ()
    monkeypatch.setattr(opening, "SMALL_BYTES", 100)
    seen.clear()
    expected = ByteRange(".metadata", 0, integrity.files[".metadata"].size)
    assert opening.open_checkpoint(folder).unread == (expected,) and ".metadata" not in seen
    data = bytearray((folder / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CorruptError, match=r"\.metadata"):
        load(folder)


def many(chunks):
    """An index of one tensor in ``chunks`` chunks, whose rows are not sorted."""
    number_N = torch.randperm(chunks)
    zeros_N = torch.zeros_like(number_N)
    return Index(
        tensors=[("w", torch.bfloat16, (chunks * 4, 64))],
        tensor_N=zeros_N,
        offsets_ND=torch.stack([number_N * 4, zeros_N], 1),
        sizes_ND=torch.stack([zeros_N + 4, zeros_N + 64], 1),
        files=["__0_0.distcp"],
        file_N=zeros_N,
        start_N=number_N * 1088,
        length_N=zeros_N + 1088,
        objects={},
        save_id="f" * 16,
        order=(number_N.argsort(),) * 2,
    )


@pytest.mark.parametrize("encode", [metadata.encode_parts, compact_manifest.encode])
@pytest.mark.slow
def test_the_index_files_are_written_in_bounded_memory(encode):
    """200,000 chunks make 30 and 11 MB; a batch of 8,192 rows is there at a time."""

    def grown():
        dcp_pickle.BATCH_ROWS = 1 << 13
        index = many(200_000)
        for _ in encode(many(100)):
            pass
        total = 0

        def stream():
            nonlocal total
            for part in encode(index):
                total += len(part)

        return peak_growth_mib(stream), total / 2**20

    grown_mib, total_mib = in_child(grown)
    assert total_mib > 10
    assert grown_mib < 9, f"{grown_mib:.1f} MiB for a file of {total_mib:.1f}"


def test_a_number_of_the_text_that_is_none_is_corrupt():
    data = written(cut(2, axis=0, tensors=3))
    for wrong in (b"[16,8.0]", b"[-6,  8]", b'["6",8]', b"[[1],8]", b"[1e3,8]", b"[null8]"):
        with pytest.raises(CorruptError):
            read(data.replace(b"[16,8]", wrong[: len(b"[16,8]")].ljust(len(b"[16,8]"))))
