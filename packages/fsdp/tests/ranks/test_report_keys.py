"""Every key of ``report()`` stands in its docstring with a unit, and nothing stands there that is no key."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

NAMED = ("own_meshes", "units", "tied")  # dicts whose keys are names


def paths(value, path: str = "") -> set[str]:
    """Dotted keys down to the values that are no dict and no list of dicts."""
    if isinstance(value, dict) and value:
        inner = path.rpartition(".")[2] in NAMED
        return set().union(*(paths(v, ".".join(filter(None, (path, "*" if inner else k)))) for k, v in value.items()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return set().union(*(paths(one, path + "[]") for one in value))
    return {path} if not isinstance(value, (dict, list)) or value else set()


def documented() -> dict[str, str]:
    """Key -> unit, from the table."""
    text = FullyShardedDataParallel.report.__doc__ or ""
    rows = [row.split("|")[1:3] for row in text.splitlines() if row.strip().startswith("| ``")]
    return {key: unit.strip() for keys, unit in rows for key in re.findall(r"``([^`]+)``", keys)}


def trained(net, optimizer=make_adamw, **options):
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], **options)
    stepping = fully_shard_optimizer(optimizer(net.parameters()), model)
    for step in range(2):
        loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
        stepping.step()
        stepping.zero_grad()
    return model, stepping  # a report tells of optimizers that live


def all_reports(rank: int, ranks: int) -> set[str]:
    from torch.distributed.device_mesh import DeviceMesh

    alone = DeviceMesh("cpu", [rank])
    group = {"process_group": dist.group.WORLD, "mixed_precision": MixedPrecision()}
    mesh_for = {"mesh_for": lambda name: alone if name.startswith("blocks.0") else None}
    tied, owners = make_net(tied=True), make_net()
    sizes = trained(make_net(), **group)[0].report()["units"].values()
    budget = BufferConfig(gathered_bytes=sum(unit["gathered_bytes"] for unit in sizes))
    kept = [
        trained(tied, **group, buffers=budget),
        trained(owners, **group, granularity=lambda name, parameter: "tensor"),
        trained(make_net(), **group, buffers=BufferConfig(offload=True)),
        trained(make_net(), **group, **mesh_for),
        trained(
            make_net(),
            lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2]),
            process_group=dist.group.WORLD,
        ),
    ]
    return set().union(*(paths(model.report()) for model, _ in kept))


@pytest.mark.slow
def test_the_docstring_of_report_has_every_key_with_its_unit():
    table = documented()
    found = set().union(*run_ranks(all_reports, 2))
    assert found - set(table) == set(), "keys without a line"
    assert set(table) - found == {"root.units_made"} - found, "lines without a key"
    assert all(table.values())
