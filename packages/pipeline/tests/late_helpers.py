"""A transport whose waits return before the data is there, as those of a device's streams do."""

from __future__ import annotations

from typing import Any

import torch

from sixfold.pipeline import Action
from sixfold.pipeline.failures.deadlines import StreamWait
from sixfold.pipeline.transport import Links, Receipt, Transport, Values


class Late:
    """``transport`` on which the messages of ``lost`` are never sent, and whose waits order a stream, not the host.

    Args:
        lost: SENDs and RECVs.
        garbage: what is in the buffers of a message that did not come.
    Attributes:
        noted: whether the failure had been noted when the links were first ended.
    """

    def __init__(self, transport: Transport, lost: set[str], garbage: Values) -> None:
        self.rank, self.ranks = transport.rank, transport.ranks
        self.lost, self.garbage = lost, garbage
        self._transport = transport
        self.noted: bool | None = None

    def join(self, device: torch.device, timeout_s: float) -> Links:
        """Links with a watchdog."""
        return _Links(self, self._transport.join(device, timeout_s), timeout_s)


class _Links:
    def __init__(self, owner: Late, links: Links, timeout_s: float) -> None:
        self.owner, self._links = owner, links
        self.stream = StreamWait(timeout_s, self.close)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._links, name)

    def lane(self, *args: Any, **options: Any) -> Any:
        return _Lane(self, self._links.lane(*args, **options))

    def check(self) -> None:
        self.stream.settle()
        self._links.check()

    def close(self) -> None:
        if self.owner.noted is None:
            self.owner.noted = bool(self.stream._overdue)
        self._links.close()


class _Lane:
    def __init__(self, links: _Links, lane: Any) -> None:
        self.begin, self.clear = lane.begin, lane.clear
        self._links, self._lane = links, lane

    def sender(self, action: Action) -> Any:
        send = self._lane.sender(action)
        return _drop if str(action) in self._links.owner.lost else send

    def receiver(self, action: Action) -> _Receipt:
        return _Receipt(self._links, self._lane.receiver(action), action)


class Kernel:
    """The work of a message that is there, or never will be."""

    def __init__(self, comes: bool) -> None:
        self._comes = comes

    def wait(self) -> None:
        """The host goes on."""

    def is_completed(self) -> bool:
        return self._comes


class _Receipt:
    def __init__(self, links: _Links, receipt: Receipt, action: Action) -> None:
        self.post = receipt.post
        self._links, self._receipt, self._action = links, receipt, action

    def wait(self) -> Values:
        owner = self._links.owner
        lost = str(self._action) in owner.lost
        values = owner.garbage if lost else self._receipt.wait()  # a stream would come to it behind the host's back
        self._links.stream(Kernel(not lost), self._action)
        return values


def _drop(_: Values) -> None:
    """It is sent and never arrives."""
