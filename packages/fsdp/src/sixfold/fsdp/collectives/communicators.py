"""The communicators that a model makes for itself: one for gathers, one for reductions, of each group.

    groups, model_store.py --> Communicators (this file) --> comm.py

The ranks of the group make them alone, from a store. ``torch.distributed.new_group`` is a collective of all ranks, or
names groups by how many a process made. The communicators are not registered with ``torch.distributed`` and end with
the model. A fault aborts them and leaves the given group as it was.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from sixfold.fsdp.collectives.comm import Comm, GlooComm, GroupComm, Launches, LocalComm
from sixfold.fsdp.collectives.user_buffers import UserBuffers
from sixfold.fsdp.config import BufferConfig
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.heartbeat import Launched

_NCCL_MARGIN_S = 30.0  # by which NCCL's own watchdog, which ends the process, comes behind ours, which says more

Result = TypeVar("Result")


class Communicators:
    """Makes the Comm of each group of a model once, and ends what it made.

    Args:
        model_store: the model's corner of a store; None: groups are used as they are given.
        device: where the tensors are; its back end in the group is the one that is made anew.
        timeout_s: for making one communicator, and behind it the back end's own deadline.
    """

    def __init__(
        self, model_store: Store | None, device: torch.device, buffers: BufferConfig, timeout_s: float
    ) -> None:
        self._model_store = model_store
        self._device = device
        self._buffers = buffers
        self._timeout_s = timeout_s
        self._comms: dict[tuple[int, ...], GroupComm] = {}  # by ranks: a parameter's own mesh may be the replicas'
        self._made: list[dist.ProcessGroup] = []
        self._shared: list[dist.ProcessGroup] = []
        self.buffers: UserBuffers | None = None

    def comm(self, group: dist.ProcessGroup | None) -> Comm:
        """The Comm of ``group``; collective over its ranks at its first call.

        Raises:
            FsdpError: CTA limits off NCCL; a rank did not come.
        """
        if group is None or (group.size() == 1 and not self._buffers.always_communicate):
            return LocalComm()
        members = tuple(dist.get_process_group_ranks(group))
        if members not in self._comms:
            self._comms[members] = self._connect(group)
        return self._comms[members]

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """What was made."""
        return self._made

    def launched(self, ranks: Sequence[int] = (), control: Launches | None = None) -> Launched:
        """Of each communicator: how many collectives, and the last signatures; of ``control`` under ``ranks``."""
        own = {} if control is None else {f"{_key(ranks)} control": control.last()}
        return own | {
            f"{_key(members)} {role}": one.last()
            for members, comm in list(self._comms.items())
            for role, one in zip(("gathers", "reductions"), comm.launches, strict=True)
        }

    def report(self) -> str:
        """One line."""
        if not self._comms:
            return "none: one process"
        kinds = sorted({backend_of(comm.gathers, self._device) for comm in self._comms.values()})
        how = f"{len(self._made)} made from the given groups" if self._made else "the given groups, shared"
        return f"{', '.join(kinds)}: {how}"

    def user_buffers(self) -> UserBuffers:
        """For the communicators made so far; made once, ends with them."""
        unable = None
        if not self._comms:
            unable = "nothing is sent: one process"
        elif self._shared:
            kinds = {backend_of(group, self._device) for group in self._shared}
            shared = self._buffers.share_communicator and kinds == {"nccl"}
            unable = (
                "share_communicator=True leaves the given group as it is"
                if shared
                else f"the group's back end for {self._device.type} is {', '.join(sorted(kinds))}"
            )
        elif any(backend_of(group, self._device) != "nccl" for group in self._made):
            unable = f"the group's back end for {self._device.type} is {backend_of(self._made[0], self._device)}"
        self.buffers = UserBuffers(
            self._buffers.user_buffers,
            self._device,
            [] if unable else [group._get_backend(self._device) for group in self._made],
            max((comm.size for comm in self._comms.values()), default=1),
            unable,
        )
        return self.buffers

    def _connect(self, group: dist.ProcessGroup) -> GroupComm:
        backend = backend_of(group, self._device)
        limits = self._buffers.nccl_min_ctas is not None or self._buffers.nccl_max_ctas is not None
        if limits and (backend != "nccl" or self._buffers.share_communicator):
            why = f"the group's back end for {self._device.type} is {backend}" if backend != "nccl" else (
                "share_communicator=True makes no group to put them on"
            )  # fmt: skip
            raise FsdpError(
                "nccl_min_ctas and nccl_max_ctas are options of the NCCL groups that fsdp makes, and "
                f"{why}; leave them None"
            )
        kind = GlooComm if backend == "gloo" and self._device.type == "cpu" else GroupComm
        if self._model_store is None or self._buffers.share_communicator or backend not in ("gloo", "nccl"):
            self._shared.append(group)
            return kind(group, group)
        members = dist.get_process_group_ranks(group)
        store = PrefixStore(f"links/{_key(members)}", self._model_store)
        made = []
        for name in ("gathers", "reductions"):
            try:
                one = within(self._timeout_s, partial(self._make, group, backend, name, store))
            except (RuntimeError, TimeoutError) as error:
                raise FsdpError(
                    f"the communicator for {name} of ranks {members} could not be made: {error}. A rank did not come, "
                    "or the network refuses the connection. Restart the job",
                    op="check",
                ) from error
            made.append(one)
        self._made += made
        return kind(*made)

    def _make(self, group: dist.ProcessGroup, backend: str, name: str, store: Store) -> dist.ProcessGroup:
        corner = PrefixStore(name, store)
        made = dist.ProcessGroup(corner, group.rank(), group.size())
        if backend == "gloo":
            kind = dist.ProcessGroup.BackendType.GLOO
            engine: Any = dist.ProcessGroupGloo(corner, group.rank(), group.size(), _gloo_options(group))
        else:
            kind = dist.ProcessGroup.BackendType.NCCL
            options = nccl_options(self._buffers, self._timeout_s)
            engine = dist.ProcessGroupNCCL(corner, group.rank(), group.size(), options)
        made._set_default_backend(kind)
        made._register_backend(self._device, kind, engine)
        made._set_group_name(f"sixfold.fsdp {name}")  # type: ignore[arg-type]
        if backend == "nccl":  # else it connects at its first collective, which no deadline of ours would end
            with torch.cuda.device(self._device):
                engine.eager_connect_single_device(self._device)
        return made

    def abort(self) -> None:
        """End the communicators, whatever they do: those made here, or the given ones where they are shared."""
        for group in (*self._made, *self._shared):
            group.abort()

    def close(self, *, failed: bool) -> None:
        """The model is gone."""
        if self.buffers is not None and not failed:
            self.buffers.close()
        for group in self._made:
            end = group.abort if failed else group.shutdown
            end()
        self._made.clear()
        self._comms.clear()


def _key(members: Sequence[int]) -> str:
    """The same on all ranks of a group, and of no other group."""
    return hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:16]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the group's back end for tensors of ``device``."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:
        return "none"


def nccl_options(buffers: BufferConfig, timeout_s: float) -> Any:
    """Options of the NCCL communicators made here."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=timeout_s + _NCCL_MARGIN_S)
    if buffers.nccl_min_ctas is not None:
        options.config.min_ctas = buffers.nccl_min_ctas
    if buffers.nccl_max_ctas is not None:
        options.config.max_ctas = buffers.nccl_max_ctas
    return options


def _gloo_options(group: dist.ProcessGroup) -> Any:
    """The given group's, and its device: one thread moves the bytes of all."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    given = getattr(group._get_backend(torch.device("cpu")), "options", None)
    if isinstance(given, dist.ProcessGroupGloo._Options):  # type: ignore[attr-defined]
        options._devices, options._timeout = given._devices, given._timeout
    else:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._threads = 2
    return options


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """``call()`` on a thread of its own, which is left behind when it has not ended after ``seconds``.

    Raises:
        TimeoutError: it has not ended; and whatever ``call`` raises.
    """
    ended = threading.Event()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised in the thread that asked
            errors.append(error)
        ended.set()

    threading.Thread(target=run, name="sixfold-fsdp-connect", daemon=True).start()
    if not ended.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
