"""A permutation of N positions by a key: one position at a time, or as a table that a thread makes.

    seed, N --> Shuffle (this file) --> exact_counts.py

It depends on nothing else, so the table can be begun before any dataset is opened. Single positions never wait for it.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import I64
from sixfold.blending.numbers.permutation import order_key, permute, permute_back, permute_range

_DEADLINE_S = 600.0  # of the thread that makes a table; 2^32 positions take it half a minute


class Shuffle:
    """The permutation of ``size`` positions under ``seed``; ``start`` begins its table."""

    def __init__(self, seed: int, size: int) -> None:
        self.size = size
        self._process = os.getpid()
        self._key = order_key("apportioned", seed, size)
        self._started: Future[npt.NDArray[Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the table: it is made again if it is asked for."""
        return {"size": self.size, "_key": self._key, "_started": None, "_process": -1}

    def start(self) -> "Shuffle":
        """Begin the table on a thread that does not keep the process alive."""
        if self._started is None:
            self._started = Future()
            self._process = os.getpid()
            Thread(target=_fulfil, args=(self._started, self._make), daemon=True, name="sixfold-shuffle").start()
        return self

    def at(self, positions: I64) -> I64:
        """Where each position is sent, computed alone."""
        return permute(self._key, self.size, positions) if positions.size else positions

    def back(self, image: int) -> int:
        """The position that is sent to ``image``."""
        return permute_back(self._key, self.size, image)

    @cached_property
    def table(self) -> npt.NDArray[Any]:
        """``at`` of every position, uint32 or int64; waits for the thread, or makes it if none was started here.

        A process that was forked meanwhile has no such thread, and locks that nobody will open: it makes its own.

        Raises:
            BlendingError: the thread does not end.
            What the thread raised.
        """
        if self._started is None or os.getpid() != self._process:
            return self._make()
        try:
            return self._started.result(_DEADLINE_S)
        except TimeoutError:
            if self._started.done():  # raised by the thread
                raise
            raise BlendingError(
                f"the table of {self.size} positions was not made in {_DEADLINE_S} s; is this machine overloaded?"
            ) from None

    def _make(self) -> npt.NDArray[Any]:
        table = np.empty(self.size, dtype=np.uint32 if self.size < 2**32 else np.int64)
        permute_range(self._key, self.size, 0, table)
        return table


def _fulfil(future: "Future[npt.NDArray[Any]]", make: Callable[[], npt.NDArray[Any]]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:
        future.set_exception(error)
