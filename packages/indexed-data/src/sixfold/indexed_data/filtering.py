"""Leaving documents out of a pair, by lists that others made, without writing the pair again.

    lists of datatrove or numbers --> filter_pair (this file) --> VIEW.view

datatrove names a document by the task that read it and its place among that task's documents, from 0. Task t of T
reads files t, t + T, t + 2 T, ... of its input, sorted by path. So the pair has to know its files: it was built with
``provenance``. Empty texts and lines that are no JSON are no documents to datatrove, and none to ``build``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.atomic_files import Temporary
from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.paths import AnyPath, anchored, local_path, output_prefix
from sixfold.indexed_data.provenance import Provenance
from sixfold.indexed_data.reader import IndexedDataset
from sixfold.indexed_data.token_ids import whole_number
from sixfold.indexed_data.view import VIEW, pack_view

I64 = npt.NDArray[np.int64]
_TASK = re.compile(r"(\d+)\.(remove|c4_dup)")


@dataclass(frozen=True, slots=True)
class FilterReport:
    """What ``filter_pair`` wrote; the fields are the keys of ``sixfold-data filter --json``."""

    output: str
    pair: str
    documents: int  # kept
    dropped: int
    sequences: int
    tokens: int


def filter_pair(
    path_prefix: AnyPath,
    output: AnyPath,
    *,
    lists: Sequence[AnyPath],
    tasks: int | None = None,
    files: Sequence[AnyPath] | None = None,
    overwrite: bool = False,
) -> FilterReport:
    """Write the view ``output`` of a pair, which leaves out the documents that ``lists`` name.

    Args:
        path_prefix: the pair, which stays as it is and where it is.
        lists: what to leave out. A folder holds NNNNNN.remove files of datatrove's MinHash deduplication, one per task,
            or folders of NNNNN.c4_dup files of its exact deduplication. A .txt file holds numbers of documents of the
            pair, one per line, from 0.
        tasks: how many tasks datatrove ran with; default: one for each file.
        files: what datatrove read, in its order, each as the pair's provenance spells it; default: all files of the
            pair, sorted as they are spelled, which is datatrove's order if all are spelled alike.
        overwrite: replace an existing view.
    Raises:
        IndexedDataError: a list that is not read, or names a document that the pair does not have; a pair without
            provenance, or whose provenance does not tell datatrove's order; a view is there already.
    Cost: one pass over the index. No id is read.
    """
    prefix = output_prefix(output)
    names = [lists] if isinstance(lists, str | bytes | os.PathLike) else list(lists)
    if not names:
        raise IndexedDataError(f"{prefix}: no lists; give at least one list of documents to leave out")
    for path in (prefix + VIEW, prefix + ".idx", prefix + ".bin"):
        if os.path.lexists(path) and not (overwrite and path.endswith(VIEW)):
            raise IndexedDataError(f"{path} is there already; choose another output, or pass overwrite for a view")
    with IndexedDataset(path_prefix) as pair:
        if pair.kept_sequences is not None:
            raise IndexedDataError(f"{pair.path_prefix} is a view; filter its pair by all lists at once")
        pair.check()
        index, ids = pair._opened()
        documents = len(pair.document_indices) - 1
        dropped_D = np.zeros(documents, np.bool_)
        places: dict[int, I64] = {}
        for name in (local_path("a list", name) for name in names):
            for path, task in _files(name):
                numbers = _numbers(path)
                if task is not None:
                    if not places:
                        places = _documents_of_tasks(pair, tasks, files)
                    numbers = _at(places, task, numbers, path)
                elif numbers.size and (numbers.min() < 0 or numbers.max() >= documents):
                    wrong = int(numbers.max() if numbers.max() >= documents else numbers.min())
                    raise IndexedDataError(f"{path}: names document {wrong}; the pair has {documents}, numbered from 0")
                dropped_D[numbers] = True
        whole = anchored(prefix)
        pieces = pack_view(
            whole, os.path.abspath(pair.path_prefix), index, ids, dropped_D, {"lists": [*map(str, names)]}
        )
        _write(prefix, whole, pieces)
    with IndexedDataset(prefix) as view:
        tokens = int(view.sequence_lengths.sum(dtype=np.int64))
        kept = len(view.document_indices) - 1
        return FilterReport(prefix, pair.path_prefix, kept, documents - kept, len(view), tokens)


def _files(name: str) -> Iterator[tuple[str, int | None]]:
    """(file, datatrove's task or None) of a list."""
    if not os.path.isdir(name):
        task = _TASK.fullmatch(os.path.basename(name))
        yield name, int(task[1]) if task else None
        return
    found = [
        (os.path.join(folder, each), int(task[1]))
        for folder, _, files in sorted(os.walk(name))
        for each in sorted(files)
        if (task := _TASK.fullmatch(each))
    ]
    if not found:
        raise IndexedDataError(f"{name}: this folder holds no NNNNNN.remove and no NNNNN.c4_dup of datatrove")
    yield from found


def _numbers(path: str) -> I64:
    """The numbers that a file lists."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise IndexedDataError(f"{path}: cannot be read: {error.strerror}") from error
    if path.endswith((".remove", ".c4_dup")):
        if len(data) % 4:
            raise IndexedDataError(f"{path}: {len(data)} bytes; a list of datatrove holds numbers of 4 bytes each")
        numbers = np.frombuffer(data, "<u4").astype(np.int64)
        if np.unique(numbers).size != numbers.size:  # one of sentences has numbers of 4 and 2 bytes in turn
            raise IndexedDataError(f"{path}: names a document twice; it is no list of documents of datatrove")
        return numbers
    if not path.endswith(".txt"):
        raise IndexedDataError(
            f"{path}: is no list that is read; one is NNNNNN.remove, NNNNN.c4_dup or a .txt of numbers"
        )
    try:
        return np.array([int(line) for line in data.split()], np.int64)
    except (ValueError, OverflowError) as error:
        raise IndexedDataError(f"{path}: {error}; a list holds one number of a document per line") from error


def _documents_of_tasks(pair: IndexedDataset, tasks: int | None, given: Sequence[AnyPath] | None) -> dict[int, I64]:
    """The documents of the pair that each task of datatrove read, in its order."""
    provenance = pair.provenance
    if provenance is None:
        raise IndexedDataError(
            f"{pair.path_prefix}: was built without provenance, so that the files of datatrove's tasks are not known; "
            "build it with --provenance, or give a .txt of document numbers"
        )
    known = set(provenance.files)
    files = sorted(known) if given is None else [local_path("a file", name) for name in given]
    if given is None:
        _refuse_mixed(pair.path_prefix, files)
    elif wrong := [name for name in files if name not in known or files.count(name) > 1]:
        raise IndexedDataError(
            f"files names {wrong[0]!r}, and the pair was built from {', '.join(sorted(known)[:3])}, ...; name each "
            "file that datatrove read once, as IndexedDataset(prefix).provenance.files spells it"
        )
    count = len(files) if tasks is None else whole_number("tasks", tasks)
    if count < 1:
        raise IndexedDataError(f"tasks is {count}; datatrove has at least one task")
    by_file = _documents_by_file(pair.path_prefix, provenance)
    none = np.empty(0, np.int64)
    return {t: np.concatenate([none, *(by_file.get(name, none) for name in files[t::count])]) for t in range(count)}


def _refuse_mixed(prefix: str, files: Sequence[str]) -> None:
    """IndexedDataError if the order of names is perhaps not that of the files: datatrove spells all of them alike."""
    plain = [os.path.normpath(name) for name in files]
    mixed = len({os.path.isabs(name) for name in files}) > 1
    # Alike are ./a and ./b, but not ./b and a, nor a and ./a.
    if mixed or plain != sorted(set(plain)):
        first, second = next(
            (a, b) for a, b in pairwise(files)
            if os.path.isabs(a) != os.path.isabs(b) or os.path.normpath(a) >= os.path.normpath(b)
        )  # fmt: skip
        raise IndexedDataError(
            f"{prefix}: its inputs are spelled in several ways, such as {first} and {second}, so that datatrove's "
            "order is not known; give its files in its order: files=[...] (--files)"
        )


def _documents_by_file(prefix: str, provenance: Provenance) -> dict[str, I64]:
    runs = provenance.runs
    ends = np.append(runs[1:, 0], provenance.documents)
    found: dict[str, list[Any]] = {}
    read: dict[str, int] = {}  # lines of each file, so far
    for (first, file, line), end in zip(runs.tolist(), ends.tolist(), strict=True):
        if file < 0:
            continue
        name = provenance.files[file]
        if line <= read.get(name, 0):
            raise IndexedDataError(
                f"{prefix}: document {first} is of line {line} of {name}, after line {read[name]} of that name: the "
                "file was given twice, or two files have the name, so that datatrove's numbers do not tell them apart. "
                "Give the numbers of the pair's documents in a .txt"
            )
        read[name] = line + end - first - 1
        found.setdefault(name, []).append(np.arange(first, end))
    return {name: np.concatenate(pieces) for name, pieces in found.items()}


def _at(places: dict[int, I64], task: int, numbers: I64, path: str) -> I64:
    members = places.get(task)
    if members is None:
        raise IndexedDataError(f"{path}: is of task {task}; the pair has files of {len(places)} tasks: pass tasks")
    if numbers.size and numbers.max() >= members.size:
        raise IndexedDataError(
            f"{path}: names document {int(numbers.max())} of task {task}, which has {members.size} in the pair. It "
            "lists sentences, or other files, or datatrove ran with another number of tasks: pass tasks"
        )
    return members[numbers]


def _write(prefix: str, whole: str, pieces: Sequence[Any]) -> None:
    made: Temporary | None = None
    try:
        made = Temporary(whole + VIEW)
        for piece in pieces:
            made.file.write(piece)
        made.sync()
        os.replace(made.name, whole + VIEW)
    except OSError as error:
        raise IndexedDataError(f"{prefix}{VIEW}: not written, {error.strerror}") from error
    finally:
        if made is not None:
            made.remove()
