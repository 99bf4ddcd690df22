"""What a load does to the caller's tensors: plain ones are filled beside DTensors, and autograd hears of it."""

import logging
from contextlib import nullcontext

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import one
from torch import nn

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, ShardedTensor, ShardingError, tools
from sixfold.dist_ckpt.dcp import Reader, Writer


@pytest.fixture(autouse=True, params=["tensors", "common data"])
def form(request):
    """What plain tensors are in the checkpoints of this process."""
    if request.param == "common data":
        request.getfixturevalue("older_saves")
    return request.param


def net(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model(torch.randn(8, 4))
    return model


def test_a_plain_model_is_filled_in_place_as_torch_does(tmp_path):
    saved, model, theirs = net(0), net(1), net(2)
    dist_ckpt.save(saved.state_dict(), tmp_path / "c", group=None)
    torch_dcp.save(saved.state_dict(), checkpoint_id=tmp_path / "t", no_dist=True)
    loaded = dist_ckpt.load(model.state_dict(), tmp_path / "c", group=None)
    torch_dcp.load(theirs.state_dict(), checkpoint_id=tmp_path / "t", no_dist=True)
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
        assert torch.equal(theirs.state_dict()[name], value), name
        assert loaded[name].data_ptr() == model.state_dict()[name].data_ptr()


def test_what_does_not_fit_is_refused_or_converted(tmp_path, form):
    if form == "common data":
        pytest.skip("older saves keep their rule: see the next test")
    dist_ckpt.save({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "c", group=None)
    with pytest.raises(MismatchError, match=r"a: asked for global shape \(4,\), stored is \(3,\)"):
        dist_ckpt.load({"a": torch.zeros(4)}, tmp_path / "c", group=None)
    wide = torch.zeros(2, dtype=torch.float64)
    dist_ckpt.load({"a": torch.zeros(3), "b": wide}, tmp_path / "c", group=None)
    assert wide.tolist() == [1, 1]
    with pytest.raises(MismatchError, match="b: "):
        dist_ckpt.load({"a": torch.zeros(3), "b": wide}, tmp_path / "c", group=None, dtype_policy="strict")


def test_what_does_not_fit_an_older_save_stays_is_returned_and_logged(tmp_path, caplog, older_saves):
    dist_ckpt.save({"a": torch.ones(3), "b": torch.ones(2), "n": 1}, tmp_path / "c", group=None)
    asked = {"a": torch.zeros(4), "b": torch.zeros(2, dtype=torch.float64), "n": 0}
    with caplog.at_level(logging.WARNING, "sixfold.dist_ckpt"):
        loaded = dist_ckpt.load(asked, tmp_path / "c", group=None)
    assert (loaded["a"].tolist(), loaded["b"].tolist(), loaded["n"]) == ([1, 1, 1], [1, 1], 1)
    assert not asked["a"].any()
    assert "your tensors do not: a, b" in caplog.text


def ways():
    """How a tensor may be filled, each as (save, load) of one tensor and a folder."""
    yield (
        "record",
        lambda w, at: dist_ckpt.save({"w": one("w", w)}, at, group=None),
        lambda w, at: dist_ckpt.load({"w": one("w", w)}, at, group=None),
    )
    yield (
        "plain",
        lambda w, at: dist_ckpt.save({"w": w.detach()}, at, group=None),
        lambda w, at: dist_ckpt.load({"w": w.detach()}, at, group=None),
    )
    yield (
        "door",
        lambda w, at: torch_dcp.save({"w": w.detach()}, storage_writer=Writer(at), no_dist=True),
        lambda w, at: torch_dcp.load({"w": w.detach()}, storage_reader=Reader(at), no_dist=True),
    )
    yield (
        "torch's folder",
        lambda w, at: torch_dcp.save({"w": w.detach()}, checkpoint_id=at, no_dist=True),
        lambda w, at: dist_ckpt.load({"w": w.detach()}, at, group=None),
    )
    yield (
        "narrowed record of a plain tensor",
        lambda w, at: dist_ckpt.save({"w": w.detach()}, at, group=None),
        lambda w, at: dist_ckpt.load({"w": one("w", w)}, at, group=None),
    )


@pytest.mark.parametrize(("save", "load"), [pytest.param(*way[1:], id=way[0]) for way in ways()])
def test_a_load_between_forward_and_backward_is_an_error_as_after_copy(tmp_path, save, load):
    w = torch.full((3,), 2.0, requires_grad=True)
    save(w, tmp_path / "c")
    loss = (w * w).sum()
    version = w._version
    load(w, tmp_path / "c")
    assert w._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def dtensor_between_forward_and_backward(rank, ranks, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    w = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (ranks,)), [Shard(0)]).requires_grad_()
    dist_ckpt.save({"w": w.detach()}, folder)
    loss = (w * w).sum().full_tensor()
    dist_ckpt.load({"w": w.detach()}, folder)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_autograd_hears_of_a_load_into_a_dtensor(tmp_path):
    run_ranks(dtensor_between_forward_and_backward, 2, tmp_path / "c")


def fsdp2(rank, ranks, seed):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(seed), init_device_mesh("cpu", (ranks,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def values(model):
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
        for name, value in model.state_dict().items()
    }


def plain_into_fsdp2(rank, ranks, folder, expected):
    """Weights and buffers, in place, from a plain model's checkpoint; and from FSDP2's own."""
    for name, whole in expected.items():
        model = fsdp2(rank, ranks, 1)
        dist_ckpt.load({"model": model.state_dict()}, folder / name)
        assert values(model) == whole, name
    wrong = fsdp2(rank, ranks, 1).state_dict()
    with pytest.raises(MismatchError, match=r"model\.absent: asked for, not in the checkpoint"):
        dist_ckpt.load({"model": {"absent": wrong["0.weight"]}}, folder / "plain")


def save_sharded(rank, ranks, folder):
    model = fsdp2(rank, ranks, 0)
    dist_ckpt.save({"model": model.state_dict()}, folder)
    return values(model)


@pytest.mark.slow
def test_a_plain_checkpoint_loads_into_fsdp2_and_fsdp2s_into_a_plain_model(tmp_path):
    plain = net(0)
    dist_ckpt.save({"model": plain.state_dict()}, tmp_path / "plain", group=None)
    sharded, _ = run_ranks(save_sharded, 2, tmp_path / "sharded")
    run_ranks(plain_into_fsdp2, 4, tmp_path, {"plain": values(plain), "sharded": sharded})
    model = net(1)
    dist_ckpt.load({"model": model.state_dict()}, tmp_path / "sharded", group=None)
    assert values(model) == sharded


def test_records_of_any_kind_take_their_part_of_a_plain_tensor(tmp_path, form):
    whole = torch.arange(24.0).view(4, 6)
    dist_ckpt.save({"w": whole}, tmp_path / "c", group=None)
    part, flat = torch.zeros(2, 6), torch.zeros(5)
    asked = {"w": ShardedTensor.from_rank_offsets("w", part, (0, 1, 2))}
    with (
        nullcontext()
        if form == "common data"
        else pytest.raises(ShardingError, match=r"w\[0:2, :\]: asked for by no main replica")
    ):
        dist_ckpt.load(asked, tmp_path / "c", group=None)
    dist_ckpt.load(asked, tmp_path / "c", group=None, validate_access_integrity=False)
    assert torch.equal(part, whole[2:])
    flat_record = ShardedTensor.from_rank_offsets_flat("w", flat, (2, 6), (0, 0, 2), flattened_range=slice(3, 8))
    loaded = dist_ckpt.load({"w": flat_record}, tmp_path / "c", group=None, validate_access_integrity=False)
    assert torch.equal(loaded["w"], whole.view(-1)[3:8])
    narrow = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 6, dtype=torch.bfloat16))
    assert torch.equal(dist_ckpt.load({"w": narrow}, tmp_path / "c", group=None)["w"].float(), whole)


