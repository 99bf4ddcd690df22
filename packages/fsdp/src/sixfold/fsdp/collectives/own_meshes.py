"""Which parameters are on a mesh of their own: an expert that fewer ranks share than the main mesh has.

    mesh_for --> Meshes (this file) --> setup/wrappable.py, setup/start_values.py; setup/build.py connects them

Such a mesh is 1-D, lies inside the main mesh and shards what is on it. Ranks outside it hold other parameters
(expert-parallel peers). Sends nothing: what ranks say of their meshes is compared in setup/start_values.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sixfold.fsdp.collectives.comm import Comm, LocalComm, Ranks
from sixfold.fsdp.errors import FsdpError

Place = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class OwnMesh:
    """The mesh of some parameters: ``place`` are positions in the main mesh."""

    place: Place
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Meshes:
    """By name, the parameters that are not on the main mesh."""

    own: Mapping[str, OwnMesh] = field(default_factory=dict)

    def connect(self, comm: Callable[[dist.ProcessGroup], Comm]) -> dict[str, Ranks]:
        """The ranks of each parameter's own mesh; collective over each, in the order of the parameters."""
        known: dict[OwnMesh, Ranks] = {}
        for mesh in self.own.values():
            if mesh not in known:
                known[mesh] = Ranks(shard=comm(mesh.group), outer=LocalComm())
        return {name: known[mesh] for name, mesh in self.own.items()}


def own_meshes(
    module: nn.Module,
    main: DeviceMesh | None,
    group: dist.ProcessGroup | None,
    mesh_for: Callable[[str], DeviceMesh | None] | None,
) -> Meshes:
    """Ask ``mesh_for`` for every parameter; ``main`` or ``group`` is the main mesh.

    Raises:
        FsdpError: a mesh is not 1-D, leaves the main mesh or does not hold this rank.
    """
    if mesh_for is None:
        return Meshes()
    everyone, me = _global_ranks(main, group)
    hybrid = main is not None and main.ndim == 2
    known: dict[Place, OwnMesh] = {}
    own: dict[str, OwnMesh] = {}
    first: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        mesh = mesh_for(name)
        inside = everyone if mesh is None else _ranks_of(name, mesh, everyone, me)
        found = None
        if mesh is not None and (hybrid or inside != everyone):
            if inside not in known:
                known[inside] = OwnMesh(tuple(everyone.index(rank) for rank in inside), mesh.get_group(0))
            found = known[inside]
        before = first.setdefault(parameter, name)
        if before != name and found is not own.get(before):
            raise FsdpError(
                f"mesh_for gives {name} the ranks {list(inside)}, and {before}, which is the same parameter, others; "
                "tied parameters are on one mesh"
            )
        if before == name and found is not None:
            own[name] = found
    return Meshes(own)


def _global_ranks(main: DeviceMesh | None, group: dist.ProcessGroup | None) -> tuple[Place, int]:
    """Of the main mesh, by position in it, replicas outermost; and which of them is this one."""
    if main is not None:
        me = dist.get_process_group_ranks(main.get_group(0))[dist.get_rank(main.get_group(0))]
        return tuple(int(rank) for rank in main.mesh.flatten().tolist()), me
    if group is not None:
        ranks = tuple(dist.get_process_group_ranks(group))
        return ranks, ranks[dist.get_rank(group)]
    return (0,), 0


def _ranks_of(name: str, mesh: object, everyone: Place, me: int) -> Place:
    """Global ranks of a parameter's own mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise FsdpError(f"mesh_for gives {name} {type(mesh).__name__}; it gives a 1-D DeviceMesh, or None")
    if mesh.ndim != 1:
        raise FsdpError(
            f"mesh_for gives {name} a mesh of {mesh.ndim} dimensions; a parameter's own mesh is 1-D, as mesh['name'] "
            "gives it; None is the main mesh"
        )
    inside = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    outside = sorted(set(inside) - set(everyone))
    if outside:
        raise FsdpError(
            f"mesh_for gives {name} a mesh with rank {outside[0]}, and the main mesh has ranks {list(everyone)}; a "
            "parameter's own mesh lies inside the main one"
        )
    if me not in inside:
        raise FsdpError(
            f"mesh_for gives {name} the mesh of ranks {list(inside)} on rank {me}; give each rank the mesh "
            "that holds it"
        )
    return inside
