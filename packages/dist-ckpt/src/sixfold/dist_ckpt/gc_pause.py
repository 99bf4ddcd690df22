"""A pause of the garbage collector while objects are made by the million and none of them is garbage.

gc_pause.py (this file) --> saving.py, loading.py, metadata.py, reader.py
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage is collected inside, by no thread; short work only.

    A plan of 8,000 tensors makes enough objects for several full collections, each of which walks through
    all that torch has imported: more time than the plan itself.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
