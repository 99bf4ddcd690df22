"""Hashes of the inputs, made beside the tokenizing.

sources --> input_hashes (this file) --> Manifest
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sixfold.indexed_data.text.inputs import Source

_CHUNK = 1 << 22


@contextmanager
def input_hashes(sources: Sequence[Source]) -> Iterator[Callable[[], list[str]]]:
    """A function that gives the SHA-256 of each input, and waits for them. A thread reads the inputs meanwhile."""
    from concurrent.futures import ThreadPoolExecutor  # only here: reading pairs should not load it

    left = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [_sha256(source.path, left) for source in sources])
        try:
            yield running.result
        finally:
            left.set()


def _sha256(path: str, left: threading.Event) -> str:
    import hashlib  # only here: reading pairs should not load it

    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while not left.is_set() and (data := file.read(_CHUNK)):
            digest.update(data)
    return digest.hexdigest()
