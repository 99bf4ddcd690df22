"""All ranks make their runner together; a rank that cannot make its own tells the others why.

group or Transport, arguments --> Links and FailureReport, or one error on all ranks (this file) --> runner, from_torch
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sixfold.pipeline.errors import PipelineTimeout, ScheduleError
from sixfold.pipeline.failures.report import FailureReport, Store
from sixfold.pipeline.transport.back_ends import over
from sixfold.pipeline.transport.protocol import EdgeFactory, Links, Transport

__all__ = ["connect", "group_of", "refuse", "transport_of"]

_CPU = torch.device("cpu")


def group_of(group: Any) -> dist.ProcessGroup | Transport | None:
    """What a runner may be given as its group; a mesh of one dimension is its group.

    Raises:
        ScheduleError: it is something else.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ScheduleError(
                f"group is a DeviceMesh of dimensions {group.mesh_dim_names or group.ndim}; give the pipeline's one, "
                'such as mesh["pp"]'
            )
        return group.get_group()
    if group is None or isinstance(group, dist.ProcessGroup | Transport):
        return group
    raise ScheduleError(
        f"group is a {type(group).__name__}; it is a process group (dist.group.WORLD is all ranks), a mesh of one "
        "dimension, a Transport, or None for one process"
    )


def transport_of(
    group: dist.ProcessGroup | Transport | None, edges: EdgeFactory | Any, *, debug_memory: bool = False
) -> Transport | None:
    """Over a process group, or as it was given."""
    return over(group, edges, debug_memory=debug_memory) if isinstance(group, dist.ProcessGroup) else group


def connect(
    transport: Transport, device: torch.device, store: Store | None, timeout_s: float
) -> tuple[Links, FailureReport]:
    """The links of a runner, and how it ends. All ranks come here together.

    Raises:
        PipelineTimeout: a rank did not come in time, or cannot be connected to.
    """
    begin, names = time.monotonic(), getattr(transport, "names", None)
    try:
        links = transport.join(device, timeout_s)
    except (RuntimeError, TimeoutError) as error:  # torch's DistStoreError too: a peer did not come
        name = transport.rank if names is None else names[transport.rank]
        message = f"rank {name} waited {timeout_s:g} s for all {transport.ranks} ranks to make their runner"
        if time.monotonic() - begin < timeout_s:
            message = f"rank {name} has no connection to all {transport.ranks} ranks: {error}"
        raise PipelineTimeout(message, rank=transport.rank) from error
    return links, FailureReport(transport.rank, transport.ranks, links, store, names)


def refuse(error: BaseException, transport: Transport | None, store: Store | None, timeout_s: float) -> NoReturn:
    """No runner is made here: the others, who make theirs, hear of ``error`` in their first wait for this rank."""
    if transport is None:
        raise error
    try:
        links, failure = connect(transport, _CPU, store, timeout_s)
    except PipelineTimeout:
        raise error from None
    if (wait_for_all := getattr(links, "wait_for_all", None)) is not None:
        with suppress(RuntimeError):  # the store is gone
            wait_for_all()
    failure.end(error, None, -1)
