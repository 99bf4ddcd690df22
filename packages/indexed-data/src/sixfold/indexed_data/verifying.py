"""Check every rule of a pair, and list all that is wrong with it.

pair_rules.py, .bin --> verify (this file) --> VerifyReport
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.companions import MASK, SOURCES
from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.index import Index
from sixfold.indexed_data.loss_mask import LossMask
from sixfold.indexed_data.manifest import Manifest, beside_problems, block_problems, read_manifest
from sixfold.indexed_data.pair_rules import all_problems
from sixfold.indexed_data.paths import AnyPath, input_prefix
from sixfold.indexed_data.provenance import Provenance
from sixfold.indexed_data.storage import IdSource, MappedIds, map_file
from sixfold.indexed_data.token_ids import whole_number
from sixfold.indexed_data.view import VIEW, View, ViewIndex

_CHUNK = 1 << 20  # ids per step when .bin is read


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found. ``problems`` holds the first place of each broken rule."""

    ok: bool
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    sequences: int
    documents: int
    tokens: int


def verify(path_prefix: AnyPath, *, multimodal: bool = False, vocab_size: int | None = None) -> VerifyReport:
    """Check every rule of the index and the size of .bin. With ``vocab_size``, check also that every id is below it.

    A pair with a manifest, as ``build`` writes one, is read whole, and each block is compared with its checksum. Other
    pairs hold none, so some damage keeps all rules. Examples are other ids in a .bin of the same size, the .bin of
    another pair, a dtype of the same width, a moved document boundary. Compare copies with their source.
    A mask, provenance and a view have checksums of their own, which are compared too.

    A bad pair raises nothing: a missing or cut file is a problem in the report, as any other.

    Raises:
        IndexedDataError: ``vocab_size`` is no whole number >= 1, ``path_prefix`` no local path.
    Cost: one pass over the .idx, and one over the .bin with ``vocab_size`` and one with a manifest.
    """
    prefix = input_prefix(path_prefix)
    if vocab_size is not None and (vocab_size := whole_number("vocab_size", vocab_size)) < 1:
        raise IndexedDataError(f"vocab_size is {vocab_size}; it is >= 1")
    view = None
    try:
        if os.path.exists(prefix + VIEW) and not os.path.lexists(prefix + ".idx"):
            view = View(prefix)
            prefix = view.pair
        raw, data = map_file(prefix + ".idx"), map_file(prefix + ".bin")
        index = Index(raw, prefix, data.size, multimodal)
        # Whole ids: what is left of a .bin that was cut is a problem below.
        ids = MappedIds(data[: data.size // index.itemsize * index.itemsize], index.header.dtype)
        if view is not None:
            view.index_over(index, ids)
        manifest = read_manifest(prefix)
    except IndexedDataError as error:
        problem = error.problem or Problem("a pair can be opened", prefix, str(error), "a pair")
        return VerifyReport(False, (problem,), (), 0, 0, 0)
    problems = list(all_problems(index))
    if isinstance(manifest, Problem):
        problems.append(manifest)
    elif manifest is not None:
        problems += [
            *block_problems(index.idx_path, raw, manifest.idx),
            *block_problems(index.bin_path, data, manifest.bin),
        ]
    problems += _companion_problems(prefix, index, ids, manifest)
    if view is not None and not problems:
        problems += view.problems(index)
    if vocab_size is not None and not problems:
        problems += ids_outside(index, ids.all, vocab_size)
    tokens = data.size // index.itemsize
    if view is not None:
        tokens = int(view.lengths_K.sum(dtype=np.int64))
        index = ViewIndex(index, view)
    return VerifyReport(
        not problems,
        tuple(problems),
        _notes(index, manifest),
        index.sequences,
        max(0, index.header.boundaries - 1),
        tokens,
    )


def ids_outside(index: Index, ids: npt.NDArray[Any], vocab_size: int) -> Iterator[Problem]:
    """The first of all ``ids`` of a pair that is not in 0..vocab_size-1."""
    dtype = ids.dtype
    # One maximum for both ends, see the note in token_ids.py. No id of a signed dtype lies above its own largest.
    unsigned = None if dtype.kind == "f" else ids.view(f"u{dtype.itemsize}")
    limit = vocab_size if dtype.kind != "i" else min(vocab_size, int(np.iinfo(dtype).max) + 1)
    for begin in range(0, ids.size, _CHUNK):
        chunk = ids[begin : begin + _CHUNK]
        if unsigned is not None and unsigned[begin : begin + _CHUNK].max() < limit:
            continue
        # A NaN lies in no vocabulary, and a fraction is no id.
        outside = np.flatnonzero(~((chunk >= 0) & (chunk < vocab_size) & (chunk == np.floor(chunk))))
        if not outside.size:
            continue
        token = begin + int(outside[0])
        # Empty sequences share their pointer with the next one; "right" finds the one that holds the token.
        sequence = int(np.searchsorted(index.pointers_S, token * index.itemsize, side="right")) - 1
        document = int(np.searchsorted(index.boundaries_D, sequence, side="right")) - 1
        position = token - index.pointers_S.item(sequence) // index.itemsize
        where = f"{index.bin_path}: document {document}, sequence {sequence}, position {position}"
        yield Problem("every id lies in the vocabulary", where, f"id {ids[token]}", f"0 to {vocab_size - 1}")
        return


def _companion_problems(
    prefix: str, index: Index, ids: IdSource, manifest: Manifest | Problem | None
) -> Iterator[Problem]:
    """What is wrong with a mask and with provenance, and with what the manifest says of them. Reads both whole."""
    beside = manifest.beside if isinstance(manifest, Manifest) else None
    for ending, opened in ((MASK, LossMask.open), (SOURCES, Provenance.open)):
        try:
            found = opened(prefix, index, ids)
        except IndexedDataError as error:
            yield error.problem or Problem("a companion of a pair can be read", prefix, str(error), "a whole file")
            continue
        yield from beside_problems(prefix, ending, beside, None if found is None else found.file.checksum)
        if found is not None:
            yield from found.file.problems()
            yield from found.problems(prefix, index)


def _notes(index: Index, manifest: Manifest | Problem | None) -> tuple[str, ...]:
    checked: tuple[str, ...] = ()
    if isinstance(manifest, Manifest):
        checked = (f"{len(manifest.bin)} blocks of {index.bin_path} were compared with their checksums",)
    return (*checked, *_trailing(index))


def _trailing(index: Index) -> tuple[str, ...]:
    if not index.trailing_bytes:
        return ()
    note = f"{index.idx_path}: {index.trailing_bytes} bytes after the last array"
    if index.trailing_bytes == index.sequences and index.modes_S is None:
        note += ", one for each sequence: probably the modes of a multimodal pair"
    return (note,)
