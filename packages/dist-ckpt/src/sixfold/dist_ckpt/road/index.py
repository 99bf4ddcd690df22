"""The index of a save: what all ranks wrote, as the files that say where it lies; kept from save to save.

what ranks wrote --> index_of (this file) --> .metadata and the compact manifest
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sixfold.dist_ckpt.files import compact, metadata
from sixfold.dist_ckpt.files.dcp_pickle import Index
from sixfold.dist_ckpt.pause import collection_paused
from sixfold.dist_ckpt.plans.table import Encoded, merge
from sixfold.dist_ckpt.road.transfer import Written
from sixfold.dist_ckpt.stores.store import Content, pieces_of

_KEPT_CHUNKS = 1 << 16  # of the last save


@dataclass(slots=True)
class Kept:
    """What the first rank keeps of the last save by a strategy: the tables, and the index files.

    [Note: plan cache] Ranks first send digests of their tables. If those are the ones of the last save, nothing is
    gathered or checked again; else all are asked once more, for the tables. Where frames lie as they did then, the
    index files are the last ones with another save id.
    """

    digests: list[str]
    tables: list[Encoded]
    keys: frozenset[str]
    index: tuple[object, str, dict[str, bytes]] | None = None  # what it was made of, save id, index files


def index_of(written: list[Written], save_id: str, kept: Kept | None, form: str = "torch") -> dict[str, Content]:
    """The index files by name, streamed if they are large. ``form``: "torch", or "compact" without ``.metadata``."""
    made_of = [form, *((part.table, part.places, part.objects, list(part.files), part.counts) for part in written)]
    if kept is not None and kept.index is not None and kept.index[0] == made_of:
        _, before, last = kept.index
        if all(data.count(before.encode()) == 1 for data in last.values()):
            return {name: data.replace(before.encode(), save_id.encode()) for name, data in last.items()}
    index = index_of_written(written, save_id)
    if kept is None or index.chunk_count > _KEPT_CHUNKS:
        return _streams(index, form)
    with collection_paused():
        files = {name: b"".join(pieces_of(data)) for name, data in _streams(index, form).items()}
    kept.index = made_of, save_id, files
    return dict(files)


def _streams(index: Index, form: str) -> dict[str, Content]:
    if form == "compact":
        return {compact.FILE_NAME: lambda: compact.encode(index, is_alone=True)}
    return {".metadata": lambda: metadata.encode_parts(index), compact.FILE_NAME: lambda: compact.encode(index)}


def index_of_written(written: list[Written], save_id: str) -> Index:
    """What all ranks wrote, the chunks of a tensor in the order of their places. See ``Written``."""
    table = merge([part.table for part in written])
    places = bytearray(b"".join(part.places for part in written))
    places_M2 = (
        torch.frombuffer(places, dtype=torch.int64) if places else torch.empty(0, dtype=torch.int64, device="cpu")
    )
    row_M, order_M = table.main_rows()
    places_M2 = places_M2.view(-1, 2)
    counts = [part.counts or (len(part.places) // 16,) * len(part.files) for part in written]
    count_F = torch.tensor([count for own in counts for count in own], dtype=torch.int64, device="cpu")
    return Index(
        tensors=table.kinds,
        tensor_N=table.rows_NW[:, 0],
        offsets_ND=table.offsets_ND,
        sizes_ND=table.sizes_ND,
        files=[name for part in written for name in part.files],
        file_N=torch.repeat_interleave(count_F),
        start_N=places_M2[:, 0],
        length_N=places_M2[:, 1],
        objects=dict(entry for part in written for entry in part.objects),
        save_id=save_id,
        order=(row_M, order_M),
    )
