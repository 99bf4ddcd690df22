"""Saving: the story of ``save``, from a state dict on every rank to one committed checkpoint, in any store.

state dicts --> agree_on --> write --> commit (this file) --> the checkpoint

``agree_on`` is the collective half; ``write`` and ``commit`` know no group, so that a background save
(background/) runs them in another process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sixfold.dist_ckpt.errors import CheckpointError, ShardingError
from sixfold.dist_ckpt.files import metadata, weights_only
from sixfold.dist_ckpt.files.integrity import FileDigest
from sixfold.dist_ckpt.pause import collection_paused
from sixfold.dist_ckpt.plans import plan, validation
from sixfold.dist_ckpt.plans.table import Encoded, merge, tabulate
from sixfold.dist_ckpt.progress import Meter, Progress
from sixfold.dist_ckpt.ranks import agreement
from sixfold.dist_ckpt.ranks.exchange import Exchange
from sixfold.dist_ckpt.road import transfer
from sixfold.dist_ckpt.road.index import Kept, index_of, index_of_written, spared
from sixfold.dist_ckpt.road.request import SaveRequest
from sixfold.dist_ckpt.road.transfer import RankContent, Written
from sixfold.dist_ckpt.state import factory, tree
from sixfold.dist_ckpt.state.dense import check_readable
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from sixfold.dist_ckpt.stores.store import Save, Store, complete, write_small
from sixfold.dist_ckpt.strategies.base import SaveEngine, owns_file


class _Report(NamedTuple):
    """What a rank tells the first one before anything is written.

    ``table`` is None if it is that of the save that ``token`` names.
    """

    table: Encoded | None
    token: str
    objects: list[ShardedObject]  # without data
    nbytes: int
    common_digest: int
    target: str = ""


class Ticket(NamedTuple):
    """What the first rank decides: the save that its store has begun."""

    save: Save
    common_differs: bool = False
    token: str = ""
    known: bool = False  # the tables are those of the save that left this token
    metadata: str = "torch"  # or "compact": no .metadata is written
    again: bool = False  # nothing is decided: the first rank asks for all tables

    @property
    def save_id(self) -> str:
        return self.save.save_id

    @property
    def staging(self) -> str:
        return self.save.staging

    @property
    def target(self) -> str:
        return self.save.target


def save(request: SaveRequest) -> None:
    """``serialization.save`` by the built-in engine."""
    agreed = agree_on(request)
    exchange, content, ticket, kept = agreed.exchange, agreed.content, agreed.ticket, agreed.kept

    def written() -> tuple[bytes | None, Written]:
        own = _write_shared(content, ticket, exchange.rank, request.check_finite, request.progress)
        own.table = None  # the first rank has it
        return spared(own, ticket.known, kept)

    def committed(by_rank: list[Written]) -> None:
        for part, table in zip(by_rank, agreed.tables, strict=True):
            part.table = table
        commit(by_rank, content, ticket, kept)

    with agreed.abandoned_on_error():
        places, _ = exchange.together(written, committed)
    if kept is not None:
        kept.places = places


@dataclass(frozen=True, slots=True)
class Agreed:
    """A save that all ranks agree on; its store has begun it, nothing is written."""

    exchange: Exchange
    content: RankContent
    ticket: Ticket
    kept: Kept | None = None
    records: Sequence[tuple[tree.KeyPath, ShardedBase]] = ()  # by place in the state dict
    tables: Sequence[Encoded] = ()  # of all ranks, on the first one

    def abandon(self) -> None:
        """Remove what was written."""
        if self.exchange.rank == 0:
            self.content.store.abandon(self.ticket.save)

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """An error inside removes what was written."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise


