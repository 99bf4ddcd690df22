"""``.metadata``: torch's own classes read what we write; ours reads bytes that lie."""

import collections
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from sixfold.dist_ckpt import CorruptError, MismatchError, UnsafeError
from sixfold.dist_ckpt.formats import metadata
from sixfold.dist_ckpt.formats.dcp_pickle import Index
from sixfold.dist_ckpt.geometry.box import Box
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, StoredChunk, StoredTensor

FRAME = ByteRange("__0_0.distcp", 64, 1000)
MANIFEST = Manifest(
    {
        "w": StoredTensor(torch.bfloat16, (4, 2), (StoredChunk(Box((0, 0), (4, 2)), FRAME),)),
        "empty": StoredTensor(torch.int8, (0, 2), ()),
    },
    {"o/shard_0_1": ByteRange("__1_0.distcp", 0, 9)},
    "0123",
    needs_metadata_json=True,
)


def encoded(index):
    return b"".join(metadata.encode_parts(index))


@pytest.mark.parametrize("trusted_bytes", [True, False])
def test_what_is_written_reads_back(trusted_bytes):
    assert metadata.decode(encoded(Index.of(MANIFEST)), trusted_bytes=trusted_bytes) == MANIFEST


def test_torch_reads_it_as_its_own_class():
    root = pickle.loads(encoded(Index.of(MANIFEST)))
    assert isinstance(root, dcp.Metadata)
    entry = root.state_dict_metadata["w"]
    assert (entry.properties.dtype, entry.size, entry.chunks[0].sizes) == (torch.bfloat16, (4, 2), (4, 2))
    assert root.storage_data[dcp.MetadataIndex("w", (0, 0))] == _StorageInfo(*FRAME)
    assert isinstance(root.state_dict_metadata["o/shard_0_1"], dcp.BytesStorageMetadata)
    assert root.sixfold_save_id == "0123"


class _Evil:
    def __init__(self, function, *args):
        self._call = (function, args)

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize("function", [os.system, eval, print, collections.deque, torch.load])
def test_a_foreign_global_is_named_and_nothing_runs(tmp_path, function):
    witness = tmp_path / "ran"
    data = pickle.dumps(_Evil(function, f"touch {witness}"))
    with pytest.raises(UnsafeError, match=function.__name__):
        metadata.decode(data, trusted_bytes=True)
    assert not witness.exists()


def root_with(**changes):
    chunk = dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    fields = {
        "state_dict_metadata": {"w": dcp.TensorStorageMetadata(dcp.TensorProperties(), torch.Size([4]), [chunk])},
        "storage_data": {dcp.MetadataIndex("w", (0,)): _StorageInfo("f.distcp", 0, 10)},
    }
    return pickle.dumps(dcp.Metadata(**{**fields, **changes}))


def test_the_model_of_the_next_tests_is_sound():
    assert metadata.decode(root_with(), trusted_bytes=False).tensors["w"].shape == (4,)


@pytest.mark.parametrize("name", ["../f", "/etc/passwd", "a/b", "..", ""])
def test_a_path_that_leaves_the_folder_is_unsafe(name):
    with pytest.raises(UnsafeError, match="leaves the folder"):
        metadata.decode(
            root_with(storage_data={dcp.MetadataIndex("w", (0,)): _StorageInfo(name, 0, 10)}), trusted_bytes=True
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"state_dict_metadata": []},
        {"state_dict_metadata": {"w": 5}},
        {"state_dict_metadata": {5: dcp.BytesStorageMetadata()}},
        {"state_dict_metadata": {"b": dcp.BytesStorageMetadata()}},
        {"storage_data": None},
        {"storage_data": {}},
        {"storage_data": {dcp.MetadataIndex("w", (0,)): _StorageInfo("f", -1, 10)}},
        {"storage_data": {dcp.MetadataIndex("w", (0,)): _StorageInfo("f", 0, "10")}},
        {"storage_data": {"w": _StorageInfo("f", 0, 10)}},
        {
            "state_dict_metadata": {
                "w": dcp.TensorStorageMetadata(
                    dcp.TensorProperties(),
                    torch.Size([3]),
                    [dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))],
                )
            }
        },
    ],
)
def test_metadata_that_contradicts_itself_is_corrupt(changes):
    with pytest.raises(CorruptError):
        metadata.decode(root_with(**changes), trusted_bytes=True)


def test_a_mangled_memo_index_allocates_nothing():
    # PROTO 4, None, LONG_BINPUT 0xFFFFFFFF: the C unpickler would make room for 2**32 entries.
    with pytest.raises(CorruptError, match="LONG_BINPUT"):
        metadata.decode(b"\x80\x04Nr\xff\xff\xff\xff.", trusted_bytes=False)


@pytest.mark.slow
def test_every_truncation_and_many_flips_end_in_a_typed_error_or_a_manifest():
    data = encoded(Index.of(MANIFEST))
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            metadata.decode(data[:length], trusted_bytes=False)
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 0x41
        try:
            metadata.decode(bytes(damaged), trusted_bytes=False)
        except (CorruptError, UnsafeError, MismatchError):
            pass


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"sharded_backend": 3}', b"\xff\xfe"])
def test_a_mangled_metadata_json_is_corrupt(data):
    with pytest.raises(CorruptError, match=r"metadata\.json"):
        metadata.check_config(data)


def test_unknown_backends_are_named():
    text = metadata.CONFIG_JSON.decode()
    with pytest.raises(MismatchError, match=r"\('tensorstore', 1\)"):
        metadata.check_config(text.replace("torch_dist", "tensorstore").encode())
    with pytest.raises(MismatchError, match=r"\('torch_dist', 2\)"):
        metadata.check_config(text.replace('"sharded_backend_version": 1', '"sharded_backend_version": 2').encode())
