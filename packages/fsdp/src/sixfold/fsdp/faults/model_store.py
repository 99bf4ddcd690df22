"""This model's corner of a store: keys of its own, calls that end, nothing left behind.

    store of the given group, fault_store --> open_model_store (this file) --> deadlines.py, heartbeat.py, collectives/

A store is shared by all that a job does. Keys here begin with the ranks of the model and with how many models these
ranks had before. So models never read each other's keys. The last rank that drops the model deletes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from sixfold.fsdp.errors import FsdpError

_TIDY_S = 1.0  # for one answer of the store when a model is dropped


class NoAnswer(RuntimeError):
    """A store gave none in time: its server is stopped, or cut off."""


class PatientStore:
    """A Store whose calls end: one that gets no answer in time is the last.

    torch's TCPStore waits for its server without a deadline, also in ``add`` and ``check``; a server that is stopped
    (SIGSTOP, a hung node) would hold every survivor. Calls run in a daemon thread that may be left behind.
    """

    def __init__(self, store: Store, answer_s: float) -> None:
        self._store = store
        self._answer_s = answer_s
        self._given_up = False

    def add(self, key: str, amount: int) -> int:
        """As Store's."""
        value: int = self._ask("add", key, amount)
        return value

    def set(self, key: str, value: str) -> None:
        """As Store's."""
        self._ask("set", key, value)

    def check(self, keys: list[str]) -> bool:
        """As Store's."""
        return bool(self._ask("check", keys))

    def get(self, key: str) -> bytes:
        """As Store's; ask ``check`` before, for it waits until the key is there."""
        value: bytes = self._ask("get", key)
        return value

    def delete_key(self, key: str) -> bool:
        """As Store's."""
        return bool(self._ask("delete_key", key))

    def list_keys(self) -> list[str]:
        """As Store's."""
        keys: list[str] = self._ask("list_keys")
        return keys

    def _ask(self, name: str, *args: Any) -> Any:
        if self._given_up:
            raise NoAnswer("the store gave no answer before")
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((getattr(self._store, name)(*args), None))
            except BaseException as error:  # raised in the thread that asked
                answers.put((None, error))

        threading.Thread(target=run, name="sixfold-fsdp-store", daemon=True).start()
        try:
            value, error = answers.get(timeout=self._answer_s)
        except queue.Empty:
            self._given_up = True
            raise NoAnswer(f"the store gave no answer within {self._answer_s:g} s") from None
        if error is not None:
            raise error
        return value


def open_model_store(store: Store, members: Sequence[int], rank: int, timeout_s: float, what: str) -> PrefixStore:
    """The corner of ``store`` for the next model of ``members`` (global ranks of the main mesh, in its order).

    Args:
        rank: this rank's position in the mesh.
        what: how the store is called in an error.
    Raises:
        FsdpError: the store does not answer.
    """
    who = hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:16]
    try:
        ordinal = PatientStore(store, timeout_s).add(f"sixfold.fsdp/{who}/{rank}", 1)
    except RuntimeError as error:
        raise FsdpError(f"{what} does not answer ({error}); give one whose process runs, or None") from error
    return PrefixStore(f"sixfold.fsdp/{who}/model{ordinal}", store)


def tidy(store: Store, size: int) -> None:
    """This rank dropped the model; the last of ``size`` ranks deletes its keys. Never longer than a moment.

    Not at the end of the process: the store may be gone by then, and torch prints what it thinks of that.
    """
    patient = PatientStore(store, _TIDY_S)
    with contextlib.suppress(RuntimeError):  # the store ended with the process that serves it, and its keys with it
        if patient.add("dropped", 1) == size:
            for key in patient.list_keys():
                patient.delete_key(key)


@dataclass(frozen=True, kw_only=True)
class ModelStores:
    """Where the ranks of one model meet: positions in the main mesh, and the two corners (None: nobody to meet)."""

    rank: int = 0
    size: int = 1
    messages: Store | None = None  # in the given group's own store: control, and what communicators exchange
    signs: Store | None = None  # in fault_store if there is one, else the same
    name: str = "the group's store"  # of ``signs``, in errors


def open_model_stores(
    mesh: DeviceMesh | None,
    groups: Sequence[dist.ProcessGroup],
    fault_store: Store | None,
    timeout_s: float,
    *,
    alone: bool = False,
) -> ModelStores:
    """The stores of the next model on ``groups`` ([shard] or [replicate, shard]).

    Args:
        alone: a mesh of one rank needs them too, for communicators of its own.
    Raises:
        FsdpError: a store does not answer, or the mesh's groups have none in common and there is no fault_store.
    """
    if not groups:
        return ModelStores()
    size, rank = 1, 0
    for group in groups:
        size, rank = size * group.size(), rank * group.size() + group.rank()
    if size == 1 and not alone:
        return ModelStores()
    members = dist.get_process_group_ranks(groups[-1]) if mesh is None else mesh.mesh.flatten().tolist()
    name = "the group's store" if fault_store is None else "fault_store"
    own = None if _is_fake(groups[0]) else common_store(groups) or fault_store
    if own is None and not _is_fake(groups[0]):
        raise FsdpError("the mesh's two groups were made from stores that have nothing in common; give fault_store=")
    messages = None if own is None else open_model_store(own, members, rank, timeout_s, "the group's store")
    signs = messages if fault_store is None else open_model_store(fault_store, members, rank, timeout_s, name)
    return ModelStores(rank=rank, size=size, messages=messages, signs=signs, name=name)


def _is_fake(group: dist.ProcessGroup) -> bool:
    """torch's fake back end: one process plays all ranks, and nobody else would answer in the store."""
    return "fake" in str(dist.get_backend_config(group))


def common_store(groups: Sequence[dist.ProcessGroup]) -> Store | None:
    """The store that all ``groups`` (the dimensions of a mesh) were made from; a single group's own.

    None if theirs have nothing in common.
    """
    first, *others = [_above(group.get_group_store()) for group in groups]
    if not others:
        return first[0]
    for store in first:
        if all(any(store is one for one in chain) for chain in others):
            return store
    return None


def _above(store: Store) -> list[Store]:
    """``store`` and, one after another, the stores that it is a prefix of."""
    chain = [store]
    while isinstance(chain[-1], PrefixStore):
        chain.append(chain[-1].underlying_store)
    return chain