def agree_on(request: SaveRequest) -> Agreed:
    """The collective half of a save: what each rank has, whether it fits together, where it goes.

    Errors: as ``serialization.save``.
    """
    exchange, engine = Exchange(request.group, request.timeout_s), request.engine or SaveEngine()
    place = f"{exchange.rank} of {exchange.ranks}"
    kept: Kept | None = None if engine.memory is None else engine.memory.get(place)
    first_rank = _FirstRank(request, kept)

    def agree(reports: list[_Report]) -> Ticket:
        return first_rank.agree(reports)._replace(metadata=request.metadata)

    def described() -> tuple[tuple[RankContent, _Report, tree.Split], _Report]:
        if exchange.ranks > 1 and not request.store.is_shared:
            raise CheckpointError(f"{request.store.name} is seen by one process alone; save into it with group=None")
        content, report, parts = describe(request, exchange, engine, kept)
        aimed = report._replace(target=request.store.name)
        return (content, aimed, parts), aimed

    try:
        if engine.arrange is not None:  # by an exchange of its own
            exchange.hear()
        (content, report, parts), ticket = exchange.together(described, agree)
        if ticket.again:
            whole = report._replace(table=content.table, token="")
            _, ticket = exchange.together(lambda: (None, whole), agree)
        if ticket.common_differs:
            agreement.check(exchange, agreement.digests(content.common, request.preprocess))
    except BaseException:
        first_rank.abandon()
        raise
    if engine.memory is not None and not ticket.known:
        kept = engine.memory[place] = Kept(ticket.token, content.table.digest, first_rank.keys, first_rank.tables)
    return Agreed(exchange, content, ticket, kept, parts.records, first_rank.tables)


class _FirstRank:
    """What it does while a save is agreed on."""

    def __init__(self, request: SaveRequest, kept: Kept | None) -> None:
        self._store, self._if_exists, self._kept = request.store, request.if_exists, kept
        self._save: Save | None = None
        self.keys: frozenset[str] = frozenset()
        self.tables: list[Encoded] = []

    def agree(self, reports: list[_Report]) -> Ticket:
        """Check that the records of all ranks fit together, and begin the save. See [Note: plan cache]."""
        targets = sorted({report.target for report in reports})
        if len(targets) > 1:
            raise ShardingError(
                f"the ranks save into different folders ({', '.join(targets[:3])}); pass one path to all"
            )
        tables = [report.table for report in reports if report.table is not None]
        tokens = {report.token for report in reports}
        known = not tables and self._kept is not None and tokens == {self._kept.token}
        if not known and len(tables) < len(reports):
            return Ticket(Save(save_id="", target=self._store.name), again=True)
        self.keys = check_together(tables, reports, self._kept if known else None)
        self.tables = self._kept.tables if known and self._kept is not None else tables
        save_id, nbytes = secrets.token_hex(8), sum(report.nbytes for report in reports)
        self._save = self._store.begin(save_id, nbytes, self._if_exists, owns_file)
        differs = len({report.common_digest for report in reports}) > 1
        return Ticket(self._save, differs, tokens.pop() if known else save_id, known)

    def abandon(self) -> None:
        """Remove what was made."""
        if self._save is not None:
            self._store.abandon(self._save)


def check_together(tables: list[Encoded], reports: list[_Report], kept: Kept | None) -> frozenset[str]:
    """The keys of all tensors.

    Raises:
        ShardingError: the records of all ranks do not describe each tensor and each grid once and whole.
    """
    objects = [report.objects for report in reports]
    problems, keys = [], frozenset[str]()
    if kept is not None:
        keys = kept.keys
    else:
        table = merge(tables)
        problems, keys = validation.table_problems(table, "saved"), table.keys
    problems += validation.object_problems(objects, "saved")
    problems += validation.name_clashes(keys, (cell.unique_key for cells in objects for cell in cells))
    validation.raise_problems(problems, "saved", ShardingError)
    return keys


def describe(
    request: SaveRequest, exchange: Exchange, engine: SaveEngine, kept: Kept | None
) -> tuple[RankContent, _Report, tree.Split]:
    """What this rank saves, its report to the first rank, and its state dict taken apart."""
    sorted_out: list[tree.Split] = []

    def own_records() -> list[ShardedBase]:
        expanded, _ = factory.expand(tree.checked(request.state))
        sorted_out.append(tree.split(expanded))
        return [record for _, record in sorted_out[0].records]

    records = own_records() if engine.arrange is None else engine.arrange(own_records, exchange)
    parts, rank = sorted_out[0], exchange.rank
    tensors = [record for record in records if isinstance(record, ShardedTensor)]
    objects = [record for record in records if isinstance(record, ShardedObject)]
    with collection_paused():
        table, pieces = tabulate(tensors)
        writes = plan.plan_save(tensors, pieces)
    for record, own in zip(tensors, pieces, strict=True):
        if own and is_main_replica(record.replica_id):
            if record.data is None:
                raise ShardingError(f"{record}: data is None on rank {rank}; a save needs the tensor")
            check_readable(record, record.data)
    common = dict(parts.common)
    if request.content_metadata is not None:
        common["content_metadata"] = request.content_metadata
    stored = [
        (record.unique_key, weights_only.dump(record.payload, f"the object {record}"))
        for record in objects
        if is_main_replica(record.replica_id)
    ]
    common_bytes = b"" if rank else weights_only.dump(common, "common data")
    nbytes = plan.total_bytes(writes) + sum(len(data) for _, data in stored) + len(common_bytes)
    encoded = table.encode()
    known = kept is not None and kept.digest == encoded.digest
    report = _Report(
        None if known else encoded,
        kept.token if kept is not None and known else "",
        [record.without_data() for record in objects],
        nbytes,
        agreement.summary(agreement.digests(common, request.preprocess)),
    )
    content = RankContent(
        request.store, tensors, writes, stored, common, common_bytes, nbytes, encoded, engine.thread_count
    )
    return content, report, parts


