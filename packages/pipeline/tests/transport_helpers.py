"""A transport that does something to each message: delays it, loses it, stops. It works over any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sixfold.pipeline import Action
from sixfold.pipeline.transport import Links, Receipt, Transport, Values

OnMessage = Callable[[Action], bool]  # whether the message goes on


class Altered:
    """``transport``, calling ``on_send`` and ``on_wait`` with the action of each message."""

    def __init__(self, transport: Transport, on_send: OnMessage, on_wait: OnMessage = bool) -> None:
        self.rank, self.ranks = transport.rank, transport.ranks
        self._transport, self._on_send, self._on_wait = transport, on_send, on_wait

    def join(self, device: torch.device, timeout_s: float) -> Links:
        """Links whose lanes are altered."""
        return _Links(self._transport.join(device, timeout_s), self._on_send, self._on_wait)


class _Links:
    def __init__(self, links: Links, on_send: OnMessage, on_wait: OnMessage) -> None:
        self._links, self._on_send, self._on_wait = links, on_send, on_wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._links, name)

    def lane(self, *args: Any, **options: Any) -> Any:
        return _Lane(self._links.lane(*args, **options), self._on_send, self._on_wait)


class _Lane:
    def __init__(self, lane: Any, on_send: OnMessage, on_wait: OnMessage) -> None:
        self.begin, self.clear = lane.begin, lane.clear
        self._lane, self._on_send, self._on_wait = lane, on_send, on_wait

    def sender(self, action: Action) -> Callable[[Values], None]:
        send, on_send = self._lane.sender(action), self._on_send

        def altered(values: Values) -> None:
            if on_send(action):
                send(values)

        return altered

    def receiver(self, action: Action) -> _Receipt:
        return _Receipt(self._lane.receiver(action), action, self._on_wait)


class _Receipt:
    def __init__(self, receipt: Receipt, action: Action, on_wait: OnMessage) -> None:
        self.post = receipt.post
        self._receipt, self._action, self._on_wait = receipt, action, on_wait

    def wait(self) -> Values:
        self._on_wait(self._action)
        return self._receipt.wait()
