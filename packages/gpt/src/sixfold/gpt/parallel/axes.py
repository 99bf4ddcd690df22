"""Where a rank stands on each axis along which one model is split inside a pipeline stage.

    mesh.py, or a user's DeviceMesh --> Axes (this file) --> decoder.py, attention.py, moe.py

An axis of one rank has no group, and every function of the model that takes an Axis does nothing on it: one process
and one rank of a thousand run the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CpCommType = Literal["all_gather", "p2p"]


@dataclass(frozen=True, slots=True)
class Axis:
    """This rank's position among ``size`` ranks of ``group``; None where it is alone.

    Attributes:
        timeout: longest wait for a message between two of its ranks on the CPU; None: what ``group`` was made with.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        assert (self.group is None) == (self.size == 1), f"an axis of {self.size} ranks has group {self.group}"
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str, timeout: timedelta | None = None) -> Axis:
        """The axis ``name`` of ``mesh``; one of one rank where the mesh does not have it."""
        if name not in (mesh.mesh_dim_names or ()) or mesh[name].size() == 1:
            return cls()
        return cls(mesh.get_local_rank(name), mesh[name].size(), mesh.get_group(name), timeout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """How one model is split inside a pipeline stage.

    Attributes:
        tp: heads, ffn columns and vocabulary rows are split over it.
        cp: the sequence is cut over it, in 2 * size chunks: rank r has chunks r and 2 * size - 1 - r.
        ep: experts are split over it, in contiguous ranges.
        exchange: ep x tp, tp fastest: the ranks that hold parts of the experts that a token may go to.
        statistics: cp x tp: the ranks that share a microbatch.
        sequence: between blocks hidden states are cut over tp along the sequence.
        overlap: the gather along the sequence comes in chunks, each beside the products of the one before.
        cp_comm_type: how keys and values travel over cp, as Megatron-Core's key of the same name.
    """

    tp: Axis = Axis()
    cp: Axis = Axis()
    ep: Axis = Axis()
    exchange: Axis = Axis()
    statistics: Axis = Axis()
    sequence: bool = True
    overlap: bool = False
    cp_comm_type: CpCommType = "all_gather"

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Axes:
        """The axes of a mesh by their names here, those that it has. Makes no group."""
        tp, cp, ep = (Axis.of(mesh, name) for name in ("tp", "cp", "ep"))
        exchange = tp if ep.size == 1 else Axis.of(mesh, "exchange")
        both = cp.size > 1 and tp.size > 1
        statistics = Axis.of(mesh, "statistics") if both else (cp if cp.size > 1 else tp)
        return cls(tp=tp, cp=cp, ep=ep, exchange=exchange, statistics=statistics)

    @property
    def sharded_sequence(self) -> bool:
        """Hidden states between blocks are (b, s / tp, hidden)."""
        return self.sequence and self.tp.size > 1


ALONE = Axes()
