"""Saves with ``compress="zstd"``: every bit, no chunk decoded in vain, torch's reader, links, conversion, damage."""

import pickle
import shutil
import sys
from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import dcp_load, dcp_save
from dist_ckpt_helpers import flip_byte, one, peak_growth_mib
from plain_tensors_helpers import all_dtypes, assert_same, by_torch, error_of
from since_helpers import data_files, new_bytes, shared

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CheckpointError,
    CheckpointManager,
    CorruptError,
    MismatchError,
    ShardedObject,
    ShardedTensor,
    dcp,
    retention,
    stores,
    tools,
)
from sixfold.dist_ckpt.formats import zstd
from sixfold.dist_ckpt.save_load import saving
from sixfold.dist_ckpt.tools.conversion import remove_sharded_tensors

zstandard = pytest.importorskip("zstandard", reason="needs the module zstandard (extra zstd)")
BLOCK = 4 << 20


def saved(state, folder, **options):
    dist_ckpt.save(state, folder, group=None, compress="zstd", **options)
    return folder


def weights(seed=0, rows=900):
    """What a training run has: weights and moments, of which one tensor is longer than a block and some are tiny."""
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(rows, 2000, generator=generator) * 0.02
    return {
        "large": large,
        "half": large[:300].bfloat16(),
        "columns": torch.randn(700, 90, generator=generator).t(),
        "zeros": torch.zeros(3_000_000, dtype=torch.uint8),
        "noise": torch.randint(0, 256, (70_000,), generator=generator, dtype=torch.uint8),
        "norm": torch.ones(64),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 4),
    }


def records(tensors):
    return {key: one(key, tensor) for key, tensor in tensors.items()}


def loaded(tensors, folder, **options):
    asked = {key: one(key, torch.empty_like(value)) for key, value in tensors.items()}
    found = dist_ckpt.load(asked, folder, group=None, **options)
    return {key: found[key] for key in tensors}


def entries(folder):
    """What torch's index says of each part: key, file, place, length, transforms."""
    found = torch_dcp.FileSystemReader(folder).read_metadata().storage_data.items()
    return [(i.fqn, s.relative_path, s.offset, s.length, s.transform_descriptors) for i, s in found]


def compressed_files(folder):
    return {name for _, name, *_, transforms in entries(folder) if transforms}


@pytest.mark.parametrize("metadata", ["torch", "compact"])
@pytest.mark.parametrize("verify", ["touched", "full", "off"])
def test_every_dtype_and_size_comes_back_bit_for_bit(tmp_path, metadata, verify):
    tensors = {**all_dtypes(), **weights()}
    saved({**records(tensors), "o": ShardedObject("o", [1, "x"], (1,), (0,)), "it": 5}, tmp_path, metadata=metadata)
    assert_same(loaded(tensors, tmp_path, verify=verify), tensors)
    assert dist_ckpt.load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path, group=None) == {"o": [1, "x"], "it": 5}


def test_torch_reads_every_bit(tmp_path):
    tensors = {key: value for key, value in {**all_dtypes(), **weights()}.items() if value.numel()}
    saved(tensors, tmp_path)
    assert_same(by_torch(tmp_path), tensors)


def test_each_chunk_is_one_zstd_frame_of_a_block_at_most_and_files_are_of_one_kind(tmp_path):
    tensors = weights()
    saved(tensors, tmp_path)
    kinds, rows = {}, Counter()
    for key, name, at, length, transforms in entries(tmp_path):
        data = (tmp_path / name).read_bytes()[at : at + length]
        kinds.setdefault(name, set()).add(str(transforms))
        if transforms:
            rows[key] += 1
            assert transforms == ["stream.zstd/1"] and zstandard.frame_content_size(data) <= BLOCK + 8192
            assert zstandard.get_frame_parameters(data).has_checksum
        else:
            assert data[:4] == b"PK\x03\x04" and tensors[key].nbytes < 1 << 14
    assert all(len(found) == 1 for found in kinds.values()) and len(kinds) == 2
    assert rows == {"large": 2, "half": 1, "columns": 1, "zeros": 1, "noise": 1}


def test_what_does_not_shrink_takes_a_thousandth_more_and_zeros_take_nothing(tmp_path):
    noise = torch.randint(0, 256, (9_000_000,), dtype=torch.uint8)
    for name, tensor, most in (("noise", noise, 9_009_000), ("zeros", torch.zeros(9_000_000), 20_000)):
        saved({"w": one("w", tensor)}, tmp_path / name)
        assert sum(path.stat().st_size for path in data_files(tmp_path / name).values()) <= most


