"""The names of megatron-core that section 8 adds: strategies that save in the background, and removing tensors."""

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import everything
from dist_ckpt_helpers import folder_bytes, names, one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, ShardedTensor, ShardedTensorFactory, dict_utils, mapping, tools, utils
from sixfold.dist_ckpt.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from sixfold.dist_ckpt.strategies.base import AsyncSaveShardedStrategy, SaveShardedStrategy
from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy


def state(value=1.0):
    return {
        "w": one("model.w", torch.full((4, 3), value)),
        "m": one("optimizer.exp_avg.model.w", torch.full((4, 3), 2 * value)),
        "v": one("optimizer.exp_avg_sq.model.w", torch.full((4_000, 3), 3 * value)),
        "it": int(value),
    }


def blank():
    return {key: value for key, value in state(0.0).items() if key != "it"}


def test_the_built_in_strategies_are_async_ones():
    assert issubclass(AsyncSaveShardedStrategy, SaveShardedStrategy)
    for strategy in (TorchDistSaveShardedStrategy(), FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())):
        assert isinstance(strategy, AsyncSaveShardedStrategy)


def test_a_request_of_the_built_in_strategy_is_scheduled_by_the_caller(tmp_path):
    (tmp_path / "c").mkdir()
    request = dist_ckpt.save(state(), tmp_path / "c", TorchDistSaveShardedStrategy(), async_sharded_save=True)
    assert isinstance(request, AsyncRequest)
    queue = AsyncCallsQueue()
    index = queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [index]
    queue.close()
    assert torch.equal(dist_ckpt.load(blank(), tmp_path / "c")["w"], torch.ones(4, 3))


class Mine(AsyncSaveShardedStrategy):
    """A user's strategy: writes one file in the background, and says when."""

    def __init__(self):
        super().__init__("mine", 1)
        self.calls = []

    @property
    def can_handle_sharded_objects(self):
        return True

    def async_save(self, sharded_state_dict, checkpoint_dir):
        found = list(dict_utils.nested_values(sharded_state_dict))
        values = {record.key: record.data.clone() for record in found}
        self.calls.append("prepared")

        def write(path):
            torch.save(values, path)
            self.calls.append("written")

        return AsyncRequest(write, (checkpoint_dir / "mine.pt",), [lambda: self.calls.append("finalized")])


def test_a_users_async_strategy_serves_a_plain_save(tmp_path):
    strategy = Mine()
    dist_ckpt.save(state(), tmp_path / "c", strategy)
    assert strategy.calls == ["prepared", "written", "finalized"]
    found = torch.load(tmp_path / "c" / "mine.pt")
    assert set(found) == {"model.w", "optimizer.exp_avg.model.w", "optimizer.exp_avg_sq.model.w"}


def test_a_users_async_strategy_gives_its_request(tmp_path):
    strategy = Mine()
    request = dist_ckpt.save(state(), tmp_path / "c", strategy, async_sharded_save=True)
    assert "prepared" in strategy.calls
    assert "written" not in strategy.calls  # the caller schedules it
    request.execute_sync()
    assert strategy.calls[:3] == ["prepared", "written", "finalized"]
    assert "mine.pt" in names(tmp_path / "c")


def test_the_methods_are_abstract():
    with pytest.raises(TypeError, match="async_save"):
        AsyncSaveShardedStrategy("mine", 1)


def test_the_default_save_of_an_async_strategy_runs_its_request(tmp_path):
    strategy = Mine()
    strategy.save({"w": one("w", torch.ones(2))}, tmp_path)
    assert strategy.calls == ["prepared", "written", "finalized"]
    assert torch.load(tmp_path / "mine.pt")["w"].tolist() == [1, 1]


def test_tensors_are_removed_by_the_prefix_of_their_keys(tmp_path):
    dist_ckpt.save(state(), tmp_path / "c")
    before = sum(map(len, folder_bytes(tmp_path / "c").values()))
    dist_ckpt.remove_sharded_tensors(str(tmp_path / "c"), "optimizer.")
    assert set(dist_ckpt.load_tensors_metadata(tmp_path / "c")) == {"model.w"}
    loaded = dist_ckpt.load({"w": one("model.w", torch.zeros(4, 3))}, tmp_path / "c", verify="full")
    assert torch.equal(loaded["w"], torch.ones(4, 3))
    assert loaded["it"] == 1
    assert tools.verify(tmp_path / "c")["problems"] == []
    assert before - sum(map(len, folder_bytes(tmp_path / "c").values())) > 40_000  # the space is free
    assert set(everything(torch_dcp.FileSystemReader(tmp_path / "c"))) == {"model.w"}
    assert names(tmp_path) == ["c"]


def test_removing_nothing_warns_and_changes_nothing(tmp_path):
    dist_ckpt.save(state(), tmp_path / "c")
    before = folder_bytes(tmp_path / "c")
    with pytest.warns(UserWarning, match="absent"):
        dist_ckpt.remove_sharded_tensors(tmp_path / "c", "absent.")
    assert folder_bytes(tmp_path / "c") == before


def test_removing_from_what_is_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="none"):
        dist_ckpt.remove_sharded_tensors(tmp_path / "none", "a")


def test_objects_of_the_prefix_stay_and_tensors_of_other_names_too(tmp_path):
    extra = {"o": dist_ckpt.ShardedObject("optimizer.o", 5, (1,), (0,)), "x": one("optimizerless", torch.ones(2))}
    dist_ckpt.save(state() | extra, tmp_path / "c")
    dist_ckpt.remove_sharded_tensors(tmp_path / "c", "optimizer.")
    assert set(dist_ckpt.load_tensors_metadata(tmp_path / "c")) == {"model.w", "optimizerless"}


def test_factories_are_applied_and_merged_under_their_own_names():
    def build(key, data, replica_id, flattened_range):
        return {"low": one(f"{key}.low", data[:2]), "high": one(f"{key}.high", data[2:])}

    tree = {"f": ShardedTensorFactory("f", torch.arange(4.0), build, lambda d: torch.cat([d["low"], d["high"]]))}
    applied = {"f": tree["f"]}
    mapping.apply_factories(applied)
    assert [record.key for record in applied["f"].values()] == ["f.low", "f.high"]
    loaded = {"f": {key: record.data for key, record in applied["f"].items()}}
    assert mapping.apply_factory_merges(loaded, tree)["f"].tolist() == [0, 1, 2, 3]


def test_prefixes_are_replaced_and_mapped_in_place():
    tree = {"a": one("model.a", torch.ones(1)), "b": [one("model.layers.b", torch.ones(1))]}
    utils.replace_prefix_for_sharding(tree, "model.", "chunk0/")
    assert [tree["a"].key, tree["b"][0].key] == ["chunk0/a", "chunk0/layers.b"]
    utils.apply_prefix_mapping(tree, {"chunk0/layers.": "l.", "chunk0/": "m."})
    assert [tree["a"].key, tree["b"][0].key] == ["m.a", "l.b"]
    assert isinstance(tree["a"], ShardedTensor)


def test_dictionaries_merge_differ_and_map():
    assert dict_utils.merge({"a": [1, {"b": 2}]}, {"c": 3}) == {"a": [1, {"b": 2}], "c": 3}
    only_a, only_b, different = dict_utils.diff({"a": 1, "b": 2}, {"b": 3, "c": 4})
    assert [list(only_a), list(only_b)] == [[("a",)], [("c",)]]
    assert different[0][0] == ("b",)
    assert dict_utils.dict_list_map_outplace(lambda v: v + 1, {"a": [1, {"b": 2}]}) == {"a": [2, {"b": 3}]}
