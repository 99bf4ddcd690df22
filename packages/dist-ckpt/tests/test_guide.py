"""The reference guide, section by section, in one process that never made a process group."""

import json
from pathlib import Path

import guide_helpers
import pytest
import torch

from sixfold import dist_ckpt as dist_checkpointing
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

TEN = torch.arange(12.0).view(2, 6)


@pytest.fixture
def one_rank(monkeypatch):
    """What the guide's code asks torch.distributed for; the package must not need it."""
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert not torch.distributed.is_initialized()


def test_basic_sharding_saves_and_loads(tmp_path, one_rank):
    guide_helpers.run(guide_helpers.SAVE, tmp_path)
    names = guide_helpers.run(guide_helpers.LOAD, tmp_path)
    assert names["loaded_state_dict"]["weight"].dtype == torch.float32


def test_keys_of_the_state_dict_are_ephemeral(tmp_path):
    class Model(torch.nn.Module):
        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    data = TEN.clone()
    arguments = (data, data.dtype, (2, 6), (2, 6), (0, 0), (1, 1))
    names = guide_helpers.run(
        guide_helpers.OTHER_KEYS, tmp_path, model=Model(), ckpt_dir=tmp_path / "c", arguments=arguments
    )
    assert torch.equal(names["model"].loaded["different-key"], TEN)


def test_both_strategy_functions_are_equivalent(tmp_path):
    def state(fill):
        return {
            "w": dist_checkpointing.ShardedTensor.from_rank_offsets("w", TEN.clone() if fill else TEN * 0),
            "o": dist_checkpointing.ShardedObject("o", {"x": 1} if fill else None, (1,), (0,)),
            "step": 5,
        }

    names = guide_helpers.run(guide_helpers.STRATEGIES, tmp_path, ckpt_dir=tmp_path / "parallel")
    results = [
        names["basic_save_load"](state(True), tmp_path / "basic"),
        names["fully_parallel_save_load"](state(True)),
    ]
    for folder in ("basic", "parallel"):
        results.append(dist_checkpointing.load(state(False), tmp_path / folder))
    for loaded in results:
        assert torch.equal(loaded["w"], TEN)
        assert (loaded["o"], loaded["step"]) == ({"x": 1}, 5)
    files = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("basic", "parallel")]
    assert files[0] == files[1]


def test_every_entity_of_a_sharded_state_dict(tmp_path):
    """Nested dicts and lists of ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistentObject and
    arbitrary objects: what is saved, what is ignored, what comes back."""

    def split_rows(key, data, replica_id, flattened_range):
        return [
            dist_checkpointing.ShardedTensor.from_rank_offsets(f"{key}.{i}", row, replica_id=replica_id)
            for i, row in enumerate(data)
        ]

    def state(data, marker):
        return {
            "tensors": [dist_checkpointing.ShardedTensor.from_rank_offsets("t", data)],
            "objects": {"o": dist_checkpointing.ShardedObject("o", marker, (1,), (0,))},
            "made": dist_checkpointing.ShardedTensorFactory("f", data.clone(), split_rows, torch.stack),
            "local": dist_checkpointing.LocalNonpersistentObject(marker),
            "common": {"marker": marker, "list": [1, "two", None]},
        }

    dist_checkpointing.save(state(TEN.clone(), "saved"), tmp_path / "c")
    loaded = dist_checkpointing.load(state(torch.zeros(2, 6), "asked"), tmp_path / "c")
    assert torch.equal(loaded["tensors"][0], TEN)
    assert torch.equal(loaded["made"], TEN)
    assert loaded["objects"]["o"] == "saved"
    assert loaded["local"] == "asked"
    assert loaded["common"] == {"marker": "saved", "list": [1, "two", None]}
    assert dist_checkpointing.load_common_state_dict(tmp_path / "c") == {"common": loaded["common"]}
    metadata = dist_checkpointing.load_tensors_metadata(tmp_path / "c")
    assert {key: record.global_shape for key, record in metadata.items()} == {"t": (2, 6), "f.0": (6,), "f.1": (6,)}
    assert all(record.data is None and set(record.axis_fragmentations) == {1} for record in metadata.values())
    plain = dist_checkpointing.load_plain_tensors(tmp_path / "c")
    assert torch.equal(plain["t"], TEN)
    assert isinstance(plain["f.1"], torch.Tensor)


