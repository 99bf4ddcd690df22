"""What the interpreter does besides: its garbage collector pauses, its pools of threads work until it has ended.

objects by the million --> collection_paused, older_objects_skipped (this file) --> saving.py, loading.py, reader.py
work --> Pool (this file) --> threads, or the caller where none are given any more --> frame_file.py, reader.py
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage is collected inside, by no thread; short work only.

    A plan of 8,000 tensors makes enough objects for several full collections. Each walks through all that torch has
    imported, which takes more time than the plan itself.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def older_objects_skipped() -> Iterator[None]:
    """The collector walks through objects that are made inside, and not through all that torch has imported.

    For longer work than ``collection_paused``, also of other libraries. Nothing where a program has frozen its objects.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Pool(ThreadPoolExecutor):
    """A pool whose work the caller does himself once Python has stopped all pools.

    Python stops them when the main thread is at its end. Then it waits for threads that still save, such as that of
    ``torch.distributed.checkpoint.async_save``. The last save of a script may be in the middle of its work then.
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
