"""Names that code written for megatron-core calls, beside the peer's own on random input."""

import copy
import inspect
import logging
import random
import threading

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
    dict_utils,
    exchange_utils,
    mapping,
    utils,
)
from sixfold.dist_ckpt.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from sixfold.dist_ckpt.strategies.base import StrategyAction, get_default_strategy, register_default_strategy

peer = pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is the oracle of these tests")
from megatron.core.dist_checkpointing import dict_utils as peer_dicts  # noqa: E402
from megatron.core.dist_checkpointing import exchange_utils as peer_exchange  # noqa: E402
from megatron.core.dist_checkpointing import mapping as peer_mapping  # noqa: E402
from megatron.core.dist_checkpointing import utils as peer_utils  # noqa: E402


def random_tree(rng, leaf, depth=3):
    if depth == 0 or rng.random() < 0.3:
        return leaf(rng)
    size = rng.randrange(4)
    if rng.random() < 0.5:
        return {rng.choice(["a", "b", "c", 1, 2]): random_tree(rng, leaf, depth - 1) for _ in range(size)}
    return [random_tree(rng, leaf, depth - 1) for _ in range(size)]


def random_dict(rng, leaf):
    return {f"k{i}": random_tree(rng, leaf) for i in range(rng.randrange(5))}


def number(rng):
    return rng.choice([1, 2, 3, 4, (5, 6), None])


def tensor_or_number(rng):
    return torch.tensor([1, rng.randrange(2)]) if rng.random() < 0.3 else number(rng)


def plain(found):
    """For comparison: tensors as lists."""
    return dict_utils.dict_list_map_outplace(lambda v: v.tolist() if isinstance(v, torch.Tensor) else v, found)


@pytest.mark.parametrize("seed", range(60))
def test_dicts_are_taken_apart_mapped_and_merged_as_by_the_peer(seed):
    rng = random.Random(seed)
    tree, other = random_dict(rng, number), random_dict(rng, number)
    for as_dicts in (False, True):
        ours = dict_utils.extract_matching_values(tree, lambda v: v in (1, 2, []), as_dicts)
        assert ours == peer_dicts.extract_matching_values(tree, lambda v: v in (1, 2, []), as_dicts)
    assert list(dict_utils.nested_values(tree)) == list(peer_dicts.nested_values(tree))
    assert list(dict_utils.nested_items_iter(tree)) == list(peer_dicts.nested_items_iter(tree))
    for name in ("dict_list_map_inplace", "dict_list_map_outplace", "dict_map"):
        a, b = copy.deepcopy(tree), copy.deepcopy(tree)
        results = getattr(dict_utils, name)(str, a), getattr(peer_dicts, name)(str, b)
        assert results[0] == results[1]
        assert a == b
    a, b = copy.deepcopy(tree), copy.deepcopy(tree)
    dict_utils.dict_map_with_key(lambda k, v: (k, v), a)
    peer_dicts.dict_map_with_key(lambda k, v: (k, v), b)
    assert a == b
    outcomes = []
    for module in (dict_utils, peer_dicts):
        try:
            outcomes.append(module.merge(copy.deepcopy(tree), copy.deepcopy(other)))
        except ValueError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]
    items = [rng.randrange(9) for _ in range(20)]
    grouping = (lambda x: x % 3, lambda x: x * 2, sum)
    assert dict_utils.map_reduce(items, *grouping) == peer_dicts.map_reduce(items, *grouping)


@pytest.mark.parametrize("seed", range(60))
def test_differences_are_those_of_the_peer(seed):
    rng = random.Random(seed)
    a = random_dict(rng, tensor_or_number)
    b = copy.deepcopy(a) if rng.random() < 0.8 else random_dict(rng, tensor_or_number)
    for container, key, value in list(dict_utils.nested_items_iter(b)):
        if rng.random() < 0.2:
            container[key] = value + 1 if isinstance(value, int | torch.Tensor) else 9
    try:
        theirs = peer_dicts.diff(a, b)
    except (AssertionError, TypeError):  # a list beside something else: the peer stops there, we tell it
        assert dict_utils.diff(a, b)[2]
        return
    ours = dict_utils.diff(a, b)
    for mine, expected in zip(ours, theirs, strict=True):
        assert sorted(map(str, mine)) == sorted(map(str, expected))


def test_a_structure_is_printed_as_by_the_peer(capsys):
    tree = {"a": [1, torch.ones(2, 3)], "b": {"c": "x" * 50}}
    dict_utils.inspect_types(tree)
    ours = capsys.readouterr().out
    peer_dicts.inspect_types(tree)
    assert ours == capsys.readouterr().out


