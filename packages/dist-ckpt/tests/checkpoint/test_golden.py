"""Folders that megatron-core 0.12.1 wrote (golden/make_megatron_012.py): read at other layouts, bit for bit."""

import importlib.util
import pickle
import random
from pathlib import Path

import pytest
import torch
from dist_ckpt_helpers import expected_values, flat_shards, one, random_cut
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError
from sixfold.dist_ckpt.formats import metadata

GOLDEN = Path(__file__).parents[1] / "golden"
_spec = importlib.util.spec_from_file_location("make_megatron_012", GOLDEN / "make_megatron_012.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)
FLATTENED = GOLDEN / "megatron-0.12-flattened"


def test_the_flattened_layout_is_listed_and_loaded_with_its_true_shapes():
    tensors = make.golden_tensors()
    assert "nd_reformulated_orig_global_shape" in (FLATTENED / ".metadata").read_bytes().decode("latin1")
    listed = dist_ckpt.load_tensors_metadata(FLATTENED)
    assert {key: (r.global_shape, r.dtype) for key, r in listed.items()} == {
        key: (tuple(t.shape), t.dtype) for key, t in tensors.items()
    }
    plain = dist_ckpt.load_plain_tensors(FLATTENED)
    assert all(torch.equal(plain[key], tensor) for key, tensor in tensors.items())
    assert dist_ckpt.load_common_state_dict(FLATTENED) == {"iteration": 12, "args": {"lr": 0.5, "sizes": [1, 2]}}


@pytest.mark.parametrize("seed", range(8))
def test_the_flattened_layout_loads_at_any_other_flattened_cut(seed):
    rng = random.Random(seed)
    tensors = make.golden_tensors()
    cuts = {key: random_cut(tuple(tensor.shape), rng) for key, tensor in tensors.items()}
    state = {key: flat_shards(key, tensor, cuts[key], fill=False) for key, tensor in tensors.items()}
    loaded = dist_ckpt.load(state, FLATTENED)
    for key, tensor in tensors.items():
        expected = expected_values(tensor, cuts[key])
        assert all(torch.equal(a, b) for a, b in zip(loaded[key], expected, strict=True)), key


def test_the_flattened_layout_saves_again_as_ordinary_chunks(tmp_path):
    state = {key: one(key, tensor) for key, tensor in dist_ckpt.load_plain_tensors(FLATTENED).items()}
    dist_ckpt.save(state, tmp_path / "c")
    plain = dist_ckpt.load_plain_tensors(tmp_path / "c")
    assert all(torch.equal(plain[key], tensor) for key, tensor in make.golden_tensors().items())


def legacy_metadata(true_shape, stored_shape=(1, 2, 12), sizes=(1, 1, 12)):
    """``.metadata`` of one tensor in the flattened layout, with two chunks of ``sizes``."""
    offsets = [(0, i, 0) for i in range(2)]
    chunks = [dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset in offsets]
    entry = dcp.TensorStorageMetadata(dcp.TensorProperties(), torch.Size(stored_shape), chunks)
    places = {dcp.MetadataIndex("w", offset): _StorageInfo("f.distcp", 0, 10) for offset in offsets}
    root = dcp.Metadata({"w": entry}, None, places)
    root.mcore_data = {"w": true_shape, "other": {}}
    return pickle.dumps(root)


def test_a_legacy_chunk_becomes_the_boxes_of_its_range():
    name = "nd_reformulated_orig_global_shape"
    stored = metadata.decode(legacy_metadata({name: (4, 6)}), trusted_bytes=False).tensors["w"]
    assert stored.shape == (4, 6)
    assert [(chunk.box.offset, chunk.box.size) for chunk in stored.chunks] == [((0, 0), (4, 3)), ((0, 3), (4, 3))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"true_shape": {"nd_reformulated_orig_global_shape": (4, 7)}}, "is no cut of the original shape"),
        ({"true_shape": {"nd_reformulated_orig_global_shape": (4, 6, 1)}}, "is no cut of the original shape"),
        ({"true_shape": {"nd_reformulated_orig_global_shape": (4, 60)}}, "is no cut of the original shape"),
        ({"true_shape": {"nd_reformulated_orig_global_shape": "46"}}, "tuple of counts"),
        ({"true_shape": {"nd_reformulated_orig_global_shape": (4, -6)}}, "tuple of counts"),
        ({"true_shape": [4, 6]}, "mcore_data of w is list"),
        ({"true_shape": {"x": 1}}, "tuple of counts"),
        ({"stored_shape": (0, 2, 12), "sizes": (0, 1, 12)}, "is no cut"),
        ({"stored_shape": (2, 2, 6), "sizes": (2, 1, 6)}, "is no run"),
    ],
)
def test_a_legacy_layout_that_lies_is_refused(changes, message):
    fields = {"true_shape": {"nd_reformulated_orig_global_shape": (4, 6)}} | changes
    with pytest.raises(CorruptError, match=message):
        metadata.decode(legacy_metadata(**fields), trusted_bytes=False)
