"""Threads of saves and loads that also work while the interpreter ends.

work --> Pool (this file) --> threads, or the caller where none are given any more --> frame_file.py, reader.py
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Pool(ThreadPoolExecutor):
    """A pool whose work the caller does himself once Python has stopped all pools.

    It stops them when the main thread is at its end, and then waits for threads that still save, such as that of
    ``torch.distributed.checkpoint.async_save``: a last save of a script is in the middle of its work there.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As of its base."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if str(error) != "cannot schedule new futures after interpreter shutdown":
                raise
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done
