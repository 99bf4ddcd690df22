"""The pickle of ``.metadata`` that is put together opcode by opcode is what torch's own classes give."""

import dataclasses
import io
import pathlib
import pickle
import pickletools
import random
from array import array

import pytest
import torch
from dist_ckpt_helpers import flat_shards, random_cut
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from sixfold.dist_ckpt import ShardingError
from sixfold.dist_ckpt.formats import compact_manifest, dcp_pickle, metadata
from sixfold.dist_ckpt.formats.dcp_pickle import Index
from sixfold.dist_ckpt.formats.integrity import FileDigest
from sixfold.dist_ckpt.formats.unpickle import loads
from sixfold.dist_ckpt.geometry.box import Box
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, StoredChunk, StoredTensor
from sixfold.dist_ckpt.plans.shard_table import tabulate
from sixfold.dist_ckpt.save_load.saving import index_of_written
from sixfold.dist_ckpt.save_load.writer import Written


def encoded(index):
    return b"".join(metadata.encode_parts(index))


def by_torch(manifest):
    """The oracle: torch's objects, made as its planner makes them."""
    entries, places = {}, {}
    for key, tensor in sorted(manifest.tensors.items(), key=lambda item: item[0].encode("utf-8", "surrogatepass")):
        chunks = []
        for box, frame, _ in tensor.chunks:
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)))
            places[dcp.MetadataIndex(key, box.offset)] = _StorageInfo(*frame)
        entries[key] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks
        )
    for key, frame in manifest.objects.items():
        entries[key] = dcp.BytesStorageMetadata()
        places[dcp.MetadataIndex(key)] = _StorageInfo(*frame)
    meta = dcp.StorageMeta(save_id=manifest.save_id)
    root = dcp.Metadata(entries, None, places, meta, version=str(CURRENT_DCP_VERSION))
    return pickle.loads(pickle.dumps(root, protocol=4))


def stored(dtype, shape, *chunks):
    return StoredTensor(dtype, shape, tuple(StoredChunk(Box(*box), ByteRange(*frame)) for box, frame in chunks))


