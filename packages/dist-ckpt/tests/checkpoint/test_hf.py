"""Hugging Face folders: safetensors, in one file or by an index, loaded by any layout through the usual load."""

import json
import shutil
import struct

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import dcp_load
from dist_ckpt_helpers import Cut, expected_values, flat_shards, flip_byte, one
from torch.distributed.checkpoint import HuggingFaceStorageReader

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CorruptError,
    MismatchError,
    ShardedTensor,
    StorageError,
    StrictHandling,
    UnsafeError,
    dcp,
    tools,
)
from sixfold.dist_ckpt.stores import MemoryStore

safe = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")


def tensors():
    torch.manual_seed(0)
    return {
        "model.embed.weight": torch.randn(16, 6),
        "model.layers.0.q.weight": torch.randn(8, 6).to(torch.bfloat16),
        "model.layers.0.norm.weight": torch.randn(6).half(),
        "model.scale": torch.tensor(2.5),
        "model.ids": torch.arange(5),
        "model.mask": torch.tensor([True, False, True]),
        "model.eight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "model.none": torch.zeros(0, 3),
    }


def others(folder):
    """What else lies in such a folder."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"\x00" * 100)
    (folder / "README.md").write_text("# a model")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"x")


def make(folder, files):
    folder.mkdir()
    whole = tensors()
    if files == 1:
        safe.save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
        weight_map = {key: names[number % files] for number, key in enumerate(whole)}
        for name in names:
            part = {key: whole[key] for key, place in weight_map.items() if place == name}
            safe.save_file(part, folder / name, metadata={"format": "pt"})
        index = {"metadata": {"total_size": sum(t.nbytes for t in whole.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    others(folder)
    return folder


@pytest.fixture(params=[1, 3], ids=["one file", "three files"], scope="module")
def model(request, tmp_path_factory):
    """Read only."""
    return make(tmp_path_factory.mktemp("hf") / "model", request.param)


@pytest.fixture
def folder(model, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(model, tmp_path / "m")


def file_of(folder, key):
    index = folder / "model.safetensors.index.json"
    return folder / (json.loads(index.read_text())["weight_map"][key] if index.exists() else "model.safetensors")


def bitwise(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_all_tensors_load_whole_and_in_place(model):
    asked = {key: one(key, torch.zeros_like(value)) for key, value in tensors().items()}
    loaded = dist_ckpt.load(asked, model)
    assert loaded.keys() == asked.keys()  # nothing of tokenizers and configurations
    for key, value in tensors().items():
        assert torch.equal(loaded[key].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), key
        assert loaded[key].data_ptr() == asked[key].data.data_ptr()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("key", ["model.embed.weight", "model.layers.0.q.weight"])
def test_rows_and_columns_are_cut_from_whole_tensors(model, key, axis):
    whole = tensors()[key]
    parts = [part.contiguous() for part in whole.chunk(2, dim=axis)]
    asked = [ShardedTensor.from_rank_offsets(key, torch.zeros_like(p), (axis, i, 2)) for i, p in enumerate(parts)]
    loaded = dist_ckpt.load({"w": asked}, model)["w"]
    assert all(map(torch.equal, loaded, parts))


def test_flattened_ranges_are_cut_from_whole_tensors(model):
    whole, cut = tensors()["model.embed.weight"], Cut(0, 2, (0, 5, 5, 31, 48))
    shards = flat_shards("model.embed.weight", whole, cut, fill=False)
    loaded = dist_ckpt.load({"w": shards}, model)["w"]
    assert all(map(torch.equal, loaded, expected_values(whole, cut)))


def test_plain_tensors_and_modules_load_by_the_names_of_their_places(model):
    """A model's state dict as it is, on one rank: names of places are names of tensors, as in DCP."""
    state = {"model": {"embed": {"weight": torch.zeros(16, 6)}, "ids": torch.zeros(5, dtype=torch.int64)}}
    loaded = dist_ckpt.load(state, model)
    assert torch.equal(loaded["model"]["embed"]["weight"], tensors()["model.embed.weight"])
    assert torch.equal(loaded["model"]["ids"], torch.arange(5))


def test_names_shapes_and_dtypes_are_listed(model):
    found = dist_ckpt.load_tensors_metadata(model)
    expected = {key: (tuple(value.shape), value.dtype) for key, value in tensors().items()}
    assert {key: (record.global_shape, record.dtype) for key, record in found.items()} == expected
    assert all(record.data is None for record in found.values())
    assert set(dist_ckpt.load_sharded_metadata(model)) == set(expected)


def test_plain_tensors_are_all_tensors(model):
    found = dist_ckpt.load_plain_tensors(model)
    assert found.keys() == tensors().keys()
    assert all(bitwise(found[key].view(-1), value.view(-1)) for key, value in tensors().items())