def record_of(module, rng_state):
    """A leaf of one of all kinds, the same choice for both packages."""
    kind, key = rng_state
    if kind == 0:
        return module.ShardedTensor.from_rank_offsets(key, torch.ones(2), (0, 1, 4))
    if kind == 1:
        return module.ShardedObject(key, 3, (2,), (1,))
    if kind == 2:
        return module.ShardedTensorFactory(key, torch.ones(1), lambda *_: {}, lambda d: d)
    return module.LocalNonpersistentObject(key) if kind == 3 else key


def shown(found):
    """Kinds and keys, so that trees of both packages compare."""
    return dict_utils.dict_list_map_outplace(
        lambda v: (type(v).__name__, getattr(v, "key", getattr(v, "obj", v))), found
    )


@pytest.mark.parametrize("seed", range(40))
def test_sharded_state_dicts_are_sorted_and_renamed_as_by_the_peer(seed):
    rng = random.Random(seed)
    choices = random_dict(rng, lambda r: (r.randrange(5), r.choice(["model.a", "model.b.c", "opt.a", "x"])))
    ours, theirs = (
        dict_utils.dict_list_map_outplace(lambda choice, m=module: record_of(m, choice), choices)
        for module in (mapping, peer_mapping)
    )
    extracting = [name for name in vars(utils) if name.startswith("extract_") and name != "extract_matching_values"]
    assert len(extracting) == 5
    for name in extracting:
        mine, expected = getattr(utils, name)(ours), getattr(peer_utils, name)(theirs)
        assert [shown(part) for part in mine] == [shown(part) for part in expected], name
    prefixes = {"model.b": "M", "model.": "N", "x": ""}
    for call in (
        lambda module, state: module.apply_prefix_mapping(state, prefixes),
        lambda module, state: module.add_prefix_for_sharding(state, "pre."),
        lambda module, state: module.replace_prefix_for_sharding(state, "pre.", "post/"),
    ):
        call(utils, ours)
        call(peer_utils, theirs)
        assert shown(ours) == shown(theirs)


def test_every_public_name_of_the_peers_pages_is_here():
    for ours, theirs in ((utils, peer_utils), (dict_utils, peer_dicts)):
        defined = {n for n, v in vars(theirs).items() if inspect.isfunction(v) and v.__module__ == theirs.__name__}
        own = {name for name in defined if not name.startswith("_")}
        assert len(own) >= 10
        assert own <= {*vars(ours)}, own - {*vars(ours)}


def test_a_prefix_that_is_missing_changes_nothing():
    state = {key: ShardedObject(key, 1, (1,), (0,)) for key in ("a.x", "b.x")}
    with pytest.raises(ValueError, match=r"b\.x does not begin with the prefix 'a\.'"):
        utils.replace_prefix_for_sharding(state, "a.", "c.")
    assert [record.key for record in state.values()] == ["a.x", "b.x"]
    shared = [state["a.x"], state["a.x"]]
    utils.add_prefix_for_sharding({"l": shared}, "p.")
    assert state["a.x"].key == "p.a.x"  # one record at two places is renamed once


def test_zip_strict_names_the_lengths():
    assert list(utils.zip_strict([1, 2], "ab")) == [(1, "a"), (2, "b")]
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        utils.zip_strict([1], [1, 2])


def test_blocks_are_timed_under_their_names(caplog):
    with caplog.at_level(logging.DEBUG), utils.logger_stack("outer", logging.getLogger("mine")):
        with utils.debug_time("inner"):
            utils.debug_msg("here")
        with utils.debug_time("slow", threshold=100.0):
            pass
    lines = [(record.name, record.getMessage()) for record in caplog.records]
    assert lines[0] == ("mine", "outer.inner here")
    assert lines[1][1].startswith("outer.inner took 0.")
    assert len(lines) == 2


def test_factories_are_applied_and_merged_in_place():
    def build(key, data, replica_id, flattened_range):
        return {"low": one(f"{key}.low", data[:2]), "high": one(f"{key}.high", data[2:])}

    def one(key, data):
        return ShardedTensor.from_rank_offsets(key, data)

    factory = ShardedTensorFactory("f", torch.arange(4), build, lambda d: torch.cat([d["low"], d["high"]]))
    state = {"a": [factory, 1]}
    mapping.apply_factories(state)
    assert shown(state)["a"][0] == {"low": ("ShardedTensor", "f.low"), "high": ("ShardedTensor", "f.high")}
    loaded = {"a": [{"low": torch.tensor([0, 1]), "high": torch.tensor([2, 3])}, 1]}
    mapping.apply_factory_merges(loaded, {"a": {0: factory}})
    assert loaded["a"][0].tolist() == [0, 1, 2, 3]
    with pytest.raises(dist_ckpt.ShardingError, match="no loaded value"):
        mapping.apply_factory_merges({}, {"a": factory})


