"""digests.jsonl of a run: the digest of each tensor after some steps, one JSON object per line.

    weight_digests.py --> DigestWriter (this file) --> digests.jsonl --> read_digests (this file) --> run_record.py

The line ``names`` comes first, and again where a run goes on; lines of digests have them in its order. A kill may cut
the last line: readers skip it. metrics.jsonl has the digest of the whole model alone. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sixfold.gpt.observe.metrics import LineWriter, parse_lines

NAME = "digests.jsonl"


class DigestWriter(LineWriter):
    """Appends to one digests.jsonl."""

    def __init__(self, path: str | Path, fence: Callable[[], None] | None = None) -> None:
        super().__init__(path, fence)
        self._names: list[str] | None = None

    def write(self, step: int, whole: str, digests: Mapping[str, str]) -> None:
        """The digests after a step, by the names of the tensors.

        Raises:
            FinalError, TrainError: as ``append``.
        """
        names = list(digests)
        if names != self._names:
            self.append({"kind": "names", "time": time.time(), "step": step, "names": names})
            self._names = names
        tensors = list(digests.values())
        self.append({"kind": "digest", "time": time.time(), "step": step, "digest": whole, "tensors": tensors})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDigests:
    """Digests after one step: of all tensors together, and by their names."""

    step: int
    whole: str
    tensors: dict[str, str]


def read_digests(path: str | Path) -> list[StepDigests]:
    """All lines of a digests.jsonl, steps that were repeated too, in the order in which they were written.

    Args:
        path: digests.jsonl; no such file has no lines.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found, names = [], list[Any]()
    for record in parse_lines(lines):
        if record["kind"] == "names":
            names = record.get("names", [])
        elif record["kind"] == "digest" and len(record.get("tensors", ())) == len(names):
            tensors = dict(zip(names, record["tensors"], strict=True))
            found.append(StepDigests(step=record["step"], whole=record["digest"], tensors=tensors))
    return found