def test_without_it_every_file_is_what_it_was(tmp_path, monkeypatch):
    """Of the two index files too; there is no id in them but that of the save."""
    monkeypatch.setattr(saving.secrets, "token_hex", lambda n: "0" * 2 * n)
    tensors = records(weights())
    dist_ckpt.save(tensors, tmp_path / "a", group=None)
    dist_ckpt.save(tensors, tmp_path / "b", group=None, compress=None)
    assert b"stream.zstd" not in (tmp_path / "a" / ".metadata").read_bytes()
    assert (tmp_path / "a" / "shard_manifest.pt").read_bytes()[:8] == b"6FCKPT\x00\x03"
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_versions_that_know_no_compression_refuse_the_manifest(tmp_path):
    """They compare its first bytes with those that they know, and say that they do not read it."""
    saved(records(weights()), tmp_path)
    assert (tmp_path / "shard_manifest.pt").read_bytes()[:8] == b"6FCKPT\x00\x04"


def test_a_few_rows_are_decoded_from_the_blocks_that_hold_them(tmp_path, monkeypatch):
    tensor = torch.randn(16 * 1024, 1024)  # sixteen blocks of 1,024 rows
    saved({"w": one("w", tensor)}, tmp_path)
    decoded, decompress = [], zstd.decompress
    monkeypatch.setattr(zstd, "decompress", lambda *given: decoded.append(0) or decompress(*given))
    rows = ShardedTensor(
        "w", torch.empty(1200, 1024), torch.float32, (1200, 1024), tuple(tensor.shape), (5000, 0), None
    )
    found = dist_ckpt.load({"w": rows}, tmp_path, group=None, validate_access_integrity=False)["w"]
    assert torch.equal(found, tensor[5000:6200]) and len(decoded) == 3


@pytest.mark.parametrize("cut", ["columns", "flattened", "other dtype", "prepended", "one row", "odd rows"])
def test_any_part_of_any_form_of_a_tensor_comes_back(tmp_path, cut):
    whole = (torch.arange(1_800_000) % 30_000).float().view(3, 600, 1000)
    record, asked = one("w", whole), one("w", torch.empty(3, 600, 1000))
    expected = whole
    if cut == "columns":
        asked = ShardedTensor("w", torch.empty(3, 600, 7), torch.float32, (3, 600, 7), (3, 600, 1000), (0, 0, 90), None)
        expected = whole[:, :, 90:97]
    elif cut == "flattened":
        flat, shape = slice(11, 1_700_003), whole.shape
        record = [
            ShardedTensor("w", whole.flatten()[a:b].clone(), torch.float32, shape, shape, (0, 0, 0), None,
                          flattened_range=slice(a, b))
            for a, b in ((0, 5), (5, 1_500_001), (1_500_001, 1_800_000))
        ]  # fmt: skip
        asked = ShardedTensor(
            "w", torch.empty(1_699_992), torch.float32, shape, shape, (0, 0, 0), None, flattened_range=flat
        )
        expected = whole.flatten()[flat]
    elif cut == "other dtype":
        asked, expected = one("w", torch.empty(3, 600, 1000, dtype=torch.float64)), whole.double()
    elif cut == "prepended":
        record = [ShardedTensor.from_rank_offsets("w", whole[i], (0, i, 3), prepend_axis_num=1) for i in range(3)]
    elif cut == "one row":
        whole = expected = whole.reshape(1, -1)
        record, asked = one("w", whole), one("w", torch.empty(1, 1_800_000))
    elif cut == "odd rows":
        whole = expected = whole.reshape(36, 50_000)[1::2]
        record, asked = one("w", whole), one("w", torch.empty(18, 50_000))
    saved({"w": record}, tmp_path)
    assert compressed_files(tmp_path)
    found = dist_ckpt.load({"w": asked}, tmp_path, group=None, validate_access_integrity=False)["w"]
    assert torch.equal(found, expected)
    assert torch.equal(by_torch(tmp_path)["w"], whole)


