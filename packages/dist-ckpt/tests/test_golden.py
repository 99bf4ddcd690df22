"""Folders that megatron-core 0.12.1 wrote (golden/make_megatron_012.py): read at other layouts, bit for bit."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from dist_ckpt_helpers import expected_values, flat_shards, one, random_cut

from sixfold import dist_ckpt

GOLDEN = Path(__file__).parent / "golden"
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
