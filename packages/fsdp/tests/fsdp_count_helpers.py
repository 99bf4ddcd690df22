"""Collectives as torch's dispatcher sees them, and many ranks in one process.

Traffic (this file), a list of (kind, bytes) --> tests/ranks/test_matrix_traffic.py
Calls (this file), names of what goes to a back end --> tests of groups of one rank
fake_world (this file): a group of any size whose collectives do nothing
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
}
LOCAL = ("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor")
CONTROL_BYTES = 2048  # messages up to this size in int64, float64 or uint8 are control


class Sent(NamedTuple):
    """One collective: the bytes of its larger side, which is the whole of what was gathered or reduced."""

    kind: str
    nbytes: int


def gathers(args: Any) -> bool:
    """The collective with ``args`` goes to a communicator that fsdp made for gathers: two ranks on gloo swap there."""
    objects = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.ScriptObject)]
    groups = [dist.ProcessGroup.unbox(one) for one in objects if "ProcessGroup" in str(one._type())]
    return any(group.group_name == "sixfold.fsdp gathers" for group in groups)


class Traffic(TorchDispatchMode):
    """All data collectives inside, in order; control messages apart."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.control: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(type(leaf).__name__ == "DTensor" for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
            return NotImplemented  # its own dispatch comes back here with local tensors
        result = func(*args, **(kwargs or {}))
        if name.startswith(("c10d.", "_c10d_functional.")) and not name.startswith(LOCAL):
            kind = "all_gather" if gathers(args) else next((kind for part, kind in KINDS.items() if part in name), name)
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            nbytes = max((tensor.nbytes for tensor in tensors), default=0)
            wide = bool(tensors) and tensors[0].dtype in (torch.int64, torch.float64, torch.uint8)
            (self.control if wide and nbytes <= CONTROL_BYTES else self.sent).append(Sent(kind, nbytes))
        return result

    def calls(self, kind: str) -> int:
        return sum(sent.kind == kind for sent in self.sent)

    def nbytes(self, kind: str) -> int:
        return sum(sent.nbytes for sent in self.sent if sent.kind == kind)


class Calls(TorchDispatchMode):
    """Names of the collectives that go to a back end."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d."):
            self.names.append(str(func).removeprefix("c10d.").removesuffix("_.default").strip("_"))
        return func(*args, **(kwargs or {}))


def fake_world(size: int) -> dist.ProcessGroup:
    """Inside a job of one rank: the default group becomes one of ``size`` whose other members do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    assert dist.group.WORLD is not None
    return dist.group.WORLD