CASES = {
    "nothing": {},
    "one": {"w": stored(torch.float32, (4,), (((0,), (4,)), ("__0_0.distcp", 0, 600)))},
    "many dtypes": {
        f"t{i}": stored(dtype, (2, 3), (((0, 0), (2, 3)), ("__0_0.distcp", 600 * i, 600)))
        for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64))
    },
    "odd shapes": {
        "scalar": stored(torch.int64, (), (((), ()), ("f", 1, 2))),
        "empty": stored(torch.float32, (0, 3)),
        "five": stored(torch.float32, (1, 2, 3, 4, 70_000), (((0,) * 5, (1, 2, 3, 4, 70_000)), ("f", 255, 256))),
    },
    "large numbers": {
        "w": stored(
            torch.float32,
            (2**40, 2**31),
            (((0, 0), (2**39, 2**31)), ("f", 2**31 - 1, 2**31)),
            (((2**39, 0), (2**39, 2**31)), ("f", 2**32, 2**62)),
        )
    },
    "odd names": {
        name: stored(torch.float32, (1,), (((0,), (1,)), ("float32", i, 65_536)))
        for i, name in enumerate(("offset", "torch", "größe" * 60, "", "x" * 300, "float32", "Size", "\ud800"))
    },
    "more than the short memo": {
        f"t{i}": stored(torch.float32, (1,), (((0,), (1,)), (f"f{i}", 0, 1))) for i in range(300)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_torch_unpickles_the_objects_that_it_would_have_written(case):
    manifest = Manifest(CASES[case], {"o/shard_0_1": ByteRange("f", 7, 8)}, "abcdef", True)
    data = encoded(Index.of(manifest))
    found, expected = pickle.loads(data), by_torch(manifest)
    assert found == expected
    assert found.sixfold_save_id == "abcdef"
    ours, torchs = (
        sorted((repr(vars(index)), vars(place)) for index, place in root.storage_data.items())
        for root in (found, expected)
    )
    assert ours == torchs
    assert type(found.state_dict_metadata) is dict
    pickletools.dis(data, out=io.StringIO())  # the stack is empty at the end, the memo is used as it was set


PLANNER_DATA = {"a.0.b": ("a", 0, "b"), "große": ("große",), "odd": [1.5, True, None, -(2**70), "\ud800", {"x": ()}]}


def test_what_a_planner_keeps_is_read_back_by_torch_and_moves_nothing_else():
    index = dataclasses.replace(Index.of(Manifest(CASES["odd names"], {}, "abc")), planner_data=PLANNER_DATA)
    data = encoded(index)
    expected = dataclasses.replace(by_torch(Manifest(CASES["odd names"], {}, "abc")), planner_data=PLANNER_DATA)
    assert pickle.loads(data) == expected
    assert loads(data, trusted_bytes=False).get("planner_data") == PLANNER_DATA


@pytest.mark.parametrize("odd", [{"w": torch.Size([1])}, {"w": ("w", pathlib.Path())}, object(), {1: {2: [io]}}])
def test_what_names_a_class_is_no_planner_data(odd):
    index = dataclasses.replace(Index.of(Manifest({}, {}, "abc")), planner_data=odd)
    with pytest.raises(ShardingError, match="planner_data"):
        encoded(index)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_what_is_written_is_read_back(case, trusted):
    manifest = Manifest(CASES[case], {"o/shard_0_1": ByteRange("f", 7, 8)}, "abcdef", True)
    assert metadata.decode(encoded(Index.of(manifest)), trusted_bytes=trusted) == manifest


@pytest.mark.parametrize("batch_rows", [1, 7, 1 << 16])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.slow
def test_what_ranks_wrote_becomes_what_torchs_objects_would_be_by_a_plain_loop(monkeypatch, seed, batch_rows):
    """Random shards on random ranks, replicas and empty ones among them, at random places of each rank's file."""
    monkeypatch.setattr(dcp_pickle, "BATCH_ROWS", batch_rows)
    rng = random.Random(seed)
    ranks = [[] for _ in range(rng.randint(1, 5))]
    shards = []
    for number in range(rng.randint(0, 6)):
        shape = tuple(rng.choice([1, 2, 3, 8]) for _ in range(rng.randint(1, 5)))
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int8])
        shards += flat_shards(f"t{number}", torch.zeros(shape, dtype=dtype), random_cut(shape, rng), fill=True)
    rng.shuffle(shards)
    for shard in shards:
        for replica, rank in enumerate(rng.sample(range(len(ranks)), rng.randint(1, len(ranks)))):
            ranks[rank].append(shard if not replica else pickle.loads(pickle.dumps(shard)))
            ranks[rank][-1].replica_id = replica
    written, tensors, objects = [], {}, {}
    for number, records in enumerate(ranks):
        places, table, pieces = array("q"), *tabulate(records)
        for record, own in zip(records, pieces, strict=True):
            found = tensors.setdefault(record.key, (record.dtype, record.global_shape, []))[2]
            for piece in own if record.replica_id == 0 else ():
                place = rng.choice([300, 70_000, 2**31 + 5, 2**40]) + len(places), rng.choice([1, 2**33])
                places.extend(place)
                found.append(StoredChunk(piece.box, ByteRange(f"__{number}_0.distcp", *place)))
        files = {f"__{number}_0.distcp": FileDigest(1, ("0",))}
        objects[f"o/shard_{number}_9"] = ByteRange(f"__{number}_0.distcp", number, 3)
        own_object = [(f"o/shard_{number}_9", objects[f"o/shard_{number}_9"])]
        written.append(Written(table.encode(), places.tobytes(), own_object, files))
    manifest = Manifest(
        {key: StoredTensor(dtype, shape, tuple(sorted(found))) for key, (dtype, shape, found) in tensors.items()},
        objects,
        "f" * 16,
        needs_metadata_json=True,
    )
    data = encoded(arrays := index_of_written(written, "f" * 16))
    found, expected = pickle.loads(data), by_torch(manifest)
    assert found == expected
    for index, place in expected.storage_data.items():
        assert vars(found.storage_data[index]) == vars(place)
    assert metadata.decode(data, trusted_bytes=False) == manifest
    assert metadata.decode(encoded(dcp_pickle.Index.of(manifest)), trusted_bytes=True) == manifest
    mapped = compact_manifest.read(
        memoryview(bytearray(b"".join(compact_manifest.encode(arrays)))), lambda name: 2**62, lambda *_: None
    )
    assert dict(mapped.objects) == objects and list(mapped.tensors) == sorted(tensors)
    for key, stored in manifest.tensors.items():
        again = mapped.tensors[key]
        assert (again.dtype, again.shape, tuple(again.chunks)) == (stored.dtype, stored.shape, stored.chunks)
    assert metadata.decode(encoded(compact_manifest.index_of(mapped)), trusted_bytes=True) == manifest
