"""Where a rank stands: its coordinates, and the groups that its data and its control messages take.

    config.parallel + rendezvous.World --> mesh (this file) --> rank_model.py, step.py, training_state.py

One DeviceMesh with axes ("pp", "dp", "cp", "tp"), outermost first, so tp varies fastest. With dp_replicate (HSDP) dp is
("dp_replicate", "dp_shard"): copies, each of neighbouring ranks that share its shards. Experts have a second mesh of
the same ranks, ("pp", "edp", "ep", "tp"): ep consecutive ranks of dp x cp hold all experts between them. A group of one
rank is ``None`` everywhere, which is how the packages below spell "this process alone". Data moves on the groups of the
meshes; control (errors, small objects, checkpoint plans) on ``control``, which is always a CPU channel.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from sixfold.gpt.parallel.axes import ALONE, Axes, Axis
from sixfold.gpt.parallel.weight_sharding import Cuts

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import ParallelConfig
    from sixfold.gpt.launch.rendezvous import World


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMesh:
    """Coordinates and groups of this rank; a group that would hold one rank is None."""

    rank: int
    size: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int  # which samples it reads: those of a cp or tp group read the same
    data_rank: int  # in ``data``: dp_rank * cp + cp_rank
    axes: Axes = ALONE
    pipeline: dist.ProcessGroup | None = None  # the pp ranks of this rank's pipeline, in stage order
    data: dist.ProcessGroup | None = None  # dp x cp: the ranks that see different tokens
    hybrid: DeviceMesh | None = None  # (replicate, shard) of ``data`` where dp_replicate > 1, else None
    expert_data: DeviceMesh | None = None  # the ranks that share this rank's experts, where ep > 1; 1-D
    control: dist.ProcessGroup | None = None  # every rank, on the CPU
    timeout: datetime.timedelta = datetime.timedelta(minutes=10)  # of every collective of these groups

    @property
    def statistics(self) -> dist.ProcessGroup | None:
        """cp x tp: the ranks that share a microbatch."""
        return self.axes.statistics.group

    @property
    def layout(self) -> dict[str, int]:
        """The degrees, as the metrics' start line shows them."""
        axes = self.axes
        return {"pp": self.pp, "dp": self.dp, "cp": axes.cp.size, "tp": axes.tp.size, "ep": axes.ep.size}

    @property
    def speaks(self) -> bool:
        """This rank's pipeline is the one, of all that run the same program, whose timeline is told."""
        return self.data_rank == 0 and self.axes.tp.rank == 0

    def rank_of(self, pp_rank: int) -> int:
        """The number among all ranks of a rank of this rank's pipeline."""
        return self.rank if self.pipeline is None else dist.get_global_rank(self.pipeline, pp_rank)

    @property
    def cuts(self) -> Cuts:
        """Which parts of canonical tensors lie here, before fsdp shards them."""
        tp, ep = self.axes.tp, self.axes.ep
        return Cuts(tp_rank=tp.rank, tp=tp.size, ep_rank=ep.rank, ep=ep.size)