@pytest.mark.parametrize("way", ["memory", "fsspec", "async_save", "manager", "check_finite"])
def test_every_way_of_a_save_compresses(tmp_path, way):
    tensors, place = weights(), tmp_path / "c"
    if way == "memory":
        place = stores.MemoryStore(tmp_path.name)
    elif way == "fsspec":
        pytest.importorskip("fsspec", reason="needs fsspec (extra fsspec)")
        place = f"memory://{tmp_path.name}/compressed"
    state = records(tensors)
    if way == "async_save":
        dist_ckpt.async_save(state, place, group=None, compress="zstd").wait()
    elif way == "manager":
        place = retention.step_path(tmp_path, 7)
        with CheckpointManager(tmp_path, group=None, compress="zstd") as manager:
            manager.save(7, state)
    else:
        saved(state, place, check_finite=way == "check_finite")
    assert tools.inspect(place)["compress"] == "zstd" and tools.verify(place)["ok"]
    assert_same(loaded(tensors, place), tensors)
    files = {file["name"]: file["nbytes"] for file in tools.inspect(place)["files"]}
    stored = sum(nbytes for name, nbytes in files.items() if name.endswith(".distcp"))
    assert stored < 0.8 * sum(tensor.nbytes for tensor in tensors.values())


def test_progress_counts_the_bytes_of_values(tmp_path):
    told = []
    saved(records(weights()), tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[0][0] == 0 and told[-1][0] == told[-1][1]
    assert len({total for _, total in told}) == 1 and any(0 < done < total for done, total in told)


def test_nan_is_told_with_its_place(tmp_path):
    tensor = torch.zeros(2000, 2000)
    tensor[1500, 3] = torch.nan
    with pytest.raises(dist_ckpt.ShardingError, match=r"w\[1500, 3\] is nan"):
        saved({"w": one("w", tensor)}, tmp_path / "c", check_finite=True)
    assert not (tmp_path / "c").exists()


# ---- faults


@pytest.mark.parametrize("given", ["lz4", "", True, 3])
def test_another_word_is_refused(tmp_path, given):
    with pytest.raises(CheckpointError, match="it is None or 'zstd'"):
        dist_ckpt.save({}, tmp_path / "c", group=None, compress=given)


def test_another_format_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="writes by itself"):
        saved({"w": one("w", torch.ones(4))}, tmp_path / "c", sharded_strategy=("zarr", 1))


def test_a_load_without_the_module_is_told_what_to_install_before_a_tensor_is_touched(tmp_path, monkeypatch):
    tensors = weights()
    saved({**records(tensors), "it": 5}, tmp_path)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    target = torch.full_like(tensors["large"], 3.0)
    with pytest.raises(MismatchError, match=r"pip install 'sixfold-dist-ckpt\[zstd\]'"):
        dist_ckpt.load({"norm": one("norm", torch.empty(64)), "large": one("large", target)}, tmp_path, group=None)
    assert bool((target == 3.0).all())
    assert torch.equal(
        dist_ckpt.load({"norm": one("norm", torch.empty(64))}, tmp_path, group=None)["norm"], torch.ones(64)
    )
    assert dist_ckpt.load_common_state_dict(tmp_path)["it"] == 5
    assert tools.verify(tmp_path)["ok"] and tools.inspect(tmp_path)["compress"] == "zstd"
    dist_ckpt.save({"w": torch.ones(4)}, tmp_path / "next", group=None, since=tmp_path)


def by_torch_compressed(tensors, folder):
    """As torch's own writer compresses: whole chunks, without their lengths."""
    extension = torch_dcp._extension.ZStandard()
    dcp_save(tensors, torch_dcp.FileSystemWriter(folder, _extensions=[extension]), no_dist=True)
    return folder


def test_what_torch_has_compressed_loads(tmp_path):
    tensors = {**weights(rows=3000), "lists": [1, {"a": "b"}]}
    by_torch_compressed(tensors, tmp_path)
    wanted = {key: value for key, value in tensors.items() if key != "lists"}
    assert_same(loaded(wanted, tmp_path), wanted)
    assert tools.verify(tmp_path)["ok"] and tools.inspect(tmp_path)["compress"] == "zstd"
    blank = {key: torch.zeros_like(value) for key, value in wanted.items()} | {"lists": [0, {"a": ""}]}
    found = dcp_load(blank, dcp.Reader(tmp_path), no_dist=True)
    assert found.pop("lists") == [1, {"a": "b"}]
    assert_same(found, wanted)
    tools.convert(tmp_path, tmp_path / "plain", to="torch_dist")
    assert tools.inspect(tmp_path / "plain")["compress"] is None and tools.diff(tmp_path, tmp_path / "plain")["equal"]


def test_torchs_reader_gets_our_transforms_from_the_door(tmp_path):
    saved(weights(), tmp_path)
    theirs = {key: value.transform_descriptors for key, value in
              torch_dcp.FileSystemReader(tmp_path).read_metadata().storage_data.items()}  # fmt: skip
    ours = dcp.Reader(tmp_path).read_metadata().storage_data
    assert {key: info.transform_descriptors for key, info in ours.items()} == theirs


