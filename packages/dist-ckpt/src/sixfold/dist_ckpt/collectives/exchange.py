"""Control exchange: small messages and errors between the ranks of a group, with a deadline.

    each rank's report --> all_reduce, reduce_scatter (this file) --> one decision, or one error, on every rank

Reports go to the first rank of the group. Its decision goes back, and to each rank its own part of it. Messages go
point to point, so that a wait that fails names the peer. They are CPU tensors: on the given group if that has a CPU
back end, else on a gloo subgroup that is made once. There is no object collective over NCCL. This is the one file of
the package that looks up the default process group, for ``group="world"``.

[Note: star and tree] Up to ``STAR_RANKS`` ranks each sends to the first one. More are cut into runs of about the
square root of their number. The first rank of a run collects the reports of its run, unread, and sends them on as
one. The decision goes back the same way. So no rank exchanges messages with more than ``2 * sqrt(ranks)`` others. At
1,024 ranks 62 messages come in one after the other, where a star has 1,023. Below the limit a star has one wait less,
and 63 small messages cost some 3 ms. A rank that waits for the first rank of a run waits a little longer than that
one does for its own. A rank that dies is named to all. Of a rank that is late, only the first rank of its run says
who it is. The others say that they have lost that one, because past a deadline gloo closes the connections.

[Note: a message has a head] On two busy cores a message costs as much as loading a small model, whatever its size. So
one of up to ``_HEAD_BYTES`` less eight is one message and not a length and a text. A longer one is followed by its
rest. gloo lets a message go when the other side has asked for it. So a rank asks for the decision before it reports,
and for all reports before it waits for the first one.

[Note: how long a hung rank is waited for] Reports are received one after the other, and each wait is ``timeout_s``
from the one before. So a rank that hangs in its ``work`` is reported ``timeout_s`` after the reports of the ranks
before it are in. That is so even if another rank knows sooner, as behind a mirror, whose ranks see who fetches no
more. The report of that rank is not read before: gloo can neither look at a message that is waited for nor call the
wait back. Whoever skipped it would get it in place of the next report.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import ceil, sqrt
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from sixfold.dist_ckpt.errors import BY_NAME, CheckpointError, CorruptError, LostPeerError, MismatchError, typed
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes

Mine = TypeVar("Mine")
Message = TypeVar("Message")
Decision = TypeVar("Decision")
Group = dist.ProcessGroup | Literal["world"] | None

STAR_RANKS = 64  # see [Note: star and tree]
_LONGEST_S = 1e8  # three years stand for infinity, which gloo's clock does not know
_HEAD_BYTES = 1 << 13  # of a message: see [Note: a message has a head]
_LENGTH = struct.Struct("=q")
_TAG, _SWAP_TAG = 0x5C4B, 0x5C4C  # keep these messages apart from a trainer's own on the same group
_cpu_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class Exchange:
    """The ranks that save or load together; alone if the group is None.

    Args:
        group: a process group this rank belongs to; None for this process alone; "world" for the
            default group if torch.distributed is initialised, else this process alone.
        timeout_s: longest wait for one peer, seconds.
    Attributes:
        channel: the CPU channel of ``group``: that group itself, or a gloo subgroup of its ranks.
    Raises:
        CheckpointError: the group is none of these.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self.timeout_s = min(checked_timeout(timeout_s), _LONGEST_S)
        self.group = _resolve(group)
        self.channel = _cpu_group(self.group, self.timeout_s)
        self.rank = 0 if self.channel is None else dist.get_rank(self.channel)
        self.ranks = 1 if self.channel is None else dist.get_world_size(self.channel)

    def all_reduce(
        self, work: Callable[[], tuple[Mine, Message]], decide: Callable[[list[Message]], Decision]
    ) -> tuple[Mine, Decision]:
        """Run ``work`` on every rank and ``decide`` on the first, with the messages of all in rank order.

        Returns:
            What ``work`` kept for this rank, and the decision, which is the same on every rank.
        Raises:
            CheckpointError: raised by ``work`` on any rank (the lowest wins) or by ``decide``: the
                same type and text on all ranks. LostPeerError if a rank is dead or late.
        """
        mine, decision, _ = self.reduce_scatter(work, lambda messages: (decide(messages), ()))
        return mine, decision

    def reduce_scatter(
        self,
        work: Callable[[], tuple[Mine, Message]],
        decide: Callable[[list[Message]], tuple[Decision, Sequence[Any]]],
    ) -> tuple[Mine, Decision, Any]:
        """``all_reduce``, where the decision comes with a part for each rank (or none): a rank gets its own alone."""

        def alone() -> tuple[Mine, Decision, Any]:
            mine, message = work()
            decision, parts = decide([message])
            return mine, decision, parts[0] if parts else None

        if self.channel is None:
            return typed(alone)
        kept: list[Mine] = []

        def keep_mine() -> Message:
            mine, message = typed(work)
            kept.append(mine)
            return message

        own = Outcome.of(keep_mine, f"rank {self.rank}")
        above, below = self._neighbours()
        if above is None:
            heard = [_heard(data, rank) for rank, data in enumerate(self._collected(below), 1)]
            decision, parts = _decided([own, *heard], decide)
        else:
            decision, parts = self._reported(above, [own.encode(), *self._collected(below)])
        for peer in below:
            at = peer - self.rank
            told = [decision.encode(), *parts[at : at + self._spoken_for_by(peer)]]
            self._send(peer, told, best_effort=decision.error is not None)
        if decision.error is not None:
            raise decision.error from (own.error.__cause__ if own.error is not None else None)
        return kept[0], decision.value, _unpickled(parts[0], "rank 0") if parts else None

    def on_first(self, given: Callable[[], dict[str, Any]], work: Callable[[], Decision]) -> Decision:
        """What ``work`` returns or raises on the first rank, on all; ``given`` is what all ranks call it for.

        Raises:
            MismatchError: a rank was given something else, and ``work`` was not run.
        """

        def decide(by_rank: Sequence[dict[str, Any]]) -> Decision:
            for rank, found in enumerate(by_rank):
                other = found if isinstance(found, dict) else {}  # of another call of this package
                for name, value in by_rank[0].items():
                    if repr(other.get(name)) != repr(value):
                        raise MismatchError(
                            f"{name}: {value} on rank 0 and {other.get(name)} on rank {rank}; give all ranks the same "
                            "step, and the same metrics, such as the mean that all_reduce makes"
                        )
            return work()

        return self.all_reduce(lambda: (None, given()), decide)[1]

    def raise_errors_of_others(self) -> None:
        """Raise the error that another rank has met before this exchange, see ``errors_to_all``.

        For a call that makes its next exchange inside the ``work`` of another one: who tells takes part in one alone.
        """
        self.run_on_all(lambda: None)

    def run_on_all(self, work: Callable[[], Mine]) -> Mine:
        """Run ``work`` on every rank; an error on any of them is raised on all."""
        return self.all_reduce(lambda: (work(), None), lambda _: None)[0]

    def swap(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send contiguous CPU tensors to peers, and fill those that peers send, all at once; both know the sizes.

        Raises:
            LostPeerError: a peer is dead or late.
        """
        works: list[tuple[dist.Work | None, int]] = []
        peer = self.rank
        try:
            for peer, tensor in receives.items():
                works.append((dist.irecv(tensor, group=self.channel, group_src=peer, tag=_SWAP_TAG), peer))
            for peer, tensor in sends.items():
                works.append((dist.isend(tensor, group=self.channel, group_dst=peer, tag=_SWAP_TAG), peer))
            for work, peer in works:
                self._wait(work, peer)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _reported(self, above: int, heard: list[bytes]) -> tuple[Outcome, list[bytes]]:
        """Send what this rank and those below have to say; the decision, and the parts of this rank and of those."""
        try:
            asked = self._ask(above)
            self._send(above, heard)
            decision, *parts = self._receive(asked)
            return _heard(decision, 0), parts
        except LostPeerError:
            for outcome in (_heard(data, rank) for rank, data in enumerate(heard, self.rank)):
                if outcome.is_lost:  # past a deadline gloo has closed all connections: whom it was for is what counts
                    return outcome, []
            raise

    def _spoken_for_by(self, peer: int) -> int:
        """How many ranks hear the decision from this one by way of a peer below, itself included."""
        return min(self._run, self.ranks - peer) if self.rank == 0 and peer % self._run == 0 else 1

    def _neighbours(self) -> tuple[int | None, list[int]]:
        """Whom this rank reports to, and who reports to it. See [Note: star and tree]."""
        run = self._run
        first = self.rank - self.rank % run
        own = list(range(self.rank + 1, min(first + run, self.ranks))) if self.rank == first else []
        if self.rank:
            return (first if self.rank != first else 0), own
        return None, own + list(range(run, self.ranks, run))

    @property
    def _run(self) -> int:
        """Ranks of which the first one speaks for all."""
        return self.ranks if self.ranks <= STAR_RANKS else ceil(sqrt(self.ranks))

    def _collected(self, peers: list[int]) -> list[bytes]:
        """What the ranks below have sent, in rank order; for one that is lost or not to be read, that it is."""
        found: list[bytes] = []
        for asked in [self._ask(peer) for peer in peers]:
            # The first rank waits longer for one that waits for others itself.
            waits = self.rank == 0 and asked.peer >= self._run
            try:
                found += self._receive(asked, min(5.0, self.timeout_s / 4) if waits else 0.0)
            except CheckpointError as error:
                # The others are still heard, so that they all get this error and none waits in vain.
                found.append(Outcome(error=error, is_lost=isinstance(error, LostPeerError)).encode())
        return found

    def _send(self, peer: int, texts: list[bytes], *, best_effort: bool = False) -> None:
        text = pickle.dumps(texts)
        memory = bytearray(max(_HEAD_BYTES, _LENGTH.size + len(text)))
        memory[: _LENGTH.size + len(text)] = _LENGTH.pack(len(text)) + text
        parts = [part for part in torch.frombuffer(memory, dtype=torch.uint8).tensor_split([_HEAD_BYTES]) if len(part)]
        try:
            for work in [dist.isend(part, group=self.channel, group_dst=peer, tag=_TAG) for part in parts]:
                self._wait(work, peer)
        except RuntimeError as error:
            if not best_effort:
                raise self._lost(peer, error) from error

    def _ask(self, peer: int) -> _Asked:
        """Say that the next message of a peer will be read, which lets it go; errors are those of ``_receive``."""
        head = torch.empty(_HEAD_BYTES, dtype=torch.uint8, device="cpu")
        try:
            return _Asked(peer, head, dist.irecv(head, group=self.channel, group_src=peer, tag=_TAG))
        except RuntimeError as error:
            return _Asked(peer, head, None, error)

    def _receive(self, asked: _Asked, slack_s: float = 0.0) -> list[bytes]:
        peer, head, work, failed = asked
        try:
            if failed is not None:
                raise failed
            self._wait(work, peer, slack_s)
            (nbytes,) = _LENGTH.unpack_from(tensor_bytes(head))
            data = torch.empty(_LENGTH.size + nbytes, dtype=torch.uint8, device="cpu")
            data[:_HEAD_BYTES] = head[: len(data)]
            if len(data) > _HEAD_BYTES:
                self._wait(dist.irecv(data[_HEAD_BYTES:], group=self.channel, group_src=peer, tag=_TAG), peer)
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        texts: list[bytes] = _unpickled(tensor_bytes(data)[_LENGTH.size :], f"rank {peer} of {self.ranks}")
        return texts

    def _wait(self, work: dist.Work | None, peer: int, slack_s: float = 0.0) -> None:
        if work is None:
            raise RuntimeError(f"this process is not in the group of rank {peer}")
        work.wait(timedelta(seconds=self.timeout_s + slack_s))

    def _lost(self, peer: int, error: RuntimeError) -> LostPeerError:
        reason = str(error).partition("\n")[0]
        many = self._spoken_for_by(peer)
        who = f"rank {peer}, which speaks for ranks {peer} to {peer + many - 1}," if many > 1 else f"rank {peer}"
        return LostPeerError(
            f"{who} of {self.ranks} is dead, absent or later than timeout_s={self.timeout_s:g} "
            f"(rank {self.rank} waited: {reason}). Restart the job; the older checkpoint stays "
            "until the newer one is visible"
        )


def checked_timeout(timeout_s: float) -> float:
    """``timeout_s``, or CheckpointError: it is no number > 0."""
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise CheckpointError(f"timeout_s is {timeout_s!r}; it is a number of seconds > 0")
    return timeout_s


@contextmanager
def errors_to_all(group: Group, timeout_s: float) -> Iterator[None]:
    """An error inside, before a call's first exchange, is raised by that exchange on every rank.

    One that is no CheckpointError, of a strategy of a user say, stays what it is on its own rank.
    """
    try:
        yield
    except Exception as error:
        known = error

        def tell() -> None:
            raise known

        try:
            Exchange(group, timeout_s).run_on_all(tell)
        except Exception:
            if isinstance(known, CheckpointError):
                raise
        raise


class _Asked(NamedTuple):
    """The first ``_HEAD_BYTES`` of a peer's next message, asked for; ``failed``: they could not be."""

    peer: int
    head: torch.Tensor
    work: dist.Work | None
    failed: RuntimeError | None = None


class Outcome(NamedTuple):
    """What a rank has to say: a value or an error."""

    value: Any = None
    error: CheckpointError | None = None
    is_lost: bool = False

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
        """As it travels; an error of a class that is not of this package as its base."""
        known = self.error is None or type(self.error) in BY_NAME.values()
        try:
            return pickle.dumps(self if known else self._replace(error=CheckpointError(str(self.error))))
        except Exception as error:  # of a class of the user's; its peers must hear of it
            return Outcome(error=CheckpointError(f"{type(error).__name__}: {error}")).encode()

    @classmethod
    def decode(cls, data: bytes, who: str) -> Outcome:
        """What ``encode`` gave: from a rank of this job, never from a file. CheckpointError: it cannot be read here."""
        outcome: Outcome = _unpickled(data, who)
        return outcome


def _heard(data: bytes, rank: int) -> Outcome:
    """What a rank has to say; that it cannot be read is an error as if that rank had met it."""
    try:
        return Outcome.decode(data, f"rank {rank}")
    except CheckpointError as error:
        return Outcome(error=error)


def _unpickled(data: Any, who: str) -> Any:
    """What ``who``, a rank of this job, has pickled."""
    try:
        return pickle.loads(data)
    except Exception as error:  # whatever a class of another version does
        raise CheckpointError(
            f"{who} sent what cannot be read here ({type(error).__name__}: {error}). All ranks of a job run the same "
            "code, in the same versions. Each can import what the state dict and the strategies are made of"
        ) from error


def _decided(
    outcomes: list[Outcome], decide: Callable[[list[Any]], tuple[Any, Sequence[Any]]]
) -> tuple[Outcome, list[bytes]]:
    """What the first rank decides, and the part of each rank, or the error that goes before the others."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        # Who is lost, then damage that one rank has found: it explains what others ran into.
        first = min(failed, key=lambda outcome: (not outcome.is_lost, not isinstance(outcome.error, CorruptError)))
        return Outcome(error=first.error), []
    decided = Outcome.of(lambda: typed(lambda: decide([outcome.value for outcome in outcomes])), "rank 0")
    if decided.error is not None:
        return decided, []
    return Outcome(decided.value[0]), [pickle.dumps(part) for part in decided.value[1]]


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
