"""Plain tensors through conversions, exports, removals, comparisons and listings: all of them, bit for bit."""

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import one
from plain_tensors_helpers import (
    alike,
    all_dtypes,
    assert_same,
    blank_like,
    by_torch,
    error_of,
    flat_tensors,
    full_state,
    odd_tensors,
    tensor_entries,
)

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, PerRank, tools


@pytest.mark.parametrize("form", ["zarr", "torch_dist"])
def test_a_conversion_there_and_back_keeps_plain_tensors_and_their_places(tmp_path, form):
    state = full_state()
    dist_ckpt.save(state, tmp_path / "c", group=None)
    expected = dist_ckpt.load_plain_tensors(tmp_path / "c")
    tools.convert(tmp_path / "c", tmp_path / "z", to=form)
    tools.convert(tmp_path / "z", tmp_path / "d", to="torch_dist")
    whole = {key: value for key, value in state.items() if key != "shard"}
    for name in ("z", "d"):
        assert_same(dist_ckpt.load_plain_tensors(tmp_path / name), expected)
        loaded = dist_ckpt.load({}, tmp_path / name, group=None)
        assert alike({key: loaded[key] for key in whole}, whole)
        asked = blank_like(whole["model"])
        dist_ckpt.load({"model": asked}, tmp_path / name, group=None)
        assert_same(asked, whole["model"])
    assert tensor_entries(tmp_path / "d").keys() == expected.keys()
    difference = tools.diff(tmp_path / "c", tmp_path / "d")
    assert difference["equal"], difference


def test_a_save_by_the_zarr_strategy_keeps_plain_tensors(tmp_path):
    state = full_state()
    dist_ckpt.save(state, tmp_path / "z", ("zarr", 1), group=None)
    loaded = dist_ckpt.load({"shard": one("s", torch.zeros(4))}, tmp_path / "z", group=None, strict="ignore_all")
    assert loaded["shard"].tolist() == [0, 1, 2, 3]
    whole = {key: value for key, value in state.items() if key != "shard"}
    loaded = dist_ckpt.load({}, tmp_path / "z", group=None)
    assert alike({key: loaded[key] for key in whole}, whole)
    asked = blank_like(whole["model"])
    dist_ckpt.load({"model": asked}, tmp_path / "z", group=None)
    assert_same(asked, whole["model"])


def test_a_conversion_of_some_keys_has_those_and_no_others(tmp_path):
    state = full_state()
    dist_ckpt.save(state, tmp_path / "c", group=None)
    expected = {f"model.{name}": value for name, value in state["model"].items()}
    for form in ("torch_dist", "zarr"):
        tools.convert(tmp_path / "c", tmp_path / form, to=form, keys="model.*")
        assert_same(dist_ckpt.load_plain_tensors(tmp_path / form), expected)
        asked = {"model": blank_like(state["model"])}
        dist_ckpt.load(asked, tmp_path / form, group=None)
        assert_same(flat_tensors(asked), expected)


