"""Loads that would bring back a part of an object, or pass over a plain value, without a word."""

import logging

import pytest
import torch
from dist_ckpt_helpers import one

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import LocalNonpersistentObject, MismatchError, ShardedObject


def fsdp2(rank, ranks, kind, steps):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(steps)
    model = fully_shard(torch.nn.Linear(6, 5), mesh=init_device_mesh("cpu", (ranks,)))
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(optimizer):
    return {
        (number, name): value.full_tensor().tolist() if hasattr(value, "full_tensor") else float(value)
        for number, parts in optimizer.state_dict()["state"].items()
        for name, value in parts.items()
        if value is not None
    }


def as_state(model, optimizer, form):
    if form == "objects":
        return {"model": model, "optimizer": optimizer}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def fresh(rank, ranks, folder, kind, form):
    """What a load into a fresh optimizer says, and what it brings when the remedies are followed."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = fsdp2(rank, ranks, kind, 2)
    dist_ckpt.save(as_state(model, optimizer, form), folder)
    saved, weights = whole(optimizer), model.weight.full_tensor().tolist()
    model, optimizer = fsdp2(rank, ranks, kind, 0)
    if form == "objects":  # which are asked for all that is stored of them
        dist_ckpt.load(as_state(model, optimizer, form), folder)
        assert whole(optimizer) == saved
        return ""
    with pytest.raises(MismatchError) as told:
        dist_ckpt.load(as_state(model, optimizer, form), folder)
    rest = dist_ckpt.load(as_state(model, optimizer, "dicts"), folder, strict="raise_unexpected")
    assert rest["model"]["weight"].full_tensor().tolist() == weights
    model, optimizer = fsdp2(rank, ranks, kind, 0)
    get_optimizer_state_dict(model, optimizer)
    loaded = dist_ckpt.load(as_state(model, optimizer, form), folder)
    optimizer.load_state_dict(loaded["optimizer"])
    assert whole(optimizer) == saved
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return str(told.value)


@pytest.mark.parametrize("form", ["dicts", "objects"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.slow
def test_moments_that_a_fresh_optimizer_does_not_ask_for_are_an_error_and_its_remedies_work(tmp_path, kind, form):
    told = run_ranks(fresh, 2, tmp_path / "c", kind, form)
    if form == "objects":
        return
    name = "exp_avg" if kind == "adamw" else "momentum_buffer"
    assert told[0] == told[1]
    assert told[0].startswith(f"optimizer.state.0.{name}")
    assert "other state of 'optimizer' is" in told[0]


def test_a_part_that_nothing_else_is_asked_of_is_left_without_a_word(tmp_path):
    state = {"model": {"w": one("model.w", torch.ones(2))}, "optimizer": {"m": one("optimizer.m", torch.ones(2))}}
    dist_ckpt.save(state, tmp_path / "c")
    assert dist_ckpt.load({"model": state["model"]}, tmp_path / "c")["model"]["w"].tolist() == [1, 1]
    kept = {"m": LocalNonpersistentObject(5)}
    assert dist_ckpt.load({"optimizer": kept}, tmp_path / "c")["optimizer"] == {"m": 5}


def test_half_of_a_plain_dcp_folder_is_an_error_too(tmp_path):
    import torch.distributed.checkpoint as torch_dcp

    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {"0": {"m": torch.ones(2)}}, "lr": 0.5}}
    torch_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    asked = {"model": {"w": torch.zeros(2)}, "optimizer": {"state": {}, "lr": 0}}
    with pytest.raises(MismatchError, match=r"optimizer\.state\.0\.m"):
        dist_ckpt.load(asked, tmp_path / "c")
    assert dist_ckpt.load(asked, tmp_path / "c", strict="raise_unexpected")["optimizer"]["lr"] == 0.5


def test_raise_all_minds_plain_keys_on_both_sides(tmp_path):
    dist_ckpt.save({"a": 1, "t": torch.ones(1)}, tmp_path / "c")
    asked = {"a": 0, "t": torch.zeros(1)}
    assert dist_ckpt.load(asked, tmp_path / "c", strict="raise_all")["a"] == 1
    with pytest.raises(MismatchError, match="b: asked for, not in the checkpoint"):
        dist_ckpt.load({**asked, "b": 0}, tmp_path / "c", strict="raise_all")
    with pytest.raises(MismatchError, match="t: in the checkpoint, asked for by no rank"):
        dist_ckpt.load({"a": 0}, tmp_path / "c", strict="raise_all")
    _, missing, unexpected = dist_ckpt.load({"a": 0, "b": {"c": 0}}, tmp_path / "c", strict="return_all")
    assert (missing, unexpected) == ({"t"}, {"b.c"})


def test_log_unexpected_leaves_a_grid_of_other_ranks_out(tmp_path, caplog):
    grid = [ShardedObject("rng", at, (2,), (at,)) for at in range(2)]
    dist_ckpt.save({"rng": grid, "w": one("w", torch.ones(1))}, tmp_path / "c")
    asked = {"rng": ShardedObject("rng", None, (1,), (0,)), "w": one("w", torch.zeros(1))}
    with caplog.at_level(logging.WARNING, "sixfold.dist_ckpt"):
        loaded = dist_ckpt.load(asked, tmp_path / "c", strict="log_unexpected")
    assert loaded == {"w": torch.ones(1)}
    assert "rng" in caplog.text
    with pytest.raises(MismatchError, match="objects cannot be cut anew"):
        dist_ckpt.load(asked, tmp_path / "c")


def test_a_plain_tensor_that_is_not_stored_is_an_error_as_a_sharded_one_is(tmp_path):
    dist_ckpt.save({"m": {"w": torch.ones(2)}, "step": 3}, tmp_path / "c")

    def asked():
        return {"m": {"w": torch.zeros(2), "new": torch.full((2,), 5.0)}, "step": 0}

    for strict in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        with pytest.raises(MismatchError, match=r"m\.new: asked for, not in the checkpoint"):
            dist_ckpt.load(asked(), tmp_path / "c", strict=strict)
    for strict in ("return_unexpected", "return_all"):
        loaded, _, unexpected = dist_ckpt.load(asked(), tmp_path / "c", strict=strict)
        assert (loaded["m"]["w"].tolist(), unexpected) == ([1, 1], {"m.new"})
    state = asked()
    assert dist_ckpt.load(state, tmp_path / "c", strict="log_unexpected")["step"] == 3
    assert state["m"]["new"].tolist() == [5, 5]


def _plain(model):
    return {"model": model.state_dict()}


def _sharded(model):
    records = {
        name: dist_ckpt.ShardedTensor.from_rank_offsets(f"model.{name}", tensor)
        for name, tensor in model.state_dict().items()
    }
    return {"model": records}


@pytest.mark.parametrize("state", [_plain, _sharded])
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_names_that_differ_by_a_wrapper_are_named_together_and_both_remedies_work(tmp_path, state, wrapped_first):
    inside = torch.nn.Sequential(torch.nn.Linear(2, 2))
    both = [torch.compile(inside), torch.nn.Sequential(torch.nn.Linear(2, 2))]
    saved, loaded = both if wrapped_first else both[::-1]
    weight = saved.state_dict()["_orig_mod.0.weight" if wrapped_first else "0.weight"].clone()
    dist_ckpt.save({**state(saved), "step": 7}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"weight: stored is model\..*weight") as raised:
        dist_ckpt.load(state(loaded), tmp_path / "c")
    assert "Rename the keys" in str(raised.value)
    asked = _renamed(state(loaded), wrapped_first)
    assert dist_ckpt.load(asked, tmp_path / "c")["step"] == 7
    assert torch.equal(next(iter(loaded.parameters())), weight)
    dist_ckpt.save(state(getattr(saved, "_orig_mod", saved)), tmp_path / "d")
    dist_ckpt.load(state(getattr(loaded, "_orig_mod", loaded)), tmp_path / "d")


def _renamed(asked, to_wrapped):
    found = {}
    for name, value in asked["model"].items():
        new = f"_orig_mod.{name}" if to_wrapped else name.removeprefix("_orig_mod.")
        sharded = isinstance(value, dist_ckpt.ShardedTensor)
        found[new] = dist_ckpt.ShardedTensor.from_rank_offsets(f"model.{new}", value.data) if sharded else value
    return {"model": found}


def test_keys_that_no_wrapper_explains_are_listed_as_before(tmp_path):
    dist_ckpt.save({"model": {"a": torch.ones(2)}}, tmp_path / "c")
    with pytest.raises(MismatchError, match="asked for, not in the checkpoint"):
        dist_ckpt.load({"model": {"a": torch.zeros(2), "module.b": torch.zeros(2)}}, tmp_path / "c")


def test_a_buffer_that_a_model_has_gained_is_an_error_and_its_remedy_works(tmp_path):
    model = torch.nn.BatchNorm1d(3)
    dist_ckpt.save({"model": model}, tmp_path / "c")
    model.register_buffer("scale", torch.ones(3))
    with pytest.raises(MismatchError, match=r"model\.scale: asked for, not in the checkpoint"):
        dist_ckpt.load({"model": model}, tmp_path / "c")
    saved = {name: value for name, value in model.state_dict().items() if name != "scale"}
    loaded = dist_ckpt.load({"model": model.state_dict()}, tmp_path / "c", strict="log_unexpected")
    assert loaded["model"].keys() == saved.keys()


def stepped(steps, in_list=False):
    model = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(model, torch.nn.Linear(3, 3)) if in_list else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize(("steps", "as_dict"), [(0, False), (0, True), (1, False), (1, True)])
def test_a_folder_of_torchs_recipe_says_how_its_state_of_an_optimizer_is_asked_for(
    tmp_path, steps, as_dict, in_list, flat
):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_optimizer_state_dict

    def by_names(model, optimizer):
        found = get_state_dict(model, optimizer, options=options)
        return dict(zip(("model", "optimizer"), found, strict=True))

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    then, old = stepped(2, in_list)
    dcp.save(by_names(then, old), checkpoint_id=tmp_path / "c", no_dist=True)
    model, optimizer = stepped(steps, in_list)
    asked = {"model": model, "optimizer": optimizer.state_dict() if as_dict else optimizer}
    with pytest.raises(
        MismatchError, match=r"saved by the names of its parameters.* pass what get_optimizer_state_dict"
    ) as told:
        dist_ckpt.load(asked, tmp_path / "c")
    assert ("flatten_optimizer_state_dict=True" in str(told.value)) == flat
    found = dist_ckpt.load(by_names(model, optimizer), tmp_path / "c")
    set_optimizer_state_dict(model, optimizer, found["optimizer"], options=options)
    for own, one_of_then in zip(model.parameters(), then.parameters(), strict=True):
        assert torch.equal(optimizer.state[own]["exp_avg"], old.state[one_of_then]["exp_avg"])


def test_state_of_an_optimizer_by_numbers_that_is_asked_for_by_names_is_told_with_its_remedy(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    then, old = stepped(2)
    dist_ckpt.save({"model": then, "optimizer": old}, tmp_path / "c")
    model, optimizer = stepped(0)
    asked = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with pytest.raises(MismatchError, match="saved by the numbers of its parameters: pass the optimizer itself"):
        dist_ckpt.load(asked, tmp_path / "c")
    dist_ckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "c")
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], old.state[then.weight]["exp_avg"])
