"""What ranks tell each other when a step fails.

    failure --> record in the store (this file) --> one report on every rank

The store is touched only here, and only after a failure: a rank writes where it
stands, then ends its edges, which wakes its neighbours; they write, end theirs,
and so on, until every rank knows. A rank that stays silent is reported as such,
and so is a store that does not answer, whose host may be what stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from sixfold.pipeline.failures.deadlines import within

__all__ = ["MemoryStore", "Record", "Records", "Store", "report"]

_POLL_S = 0.02
_ANSWER_S = 0.25  # of the store


class Store(Protocol):
    """What is used of a ``torch.distributed`` store."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether the keys are there, without waiting."""


@dataclass(frozen=True)
class Record:
    """Where a rank stopped.

    Attributes:
        place: ``[17/48] 0RECV_B3``.
        peer: rank it waited for, None if it did not wait.
        error: what its stage raised, None if it only waited.
        overdue: ``error`` is a time-out, of a wait inside of the stage.
    """

    place: str
    peer: int | None = None
    error: str | None = None
    overdue: bool = False


class MemoryStore:
    """A store for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """See Store."""
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """See Store."""
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """See Store."""
        return all(key in self._values for key in keys)


class Records:
    """The records of all ranks of one runner, in a store.

    Args:
        store: shared by all ranks; None when there is none, and then nobody else is heard.
        key: equal on the ranks of one runner and unlike any other runner's.
    """

    def __init__(self, store: Store | None, key: str, rank: int, ranks: int) -> None:
        self._store, self._key, self._rank, self._ranks = store, key, rank, ranks
        self.deaf = False  # whether the store was asked and did not answer

    @property
    def has_store(self) -> bool:
        """Whether the other ranks can be heard."""
        return self._store is not None

    def write(self, record: Record) -> None:
        """Tell the others where this rank stopped."""
        if (store := self._store) is not None:
            try:
                within(_ANSWER_S, lambda: store.set(f"{self._key}/{self._rank}", json.dumps(asdict(record))))
            except (RuntimeError, TimeoutError):
                self.deaf = True

    def others(self, wait_s: float) -> dict[int, Record]:
        """Records of the other ranks, after all have spoken, one has failed, or ``wait_s`` has passed."""
        found: dict[int, Record] = {}
        if (store := self._store) is None or self.deaf:
            return found
        deadline = time.monotonic() + wait_s
        missing = [rank for rank in range(self._ranks) if rank != self._rank]

        def look() -> None:
            for rank in tuple(missing):
                if store.check([f"{self._key}/{rank}"]):
                    found[rank] = Record(**json.loads(store.get(f"{self._key}/{rank}")))
                    missing.remove(rank)

        while missing:
            try:
                within(_ANSWER_S, look)
            except (RuntimeError, TimeoutError):
                self.deaf = True
                return dict(found)
            if time.monotonic() > deadline or any(record.error is not None for record in found.values()):
                break
            time.sleep(_POLL_S)
        return found


def report(
    rank: int, names: Sequence[int], mine: Record, others: dict[int, Record], heard: bool, deaf: bool = False
) -> str:
    """The line of a time-out: this rank, then what is known of the others, and whether the store did not answer.

    Args:
        names: what each rank is called.
    """
    parts = [
        f"rank {names[rank]} waits at {mine.place}" + ("" if mine.peer is None else f" for rank {names[mine.peer]}")
    ]
    for other, name in enumerate(names) if heard else ():
        if other != rank:
            parts.append(f"rank {name} at {others[other].place}" if other in others else f"rank {name} silent")
    known = "; ".join((*parts, "the store does not answer") if deaf else parts)
    return f"{known} [see errors/pipeline.html#a-peer-did-not-come]"
