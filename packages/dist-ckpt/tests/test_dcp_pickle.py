"""The pickle of ``.metadata`` that is put together opcode by opcode is what torch's own classes give."""

import io
import pickle
import pickletools

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from sixfold.dist_ckpt import metadata
from sixfold.dist_ckpt.box import Box
from sixfold.dist_ckpt.manifest import ByteRange, Manifest, StoredChunk, StoredTensor


def by_torch(manifest):
    """The oracle: torch's objects, made as its planner makes them."""
    entries, places = {}, {}
    for key, tensor in manifest.tensors.items():
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
    data = metadata.encode(manifest)
    found, expected = pickle.loads(data), by_torch(manifest)
    assert found == expected
    assert found.sixfold_save_id == "abcdef"
    for ours, torchs in zip(found.storage_data.items(), expected.storage_data.items(), strict=True):
        assert [vars(part) for part in ours] == [vars(part) for part in torchs]
    assert type(found.state_dict_metadata) is dict
    pickletools.dis(data, out=io.StringIO())  # the stack is empty at the end, the memo is used as it was set


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_what_is_written_is_read_back(case, trusted):
    manifest = Manifest(CASES[case], {"o/shard_0_1": ByteRange("f", 7, 8)}, "abcdef", True)
    assert metadata.decode(metadata.encode(manifest), trusted_bytes=trusted) == manifest
