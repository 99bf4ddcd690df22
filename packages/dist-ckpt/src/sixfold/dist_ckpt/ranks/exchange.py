"""Control exchange: small messages and errors between the ranks of a group, with a deadline.

    each rank's report --> together (this file) --> one decision on every rank, or one error on every rank

Star-shaped: reports go to the first rank of the group, its decision goes back. Point to point, so
that a wait that fails names the peer. It runs on CPU tensors: on the given group where that has a
CPU back end, else on a gloo subgroup derived from it once; never an object collective over NCCL.
This is the one file of the package that looks up the default process group, for ``group="world"``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from sixfold.dist_ckpt.errors import BY_NAME, CheckpointError, CorruptError, LostPeerError, StorageError, typed
from sixfold.dist_ckpt.files.frame import tensor_bytes

Mine = TypeVar("Mine")
Message = TypeVar("Message")
Decision = TypeVar("Decision")
Group = dist.ProcessGroup | Literal["world"] | None

_LONGEST_S = 1e8  # three years stand for infinity, which gloo's clock does not know
_TAG = 0x5C4B  # keeps these messages apart from a trainer's own on the same group
_cpu_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class Exchange:
    """The ranks that save or load together; alone if the group is None.

    Args:
        group: a process group this rank belongs to; None for this process alone; "world" for the
            default group if torch.distributed is initialised, else this process alone.
        timeout_s: longest wait for one peer, seconds.
    Raises:
        CheckpointError: the group is none of these.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise CheckpointError(f"timeout_s is {timeout_s}; it is > 0")
        self.timeout_s = min(timeout_s, _LONGEST_S)
        self.group = _resolve(group)
        self._group = _cpu_group(self.group, self.timeout_s)
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self.ranks = 1 if self._group is None else dist.get_world_size(self._group)

    @property
    def channel(self) -> dist.ProcessGroup | None:
        """The CPU channel of ``group``: that group itself, or a gloo subgroup of its ranks."""
        return self._group

    def together(
        self, work: Callable[[], tuple[Mine, Message]], decide: Callable[[list[Message]], Decision]
    ) -> tuple[Mine, Decision]:
        """Run ``work`` on every rank and ``decide`` on the first, with the messages of all in rank order.

        Returns:
            What ``work`` kept for this rank, and the decision, which is the same on every rank.
        Raises:
            CheckpointError: raised by ``work`` on any rank (the lowest wins) or by ``decide``: the
                same type and text on all ranks. LostPeerError if a rank is dead or late.
        """
        if self._group is None:
            mine, message = typed(work)
            return mine, typed(lambda: decide([message]))
        kept: list[Mine] = []

        def keep_mine() -> Message:
            mine, message = typed(work)
            kept.append(mine)
            return message

        own = Outcome.of(keep_mine, f"rank {self.rank}")
        if self.rank:
            self._send(0, own.encode())
            return _result(kept, Outcome.decode(self._receive(0)), own)
        decision = self._decide(own, decide)
        for peer in range(1, self.ranks):
            self._send(peer, decision.encode(), best_effort=decision.error is not None)
        return _result(kept, decision, own)

    def _decide(self, own: Outcome, decide: Callable[[list[Any]], Any]) -> Outcome:
        outcomes = [own]
        lost: Outcome | None = None
        for peer in range(1, self.ranks):
            try:
                outcomes.append(Outcome.decode(self._receive(peer)))
            except LostPeerError as error:
                # The others are still heard, so that they all get this error and none waits in vain.
                lost = lost or Outcome(error=error)
        if lost is not None:
            return lost
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            # Damage that one rank has found explains what others ran into.
            return min(failed, key=lambda outcome: not isinstance(outcome.error, CorruptError))
        return Outcome.of(lambda: typed(lambda: decide([outcome.value for outcome in outcomes])), "rank 0")

    def _send(self, peer: int, data: bytes, *, best_effort: bool = False) -> None:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            for tensor in (torch.tensor([len(data)], device="cpu"), payload):
                self._wait(dist.isend(tensor, group=self._group, group_dst=peer, tag=_TAG), peer)
        except RuntimeError as error:
            if not best_effort:
                raise self._lost(peer, error) from error

    def _receive(self, peer: int) -> bytes:
        header = torch.zeros(1, dtype=torch.int64, device="cpu")
        try:
            self._wait(dist.irecv(header, group=self._group, group_src=peer, tag=_TAG), peer)
            payload = torch.empty(int(header), dtype=torch.uint8, device="cpu")
            self._wait(dist.irecv(payload, group=self._group, group_src=peer, tag=_TAG), peer)
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        return bytes(tensor_bytes(payload))

    def _wait(self, work: dist.Work | None, peer: int) -> None:
        if work is None:
            raise RuntimeError(f"this process is not in the group of rank {peer}")
        work.wait(timedelta(seconds=self.timeout_s))

    def _lost(self, peer: int, error: RuntimeError) -> LostPeerError:
        reason = str(error).partition("\n")[0]
        return LostPeerError(
            f"rank {peer} of {self.ranks} is dead, absent or later than timeout_s={self.timeout_s:g} "
            f"(rank {self.rank} waited: {reason}). Restart the job; the folder holds the old or "
            "the new checkpoint, whole"
        )


@contextmanager
def told_to_all(group: Group, timeout_s: float) -> Iterator[None]:
    """An error inside, before a call's first exchange, is raised by that exchange on every rank."""
    try:
        yield
    except CheckpointError as error:
        known = error

        def tell() -> tuple[None, None]:
            raise known

        Exchange(group, timeout_s).together(tell, lambda _: None)
        raise


class Outcome:
    """What a rank has to say: a value or an error."""

    def __init__(self, value: Any = None, error: CheckpointError | None = None) -> None:
        self.value, self.error = value, error

    @classmethod
    def of(cls, action: Callable[[], Any], who: str) -> Outcome:
        try:
            return cls(value=action())
        except CheckpointError as error:
            return cls(error=error)
        except Exception as error:  # a caller's own factory may raise anything; its peers must hear of it
            wrapped = CheckpointError(f"{who}: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            return cls(error=wrapped)

    def encode(self) -> bytes:
        error = self.error and (type(self.error).__name__, str(self.error), getattr(self.error, "errno", None))
        return pickle.dumps((self.value, error))

    @classmethod
    def decode(cls, data: bytes) -> Outcome:
        value, error = pickle.loads(data)  # from a rank of this job, never from a file
        if error is None:
            return cls(value=value)
        name, text, errno = error
        kind = BY_NAME.get(name, CheckpointError)
        return cls(error=StorageError(text, errno) if kind is StorageError else kind(text))


def _result(kept: list[Mine], decision: Outcome, own: Outcome) -> tuple[Mine, Any]:
    if decision.error is not None:
        raise decision.error from (own.error.__cause__ if own.error is not None else None)
    return kept[0], decision.value


def _resolve(group: Group) -> dist.ProcessGroup | None:
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if group == "world":
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    raise CheckpointError(f"group is {group!r}; it is a ProcessGroup of this rank, None or 'world'")


def _cpu_group(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup | None:
    """The CPU channel of a group: itself, or a gloo subgroup of its ranks made at first use."""
    if group is None or torch.device("cpu") in group._device_types:
        return group
    if group not in _cpu_groups:
        ranks = dist.get_process_group_ranks(group)
        _cpu_groups[group] = dist.new_group(
            ranks, backend="gloo", timeout=timedelta(seconds=timeout_s), use_local_synchronization=True
        )
    return _cpu_groups[group]