def test_inspect_lists_the_tensors_and_their_files(model):
    found = tools.inspect(model)
    expected = {key: (str(v.dtype).removeprefix("torch."), list(v.shape), v.nbytes) for key, v in tensors().items()}
    assert {t["key"]: (t["dtype"], list(t["shape"]), t["nbytes"]) for t in found["tensors"]} == expected
    assert found["nbytes"] == sum(value.nbytes for value in tensors().values())
    assert found["backend"] == "safetensors"
    assert found["integrity"] is False
    assert {file["name"] for file in found["files"]} >= {path.name for path in model.glob("*.safetensors")}
    assert "tokenizer.model" not in {file["name"] for file in found["files"]}


def test_verify_and_diff_and_convert_take_the_folder(model, tmp_path):
    assert tools.verify(model)["problems"] == []
    tools.convert(model, tmp_path / "c", to="torch_dist")
    assert tools.verify(tmp_path / "c")["ok"]
    assert tools.diff(model, tmp_path / "c")["equal"]
    found = dist_ckpt.load_plain_tensors(tmp_path / "c")
    assert torch.equal(found["model.embed.weight"], tensors()["model.embed.weight"])


def test_what_the_package_exports_it_reads(model, tmp_path):
    tools.convert(model, tmp_path / "c", to="torch_dist")
    tools.convert(tmp_path / "c", tmp_path / "h", to="safetensors", max_shard_bytes=300)
    assert (tmp_path / "h" / "model.safetensors.index.json").exists()
    assert tools.diff(model, tmp_path / "h")["equal"]


def test_dtypes_follow_the_policy(model):
    def load(key, dtype, **options):
        return dist_ckpt.load({"w": one(key, torch.zeros(tensors()[key].shape, dtype=dtype))}, model, **options)["w"]

    wide = load("model.layers.0.q.weight", torch.float32)  # every bfloat16 survives
    assert torch.equal(wide, tensors()["model.layers.0.q.weight"].float())
    with pytest.raises(MismatchError, match=r"model\.embed\.weight"):
        load("model.embed.weight", torch.bfloat16)
    with pytest.raises(MismatchError, match=r"model\.layers\.0\.q\.weight"):
        load("model.layers.0.q.weight", torch.float32, dtype_policy="strict")
    with pytest.warns(UserWarning, match=r"model\.embed\.weight"):
        narrow = load("model.embed.weight", torch.bfloat16, dtype_policy="cast")
    assert torch.equal(narrow, tensors()["model.embed.weight"].to(torch.bfloat16))


def test_missing_and_unexpected_keys_follow_strict(model):
    asked = {"a": one("model.scale", torch.zeros(())), "b": one("model.absent", torch.zeros(2))}
    with pytest.raises(MismatchError, match=r"model\.absent"):
        dist_ckpt.load(asked, model)
    loaded, missing, unexpected = dist_ckpt.load(asked, model, strict=StrictHandling.RETURN_ALL)
    assert loaded == {"a": torch.tensor(2.5)}
    assert (missing, unexpected) == (set(tensors()) - {"model.scale"}, {"model.absent"})
    with pytest.raises(MismatchError, match=r"model\.ids"):
        dist_ckpt.load({"a": one("model.scale", torch.zeros(()))}, model, strict="raise_all")


def test_another_shape_is_named(model):
    with pytest.raises(MismatchError, match=r"model\.embed\.weight.*\(16, 6\)"):
        dist_ckpt.load({"w": one("model.embed.weight", torch.zeros(16, 7))}, model)


def test_torchs_load_reads_the_folder_through_the_reader_as_through_its_own(model):
    ours, theirs = ({key: torch.zeros_like(value) for key, value in tensors().items()} for _ in range(2))
    dcp_load(ours, dcp.Reader(model))
    dcp_load(theirs, HuggingFaceStorageReader(str(model)))
    for key, value in tensors().items():
        assert bitwise(theirs[key].view(-1), value.view(-1)), key
        assert bitwise(ours[key].view(-1), value.view(-1)), key
    assert isinstance(dcp.Reader(model).read_metadata(), torch_dcp.Metadata)


