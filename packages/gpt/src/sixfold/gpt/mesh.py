"""Where a rank stands: its coordinates, and the groups that its data and its control messages take.

    config.parallel + launch.World --> mesh (this file) --> build.py, step.py, checkpoint.py

One DeviceMesh with axes ("pp", "dp", "cp", "tp"), outermost first, so tp varies fastest. With dp_replicate (HSDP) dp is
("dp_replicate", "dp_shard"): copies, each of neighbouring ranks that share its shards. A group of one rank is
``None`` everywhere, which is how the packages below spell "this process alone". Data moves on the groups of the mesh;
control (errors, small objects, checkpoint plans) on ``control``, which is always a CPU channel.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

if TYPE_CHECKING:
    from sixfold.gpt.config import ParallelConfig
    from sixfold.gpt.launch import World


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMesh:
    """Coordinates and groups of this rank; a group that would hold one rank is None."""

    rank: int
    size: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int
    pipeline: dist.ProcessGroup | None = None  # the pp ranks of this rank's pipeline, in stage order
    data: dist.ProcessGroup | None = None  # dp x cp: the ranks that see different samples
    hybrid: DeviceMesh | None = None  # (replicate, shard) of ``data`` where dp_replicate > 1, else None
    control: dist.ProcessGroup | None = None  # every rank, on the CPU
    timeout: datetime.timedelta = datetime.timedelta(minutes=10)  # of every collective of these groups

    @property
    def layout(self) -> dict[str, int]:
        """The degrees, as the metrics' start line shows them."""
        return {"pp": self.pp, "dp": self.dp, "cp": 1, "tp": 1, "ep": 1}


def make_mesh(parallel: ParallelConfig, world: World, device: torch.device, timeout_s: float) -> RankMesh:
    """Build the mesh of a job whose ``parallel`` degrees multiply to ``world.size`` (checked in config.py).

    Args:
        timeout_s: longest wait in a collective of any of its groups.
    """
    if world.size == 1:
        return RankMesh(rank=0, size=1, pp=1, pp_rank=0, dp=1, dp_rank=0)
    sizes = {"pp": parallel.pp, "dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp}
    copies = parallel.dp_replicate
    if copies > 1:
        shards = {"dp_replicate": copies, "dp_shard": parallel.dp // copies}
        sizes = {"pp": parallel.pp, **shards, "cp": parallel.cp, "tp": parallel.tp}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    hybrid = mesh["dp_replicate", "dp_shard"] if copies > 1 else None
    data = mesh["dp"] if hybrid is None else hybrid._flatten("dp")
    control = dist.group.WORLD if device.type == "cpu" else dist.new_group(backend="gloo")
    timeout = datetime.timedelta(seconds=timeout_s)
    # [Note: deadlines of groups] torch gives the groups of a mesh its own default of 10 or 30 minutes, whatever the
    # default group was made with.
    for group in (*(mesh.get_group(axis) for axis in sizes), data.get_group(), control):
        _set_pg_timeout(timeout, group)
    return RankMesh(
        timeout=timeout,
        rank=world.rank,
        size=world.size,
        pp=parallel.pp,
        pp_rank=mesh.get_local_rank("pp"),
        dp=parallel.dp,
        dp_rank=data.get_local_rank(),
        pipeline=mesh.get_group("pp") if parallel.pp > 1 else None,
        data=data.get_group() if parallel.dp > 1 else None,
        hybrid=hybrid,
        control=control,
    )


def pair_group(mesh: RankMesh, first: int, last: int) -> dist.ProcessGroup | None:
    """The group of pipeline ranks ``first`` and ``last`` of this rank's pipeline; None where the rank is neither.

    Made by its two members alone, so the ranks between them need not call. torch names such a group by its ranks and
    by how many groups the process has made: both must have made equally many, as the ranks of one pipeline have.
    """
    if mesh.pipeline is None or first == last or mesh.pp_rank not in (first, last):
        return None
    members = [dist.get_global_rank(mesh.pipeline, r) for r in (first, last)]
    group: dist.ProcessGroup = dist.new_group(members, use_local_synchronization=True, timeout=mesh.timeout)
    return group
