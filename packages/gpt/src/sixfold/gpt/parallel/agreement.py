"""What ranks share: small objects, and errors: one rank's is raised on all, and a lost peer gets a name.

the loop, starts, saves --> gather_objects, all_or_raise, from_rank_0 (this file) --> an error on every rank
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from sixfold.gpt.errors import ConfigError, FinalError, TrainError, raised_inside
from sixfold.gpt.parallel.lost_ranks import is_lost_rank
from sixfold.pipeline.errors import ScheduleError

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig

T = TypeVar("T")
_OF_PEER = "_sixfold_of_peer"  # attribute of an error that another rank met

# How torch says that memory ran out, on a CPU and on a GPU; the group is how much was asked for.
MEMORY_WORDS = (
    r"can't allocate memory: you tried to allocate (\d+ bytes)",
    r"out of memory\. Tried to allocate ([\d.]+ \w+)",
)


def gather_objects(control: dist.ProcessGroup | None, ranks: int, mine: T) -> list[T]:
    """``mine`` of every rank, by rank, over the CPU channel ``control``; None is a world of one.

    Raises:
        TrainError: another rank died or did not answer before the group's deadline.
    """
    if control is None:
        return [mine]
    found: list[T | None] = [None] * ranks
    with world_collective("an exchange between all ranks"):
        dist.all_gather_object(found, mine, group=control)
    return found  # type: ignore[return-value]


def all_or_raise(control: dist.ProcessGroup | None, ranks: int, task: Callable[[], T]) -> T:
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
    mine = None if failure is None else (_kind(failure), f"{type(failure).__name__}: {failure}")
    for rank, report in enumerate(gather_objects(control, ranks, mine)):
        if report is not None and failure is None:
            theirs = report[0](f"rank {rank}: {report[1]}")
            theirs.__dict__[_OF_PEER] = True
            raise theirs
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def is_of_peer(error: BaseException) -> bool:
    """Whether `all_or_raise` raised it here for another rank."""
    return _OF_PEER in error.__dict__


def _kind(failure: Exception) -> type[ConfigError | TrainError]:
    """What one rank's error is on the others."""
    return next((kind for kind in (ConfigError, FinalError) if isinstance(failure, kind)), TrainError)


def from_rank_0(control: dist.ProcessGroup | None, rank: int, ranks: int, task: Callable[[], T]) -> T:
    """Run ``task`` on rank 0 alone: its result, or its error, is everybody's.

    For what the ranks could see differently: a folder of a shared file system, a file that grows.
    """
    found: list[T] = []
    all_or_raise(control, ranks, lambda: found.append(task()) if rank == 0 else None)
    return gather_objects(control, ranks, found[0] if found else None)[0]  # type: ignore[return-value]


def any_rank(control: dist.ProcessGroup | None, mine: bool) -> bool:
    """Whether ``mine`` is true on some rank; the same answer on all of them."""
    if control is None:
        return mine
    flag = torch.tensor(int(mine))
    with world_collective("an agreement of all ranks"):
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=control)
    return bool(flag)


@contextmanager
def memory_errors(rank: int, config: TrainConfig) -> Iterator[None]:
    """Turn an allocation that fails into a FinalError that says what to change."""
    try:
        yield
    except (RuntimeError, ScheduleError) as error:
        inside = raised_inside(error)
        words = str(inside) if isinstance(inside, RuntimeError) else ""  # torch.OutOfMemoryError is one
        asked = next((m for word in MEMORY_WORDS if (m := re.search(word, words))), None)
        if asked is None:
            raise
        raise FinalError(
            f"rank {rank}: memory ran out: {asked[1]} could not be allocated. The model has "
            f"{config.model.num_parameters:,} parameters. To need less, take more ranks, a smaller "
            f'train.micro_batch_size or data.seq_length, or train.recompute = "full"'
        ) from error


@contextmanager
def world_collective(what: str) -> Iterator[None]:
    """Turn an error of a collective of gpt itself (a peer died or hangs) into a TrainError that says what ran."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise TrainError(
            f"{what}: another rank died or did not answer in time. Look at the output of the other ranks. The back end "
            f"says: {error}"
        ) from error