@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
@pytest.mark.filterwarnings("ignore:the zarr format")
def test_a_tuple_names_the_backend_and_the_folder_tells_it_at_load(tmp_path, backend):
    state = {"w": dist_checkpointing.ShardedTensor.from_rank_offsets("w", TEN.clone()), "step": 1}
    dist_checkpointing.save(state, tmp_path / "c", (backend, 1), ("torch", 1))
    assert f'"sharded_backend": "{backend}"' in (tmp_path / "c" / "metadata.json").read_text()
    assert (tmp_path / "c" / "common.pt").exists()
    state["w"].data.zero_()
    assert torch.equal(dist_checkpointing.load(state, tmp_path / "c")["w"], TEN)
    assert torch.equal(dist_checkpointing.load(state, tmp_path / "c", (backend, 1), ("torch", 1))["w"], TEN)


def test_the_native_torch_reader_reads_the_torch_dist_format(tmp_path):
    import torch.distributed.checkpoint as dcp

    dist_checkpointing.save({"w": dist_checkpointing.ShardedTensor.from_rank_offsets("w", TEN.clone())}, tmp_path / "c")
    asked = {"w": torch.zeros(2, 6)}
    dcp.load(asked, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    assert torch.equal(asked["w"], TEN)


def test_strategies_tell_what_they_handle():
    assert (TorchDistSaveShardedStrategy().backend, TorchDistSaveShardedStrategy().version) == ("torch_dist", 1)
    assert TorchDistSaveShardedStrategy().can_handle_sharded_objects is True
    assert TorchDistLoadShardedStrategy().can_handle_sharded_objects is True


@pytest.mark.parametrize(("saved", "asked"), [((5, 3), (8, 3)), ((8, 3), (5, 3))])
def test_shape_mismatch_pads_with_zeros_or_strips(tmp_path, saved, asked):
    values = torch.arange(1.0, 1 + saved[0] * saved[1]).view(saved)
    dist_checkpointing.save({"w": dist_checkpointing.ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "c")
    record = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.full(asked, 9.0), allow_shape_mismatch=True)
    loaded = dist_checkpointing.load({"w": record}, tmp_path / "c")["w"]
    expected = torch.zeros(asked)
    rows = min(saved[0], asked[0])
    expected[:rows] = values[:rows]
    assert torch.equal(loaded, expected)


def flattened(tp, dp, tables):
    """The guide's tables: rank -> what it holds of [[0..5], [6..11]], cut by TP over axis 1, then flattened."""
    length = 12 // tp // dp
    return [
        dist_checkpointing.ShardedTensor.from_rank_offsets_flat(
            "w",
            torch.tensor(tables[d * tp + t], dtype=torch.float32),
            (2, 6 // tp),
            (1, t, tp),
            flattened_range=slice(d * length, (d + 1) * length),
        )
        for t in range(tp)
        for d in range(dp)
    ]


TP2_DP3 = {0: [0, 1], 2: [2, 6], 4: [7, 8], 1: [3, 4], 3: [5, 9], 5: [10, 11]}
TP6_DP1 = {0: [0, 6], 1: [1, 7], 2: [2, 8], 3: [3, 9], 4: [4, 10], 5: [5, 11]}


def test_flattening_the_guides_two_tables_load_as_each_other(tmp_path):
    cuts = {"a": (2, 3, TP2_DP3), "b": (6, 1, TP6_DP1)}
    for name, cut in cuts.items():
        dist_checkpointing.save({"w": flattened(*cut)}, tmp_path / name)
        assert dist_checkpointing.load_tensors_metadata(tmp_path / name)["w"].global_shape == (2, 6)
        assert torch.equal(dist_checkpointing.load_plain_tensors(tmp_path / name)["w"], TEN)
        for tp, dp, tables in cuts.values():
            asked = flattened(tp, dp, {rank: [-1, -1] for rank in tables})
            loaded = dist_checkpointing.load({"w": asked}, tmp_path / name)["w"]
            assert [part.tolist() for part in loaded] == [tables[d * tp + t] for t in range(tp) for d in range(dp)]


def test_metadata_json_and_common_pt_are_beside_the_tensors(tmp_path):
    dist_checkpointing.save(
        {"w": dist_checkpointing.ShardedTensor.from_rank_offsets("w", TEN.clone())},
        str(tmp_path / "c"),
        content_metadata={"layout": "tp1"},
    )
    names = {path.name for path in Path(tmp_path / "c").iterdir()}
    index = {".metadata", "shard_manifest.pt"}
    assert names == {"metadata.json", "common.pt", "integrity.json", "__0_0.distcp"} | index
    assert json.loads((tmp_path / "c" / "metadata.json").read_text()) == {  # megatron-core refuses any further key
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    assert dist_checkpointing.load_content_metadata(tmp_path / "c") == {"layout": "tp1"}
    assert dist_checkpointing.load_content_metadata(preloaded_state_dict={"content_metadata": 1}) == 1
