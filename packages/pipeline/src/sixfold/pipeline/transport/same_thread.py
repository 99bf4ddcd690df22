"""All ranks in one thread: a message lies on a mailbox until it is taken.

    SEND --> mailbox (this file) --> RECV

Nothing waits and nothing is copied: whoever makes the calls makes a SEND before the
``wait`` of its RECV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sixfold.pipeline.failures.report import Store
from sixfold.pipeline.program.action import Action
from sixfold.pipeline.transport.routes import Route, route_of
from sixfold.pipeline.transport.shape_agreement import AgreedShapes
from sixfold.pipeline.transport.specs import specs_of

__all__ = ["Mailbox", "SameThreadTransport", "leaves"]

Shapes = bool | Literal["announced"]


class Mailbox:
    """What the ranks of one process have in common."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.messages: dict[tuple[int, Route], deque[tuple[Any, ...]]] = {}  # by number of the program
        self.control: dict[tuple[int, int], deque[bytes]] = {}  # by source and destination


class SameThreadTransport:
    """One rank's place; it is its own Links, since nobody else can join."""

    store: Store | None = None
    key = "one thread"

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self.rank, self.ranks = rank, mailbox.ranks
        self._mailbox = mailbox
        self.control = _Control(mailbox, rank)

    def join(self, device: torch.device, timeout_s: float) -> SameThreadTransport:
        """Nobody to wait for."""
        return self

    def lane(
        self, placement: Sequence[int], microbatches: int, *, backward: bool, number: int, dynamic_shapes: Shapes
    ) -> _Lane:
        """See Links."""
        return _Lane(self._mailbox, placement, microbatches, number, dynamic_shapes)

    def check(self) -> None:
        """Nothing is ever overdue."""

    def close(self) -> None:
        """Nobody waits."""


class _Lane(AgreedShapes):
    def __init__(
        self,
        mailbox: Mailbox,
        placement: Sequence[int],
        microbatches: int,
        number: int,
        dynamic_shapes: Shapes,
    ) -> None:
        super().__init__(placement, microbatches, dynamic_shapes)
        self._mailbox, self._number = mailbox, number

    def sender(self, action: Action) -> Callable[[tuple[Any, ...]], None]:
        route = route_of(action, self._microbatches)
        put = self._messages(route).append
        if not route.forward:
            return put
        outputs_of, slot = self.outputs_of, (route.stage, route.slot)

        def send(values: tuple[Any, ...]) -> None:
            outputs = outputs_of(route.stage)
            outputs.look(slot, specs_of(values), action)
            put((values, outputs.open))

        return send

    def receiver(self, action: Action) -> _Receipt:
        route = route_of(action, self._microbatches)
        take = self._messages(route).popleft
        return _Receipt(partial(_take_leaves, take, self) if route.forward else take)

    def clear(self) -> None:
        self.forget()
        for (number, _), messages in self._mailbox.messages.items():
            if number == self._number:
                messages.clear()

    def _messages(self, route: Route) -> deque[tuple[Any, ...]]:
        return self._mailbox.messages.setdefault((self._number, route), deque())


class _Receipt:
    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], tuple[Any, ...]]) -> None:
        self.wait = wait

    def post(self) -> None:
        """Nothing to ask for."""


class _Control:
    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox, self._rank = mailbox, rank

    def send(self, data: bytes, peer: int, action: Action | None = None) -> None:
        self._mailbox.control.setdefault((self._rank, peer), deque()).append(data)

    def receive(self, peer: int, action: Action | None = None) -> bytes:
        return self._mailbox.control[peer, self._rank].popleft()

    def gather(self, number: int) -> list[int]:
        """One caller speaks for all ranks."""
        return [number] * self._mailbox.ranks


def leaves(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """``values`` with tensors that have no history, asking for gradients where they did."""
    return tuple([v.detach().requires_grad_() if isinstance(v, Tensor) and v.requires_grad else v for v in values])


def _take_leaves(take: Callable[[], tuple[Any, ...]], lane: _Lane) -> tuple[Any, ...]:
    values, may_change = take()
    if may_change:
        lane.open = True
    if len(values) == 1 and isinstance(value := values[0], Tensor) and value.requires_grad:
        return (value.detach().requires_grad_(),)
    return leaves(values)
