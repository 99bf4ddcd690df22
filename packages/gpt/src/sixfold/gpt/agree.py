"""What ranks share: small objects, and errors: one rank's is raised on all, and a lost peer gets a name.

loop.py, checkpoint.py --> gather, together, wire_errors (this file) --> TrainError, ConfigError on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from sixfold.gpt.errors import ConfigError, TrainError

T = TypeVar("T")

# How torch's CPU back end says that a peer is gone; its errors are plain RuntimeErrors.
WIRE_WORDS = ("gloo", "Connection closed by peer", "Timed out waiting", "Application timeout")


def gather(control: dist.ProcessGroup | None, ranks: int, mine: T) -> list[T]:
    """``mine`` of every rank, by rank, over the CPU channel ``control``; None is a world of one.

    Raises:
        TrainError: another rank died or did not answer before the group's deadline.
    """
    if control is None:
        return [mine]
    found: list[T | None] = [None] * ranks
    with wire_errors("an exchange between all ranks"):
        dist.all_gather_object(found, mine, group=control)
    return found  # type: ignore[return-value]


def together(control: dist.ProcessGroup | None, ranks: int, task: Callable[[], T]) -> T:
    """Run ``task`` on every rank; if it fails on one, raise that error on all of them, so that none waits for it.

    Raises:
        The rank's own exception where it happened; elsewhere its type and text, led by ``rank R:``.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = task()
    except Exception as error:
        failure = error
    mine = None if failure is None else (isinstance(failure, ConfigError), f"{type(failure).__name__}: {failure}")
    for rank, report in enumerate(gather(control, ranks, mine)):
        if report is not None and failure is None:
            raise (ConfigError if report[0] else TrainError)(f"rank {rank}: {report[1]}")
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


@contextmanager
def wire_errors(what: str) -> Iterator[None]:
    """Turn an error of a collective of gpt itself (a peer died or hangs) into a TrainError that says what ran."""
    try:
        yield
    except dist.DistError as error:
        raise TrainError(f"{what}: another rank died or did not answer in time: {error}") from error
    except RuntimeError as error:
        if type(error) is not RuntimeError or not any(word in str(error) for word in WIRE_WORDS):
            raise
        raise TrainError(f"{what}: another rank died or did not answer in time: {error}") from error
