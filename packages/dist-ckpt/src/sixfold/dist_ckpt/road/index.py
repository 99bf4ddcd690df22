"""The index of a save: what all ranks wrote, as the files that say where it lies; kept from save to save.

    what ranks wrote --> spared, index_of (this file) --> .metadata and the compact manifest

Of a save whose tables and places are those of the last one the files are the last ones with another save id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sixfold.dist_ckpt.files import compact, metadata
from sixfold.dist_ckpt.files.dcp_pickle import Index
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.pause import collection_paused
from sixfold.dist_ckpt.plans.table import Encoded, merge
from sixfold.dist_ckpt.road.transfer import Written
from sixfold.dist_ckpt.stores.store import Content, pieces_of

_KEPT_CHUNKS = 1 << 16  # of the last save

_Named = tuple[list[tuple[str, ByteRange]], list[str]]


@dataclass(slots=True)
class Kept:
    """What a strategy keeps of its last save in a group; ``token`` is the same on all ranks.

    ``digest`` is of this rank's table; on the first rank there are the keys and ``tables`` of all. The rest is of the
    last save that was committed: this rank's ``places``, and on the first rank what all ranks wrote, and the last
    ``.metadata``.

    [Note: plan cache] A rank whose table has not changed sends the token instead. If all do, and mean the same save,
    nothing is gathered or checked again: each knows that the sum of the tables is what it was. If only some do,
    all are asked once more, for their tables.
    """

    token: str
    digest: str
    keys: frozenset[str] = frozenset()
    tables: list[Encoded] = field(default_factory=list)
    places: bytes | None = None
    written: list[Written] = field(default_factory=list)
    index: tuple[str, list[_Named], dict[str, bytes]] | None = None  # save id, objects and file names, index files


def spared(written: Written, known: bool, kept: Kept | None) -> tuple[bytes | None, Written]:
    """The places of what was written, and the message to the first rank without what it has already."""
    places = written.places
    if kept is not None:
        if known and places == kept.places:
            written.places = None
        kept.places = None  # until this save is committed: the first rank keeps what is of it from now on
    return places, written


def index_of(written: list[Written], save_id: str, kept: Kept | None, form: str = "torch") -> dict[str, Content]:
    """The index files by name, streamed if they are large; the last ones with another save id if nothing has moved.

    ``form``: "torch", or "compact" without ``.metadata``. See [Note: plan cache].
    """
    if kept is None:
        return _streams(index_of_written(written, save_id), form)
    objects, last_index = [(part.objects, list(part.files)) for part in written], kept.index
    unmoved = all(part.places is None for part in written)
    if unmoved and last_index is not None and objects == last_index[1]:
        before, _, last = last_index
        is_known = (".metadata" in last) == (form == "torch")
        if is_known and all(data.count(before.encode()) == 1 for data in last.values()):
            return {name: data.replace(before.encode(), save_id.encode()) for name, data in last.items()}
    for part, one in zip(written, kept.written or written, strict=True):
        part.places = one.places if part.places is None else part.places
    index = index_of_written(written, save_id)
    kept.written, kept.index = written, None
    if index.chunk_count > _KEPT_CHUNKS:
        return _streams(index, form)
    with collection_paused():
        made = {name: b"".join(pieces_of(data)) for name, data in _streams(index, form).items()}
    kept.index = (save_id, objects, made)
    return dict(made)


def _streams(index: Index, form: str) -> dict[str, Content]:
    if form == "compact":
        return {compact.FILE_NAME: lambda: compact.encode(index, is_alone=True)}
    return {".metadata": lambda: metadata.encode_parts(index), compact.FILE_NAME: lambda: compact.encode(index)}


def index_of_written(written: list[Written], save_id: str) -> Index:
    """What all ranks wrote, the chunks of a tensor in the order of their places. See ``Written``."""
    tables = [part.table for part in written]
    table = merge([part for part in tables if part is not None])
    assert len(tables) == len(written) and None not in tables, "a rank has kept its table to itself"
    places = bytearray(b"".join(part.places or b"" for part in written))
    places_M2 = (
        torch.frombuffer(places, dtype=torch.int64) if places else torch.empty(0, dtype=torch.int64, device="cpu")
    )
    row_M, order_M = table.main_rows()
    places_M2 = places_M2.view(-1, 2)
    counts = [part.counts or (len(part.places or b"") // 16,) * len(part.files) for part in written]
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
