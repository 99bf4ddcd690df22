"""Parts made by this process or by several, given back in order.

parts --> run_parts (this file) --> PartReport, PartReport, ...
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator, Sequence
from functools import lru_cache

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.text.fingerprints import Fingerprint, differences, fingerprint
from sixfold.indexed_data.text.inputs import Slice
from sixfold.indexed_data.text.parts import Job, PartReport, build_part, read_report
from sixfold.indexed_data.text.tokenizers import Tokenizer, load_tokenizer
from sixfold.indexed_data.text.workshop import part_prefix

Parts = Sequence[tuple[Slice, ...]]


def run_parts(
    parts: Parts, folder: str, job: Job, tokenizer: Tokenizer, workers: int
) -> Generator[PartReport, None, None]:
    """The reports of all parts in their order; finished ones are read, the others made.

    Raises:
        IndexedDataError: a part could not be made, or a worker died. The message names the part.
    """
    missing = [number for number in range(len(parts)) if read_report(part_prefix(folder, number)) is None]
    if min(workers, len(missing)) <= 1:
        for number, slices in enumerate(parts):
            yield read_report(part_prefix(folder, number)) or _make(slices, part_prefix(folder, number), job, tokenizer)
    else:
        yield from _run_side_by_side(parts, missing, folder, job, min(workers, len(missing)))


def _run_side_by_side(
    parts: Parts, missing: list[int], folder: str, job: Job, workers: int
) -> Generator[PartReport, None, None]:
    # Imported here: most builds are small, and no reader of pairs needs processes.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # spawn: the caller may run threads (torch does), and a fork would copy their locks as they stand.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker) as pool:
        futures = {n: pool.submit(_make_in_worker, parts[n], part_prefix(folder, n), job) for n in missing}
        try:
            for number, slices in enumerate(parts):
                if number not in futures:
                    report = read_report(part_prefix(folder, number))
                    assert report is not None, f"part {number} was finished and is not any more"
                    yield report
                    continue
                try:
                    yield futures[number].result()
                except BrokenProcessPool as error:
                    raise IndexedDataError(
                        f"a worker died before {part_name(slices)} was done (out of memory, or killed); finished parts "
                        "are kept, the same command goes on from them"
                    ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _make_in_worker(slices: tuple[Slice, ...], prefix: str, job: Job) -> PartReport:
    return _make(slices, prefix, job, _loaded(job.tokenizer, job.eod_token, job.encoding))


@lru_cache(maxsize=1)
def _loaded(name: str, eod_token: str | None, encoding: Fingerprint) -> Tokenizer:
    """Once per worker: it works for one build, and tokenizers do not travel between processes.

    Raises:
        IndexedDataError: here it encodes otherwise than in the process of the build.
    """
    loaded = load_tokenizer(name, eod_token)
    found = fingerprint(loaded)
    if found != encoding:
        raise IndexedDataError(
            f"tokenizer {name} is another one in a worker process ({', '.join(differences(found, encoding))} differ): "
            "it was edited after the build's process had loaded it, or depends on that process. Start the build in a "
            "new process, or with workers=1"
        )
    return loaded


def _make(slices: tuple[Slice, ...], prefix: str, job: Job, tokenizer: Tokenizer) -> PartReport:
    try:
        return build_part(slices, prefix, job, tokenizer)
    except (IndexedDataError, OSError) as error:
        raise IndexedDataError(f"{part_name(slices)}: {error}") from error


def part_name(slices: tuple[Slice, ...]) -> str:
    """How messages call a part."""
    more = f" and {len(slices) - 1} more" if len(slices) > 1 else ""
    return f"input part {slices[0]}{more}"


def _prepare_worker() -> None:
    """A worker finishes its part at Ctrl-C, and does not outlive the build that started it."""
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None, "a worker is started by a build"

    def leave_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