def header_of(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path, header, body):
    """Write the file anew; ``header`` is JSON's value, or the bytes that stand there."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def load_all(folder):
    return dist_ckpt.load({key: one(key, torch.zeros_like(value)) for key, value in tensors().items()}, folder)


KEY = "model.embed.weight"


def reaching(header, body):
    header[KEY]["data_offsets"][1] += 4 * len(body)


def backwards(header, body):
    header[KEY]["data_offsets"].reverse()


def overlapping(header, body):
    header["model.copy"] = header[KEY]


def another_size(header, body):
    header[KEY]["shape"] = [17, 6]


def unknown_dtype(header, body):
    header[KEY]["dtype"] = "Q9"


def negative(header, body):
    header[KEY]["shape"] = [-16, -6]


def enormous(header, body):
    header[KEY]["shape"] = [2**62, 2**62]


def no_places(header, body):
    del header[KEY]["data_offsets"]


CHANGES = [reaching, backwards, overlapping, another_size, unknown_dtype, negative, enormous, no_places]


@pytest.mark.parametrize("change", CHANGES)
def test_a_header_that_lies_is_damage_and_names_the_file(folder, change):
    path = file_of(folder, KEY)
    header, body = header_of(path)
    change(header, body)
    with_header(path, header, body)
    with pytest.raises(CorruptError, match=path.name):
        load_all(folder)
    assert not tools.verify(folder)["ok"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        b"\xff" * 64,
        struct.pack("<Q", 2**40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": 1}}',
        struct.pack("<Q", 40) + b"[" * 40,
        struct.pack("<Q", 4) + b"\xff\xfe{}",
    ],
)
def test_a_file_that_is_no_safetensors_is_damage_at_once(folder, content):
    path = file_of(folder, KEY)
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=path.name):
        load_all(folder)
    with pytest.raises(CorruptError, match=path.name):
        dist_ckpt.load_tensors_metadata(folder)


def test_a_truncated_file_is_named_before_a_tensor_is_touched(folder):
    path = file_of(folder, KEY)
    path.write_bytes(path.read_bytes()[:-3])
    asked = {key: one(key, torch.zeros_like(value)) for key, value in tensors().items()}
    with pytest.raises(CorruptError, match=path.name):
        dist_ckpt.load(asked, folder)
    assert all(not record.data.view(torch.uint8).any() for record in asked.values() if record.data.dim())


def test_a_key_that_the_index_places_wrongly_is_damage(tmp_path):
    folder = make(tmp_path / "m", 3)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][KEY] = next(n for n in index["weight_map"].values() if n != index["weight_map"][KEY])
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptError, match=r"model\.embed\.weight"):
        load_all(folder)


def test_a_file_that_the_index_names_and_that_is_not_there_is_named(tmp_path):
    folder = make(tmp_path / "m", 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"model-00002-of-00003\.safetensors"):
        load_all(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b.safetensors", "a\0b"])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    folder = make(tmp_path / "m", 3)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][KEY] = name
    path.write_text(json.dumps(index))
    with pytest.raises(UnsafeError, match="leaves the folder"):
        load_all(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_a_mangled_index_is_damage(tmp_path, text):
    folder = make(tmp_path / "m", 3)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptError, match=r"model\.safetensors\.index\.json"):
        load_all(folder)


def test_a_folder_is_not_written_into_by_a_save(folder):
    """It holds more than checkpoint files: a save to it would lose the tokenizer."""
    with pytest.raises(dist_ckpt.StorageError):
        dist_ckpt.save({"w": one("w", torch.ones(2))}, folder)
    assert (folder / "tokenizer.json").exists()


def test_a_checkpoint_of_our_own_beside_safetensors_files_is_still_the_checkpoint(tmp_path):
    dist_ckpt.save({"w": one("w", torch.ones(2)), "it": 3}, tmp_path / "c")
    safe.save_file({"w": torch.zeros(2)}, tmp_path / "c" / "model.safetensors")
    try:
        found = dist_ckpt.load({"w": one("w", torch.zeros(2))}, tmp_path / "c")
    except CorruptError as error:  # an extra file is damage, as of any name
        assert "model.safetensors" in str(error)  # noqa: PT017
    else:
        assert found["w"].tolist() == [1, 1]


def test_a_flipped_bit_cannot_be_found_but_its_place_can(folder):
    """Such files have no digests: this says what is not promised, and that ``verify`` does not claim it."""
    path = file_of(folder, KEY)
    flip_byte(path, path.stat().st_size - 2)
    assert tools.inspect(folder)["integrity"] is False
    load_all(folder)


@pytest.mark.parametrize("kind", ["safetensors", "zarr"])
def test_a_folder_without_digests_in_a_store_that_is_written_over_meanwhile_is_told(kind, tmp_path):
    """Files of equal size: only what the store says of them tells them apart."""

    def files(value):
        if kind == "safetensors":
            parts = {f"model-{i}.safetensors": safe.save({f"w{i}": torch.full((4096,), value)}) for i in range(2)}
            places = {f"w{i}": f"model-{i}.safetensors" for i in range(2)}
            index = json.dumps({"metadata": {}, "weight_map": places})
            return parts | {"model.safetensors.index.json": index.encode()}
        folder = tmp_path / str(value)
        with pytest.warns(UserWarning, match="zarr"):
            dist_ckpt.save({f"w{i}": one(f"w{i}", torch.full((4096,), value)) for i in range(2)}, folder, ("zarr", 1))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    class Replaced(MemoryStore):
        def read(self, name, start=0, stop=None):
            data = super().read(name, start, stop)
            if len(data) > 10_000 or start:
                self.files.update(second)
            return data

    store, first, second = Replaced(), files(1.0), files(2.0)
    assert [*map(len, first.values())] == [*map(len, second.values())]
    store.files = dict(first)
    with pytest.raises(StorageError, match="this store in memory was replaced or removed while it was read"):
        dist_ckpt.load({f"w{i}": one(f"w{i}", torch.zeros(4096)) for i in range(2)}, store)
