"""What travels between pytest and a rank, and the rank's entry point.

    launch.py --> Job, Call (this file) --> rank.py --> Report (this file) --> launch.py

Free of torch: pytest's process loads this file with every session, also where nothing needs torch.
"""

import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The function to run, in a form that needs no import path: pytest's test modules have none."""

    module: str
    path: str
    code: bytes  # marshalled, with pytest's rewritten asserts; empty: an ordinary module, imported by name
    qualname: str
    arguments: bytes  # unpickled only after the module is there: they may hold its classes


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all ranks of one job share."""

    ranks: int
    folder: str
    cwd: str
    environment: dict[str, str]
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A rank's one message: a pickled result, or the text of what it raised."""

    kind: str  # "result", "failed" or "skipped"
    result: bytes = b""
    text: str = ""


class Current:
    """The job that this process is a rank of; set once, by rank.py."""

    store: ClassVar["Store | None"] = None


def store() -> "Store":
    """The job's FileStore, under a prefix of its own; inside a rank only."""
    from torch.distributed.distributed_c10d import PrefixStore

    if Current.store is None:
        raise RuntimeError("store() was called outside a rank; call it in the function given to run_ranks")
    return PrefixStore("test", Current.store)


def enter_rank(rank: int, job: Job, call: Call, channel: Connection) -> None:
    """Target of a rank's process; pytest can name it without loading torch."""
    try:
        from ranktest.rank import run_rank
    except Exception:  # a broken torch: the test shall say so
        channel.send(Report(kind="failed", text=traceback.format_exc()))
        channel.recv()
        return
    run_rank(rank, job, call, channel)