def test_a_file_with_parts_of_both_kinds_is_refused(tmp_path):
    by_torch_compressed(weights(), tmp_path)
    index = torch_dcp.FileSystemReader(tmp_path).read_metadata()
    next(iter(index.storage_data.values())).transform_descriptors = None
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(MismatchError, match="whose parts are all alike"):
        loaded({"norm": torch.ones(64)}, tmp_path)


def test_every_flip_of_what_torch_has_compressed_is_found_or_harmless(tmp_path):
    """Without checksums of ours the CRC-32 of the frame inside finds it."""
    tensors = {"w": torch.randn(900)}
    by_torch_compressed(tensors, tmp_path)
    (path,) = data_files(tmp_path).values()
    intact, refused = path.read_bytes(), 0
    for position in range(0, len(intact), 29):
        flip_byte(path, position)
        try:
            assert torch.equal(loaded(tensors, tmp_path)["w"], tensors["w"]), position
        except CorruptError:
            refused += 1
        path.write_bytes(intact)
    assert refused > 0.8 * len(intact) / 29


def test_without_checksums_the_one_of_each_frame_finds_every_flip(tmp_path):
    tensors = {"w": torch.randn(9000)}
    saved(records(tensors), tmp_path)
    ((path, length),) = {(tmp_path / name, at + length) for _, name, at, length, _ in entries(tmp_path)}
    intact, harmless = path.read_bytes(), 0
    assert len(intact) == length
    for position in range(0, length, 401):
        flip_byte(path, position)
        found = []
        told = error_of(lambda found=found: found.append(loaded(tensors, tmp_path, verify="off")["w"]))
        if not told:
            harmless += 1
            assert torch.equal(found[0], tensors["w"]), position
        assert not told or f"{path.name}: w" in told
        assert path.name in error_of(lambda: loaded(tensors, tmp_path)) and not tools.verify(tmp_path)["ok"]
        path.write_bytes(intact)
    assert harmless < 3, "unused bits of the head"


FRAMES = {
    "cut": lambda data, inside: data[:-100],
    "of zeros": lambda data, inside: bytes(len(data)),
    "longer": lambda data, inside: zstandard.compress(inside + bytes(1 << 20)),
    "of a GiB": lambda data, inside: zstandard.compress(bytes(1 << 30), 1),
    "of a GiB that does not say so": lambda data, inside: streamed(bytes(1 << 30)),
    "of another dtype": lambda data, inside: zstandard.compress(inside.replace(b"FloatStorage", b"ShortStorage")),
}


def streamed(data):
    coder = zstandard.ZstdCompressor(level=1).compressobj()
    return coder.compress(data) + coder.flush()


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_that_is_not_what_the_index_says_is_damage_in_bounded_memory(tmp_path, kind):
    tensors = {"w": torch.randn(9000)}
    by_torch_compressed(tensors, tmp_path)
    ((_, name, at, length, _),) = entries(tmp_path)
    data = (tmp_path / name).read_bytes()[at : at + length]
    made = FRAMES[kind](data, zstandard.ZstdDecompressor().decompressobj().decompress(data))
    (tmp_path / name).write_bytes(made)
    index = torch_dcp.FileSystemReader(tmp_path).read_metadata()
    (info,) = index.storage_data.values()
    info.offset, info.length = 0, len(made)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))

    def look():
        with pytest.raises(CorruptError, match=f"{name}: w"):
            loaded(tensors, tmp_path)
        assert not tools.verify(tmp_path)["ok"]

    assert peak_growth_mib(look) < 16


# ---- smaller saves


def test_what_has_not_changed_is_linked_and_what_has_is_written(tmp_path):
    tensors = weights()
    first = saved(records(tensors), tmp_path / "1")
    assert shared(saved(records(tensors), tmp_path / "2", since=first), first) == sorted(data_files(first))
    third = saved(records(tensors), tmp_path / "3", since=tmp_path / "2")
    assert new_bytes(third, first) == 0, "known by their digests"
    changed = {**tensors, "half": tensors["half"] + 1, "norm": tensors["norm"] + 1}
    fourth = saved(records(changed), tmp_path / "4", since=third)
    assert 0 < new_bytes(fourth, first) < tensors["half"].nbytes, "that, and the small ones"
    shutil.rmtree(first)
    for folder, expected in ((third, tensors), (fourth, changed)):
        assert_same(loaded(expected, folder, verify="full"), expected)
        full = {key: value for key, value in expected.items() if value.numel()}
        assert_same({key: by_torch(folder)[key] for key in full}, full)
        assert tools.verify(folder)["ok"]


