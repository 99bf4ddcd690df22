"""What became of one part of a build: counts, bad lines, where it was given up.

parts.py, document_ids.py --> PartReport (this file) --> part-00000.json --> workers.py, build.py
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field

import numpy as np

from sixfold.indexed_data.provenance import I64
from sixfold.indexed_data.text.job import Job

LISTED_ERRORS = 10
ENDINGS = (".bin", ".idx", ".json", ".mask", ".runs")  # of the files that a finished part may have


@dataclass(slots=True)
class PartReport:
    """What became of a part. A place is (slice, line in it, reason)."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    empty_documents: int = 0
    spelled: int = 0  # documents whose text spells a special token
    ended_inside: int = 0  # documents with the EOD before their end
    uncounted: int = 0  # conversations of which no token counts in the loss
    bad_lines: int = 0
    bad: list[tuple[int, int, str]] = field(default_factory=list)  # the first LISTED_ERRORS places
    blocks: list[tuple[int, int]] = field(default_factory=list)  # of its .bin, for the manifest
    lines: list[int] = field(default_factory=list)  # of each slice, so that the next part can count on
    fatal: tuple[int, int, str] | None = None  # where the part was given up; it then wrote nothing


def count_bad_line(report: PartReport, place: tuple[int, int, str], job: Job) -> None:
    """A line gives no document: the part ends there, or goes on and lists it, by the job's ``on_error``."""
    if job.on_error == "fail":
        report.fatal = place
    report.bad_lines += 1
    if len(report.bad) < LISTED_ERRORS:
        report.bad.append(place)


def read_report(prefix: str) -> PartReport | None:
    """The report of a finished part, or None if it is not finished."""
    import json  # only here: reading pairs should not load it

    if not all(os.path.exists(prefix + end) for end in (".bin", ".idx", ".json")):
        return None
    try:
        with open(prefix + ".json", encoding="utf-8") as file:
            return PartReport(**json.load(file))
    except (OSError, ValueError, TypeError):  # cut when the machine went down: the part is made again
        return None


def write_report(path: str, report: PartReport) -> None:
    """Write what ``read_report`` reads: the part is finished then."""
    import json  # only here: reading pairs should not load it

    temporary = path + ".tmp"  # in the folder of a build, which is locked
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(asdict(report), file)
    os.replace(temporary, path)


def write_runs(prefix: str, runs: I64) -> None:
    """Write where the documents of a part come from, before its report: file is the slice, lines count from there."""
    np.save(prefix + ".npy", runs)
    os.replace(prefix + ".npy", prefix + ".runs")


def read_runs(prefix: str) -> I64:
    """What ``write_runs`` wrote."""
    with open(prefix + ".runs", "rb") as file:
        runs: I64 = np.load(file, allow_pickle=False)
    return runs
