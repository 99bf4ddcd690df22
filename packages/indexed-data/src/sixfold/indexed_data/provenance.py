"""Where each document of a pair comes from: its file and its line, as runs.

    build(provenance=True) --> SourceRuns --> PREFIX.sources --> Provenance (this file) --> why, find

A run is documents in a row whose lines follow each other in one file: (first document, file, its line). Most corpora
need one run per file and one for each gap. Lines of a file rise with the documents. Rows of tables are lines too. File
-1 is unknown: that of documents of a pair that was joined and had no provenance.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.companions import SOURCES, Companion, Facts, map_if_there, pack, read_companion
from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.index import Index
from sixfold.indexed_data.storage import Bytes, IdSource

I64 = npt.NDArray[np.int64]
UNKNOWN = -1
_BEGIN_AT_0 = "runs of documents begin at 0, and follow each other"


def runs_of(files: Iterable[int], lines: Iterable[int]) -> I64:
    """(n, 3) runs of documents, given each one's file and line."""
    file_D, line_D = np.asarray(files, np.int64), np.asarray(lines, np.int64)
    begins = np.ones(file_D.size, np.bool_)
    begins[1:] = (np.diff(file_D) != 0) | (np.diff(line_D) != 1)
    first = np.flatnonzero(begins)
    return np.stack((first, file_D[first], line_D[first]), axis=1).astype(np.int64)


class SourceRuns:
    """The runs of a pair that is being written."""

    def __init__(self) -> None:
        self._files: list[str] = []
        self._runs: list[I64] = []

    def append(self, begin: int, runs: I64, files: list[str], end: int) -> None:
        """Documents ``begin`` to ``end``, whose ``runs`` count from 0 and name ``files`` by number."""
        known = np.where(runs[:, 1] >= 0, runs[:, 1] + len(self._files), UNKNOWN)
        self._runs.append(np.stack((runs[:, 0] + begin, known, runs[:, 2]), axis=1))
        self._runs.append(_unknown_from(end))
        self._files += files

    def cut(self, documents: int) -> None:
        """Forget what was said of the documents from ``documents`` on."""
        while self._runs and self._runs[-1].size and self._runs[-1].item(0, 0) >= documents:
            self._runs.pop()

    def pack(self, facts: Facts, documents: int) -> list[Any]:
        """The file of a pair of so many documents; a run that nobody has given is unknown."""
        import json  # only here: reading pairs should not load it

        runs = np.concatenate([_unknown_from(0), *self._runs, _unknown_from(documents)])
        runs = runs[:-1][np.diff(runs[:, 0]) > 0]  # an empty run says nothing
        return pack(SOURCES, facts, runs, json.dumps(self._files).encode())


def _as_text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no name of a file")
    return name


def _unknown_from(document: int) -> I64:
    return np.array([[document, UNKNOWN, 0]], np.int64)


class Provenance:
    """Files and lines of the documents of a pair, mapped."""

    def __init__(self, file: Companion, files: list[str], documents: int, kept: I64 | None = None) -> None:
        self.file, self.runs, self.files, self.documents = file, file.array, files, documents
        self._kept = kept  # numbers in the pair of the documents of a view

    @classmethod
    def open(
        cls,
        prefix: str,
        index: Index,
        ids: IdSource,
        kept: I64 | None = None,
        load: Callable[[str], Bytes | None] = map_if_there,
    ) -> Provenance | None:
        """What lies beside a pair; None if it has no provenance.

        Raises:
            IndexedDataError: it is damaged, or belongs to another pair.
        """
        import json  # only here: reading pairs should not load it

        found = read_companion(prefix, SOURCES, index, ids, 3, load)
        if found is None:
            return None
        try:
            files = [*map(_as_text, json.loads(found.behind))]
        except (ValueError, TypeError, RecursionError) as error:
            problem = Problem("the files of provenance can be read", found.path, str(error), "a list of names")
            raise IndexedDataError.broken(problem, "Build the pair again, or remove this file") from error
        return cls(found, files, max(0, index.header.boundaries - 1), kept)

    def problems(self, prefix: str, index: Index) -> Iterator[Problem]:
        """The rules that all runs keep. O(runs)."""
        first, file = self.runs[:, 0], self.runs[:, 1]
        begins_at_0 = not self.documents or (first.size and first.item(0) == 0)
        if not begins_at_0 or (np.diff(first) <= 0).any() or (first >= max(1, self.documents)).any():
            yield Problem(_BEGIN_AT_0, prefix + SOURCES, f"{first.size} runs", f"runs of {self.documents} documents")
        elif ((file < UNKNOWN) | (file >= len(self.files))).any():
            rule = "a run names one of the files"
            yield Problem(rule, prefix + SOURCES, f"file {file.max()}", f"{UNKNOWN} to {len(self.files) - 1}")

    def of(self, document: int) -> tuple[str, int] | None:
        """(file, line) of a document; None if it is unknown. Lines and rows are counted from 1."""
        documents = self.documents if self._kept is None else len(self._kept)
        if not 0 <= document < documents:
            raise IndexedDataError(f"document {document} is asked for; there are {documents}, numbered from 0")
        if self._kept is not None:
            document = self._kept.item(document)
        run = bisect_right(self.runs[:, 0], document) - 1
        first, file, line = self.runs[run].tolist() if run >= 0 else (document + 1, 0, 0)
        if first > document or not UNKNOWN <= file < len(self.files):
            problem = Problem(_BEGIN_AT_0, self.file.path, f"document {document} in no run of a file", "one run")
            raise IndexedDataError.broken(problem, "Run `sixfold-data verify`, then build the pair again")
        return None if file == UNKNOWN else (self.files[file], line + document - first)

    def find(self, file: str, line: int) -> list[int]:
        """The documents that come from that line, in order; a file that was given twice has several."""
        numbers = [number for number, name in enumerate(self.files) if name == file]
        if not numbers:
            names = [*dict.fromkeys(self.files)]  # one that was cut, or given twice, is there more than once
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise IndexedDataError(f"no document comes from {file!r}; the pair was built from {shown or 'no file'}")
        found = []
        for run in np.flatnonzero(np.isin(self.runs[:, 1], numbers)).tolist():
            first, _, begin = self.runs[run].tolist()
            end = self.runs.item(run + 1, 0) if run + 1 < len(self.runs) else self.documents
            if begin <= line < begin + end - first:
                found.append(first + line - begin)
        if self._kept is None:
            return found
        at = np.searchsorted(self._kept, found)
        there = [i < len(self._kept) and self._kept.item(i) == each for i, each in zip(at.tolist(), found, strict=True)]
        return at[there].tolist() if found else []