def test_plain_tensors_are_listed_and_exported(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    model = net(0)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "w": one("w", torch.ones(2))}
    dist_ckpt.save(state, tmp_path / "c", group=None)
    expected = {f"model.{name}": value for name, value in model.state_dict().items()} | {"w": torch.ones(2)}
    for number, parts in optimizer.state_dict()["state"].items():
        expected |= {f"optimizer.state.{number}.{name}": value for name, value in parts.items()}
    found = dist_ckpt.load_plain_tensors(tmp_path / "c")
    told = dist_ckpt.tools.convert(tmp_path / "c", tmp_path / "s", to="safetensors")
    exported = safetensors.load_file(tmp_path / "s" / "model.safetensors")
    for tensors in (found, exported):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    assert told["tensors"] == len(expected)
    assert told["nbytes"] == sum(value.nbytes for value in expected.values())
    dist_ckpt.tools.convert(tmp_path / "c", tmp_path / "m", to="safetensors", keys="model.*", max_shard_bytes=64)
    names = {key for file in (tmp_path / "m").glob("*.safetensors") for key in safetensors.load_file(file)}
    assert names == {name for name in expected if name.startswith("model.")}


def meta_fsdp2(rank, ranks, folder, expected):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    with pytest.raises(ShardingError, match=r"holds no values; give it memory first, as module\.to_empty"):
        dist_ckpt.load({"model": model.state_dict()}, folder)
    model.to_empty(device="cpu")
    dist_ckpt.load({"model": model.state_dict()}, folder)
    assert values(model) == expected


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_told_to_take_memory_and_loads_then(tmp_path):
    plain = net(0)
    dist_ckpt.save({"model": plain.state_dict()}, tmp_path / "c", group=None)
    run_ranks(meta_fsdp2, 2, tmp_path / "c", values(plain))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    loaded = dist_ckpt.load({"model": model.state_dict()}, tmp_path / "c", group=None)
    model.load_state_dict(loaded["model"], assign=True)
    assert values(model) == values(plain)


@pytest.mark.parametrize("kind", ["plain", "position", "sharded"])
def test_tensors_whose_places_read_alike_are_kept_and_no_export_drops_one(tmp_path, kind):
    state = {
        "plain": {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}},
        "position": {"a.0": torch.ones(2), "a": [torch.zeros(2)]},
        "sharded": {"a": {"b": torch.ones(2)}, "s": one("a.b", torch.zeros(2))},
    }[kind]
    dist_ckpt.save(state, tmp_path / "c")
    asked = {"s": one("a.b", torch.ones(2))} if kind == "sharded" else {}
    loaded = dist_ckpt.load(asked, tmp_path / "c")
    first, second = (loaded["a"]["b"], loaded["s"]) if kind == "sharded" else (loaded[next(iter(state))], loaded["a"])
    second = second["b"] if kind == "plain" else second[0] if kind == "position" else second
    assert (first.tolist(), second.tolist()) == ([1, 1], [0, 0])
    for export in (
        lambda: dist_ckpt.load_plain_tensors(tmp_path / "c"),
        lambda: tools.convert(tmp_path / "c", tmp_path / "d", to="safetensors"),
    ):
        with pytest.raises(MismatchError, match=r"a\.[b0]: two tensors of the checkpoint have this name"):
            export()
    assert not (tmp_path / "d").exists()
