"""Joining pairs end to end.

    pairs --> merge (this file) --> writer.py

The order of the pairs is kept. writer.py computes pointers and document ends again, and has the kernel copy .bin files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from sixfold.indexed_data.atomic_files import files_of
from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.manifest import Blocks, Manifest, block_problems, blocks_of, read_manifest
from sixfold.indexed_data.paths import AnyPath, input_prefix, output_prefix, path_text
from sixfold.indexed_data.reader import IndexedDataset
from sixfold.indexed_data.storage import map_file
from sixfold.indexed_data.writer import IndexedDatasetBuilder


def merge(inputs: Sequence[AnyPath], output: AnyPath, *, multimodal: bool = False, overwrite: bool = False) -> None:
    """Write the documents of all ``inputs`` (path prefixes), in that order, as the pair ``output``.

    With ``overwrite`` an output that is there already is replaced when the new one is whole; it may be one of the
    inputs.

    Raises:
        IndexedDataError: an output that is there already, no inputs, different dtypes, a damaged pair, or modes
            unexpected or missing.
    Cost: memory of the index arrays alone, whatever the size of the .bin files. Masks, provenance and manifests are
    joined too.
    """
    if isinstance(inputs, str | bytes | os.PathLike):
        raise IndexedDataError(f"inputs is {path_text('inputs', inputs)!r}; it is a list of path prefixes")
    prefix = output_prefix(output)
    prefixes = list(inputs)
    if not prefixes:
        raise IndexedDataError(f"{prefix}: nothing to merge; give at least one path prefix")
    there = files_of(prefix)
    if there and not overwrite:
        raise IndexedDataError(f"{there[0]} is there already; pass overwrite (--overwrite) to replace the pair")
    with IndexedDataset(prefixes[0], multimodal) as first:
        dtype = first.dtype
    with IndexedDatasetBuilder(prefix + ".bin", dtype, multimodal) as builder:
        for path_prefix in prefixes:
            builder.add_index(path_prefix)
        builder._made_of = _made_of(prefixes)


def _made_of(prefixes: Sequence[AnyPath]) -> tuple[Blocks, list[dict[str, Any] | None]] | None:
    """What a manifest says of all pairs end to end; None if no pair has one. A pair without is read whole."""
    names = [input_prefix(prefix) for prefix in prefixes]
    found = [read_manifest(name) for name in names]
    for name, manifest in zip(names, found, strict=True):
        for problem in _manifest_problems(name, manifest):
            raise IndexedDataError.broken(problem, "Verify the pair; without its manifest it is joined as any other")
    if not any(isinstance(manifest, Manifest) for manifest in found):
        return None
    blocks: Blocks = []
    builds: list[dict[str, Any] | None] = []
    for name, manifest in zip(names, found, strict=True):
        if not isinstance(manifest, Manifest):
            blocks += blocks_of(map_file(name + ".bin"))
            builds.append(None)
        else:
            blocks += manifest.bin
            builds += manifest.builds
    return blocks, builds


def _manifest_problems(prefix: str, manifest: Manifest | Problem | None) -> Iterator[Problem]:
    """Whether the manifest beside a pair can be read, and is that of its .idx."""
    if isinstance(manifest, Manifest):
        yield from block_problems(prefix + ".idx", map_file(prefix + ".idx"), manifest.idx)
    elif manifest is not None:
        yield manifest