def write(
    content: RankContent,
    ticket: Ticket,
    rank: int,
    check_finite: bool,
    moved: Callable[[int], None] | None = None,
) -> Written:
    """Write this rank's share into the store. No group: any process that sees the data may do it.

    ``moved``: told of each part that is written, by its bytes.
    """
    return transfer.write(content, ticket.save, rank, check_finite, moved)


def _write_shared(
    content: RankContent, ticket: Ticket, rank: int, check_finite: bool, progress: Progress | None = None
) -> Written:
    """``write``, where it is not known yet whether this rank sees what the first one has made."""
    if rank:
        content.store.join(ticket.save)
    meter = Meter(progress, lambda: content.total_bytes)
    written = write(content, ticket, rank, check_finite, meter.add)
    meter.finish()
    return written


def commit(written: list[Written], content: RankContent, ticket: Ticket, kept: Kept | None = None) -> None:
    """Write the small files, metadata.json last, and make the save visible: what the first rank does.

    Args:
        written: what each rank wrote, in rank order; content: the first rank's.
        kept: of the last save, if that is known to all ranks; it is brought up to date.
    """
    save = ticket.save
    index = index_of(written, save.save_id, kept, ticket.metadata)
    for_torch = partial(_for_torch, written if kept is None else kept.written, save) if ".metadata" in index else None
    small = index | {"common.pt": content.common_bytes}
    complete(
        content.store, save, _digests(written), small, metadata.encode_config(), for_torch if save.inside else None
    )


def _digests(written: list[Written]) -> dict[str, FileDigest]:
    return {name: digest for part in written for name, digest in part.files.items()}


def _for_torch(written: list[Written], save: Save) -> Iterable[bytes]:
    """A ``.metadata`` that names the files by their folder."""
    index = index_of_written(written, save.save_id)
    return metadata.encode_parts(index.within(save.inside))


def share_of_records(state: Mapping[Any, Any], folder: Path, exchange: Exchange, save_id: str) -> Share:
    """The records of all ranks for an existing folder: all but common data, ``metadata.json`` and the commit.

    For strategies that wrap this format; collective. ``integrity.json`` covers what is written here.
    """
    save = Save(save_id=save_id, target=str(folder), staging=str(folder))

    def check(reports: list[_Report]) -> Ticket:
        check_together([report.table for report in reports if report.table is not None], reports, None)
        return Ticket(save)

    request = SaveRequest.made(state, folder, group=exchange.group, timeout_s=exchange.timeout_s)

    def described() -> tuple[RankContent, _Report]:
        return describe(request, exchange, SaveEngine(), None)[:2]

    content, ticket = exchange.together(described, check)
    return Share(exchange, request.store, content, ticket)


@dataclass(slots=True)
class Share:
    """This rank's part of a save into an existing folder, in two steps."""

    exchange: Exchange
    store: Store
    content: RankContent
    ticket: Ticket
    written: Written | None = None

    def write(self) -> Written:
        """Write the frames. No group."""
        self.written = _write_shared(self.content, self.ticket, self.exchange.rank, False)
        return self.written

    def index(self) -> None:
        """Write what says where they lie; collective, when all ranks have written."""
        self.exchange.together(
            lambda: (None, self.written or self.write()),
            self._write_index,
        )

    def _write_index(self, written: list[Written]) -> None:
        index = index_of(written, self.ticket.save_id, None)
        write_small(self.store, self.ticket.save, _digests(written), index)