@pytest.mark.parametrize("seed", range(40))
def test_shards_are_given_to_ranks_as_by_the_peer(seed):
    rng = random.Random(seed)
    ranks = rng.randrange(1, 9)
    holders = {f"s{i}": rng.sample(range(ranks), rng.randint(1, ranks)) for i in range(rng.randrange(40))}
    sizes = {shard: rng.randrange(5) * 10 for shard in holders}
    crossing = {shard for shard in holders if rng.random() < 0.2}
    arguments = holders, sizes, ranks, crossing
    assert exchange_utils.distribute_shards_to_ranks(*arguments) == peer_exchange.distribute_shards_to_ranks(*arguments)


def test_a_shard_that_nobody_holds_is_refused():
    with pytest.raises(dist_ckpt.ShardingError, match="none of 2 ranks"):
        exchange_utils.distribute_shards_to_ranks({"s": [2]}, {"s": 1}, 2)


def test_default_strategies_have_the_peers_names_and_words():
    for action, backend in (
        (StrategyAction.SAVE_SHARDED, "torch_dist"),
        (StrategyAction.LOAD_SHARDED, "torch_dist"),
        (StrategyAction.SAVE_COMMON, "torch"),
        (StrategyAction.LOAD_COMMON, "torch"),
    ):
        strategy = get_default_strategy(action, backend, 1)
        register_default_strategy(action, backend, 1, strategy)
        assert get_default_strategy(action, backend, 1) is strategy
    with pytest.raises(
        CheckpointingException, match=r"Cannot find a default strategy for: \('save_sharded', 'gold', 3\)"
    ):
        get_default_strategy(StrategyAction.SAVE_SHARDED, "gold", 3)


def test_a_missing_folder_is_told_in_the_peers_words(tmp_path):
    for load in (lambda: dist_ckpt.load({}, tmp_path / "c"), lambda: dist_ckpt.load_common_state_dict(tmp_path / "c")):
        with pytest.raises(CheckpointingException, match=r"directory .*c does not exist"):
            load()


@pytest.mark.parametrize("mode", StrictHandling)
def test_unexpected_and_missing_keys_are_told_in_the_peers_words(tmp_path, mode, caplog):
    saved = {"a": ShardedObject("a", 1, (1,), (0,)), "b": ShardedTensor.from_rank_offsets("b", torch.ones(1))}
    dist_ckpt.save(saved, tmp_path / "c")
    asked = {"b": saved["b"], "new": ShardedTensor.from_rank_offsets("new", torch.ones(1))}
    text = ""
    try:
        found = dist_ckpt.load(asked, tmp_path / "c", strict=mode)
    except CheckpointingException as error:
        found, text = None, str(error)
    text += caplog.text
    assert ("Unexpected keys" in text) == (mode.raises_unexpected or mode.logs)
    assert ("Missing keys" in text) == (mode in (StrictHandling.RAISE_ALL, StrictHandling.LOG_ALL))
    assert (found is None) == mode.raises_unexpected
    assert isinstance(found, tuple) == mode.returns


def test_what_does_not_persist_is_dropped_at_save_and_unwrapped_at_load(tmp_path):
    state = {"a": {"local": LocalNonpersistentObject([1]), "kept": 2}}
    dist_ckpt.save(state, tmp_path / "c")
    assert dist_ckpt.load_common_state_dict(tmp_path / "c") == {"a": {"kept": 2}}
    assert dist_ckpt.load(state, tmp_path / "c") == {"a": {"local": [1], "kept": 2}}


def test_a_request_that_hangs_ends_the_wait_at_the_deadline():
    release = threading.Event()
    queue = AsyncCallsQueue(group=None, timeout_s=0.2)
    queue.schedule_async_request(AsyncRequest(release.wait, (), []))
    assert queue.maybe_finalize_async_calls() == []
    with pytest.raises(dist_ckpt.LostPeerError, match=r"within timeout_s=0\.2"):
        queue.maybe_finalize_async_calls(blocking=True)
    release.set()


def test_what_the_peers_trainer_and_optimizers_import_besides():
    from megatron.core.dist_checkpointing import optimizer as peer_optimizer

    from sixfold.dist_ckpt import optimizer

    assert "keep_vars=True" in optimizer.KEEP_VARS_HINT and "keep_vars=True" in peer_optimizer.KEEP_VARS_HINT
    for metadata in (None, {}, {"a": 1, "dp_cp_group": object()}):
        before = copy.copy(metadata)
        clean = utils._clean_metadata_for_serialization(metadata)
        assert clean == peer_utils._clean_metadata_for_serialization(metadata)
        assert metadata == before


def test_the_saving_strategy_takes_all_arguments_of_the_peers_in_its_order():
    from megatron.core.dist_checkpointing.strategies import torch as peer_torch

    from sixfold.dist_ckpt.strategies import torch as strategies_torch

    theirs = [*inspect.signature(peer_torch.TorchDistSaveShardedStrategy).parameters]
    ours = [*inspect.signature(strategies_torch.TorchDistSaveShardedStrategy).parameters]
    assert ours[: len(theirs)] == theirs
