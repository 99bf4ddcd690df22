"""The forms in which people save, each with values that a number makes: a mixture of two saves shows.

    number --> made --> save (this file) --> folder --> load (this file) --> flat: value by path, for comparing

Used by tests of damage. No form has a value that another number makes too, other than structure and names.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from dist_ckpt_dcp_helpers import dcp_load, dcp_save
from dist_ckpt_helpers import one
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointManager, PerRank, ShardedObject, ShardedTensor, dcp, retention

LARGE = 20_000  # elements: above what common.pt keeps a second copy of


def values(fill, size=LARGE):
    """Large and small tensors of several dtypes."""
    generator = torch.Generator().manual_seed(fill)
    return {
        "large": torch.randn(size, generator=generator),
        "wide": torch.randn(50, 60, generator=generator),
        **{f"small{i}": torch.randn(7 + i, generator=generator).to(torch.bfloat16) for i in range(6)},
        "count": torch.tensor(1000 + fill),
    }


def records(fill):
    tensors = {key: one(key, tensor) for key, tensor in values(fill).items()}
    return {**tensors, "o": ShardedObject("o", {"fill": fill}, (1,), (0,)), "it": fill}


def plain(fill):
    return {"model": values(fill), "list": [values(fill + 50, 100)["wide"], {"x": fill}], "text": f"run {fill}"}


def trained(fill):
    """Objects: a model with buffers, its optimizer and schedule, as many steps on as ``fill`` says."""
    torch.manual_seed(fill)
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(fill):
        model(torch.randn(4, 20)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": fill}


def of_ranks(fill):
    """On several ranks: shards, copies, plain tensors, values of each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, tensors = init_device_mesh("cpu", (ranks,)), values(fill)
    placements = {"large": Shard(0), "wide": Shard(1), "small0": Replicate()}
    cut = {name: distribute_tensor(tensors.pop(name), mesh, [kind]) for name, kind in placements.items()}
    own = PerRank({"rng": values(100 * fill + rank)["large"], "position": [fill, rank]})
    return {"cut": cut, "plain": tensors, "own": own, "few": PerRank(torch.tensor([fill, rank])), "step": fill}


class Form(NamedTuple):
    save: Callable[[Any, int], Any]
    load: Callable[..., Any]  # folder, options of a load
    expected: Callable[[int], Any]
    ranks: int = 1


def _saver(make, **options):
    return lambda folder, fill: dist_ckpt.save(make(fill), folder, **options)


def _loader(make):
    return lambda folder, **options: dist_ckpt.load(make(0), folder, **options)


def save_since(folder, fill):
    """Its largest tensor is linked from a save beside it."""
    base = folder.with_name("base")
    dist_ckpt.save({"model": {"large": values(fill)["large"]}}, base, group=None)
    dist_ckpt.save(plain(fill), folder, group=None, since=base)
    assert any(path.stat().st_nlink > 1 for path in folder.iterdir()), "nothing is linked"


def save_managed(folder, fill):
    """``folder`` is that of a step, as a manager names it."""
    root, step = folder.parent, int(folder.name.removeprefix("step-"))
    assert retention.step_path(root, step) == folder, f"{folder} is no step"
    with CheckpointManager(root, background=False, best="loss", group=None) as manager:
        manager.save(step, plain(fill), {"loss": fill / 8}, force=True)


def load_managed(folder, **options):
    manager = CheckpointManager(folder.parent, best="loss", group=None)
    restored = manager.restore(plain(0), int(folder.name.removeprefix("step-")), **options)
    return {"state": restored.state, "metrics": restored.metrics}


def load_by_the_door(folder, **options):
    state = {"model": {name: torch.zeros_like(value) for name, value in values(0).items()}, "list": [None, {"x": 0}]}
    state |= {"text": ""}
    state["list"][0] = torch.zeros(50, 60)
    try:
        dcp_load(state, dcp.Reader(folder, **options), no_dist=True)
    except CheckpointException as told:  # torch's, with ours inside
        raise next(error for error, _ in told.failures.values()) from None
    return state


def save_by_the_door(folder, fill):
    dcp_save(plain(fill), dcp.Writer(folder), no_dist=True)


def load_of_ranks(folder, **options):
    """By one process: shards whole, and a list of what the ranks had of their own."""
    whole = {name: torch.zeros_like(value) for name, value in values(0).items()}
    cut = {name: whole.pop(name) for name in ("large", "wide", "small0")}
    every = {name: PerRank(None, lambda found, rank, ranks: found) for name in ("own", "few")}
    return dist_ckpt.load({"cut": cut, "plain": whole, **every, "step": 0}, folder, group=None, **options)


def expected_of_ranks(fill):
    whole = values(fill)
    cut = {name: whole.pop(name) for name in ("large", "wide", "small0")}
    own = [{"rng": values(100 * fill + rank)["large"], "position": [fill, rank]} for rank in (0, 1)]
    few = [torch.tensor([fill, rank]) for rank in (0, 1)]
    return {"cut": cut, "plain": whole, "own": own, "few": few, "step": fill}


FORMS = {
    "records": Form(_saver(records, group=None), _loader(records), records),
    "plain": Form(_saver(plain, group=None), _loader(plain), plain),
    "for megatron": Form(_saver(plain, group=None, megatron=True), _loader(plain), plain),
    "compact": Form(_saver(plain, group=None, metadata="compact"), _loader(plain), plain),
    "objects": Form(_saver(trained, group=None), _loader(trained), trained),
    "managed": Form(save_managed, load_managed, lambda fill: {"state": plain(fill), "metrics": {"loss": fill / 8}}),
    "since": Form(save_since, _loader(plain), plain),
    "door": Form(save_by_the_door, load_by_the_door, plain),
    "of two ranks": Form(_saver(of_ranks), load_of_ranks, expected_of_ranks, 2),
}
if find_spec("zstandard") is not None:  # the extra zstd
    FORMS["compressed"] = Form(_saver(plain, group=None, compress="zstd"), _loader(plain), plain)


def flat(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values by path; of an object those of its state dict, of a record its data."""
    if isinstance(state, ShardedTensor | ShardedObject):
        state = state.data
    elif callable(getattr(state, "state_dict", None)):
        state = state.state_dict()
    if isinstance(state, dict):
        for key, value in state.items():
            yield from flat(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from flat(value, f"{path}/{number}")
    else:
        yield path, state


def same(found: Any, expected: Any) -> bool:
    """Of one type and, if tensors, of the same dtype, shape and bits."""
    if hasattr(expected, "tobytes"):  # an array of numpy, which not all who run this have
        return type(found) is type(expected) and found.dtype == expected.dtype and found.tolist() == expected.tolist()
    if not isinstance(expected, torch.Tensor):
        return type(found) is type(expected) and bool(found == expected)
    return (
        isinstance(found, torch.Tensor)
        and (found.dtype, found.shape, found.is_meta) == (expected.dtype, expected.shape, expected.is_meta)
        and (
            expected.is_meta
            or torch.equal(
                found.detach().reshape(-1).view(torch.uint8), expected.detach().reshape(-1).view(torch.uint8)
            )
        )
    )


def wrong(found: Any, expected: Any) -> list[str]:
    """Paths whose values are not those that were expected, or are not there."""
    a, b = dict(flat(found)), dict(flat(expected))
    return sorted({*a} ^ {*b} | {path for path in {*a} & {*b} if not same(a[path], b[path])})