def make_mesh(parallel: ParallelConfig, world: World, device: torch.device, timeout_s: float) -> RankMesh:
    """Build the mesh of a job whose ``parallel`` degrees multiply to ``world.size`` (checked in train_config.py).

    Args:
        timeout_s: longest wait in a collective of any of its groups.
    """
    if world.size == 1:
        return RankMesh(rank=0, size=1, pp=1, pp_rank=0, dp=1, dp_rank=0, data_rank=0)
    sizes = {"pp": parallel.pp, "dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp}
    copies = parallel.dp_replicate
    if copies > 1:
        shards = {"dp_replicate": copies, "dp_shard": parallel.dp // copies}
        sizes = {"pp": parallel.pp, **shards, "cp": parallel.cp, "tp": parallel.tp}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data, hybrid = _data_meshes(mesh, parallel)
    both = mesh["cp", "tp"]._flatten("cp_tp") if parallel.cp > 1 and parallel.tp > 1 else None
    experts = _expert_mesh(parallel, device)
    control = dist.group.WORLD if device.type == "cpu" else dist.new_group(backend="gloo")
    timeout = datetime.timedelta(seconds=timeout_s)
    axes = _axes(mesh, experts, both, parallel, timeout)
    shared = axes.statistics.group, axes.exchange.group
    # [Note: deadlines of groups] torch gives the groups of a mesh its own default of 10 or 30 minutes, whatever the
    # default group was made with. What is set here does not reach messages between two ranks of gloo, which keep what
    # their group was made with: an Axis has the deadline for those.
    groups: list[Any] = [mesh.get_group(axis) for axis in sizes]
    if experts is not None:
        groups += [experts.get_group(axis) for axis in ("edp", "ep")]
    groups += [data.get_group(), control, *(group for group in shared if group is not None)]
    if hybrid is not None:
        groups.append(hybrid.get_group(1))
    for group in groups:
        _set_pg_timeout(timeout, group)
    return RankMesh(
        timeout=timeout,
        rank=world.rank,
        size=world.size,
        pp=parallel.pp,
        pp_rank=mesh.get_local_rank("pp"),
        dp=parallel.dp,
        dp_rank=data.get_local_rank() // parallel.cp,
        data_rank=data.get_local_rank(),
        axes=axes,
        pipeline=mesh.get_group("pp") if parallel.pp > 1 else None,
        data=data.get_group() if parallel.dp * parallel.cp > 1 else None,
        hybrid=hybrid,
        expert_data=experts["edp"] if experts is not None else None,
        control=control,
    )


def _data_meshes(mesh: DeviceMesh, parallel: ParallelConfig) -> tuple[DeviceMesh, DeviceMesh | None]:
    """dp x cp as one axis, and as (replicate, shard) where there are replicas."""
    if parallel.dp_replicate == 1:
        return (mesh["dp"] if parallel.cp == 1 else mesh["dp", "cp"]._flatten("dp_cp")), None
    if parallel.cp == 1:
        hybrid = mesh["dp_replicate", "dp_shard"]
        return hybrid._flatten("dp"), hybrid
    data = mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp")
    names = ("dp_replicate", "dp_shard_cp")
    groups = [mesh.get_group(names[0]), mesh["dp_shard", "cp"]._flatten(names[1]).get_group()]
    # Not a slice of ``mesh``: torch gives up slices by the name of a flattened axis.
    ranks = data.mesh.view(parallel.dp_replicate, -1)
    return data, DeviceMesh.from_group(groups, data.device_type, ranks, mesh_dim_names=names)


def _expert_mesh(parallel: ParallelConfig, device: torch.device) -> DeviceMesh | None:
    """The ranks again, with dp x cp as ("edp", "ep"); None where every rank has all experts."""
    if parallel.ep == 1:
        return None
    shared = parallel.dp * parallel.cp // parallel.ep
    sizes = {"epp": parallel.pp, "edp": shared, "ep": parallel.ep, "etp": parallel.tp}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _axes(
    mesh: DeviceMesh,
    experts: DeviceMesh | None,
    both: DeviceMesh | None,
    parallel: ParallelConfig,
    timeout: datetime.timedelta,
) -> Axes:
    """``both`` is cp x tp as one axis, where both have several ranks."""
    tp, cp = (Axis.of(mesh, name, timeout) for name in ("tp", "cp"))
    statistics = cp if cp.size > 1 else tp
    if both is not None:
        statistics = Axis(both.get_local_rank(), both.size(), both.get_group(), timeout)
    ep, exchange = Axis(), tp
    if experts is not None:
        ep = exchange = Axis.of(experts, "ep", timeout)
        if tp.size > 1:
            both = experts["ep", "etp"]._flatten("exchange")
            exchange = Axis(both.get_local_rank(), both.size(), both.get_group(), timeout)
    return Axes(
        tp=tp,
        cp=cp,
        ep=ep,
        exchange=exchange,
        statistics=statistics,
        sequence=parallel.sequence,
        overlap=parallel.tp_overlap,
        cp_comm_type=parallel.cp_comm_type,
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