@pytest.mark.parametrize("older", [None, "zstd"])
def test_where_only_the_compression_differs_each_folder_is_what_its_save_says(tmp_path, older, monkeypatch):
    tensors, newer = weights(), None if older else "zstd"
    dist_ckpt.save(records(tensors), tmp_path / "1", group=None, compress=older)
    dist_ckpt.save(records(tensors), tmp_path / "2", group=None, compress=newer, since=tmp_path / "1")
    assert_same(loaded(tensors, tmp_path / "2", verify="full"), tensors)
    assert tools.verify(tmp_path / "2")["ok"]
    kinds = {key: bool(transforms) for key, *_, transforms in entries(tmp_path / "2")}
    assert kinds["large"] == (newer == "zstd"), "it is cut at other places, so it is written"
    if newer is None:
        assert not any(kinds.values())
        monkeypatch.setitem(sys.modules, "zstandard", None)
        assert_same(loaded(tensors, tmp_path / "2"), tensors)


# ---- tools


def test_tools_tell_convert_and_compare(tmp_path):
    tensors = weights()
    folder, plain = saved({**tensors, "it": 5}, tmp_path / "c"), tmp_path / "plain"
    dist_ckpt.save({**tensors, "it": 5}, plain, group=None)
    assert (tools.inspect(folder)["compress"], tools.inspect(plain)["compress"]) == ("zstd", None)
    assert tools.diff(folder, plain)["equal"]
    tools.convert(folder, tmp_path / "to plain", to="torch_dist")
    tools.convert(plain, tmp_path / "to zstd", to="torch_dist", compress="zstd")
    kinds = {name: tools.inspect(tmp_path / name)["compress"] for name in ("to plain", "to zstd")}
    assert kinds == {"to plain": None, "to zstd": "zstd"}
    tools.convert(folder, tmp_path / "zarr", to="zarr", keys="[!eh]*")  # it has no bfloat16 of 0 axes
    for other in ("to plain", "to zstd"):
        assert tools.diff(tmp_path / other, plain)["equal"] and tools.verify(tmp_path / other)["ok"]
    with pytest.raises(CheckpointError, match="it goes with 'torch_dist'"):
        tools.convert(folder, tmp_path / "x", to="zarr", compress="zstd")
    tools.consolidate(folder)
    assert tools.inspect(folder)["compress"] is None
    tools.consolidate(folder, compress="zstd")
    assert tools.inspect(folder)["compress"] == "zstd" and tools.diff(folder, plain)["equal"]
    remove_sharded_tensors(folder, "lar")
    assert tools.inspect(folder)["compress"] == "zstd" and tools.diff(folder, plain)["only_in_b"] == ["large"]


def test_the_manifest_can_be_made_into_the_same_index_later(tmp_path):
    tensors = {key: value for key, value in weights().items() if value.numel()}
    saved(tensors, tmp_path, metadata="compact")
    tools.metadata(tmp_path)
    assert compressed_files(tmp_path)
    assert_same(by_torch(tmp_path), tensors)


def test_files_of_hugging_face_are_the_same(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors (extra safetensors)")
    tensors = {key: value.contiguous() for key, value in weights().items() if key != "columns"}
    folder = saved(tensors, tmp_path / "c")
    tools.convert(folder, tmp_path / "hf", to="safetensors")
    assert_same(safetensors.load_file(tmp_path / "hf" / "model.safetensors"), tensors)


# ---- memory


def peaks(rank, ranks, folder):
    """MiB that a save and a load need besides the tensors, where blocks are of half a MiB and tensors of two."""
    saving.BLOCK_BYTES = 1 << 19
    state = {f"w{i}": one(f"w{i}", torch.arange(1 << 19).float()) for i in range(16)}
    for name in ("warm", "c"):
        found = [peak_growth_mib(lambda name=name: saved(state, folder / name))]
        found += [peak_growth_mib(lambda name=name: dist_ckpt.load(state, folder / name, group=None))]
    return found


def test_a_save_and_a_load_hold_a_few_blocks(tmp_path):
    save_mib, load_mib = run_ranks(peaks, 1, tmp_path, timeout=60)[0]
    assert max(save_mib, load_mib) < 10, (save_mib, load_mib)  # of 32: two threads, each with a block and its frame