def test_safetensors_has_every_plain_tensor_bit_for_bit(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    dtypes = {name: value for name, value in all_dtypes().items() if "complex" not in name}
    odd = {name: value for name, value in odd_tensors().items() if not value.dtype.is_complex}
    dist_ckpt.save({"d": dtypes, "o": [odd]}, tmp_path / "c", group=None)
    tools.convert(tmp_path / "c", tmp_path / "s", to="safetensors")
    exported = safetensors.load_file(tmp_path / "s" / "model.safetensors")
    expected = {f"d.{name}": value for name, value in dtypes.items()}
    expected |= {f"o.0.{name}": value.detach().clone() for name, value in odd.items()}
    assert_same(exported, expected)


def test_removed_prefixes_take_plain_tensors_with_them(tmp_path):
    state = full_state()
    dist_ckpt.save(state, tmp_path / "c", group=None)
    dist_ckpt.remove_sharded_tensors(tmp_path / "c", "optimizer.")
    kept = flat_tensors({**state, "shard": None, "s": state["shard"].data})
    kept = {name: value for name, value in kept.items() if not name.startswith("optimizer.")}
    assert_same(dist_ckpt.load_plain_tensors(tmp_path / "c"), kept)
    assert_same(by_torch(tmp_path / "c"), kept)
    assert tools.verify(tmp_path / "c")["problems"] == []
    loaded = dist_ckpt.load({}, tmp_path / "c", group=None)
    assert alike(loaded["model"], state["model"])
    assert loaded["step"] == 3
    assert not any(value.is_meta for value in flat_tensors(loaded).values())


def test_saves_for_megatron_and_by_default_do_not_differ(tmp_path):
    state = full_state()
    dist_ckpt.save(state, tmp_path / "a", group=None)
    dist_ckpt.save(state, tmp_path / "b", group=None, megatron=True)
    difference = tools.diff(tmp_path / "a", tmp_path / "b")
    assert difference["equal"], difference
    state["optimizer"]["state"][0]["exp_avg"][0, 0] += 1
    dist_ckpt.save(state, tmp_path / "b", group=None, megatron=True)
    difference = tools.diff(tmp_path / "a", tmp_path / "b")
    assert not difference["equal"]
    assert "optimizer.state.0.exp_avg" in str(difference)
    assert "optimizer.state.0.exp_avg_sq" not in str(difference)


@pytest.mark.slow
def test_older_saves_load_as_new_ones_and_do_not_differ_from_them(tmp_path, request):
    state = full_state()
    dist_ckpt.save(state, tmp_path / "new", group=None)
    request.getfixturevalue("older_saves")
    dist_ckpt.save(state, tmp_path / "old", group=None)
    whole = {key: value for key, value in state.items() if key != "shard"}
    for name in ("old", "new"):
        loaded = dist_ckpt.load({}, tmp_path / name, group=None)
        assert alike({key: loaded[key] for key in whole}, whole)
        asked = blank_like(whole)
        dist_ckpt.load(asked, tmp_path / name, group=None)
        assert_same(flat_tensors(asked), flat_tensors(whole))
    assert tensor_entries(tmp_path / "old").keys() == {"s"}
    assert tools.diff(tmp_path / "old", tmp_path / "new")["equal"]
    assert tools.diff(tmp_path / "new", tmp_path / "old")["equal"]
    state["list"][1]["x"][5] += 2
    state["list"][0] = torch.arange(4)
    dist_ckpt.save(state, tmp_path / "changed", group=None)
    for left, right in (("changed", "new"), ("new", "changed")):
        difference = tools.diff(tmp_path / left, tmp_path / right)
        assert [(entry["key"], entry["reason"]) for entry in difference["different"]] == [
            ("list.0", "shape"),
            ("list.1.x", "values"),
        ]
        assert not (difference["only_in_a"] or difference["only_in_b"] or difference["common_differs"])


def test_inspect_lists_plain_tensors_with_shape_dtype_and_bytes(tmp_path):
    state = full_state()
    dist_ckpt.save(state, tmp_path / "c", group=None)
    told = tools.inspect(tmp_path / "c")
    for name, value in flat_tensors({k: v for k, v in state.items() if k != "shard"}).items():
        line = str(next(entry for entry in _entries(told) if entry.get("key", entry.get("name")) == name))
        assert str(list(value.shape)) in line.replace("(", "[").replace(",)", "]").replace(")", "]"), line
        assert str(value.dtype).removeprefix("torch.") in line
    some = tools.inspect(tmp_path / "c", keys="model.0.*")
    assert "optimizer" not in str(some.get("tensors", some))


def _entries(told):
    found = told["tensors"]
    if isinstance(found, dict):
        return [
            {"key": key, **(value if isinstance(value, dict) else {"value": value})} for key, value in found.items()
        ]
    return found


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/b", "x" * 300])
def test_names_that_look_like_files_stay_names_in_every_format(tmp_path, name):
    state = {name: torch.arange(30_000.0), "step": 3}
    at = tmp_path / "of"
    at.mkdir()
    dist_ckpt.save(state, at / "c", group=None)
    assert alike(dist_ckpt.load({}, at / "c", group=None), state)
    for target, make in {
        "z": lambda place: dist_ckpt.save(state, place, ("zarr", 1), group=None),
        "y": lambda place: tools.convert(at / "c", place, to="zarr"),
    }.items():
        error = error_of(lambda make=make, target=target: make(at / target))
        if error:
            assert name[:40] in error
            assert not (at / target).exists()
        else:
            assert alike(dist_ckpt.load({}, at / target, group=None), state)
    assert [path.name for path in tmp_path.iterdir()] == ["of"]


def test_a_conversion_to_another_dtype_converts_second_copies_too(tmp_path):
    """Small plain tensors lie in common.pt as well, where megatron-core reads them."""
    dist_ckpt.save({"w": torch.nn.Parameter(torch.ones(3)), "n": torch.arange(2), "step": 3}, tmp_path / "c")
    tools.convert(tmp_path / "c", tmp_path / "d", to="torch_dist", dtype=torch.bfloat16)
    common = dist_ckpt.load_common_state_dict(tmp_path / "d")
    assert {key: common[key].dtype for key in "wn"} == {"w": torch.bfloat16, "n": torch.int64}
    assert isinstance(common["w"], torch.nn.Parameter)
    loaded = dist_ckpt.load(
        {"w": torch.zeros(3, dtype=torch.bfloat16), "n": torch.zeros(2, dtype=torch.int64)}, tmp_path / "d"
    )
    assert torch.equal(loaded["w"], torch.ones(3, dtype=torch.bfloat16))
    assert loaded["step"] == 3


@pytest.mark.parametrize("to", ["torch_dist", "zarr"])
@pytest.mark.parametrize(
    "value",
    [
        lambda tensor: (tensor, 3),
        lambda tensor: [{"deep": ({"er": tensor},)}],
        lambda tensor: tensor.to_sparse(),
        lambda tensor: PerRank((tensor,)),
    ],
    ids=["tuple", "deep", "sparse", "of a rank"],
)
def test_a_conversion_to_another_dtype_leaves_no_tensor_as_it_was_without_a_word(tmp_path, value, to):
    dist_ckpt.save({"odd": value(torch.ones(2)), "x": torch.ones(2)}, tmp_path / "c", group=None)
    with pytest.raises(CheckpointError, match=r"odd.* holds torch\.float32, and dtype is torch\.bfloat16"):
        tools.convert(tmp_path / "c", tmp_path / "d", to=to, dtype=torch.bfloat16)
    assert not (tmp_path / "d").exists()
    tools.convert(tmp_path / "c", tmp_path / "d", to="torch_dist", dtype=torch.float32)
    dist_ckpt.save({"odd": value(torch.ones(2).int()), "x": torch.ones(2)}, tmp_path / "n", group=None)
    tools.convert(tmp_path / "n", tmp_path / "e", to="torch_dist", dtype=torch.bfloat16)  # integers stay
    assert dist_ckpt.load({}, tmp_path / "e", group=None)["x"].dtype is torch.bfloat16


def numbers_of(optimizer):
    """Each 0-dim tensor of an optimizer, by what holds it."""
    return {
        f"{number}.{name}": value
        for number, part in [*optimizer.state_dict()["state"].items(), *enumerate(optimizer.param_groups)]
        for name, value in part.items()
        if isinstance(value, torch.Tensor) and not value.dim()
    }


@pytest.mark.slow
@pytest.mark.parametrize("to", ["torch_dist", "zarr", "safetensors"])
@pytest.mark.parametrize(
    ("kind", "dtype", "by"),
    [
        (torch.optim.AdamW, torch.bfloat16, "us"),
        (torch.optim.NAdam, torch.float16, "us"),
        (torch.optim.ASGD, torch.bfloat16, "torch"),
    ],
)
def test_a_conversion_to_another_dtype_keeps_steps_and_rates_of_optimizers(tmp_path, kind, dtype, by, to):
    def of():
        model = torch.nn.Linear(3, 3)
        return model, kind(model.parameters(), lr=torch.tensor(0.1), foreach=False)

    (model, optimizer), (now, own) = of(), of()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for number in optimizer.state.values():
        number["step"].fill_(100_003.0)
    wanted = numbers_of(optimizer)
    assert {"0.step", "0.lr"} <= wanted.keys()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": torch.tensor(100_003.0)}
    if by == "us":
        dist_ckpt.save(state, tmp_path / "c", group=None)
    else:
        torch_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    tools.convert(tmp_path / "c", tmp_path / "d", to=to, dtype=dtype)
    found = dist_ckpt.load_plain_tensors(tmp_path / "d")
    assert {found["model.weight"].dtype, found["optimizer.state.0.step"].dtype} == {dtype, torch.float32}
    assert float(found["step"]) == 100_003
    if to == "torch_dist" or (to, by) == ("zarr", "us"):  # bytes of DCP become flat common data in zarr
        dist_ckpt.load({"model": now, "optimizer": own}, tmp_path / "d", group=None)
        assert numbers_of(own) == wanted
        now(torch.ones(1, 3)).sum().backward()
        own.step()
        assert own.state[now.weight]["step"] == 100_004
