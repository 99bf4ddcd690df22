"""Stateful objects: the order of their calls, what a lenient ``strict`` leaves them, and factories around them."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, ShardedObject, ShardedTensorFactory, ShardingError


class Noted:
    """Notes in a list that all share who was called."""

    def __init__(self, name, calls, state):
        self.name, self.calls, self.state = name, calls, state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.calls.append((self.name, state_dict))


def test_values_are_handed_over_in_the_order_of_the_state_dict_and_inner_objects_first(tmp_path):
    def state(calls):
        inner = Noted("inner", calls, {"x": 1})
        outer = Noted("outer", calls, {"parts": [inner, {"y": 2}]})
        return {"a": [Noted("first", calls, {"z": 3})], "b": {"deep": outer}, "c": Noted("last", calls, {"v": 4})}

    dist_ckpt.save(state([]), tmp_path / "c")
    calls = []
    asked = state(calls)
    dist_ckpt.load(asked, tmp_path / "c")
    assert [name for name, _ in calls] == ["first", "inner", "outer", "last"]
    assert calls[1][1] == {"x": 1}
    assert calls[2][1]["parts"][0] is asked["b"]["deep"].state["parts"][0]  # loaded by then
    assert calls[2][1]["parts"][1] == {"y": 2}


def test_a_module_on_meta_is_refused_as_an_object_and_loads_once_it_has_memory(tmp_path):
    made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    dist_ckpt.save({"first": made[0], "m": made}, tmp_path / "c")
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    first = torch.nn.Linear(3, 2)
    before = first.weight.clone()
    with pytest.raises(ShardingError, match=r"0.weight: .* holds no values; give it memory first, as module\.to_empty"):
        dist_ckpt.load({"first": first, "m": module}, tmp_path / "c")
    assert first.weight.equal(before), "nothing is handed over before all can be"
    module.to_empty(device="cpu")
    dist_ckpt.load({"first": first, "m": module}, tmp_path / "c")
    assert all(there.equal(module.state_dict()[name]) for name, there in made.state_dict().items())
    assert first.weight.equal(made[0].weight)


@pytest.mark.parametrize("strict", ["log_unexpected", "ignore_all", "return_all"])
def test_what_strict_leaves_out_keeps_the_objects_own_value(tmp_path, strict):
    dist_ckpt.save({"m": Noted("m", [], {"old": one("old", torch.ones(2)), "n": 1})}, tmp_path / "c")
    calls, new = [], torch.full((2,), 7.0)
    state = {"old": one("old", torch.zeros(2)), "new": one("new", new), "o": ShardedObject("o", 5, (1,), (0,))}
    other = Noted("gone", calls, {"w": one("w", torch.zeros(1))})
    found = dist_ckpt.load({"m": Noted("m", calls, state), "gone": other}, tmp_path / "c", strict=strict)
    ((name, values),) = calls  # of "gone" nothing was stored, and it is left alone
    assert name == "m"
    assert values["old"].tolist() == [1, 1]
    assert (values["new"].tolist(), values["o"], values["n"]) == ([7, 7], 5, 1)
    result = found[0] if strict == "return_all" else found
    assert "gone" not in result
    if strict == "return_all":
        assert found[2] == {"new", "w", "o"}


def test_a_factory_may_build_stateful_objects(tmp_path):
    def state(calls, value):
        def build(key, data, replica_id, flattened_range):
            return {"object": Noted("built", calls, {"w": one(key, data)}), "rest": one(f"{key}.rest", data)}

        return {"f": ShardedTensorFactory("f", torch.full((2,), value), build, lambda parts: parts["rest"] + 1)}

    dist_ckpt.save(state([], 3.0), tmp_path / "c")
    calls = []
    assert dist_ckpt.load(state(calls, 0.0), tmp_path / "c")["f"].tolist() == [4, 4]
    ((_, values),) = calls
    assert values["w"].tolist() == [3, 3]


def test_what_an_object_does_not_ask_for_is_an_error_or_logged_where_strict_allows_it(tmp_path, caplog):
    dist_ckpt.save({"m": Noted("m", [], {"a": 1, "w": one("m.w", torch.ones(1))})}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"m\.w: in the checkpoint, asked for by no rank"):
        dist_ckpt.load({"m": Noted("m", [], {"a": 0})}, tmp_path / "c")
    with caplog.at_level(logging.WARNING, "sixfold.dist_ckpt"):
        dist_ckpt.load({"m": Noted("m", [], {"a": 0})}, tmp_path / "c", strict="raise_unexpected")
    assert "not loaded: m.w" in caplog.text


def test_an_object_of_which_nothing_is_stored_is_an_unexpected_key(tmp_path):
    dist_ckpt.save({"m": Noted("m", [], {})}, tmp_path / "c")
    calls = []
    dist_ckpt.load({"m": Noted("m", calls, {})}, tmp_path / "c")
    assert calls == [("m", {})]
    with pytest.raises(MismatchError, match=r"x\.y: asked for"):
        dist_ckpt.load({"x": {"y": Noted("y", calls, {"a": 1})}}, tmp_path / "c")
    assert len(calls) == 1


def test_values_of_plain_dcp_keep_their_lists_and_are_listed(tmp_path):
    torch_dcp.save({"one": [5], "deep": {"x": (1,)}, "w": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    listed = dist_ckpt.load_sharded_metadata(tmp_path / "c")
    assert set(listed) == {"one", "deep.x", "w"}
    loaded = dist_ckpt.load(listed, tmp_path / "c")
    assert (loaded["one"], loaded["deep.x"], loaded["w"].tolist()) == ([5], (1,), [1, 1])
    assert dist_ckpt.load({"any": ShardedObject("one", None, (1,), (0,))}, tmp_path / "c") == {"any": [5]}
    dist_ckpt.remove_sharded_tensors(tmp_path / "c", "w")
    assert dist_ckpt.load({"one": 0, "deep": {"x": 0}}, tmp_path / "c") == {"one": [5], "deep": {"x": (1,)}}
    theirs = {"one": None, "deep": {"x": None}}
    torch_dcp.load(theirs, checkpoint_id=tmp_path / "c", no_dist=True)
    assert theirs == {"one": [5], "deep": {"x": (1,)}}


def with_rates(*rates, kind=torch.optim.AdamW, **options):
    """An optimizer with a group for each rate."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return kind(groups, lr=rates[0], foreach=False, **options)


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("saves", [dist_ckpt.save, lambda state, at: torch_dcp.save(state, checkpoint_id=at)])
def test_a_learning_rate_that_others_share_changes_only_where_it_is_loaded(tmp_path, saves):
    saves({"optimizer": with_rates(torch.tensor(0.125), torch.tensor(0.25)).state_dict()}, tmp_path / "c")
    rate = torch.tensor(0.5)
    loaded, other = with_rates(rate, rate), with_rates(rate)
    dist_ckpt.load({"optimizer": loaded}, tmp_path / "c")
    loaded.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert (rates_of(loaded), rates_of(other), float(rate)) == ([0.125, 0.25, 0.5], [0.5], 0.5)


def test_optimizers_that_share_a_learning_rate_are_loaded_with_two(tmp_path):
    saved = [with_rates(torch.tensor(0.125)), with_rates(torch.tensor(0.25), kind=torch.optim.SGD)]
    dist_ckpt.save({"body": saved[0], "head": saved[1]}, tmp_path / "c")
    rate = torch.tensor(0.5, dtype=torch.float64)
    body, head = with_rates(rate), with_rates(rate, kind=torch.optim.SGD)
    dist_ckpt.load({"body": body, "head": head}, tmp_path / "c")
    assert (rates_of(body), rates_of(head), float(rate)) == ([0.125], [0.25], 0.5)
    assert body.param_groups[0]["lr"].dtype is torch.float64  # as the group had it


def test_a_learning_rate_that_was_not_saved_stays_the_groups_own(tmp_path):
    dist_ckpt.save({"optimizer": with_rates(0.125)}, tmp_path / "c")
    own = with_rates(torch.tensor(0.5))
    dist_ckpt.load({"optimizer": own}, tmp_path / "c")
    assert rates_of(own) == [0.125]
