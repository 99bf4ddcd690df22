"""What the runner knows of how ranks reach each other: Protocols.

    group or Transport --> join --> Links --> lane of a program (this file) --> compiler, executor

A ``Transport`` is one rank's place among the ranks: given to the runner, or made of a process group. ``join`` gives
what one runner has of it for itself, so that two runners never take each other's messages. A ``Lane`` is what one
compiled program uses. Its ends are bound to an action each. A SEND is one call. A RECV is two: ``post`` at its place
(or ahead of it), ``wait`` at its consumer.

Back ends: ``process_groups.py`` (gloo, NCCL, and ``shared_memory.py`` for CPU tensors on one host),
``thread_queues.py`` (ranks that are threads), ``same_thread.py`` (all ranks in one thread).
What a message holds is given as it is: tensors, None, ints, floats and bools. Of a
forward message the receiver gets leaves that ask for gradients where the sender's
tensors did; of a backward message the gradients of those, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from sixfold.pipeline.failures.report import Store
from sixfold.pipeline.program.action import Action

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Control", "EdgeFactory", "Lane", "Links", "Receipt", "Transport", "Values"]

Value = Tensor | float | None  # ints and bools are floats to a type checker
Values = tuple[Value, ...]
Shapes = bool | Literal["announced"]  # whether they may differ in every message, or only behind ``renew``
EdgeFactory = Callable[[int, int], "dist.ProcessGroup"]


class Receipt(Protocol):
    """The receiving end of one message of a list."""

    def post(self) -> None:
        """Ask for the message; blocks nobody. Called in the order of the list's RECVs."""

    def wait(self) -> Values:
        """What it holds; once per ``post``.

        Raises:
            PeerLost: it did not come before the deadline, or the sender ended its links.
        """


class Lane(Protocol):
    """The messages of one compiled program on one rank, all its prefixes, periods and tails."""

    def begin(self, signature: object) -> None:
        """A new batch; ``signature`` describes stage 0's inputs where they are known, else None.

        Equal signatures promise that all shapes are those of the batch before, where shapes are agreed.
        """

    def sender(self, action: Action) -> Callable[[Values], None]:
        """What sends the values of this SEND_F or SEND_B; blocks only while the peer is far behind."""

    def receiver(self, action: Action) -> Receipt:
        """The end of this RECV_F or RECV_B."""

    def resume(self, action: Action, values: Values) -> None:
        """This SEND_F was made in another life of the runner, and gradients of these values are to come."""

    def renew(self) -> None:
        """Shapes may differ from here on from those before; all ranks say so between the same two batches."""

    def clear(self) -> None:
        """Forget what is under way: a step has failed here."""


class Control(Protocol):
    """Small things between the hosts, in order per peer; nothing of it is in the way of tensors."""

    def send(self, data: bytes, peer: int, action: Action | None = None) -> None:
        """Start to send; ``action`` is for reports."""

    def receive(self, peer: int, action: Action | None = None) -> bytes:
        """The next that ``peer`` sent here.

        Raises:
            PeerLost: it did not come before the deadline.
        """

    def gather(self, number: int) -> list[int]:
        """``number`` of every rank, by rank; all ranks call it. Raises PeerLost."""


class Links(Protocol):
    """What one runner has of a transport.

    Optional besides: ``calls``, on which the runner counts its calls (call_count.py), and ``meet(number)``. It is asked
    instead of ``control.gather(number)`` where this rank brings a new program: it raises where another rank runs what
    it knows.
    """

    rank: int
    ranks: int

    @property
    def control(self) -> Control:
        """The channel of all ranks."""

    @property
    def store(self) -> Store | None:
        """Where ranks leave reports when the caller gives no store, if anywhere."""

    @property
    def key(self) -> str:
        """Equal on all ranks of this runner, and no other runner's."""

    def lane(
        self, placement: Sequence[int], microbatches: int, *, backward: bool, number: int, dynamic_shapes: Shapes
    ) -> Lane:
        """The lane of one program; all ranks of its edges ask for it, in one order.

        Args:
            placement: rank of each stage.
            microbatches: of a batch. An action's microbatch counts modulo it, so that the batches of an endless
                program share slots.
            backward: whether gradients travel too.
            number: equal on ranks that run the same program for the same call, below 2**56.
            dynamic_shapes: shapes may differ in every message; "announced": only behind ``renew``.
        Raises:
            PeerLost: the other end of an edge did not come before the deadline, or failed and left.
        """

    def check(self) -> None:
        """What was waited for is there: returns at once unless a device is still on its way to it.

        Raises:
            PeerLost: a wait was found overdue behind the caller's back, or a rank is known to have ended its links.
        """

    def close(self) -> None:
        """End every link at once, so that all who wait for this rank raise PeerLost. Never raises."""


@runtime_checkable
class Transport(Protocol):
    """One rank's place among the ranks of a pipeline.

    A transport may have an attribute ``one``, true where all edges run in one order (one_communicator.py), and one
    ``names``: what reports call each of its ranks, where that is not its number here.
    """

    rank: int
    ranks: int

    def join(self, device: torch.device, timeout_s: float) -> Links:
        """Links of one runner; all ranks join together. Tensors are those of ``device``.

        Raises:
            RuntimeError, TimeoutError: a rank did not come before the deadline.
        """
