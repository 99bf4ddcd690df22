"""Saving: the story of ``save``, from a state dict on every rank to one committed checkpoint, in any store.

state dicts --> agree_on --> writer.py --> commit (this file) --> the checkpoint

``agree_on`` is the collective half; ``writer.write`` and ``commit`` know no group, so that a background save
(background/) runs them in another process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.collectives import consistency, mesh_slices
from sixfold.dist_ckpt.collectives.consistency import Owners
from sixfold.dist_ckpt.collectives.exchange import Exchange, Group, errors_to_all
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError, ShardingError
from sixfold.dist_ckpt.formats import compact_manifest, metadata, weights_only, zstd
from sixfold.dist_ckpt.formats import frame as frames
from sixfold.dist_ckpt.formats.dcp_pickle import Index
from sixfold.dist_ckpt.formats.integrity import BLOCK_BYTES, Content, Contents, FileDigest, pieces_of
from sixfold.dist_ckpt.interpreter import collection_paused
from sixfold.dist_ckpt.plans import plan
from sixfold.dist_ckpt.plans.shard_table import (
    Encoded,
    merge,
    object_problems,
    raise_problems,
    table_problems,
    tabulate,
)
from sixfold.dist_ckpt.progress import Meter, Progress
from sixfold.dist_ckpt.save_load import replicated_tensors, writer
from sixfold.dist_ckpt.save_load.replicated_tensors import CONTENT_METADATA
from sixfold.dist_ckpt.save_load.writer import RankContent, Written
from sixfold.dist_ckpt.state import factory, tree
from sixfold.dist_ckpt.state.records import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardId,
    check_data,
    is_main_replica,
)
from sixfold.dist_ckpt.state.tensor_memory import check_readable
from sixfold.dist_ckpt.storage.local import LocalStore, local_path, resolved, store_at
from sixfold.dist_ckpt.storage.store import Save, Store, complete, write_small
from sixfold.dist_ckpt.strategies import base
from sixfold.dist_ckpt.strategies.base import SaveEngine, owns_file

_CACHED_CHUNKS = 1 << 16  # of the last save
_NO_TABLE = Encoded(b"", 0, b"")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of a call of ``save`` or ``async_save``, which ``serialization.save`` explains, and what they name.

    Attributes:
        store: opened. sharded, common: strategies that were looked up.
        engine: what the built-in engine shall do; None: the strategies write by themselves (user_strategies.py).
    Raises:
        CheckpointError: what is wrong with any of it, on every rank.
    """

    sharded_state_dict: Mapping[Any, Any]
    checkpoint_dir: Any
    sharded_strategy: Any = None
    common_strategy: Any = None
    validate_access_integrity: bool = True
    preprocess_common_before_consistancy_check: Callable[[dict[Any, Any]], Any] | None = None
    content_metadata: dict[str, Any] | None = None
    group: Group = field(kw_only=True)
    timeout_s: float = field(kw_only=True)
    if_exists: str = field(default="replace", kw_only=True)
    check_finite: bool = field(default=False, kw_only=True)
    metadata: str = field(default="torch", kw_only=True)
    progress: Progress | None = field(default=None, kw_only=True)
    megatron: bool = field(default=False, kw_only=True)
    since: str | Path | None = field(default=None, kw_only=True)
    compress: str | None = field(default=None, kw_only=True)
    lazy: bool = field(default=False, kw_only=True)
    store: Store = field(init=False)
    sharded: base.SaveShardedStrategy = field(init=False)
    common: base.SaveCommonStrategy = field(init=False)
    engine: SaveEngine | None = field(init=False)

    def __post_init__(self) -> None:
        with errors_to_all(self.group, self.timeout_s):
            check_if_exists(self.if_exists)
            if self.metadata not in ("torch", "compact"):
                raise CheckpointError(
                    f"metadata is {self.metadata!r}; it is 'torch' or 'compact' (no .metadata is written)"
                )
            if self.compress is not None:
                zstd.check_option(self.compress)
            sharded = base.find(base.StrategyAction.SAVE_SHARDED, self.sharded_strategy, ("torch_dist", 1))
            common = base.find(base.StrategyAction.SAVE_COMMON, self.common_strategy, ("torch", 1))
            engine = sharded.engine() if common.is_built_in else None
            if self.compress is not None and engine is None:
                raise CheckpointError(
                    f"compress is {self.compress!r}, and {sharded} writes by itself; leave one of them out"
                )
            store = store_at(self.checkpoint_dir, self.timeout_s)
            since = None if self.since is None else _checked_since(self.since, store, engine)
            found = {"store": store, "sharded": sharded, "common": common, "engine": engine, "since": since}
            for name, value in found.items():
                object.__setattr__(self, name, value)

    def compared(self, common: dict[Any, Any]) -> Any:
        """What of common data is compared between ranks; a function of the caller's gets dicts and lists of its own."""
        preprocess = self.preprocess_common_before_consistancy_check
        return common if preprocess is None else preprocess(tree.mapped(common, lambda _, leaf: leaf))


def _checked_since(since: str | Path, store: Store, engine: SaveEngine | None) -> Path:
    """The folder of ``since``. CheckpointError for a save that cannot link files of it."""
    remedy = "since names a local folder, whose files are linked; leave it out elsewhere"
    folder = resolved(local_path(since, remedy, "since"))
    if store.local_folder is None or engine is None:
        what = "no local folder" if store.local_folder is None else "written by a strategy of its own"
        raise CheckpointError(f"since is {folder}, and {store.name} is {what}; since goes with torch_dist into folders")
    if not folder.is_dir():
        raise MismatchError(f"since is {folder}, which is no folder; name a checkpoint, or None for the first save")
    return folder


def check_if_exists(if_exists: str) -> None:
    """CheckpointError for what is neither of the two words."""
    if if_exists not in ("replace", "error"):
        raise CheckpointError(f"if_exists is {if_exists!r}; it is 'replace' or 'error'")


@dataclass(slots=True)
class PlanCache:
    """What the first rank keeps of the last save by a strategy: the tables, and the index files.

    [Note: plan cache] Ranks first send digests of their tables. If those are the ones of the last save, nothing is
    gathered or checked again; else all are asked once more, for the tables. Where frames lie as they did then, the
    index files are the last ones with another save id.
    """

    digests: list[str]
    tables: list[Encoded]
    keys: frozenset[str]
    index: tuple[object, str, dict[str, bytes]] | None = None  # what it was made of, save id, index files


class _Report(NamedTuple):
    """What a rank tells the first one before anything is written. See [Note: plan cache]."""

    digest: str  # of the table
    table: Encoded | None
    objects: list[ShardedObject]  # without data
    nbytes: int
    common_digest: int
    target: str
    samples: consistency.Samples
    has_slices: bool = False  # of which copies are to be compared; see mesh_slices.py
    copies: consistency.Samples | None = None  # when the first rank has asked for them
    since: str = ""


class Ticket(NamedTuple):
    """What the first rank decides: the save that its store has begun."""

    save: Save
    common_differs: bool = False
    again: bool = False  # nothing is decided: the first rank asks for all tables, unless common data differs
    asks_copies: bool = False  # and for digests of what lies on slices of meshes
    owners: Mapping[ShardId, int] | None = None  # and has those shards written by one rank each


def save(request: SaveRequest) -> None:
    """``serialization.save`` by the built-in engine."""
    agreed = agree_on(request)
    with agreed.abandoned_on_error():
        agreed.exchange.all_reduce(lambda: (None, agreed.write(request.check_finite, request.progress)), agreed.commit)


@dataclass(frozen=True, slots=True)
class Agreed:
    """A save that all ranks agree on; its store has begun it, or is to be asked to by ``begin``; nothing is written."""

    exchange: Exchange
    content: RankContent
    ticket: Ticket
    cache: PlanCache | None  # on the first rank
    records: Sequence[tuple[tree.KeyPath, ShardedBase]]  # by place in the state dict
    begin: Callable[[], Save] | None = None  # on the first rank, if the ticket's save is still to be begun

    def join(self) -> None:
        """StorageError unless this rank sees what the first one has begun."""
        if self.exchange.rank:
            self.content.store.join(self.ticket.save)

    def write(self, check_finite: bool, progress: Progress | None) -> Written:
        """Write this rank's share. What is agreed on is not sent again."""
        self.join()
        meter = None if progress is None else Meter(progress, lambda: self.content.total_bytes)
        moved = None if meter is None else meter.add
        written = writer.write(self.content, self.ticket.save, self.exchange.rank, check_finite, moved)
        if meter is not None:
            meter.finish()
        return replace(written, table=_NO_TABLE)

    def commit(self, by_rank: list[Written]) -> None:
        """What the first rank does when all have written."""
        commit(self.with_tables(by_rank), self.content, self.ticket, self.cache)

    def with_tables(self, by_rank: list[Written]) -> list[Written]:
        """What all ranks wrote, with their tables; on the first rank."""
        assert self.cache is not None, "the first rank has the tables"
        return [replace(part, table=table) for part, table in zip(by_rank, self.cache.tables, strict=True)]

    def abandon(self) -> None:
        """Remove what was written."""
        if self.exchange.rank == 0 and self.begin is None:
            self.content.store.abandon(self.ticket.save)

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """An error inside removes what was written."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise


def agree_on(request: SaveRequest, begins_later: bool = False) -> Agreed:
    """The collective half of a save: what each rank has, whether it fits together, where it goes.

    Errors: as ``serialization.save``. ``begins_later``: the caller asks the store, by ``begin`` of what this returns.
    """
    exchange, engine = Exchange(request.group, request.timeout_s), request.engine or SaveEngine()
    store, begun, later = request.store, list[Save](), list[Callable[[], Save]]()
    cache: PlanCache | None = None if engine.memory is None else engine.memory.get("last")

    def described() -> tuple[tuple[list[ShardedBase], tree.Split, RankContent, _Report], _Report]:
        if exchange.ranks > 1 and not store.is_shared:
            raise CheckpointError(f"{store.name} is seen by one process alone; save into it with group=None")
        records, parts = taken_apart(request, exchange, engine)
        content, report = describe(request, exchange, engine, records, parts)
        return (records, parts, content, report), report

    def again() -> tuple[tuple[RankContent, _Report], _Report]:
        if not ticket.common_differs:
            own = _with_more(content, report, ticket, exchange.rank)
        elif owners is None:
            own = content, report._replace(common_digest=0)
        else:
            own = describe(request, exchange, engine, records, parts, owners)
        return own, own[1]

    def agree(reports: list[_Report]) -> Ticket:
        """On the first rank: the records of all ranks fit together, and the save begins. See [Note: plan cache]."""
        nonlocal cache
        _check_places(reports)
        nothing = Save(save_id="", target=store.name)
        if len({report.common_digest for report in reports}) > 1:
            return Ticket(nothing, again=True, common_differs=True)
        if cache is not None and cache.digests != [report.digest for report in reports]:
            cache = None
        if cache is None and any(report.table is None for report in reports):
            return Ticket(nothing, again=True)
        if asked := [report.copies for report in reports if report.copies is not None]:
            raise_problems(mesh_slices.slice_problems(asked), "saved", ShardingError)
            return Ticket(nothing, again=True, owners=mesh_slices.owners(asked))
        try:
            cache = check_reports(reports, cache)
        except ShardingError:
            if any(report.has_slices for report in reports):
                cache = None
                return Ticket(nothing, again=True, asks_copies=True)
            raise
        # With ``since`` it is not known yet: each file asks for its own room.
        nbytes = sum(report.nbytes for report in reports) if request.since is None else 0
        save_id = secrets.token_hex(8)
        begin = partial(store.begin, save_id, nbytes, request.if_exists, owns_file)
        if begins_later:
            later.append(begin)
            return Ticket(Save(save_id=save_id, target=store.name))
        begun.append(begin())
        return Ticket(begun[0])

    try:
        if engine.arrange is not None:  # by an exchange of its own
            exchange.raise_errors_of_others()
        (records, parts, content, report), ticket = exchange.all_reduce(described, agree)
        while ticket.again:
            owners = None
            if ticket.common_differs:  # told before holes are: a tensor that some ranks have would be one
                compared = request.compared(parts.common)
                # A tensor of some ranks is taken out by identity, which a function of the caller's may not keep.
                is_own = request.engine is not None and request.preprocess_common_before_consistancy_check is None
                owners = consistency.check(exchange, compared, with_tensors=is_own)
            (content, report), ticket = exchange.all_reduce(again, agree)
    except BaseException:
        for save in begun:
            store.abandon(save)
        raise
    if engine.memory is not None:
        engine.memory["last"] = cache
    return Agreed(exchange, content, ticket, cache, parts.records, *later)


def _with_more(content: RankContent, report: _Report, ticket: Ticket, rank: int) -> tuple[RankContent, _Report]:
    """What this rank saves and reports when the first one has asked for more, or has decided who writes copies."""
    if ticket.asks_copies:
        report = report._replace(copies=mesh_slices.on_slices(content.records))
    if ticket.owners is not None:
        before = plan.total_bytes(content.writes)
        mesh_slices.settle(content.records, ticket.owners, rank)
        table, pieces = tabulate(content.records, BLOCK_BYTES if content.compress else None)
        writes, encoded = plan.plan_save(content.records, pieces), table.encode()
        nbytes = content.nbytes - before + plan.total_bytes(writes)
        content = replace(content, writes=writes, table=encoded, nbytes=nbytes)
        report = report._replace(digest=encoded.digest, nbytes=nbytes, has_slices=False, copies=None)
    return content, report._replace(table=content.table)


def _check_places(reports: list[_Report]) -> None:
    targets, sinces = ({report.target for report in reports}, {report.since for report in reports})
    if len(targets) > 1:
        raise ShardingError(
            f"the ranks save into different folders ({', '.join(sorted(targets)[:3])}); pass one path to all"
        )
    if len(sinces) > 1:
        raise ShardingError(f"since differs between ranks ({', '.join(sorted(sinces)[:3])}); pass one path to all")


def check_reports(reports: list[_Report], cache: PlanCache | None) -> PlanCache:
    """What the next save of these records need not look at again, such as this one, if ``cache`` is of the same tables.

    Raises:
        ShardingError: the records of all ranks do not describe each tensor and each grid once and whole.
    """
    problems: list[str] = []
    if cache is None:
        tables = [report.table for report in reports if report.table is not None]
        table = merge(tables)
        problems = table_problems(table, "saved")
        cache = PlanCache([report.digest for report in reports], tables, table.keys)
    problems += consistency.replica_problems([report.samples for report in reports])
    objects = [report.objects for report in reports]
    problems += object_problems(objects, "saved")
    both = cache.keys & {cell.unique_key for cells in objects for cell in cells}
    problems += [f"{key}: a tensor and an object share this key" for key in sorted(both)]
    raise_problems(problems, "saved", ShardingError)
    return cache


def taken_apart(request: SaveRequest, exchange: Exchange, engine: SaveEngine) -> tuple[list[ShardedBase], tree.Split]:
    """The records of this rank, as the engine arranges them, and its state dict taken apart."""
    sorted_out: list[tree.Split] = []

    def own_records() -> list[ShardedBase]:
        expanded, _ = factory.expand(tree.checked(request.sharded_state_dict), exchange.rank, exchange.ranks)
        sorted_out.append(tree.split(expanded))
        _add_content_metadata(request, sorted_out[0].common)
        return [record for _, record in sorted_out[0].records]

    records = own_records() if engine.arrange is None else engine.arrange(own_records, exchange)
    return [*records], sorted_out[0]


def describe(
    request: SaveRequest,
    exchange: Exchange,
    engine: SaveEngine,
    records: Sequence[ShardedBase],
    parts: tree.Split,
    owners: Owners | None = None,
) -> tuple[RankContent, _Report]:
    """What this rank saves, and its report to the first rank.

    ``owners``: who writes each plain tensor, if not all ranks have the same; then common data has been compared.
    """
    rank, compared = exchange.rank, request.compared(parts.common)
    objects = [record for record in records if isinstance(record, ShardedObject)]
    replicated, common, with_values = list[ShardedTensor](), parts.common, tuple[str, ...]()
    crcs = dict[str, int | None]()
    if common and request.engine is not None:  # else common data is a strategy's
        taken = {record.key for record in records} | {record.unique_key for record in objects}
        replicated, common, with_values, crcs = replicated_tensors.take_out(
            common, compared, taken, rank, exchange.ranks, keep_values=request.megatron, owners=owners
        )
    tensors = [*(record for record in records if isinstance(record, ShardedTensor)), *replicated]
    # Compared as they were before ``arrange`` cut them: two ranks that write parts of one shard share none.
    whole = [record for _, record in parts.records if isinstance(record, ShardedTensor)]
    with collection_paused():
        table, pieces = tabulate(tensors, BLOCK_BYTES if request.compress else None)
        writes = plan.plan_save(tensors, pieces)
    for record, own in zip(tensors, pieces, strict=True):
        if own and is_main_replica(record.replica_id):
            if record.data is None:
                raise ShardingError(f"{record}: data is None on rank {rank}; a save needs the tensor")
            check_readable(record, record.data)
            check_data(record, record.data)
            try:
                frames.data_pickle(record.dtype, ())
            except (KeyError, RuntimeError) as error:  # of torch's storages
                raise ShardingError(
                    f"{record}: torch has no saved form of {record.dtype}; save its bytes, as .view(torch.uint8)"
                ) from error
    stored = [
        (record.unique_key, weights_only.dump(record.payload, f"the object {record}"))
        for record in objects
        if is_main_replica(record.replica_id)
    ]
    if request.check_finite:
        named = [] if rank else [(tree.path_text(path), leaf) for path, leaf in tree.leaves(common)]
        named += [(record.key, record.data) for record in objects if is_main_replica(record.replica_id)]
        for name, value in named:
            writer.check_value_finite(name, value, rank, set())
    common_bytes = b"" if rank else weights_only.dump(common, "common data")
    nbytes = plan.total_bytes(writes) + sum(len(data) for _, data in stored) + len(common_bytes)
    encoded, same = table.encode(), common if compared is parts.common else compared
    report = _Report(
        encoded.digest,
        encoded if engine.memory is None else None,
        [record.without_data() for record in objects],
        nbytes,
        0 if exchange.ranks == 1 or owners is not None else consistency.summary(same),
        request.store.name,
        consistency.samples(whole, rank) if request.validate_access_integrity else {},
        request.validate_access_integrity and any(record.is_on_slice for record in tensors),
        since=str(request.since),
    )
    content = RankContent(
        request.store,
        tensors,
        writes,
        stored,
        common,
        common_bytes,
        nbytes,
        encoded,
        engine.thread_count,
        request.metadata,
        with_values,
        None if request.since is None else Path(request.since),
        crcs,
        request.compress is not None,
    )
    return content, report


def _add_content_metadata(request: SaveRequest, common: dict[Any, Any]) -> None:
    if request.content_metadata is None:
        return
    if CONTENT_METADATA in common:
        raise ShardingError(
            "the state dict has a key 'content_metadata' of its own, and content_metadata= is saved there. Rename the "
            "key, or leave the argument out"
        )
    common[CONTENT_METADATA] = request.content_metadata


def commit(written: list[Written], content: RankContent, ticket: Ticket, cache: PlanCache | None = None) -> None:
    """Write the small files, metadata.json last, and make the save visible: what the first rank does.

    Args:
        written: what each rank wrote, in rank order; content: the first rank's.
        cache: of the last save, or None; it is brought up to date.
    Raises:
        ShardingError: ranks hold different values under one name; nothing is visible then.
    """
    save = ticket.save
    if content.crcs:
        consistency.check_crcs(content.crcs, [part.crcs for part in written])
    index = index_of(written, save.save_id, cache, content.metadata)

    def for_torch() -> Iterable[bytes]:
        """A ``.metadata`` that names the files by their folder."""
        return metadata.encode_parts(index_of_written(written, save.save_id).within(save.inside))

    small = index | {"common.pt": content.common_bytes}
    second = for_torch if ".metadata" in index and save.inside else None
    contents, digests = Contents(), _digests(written)
    for part in written:
        for name, known in part.contents.items():
            contents.setdefault(name, {}).update(known)
    complete(content.store, save, digests, small, metadata.CONFIG_JSON, second, content.in_common, contents)


def index_of(written: list[Written], save_id: str, cache: PlanCache | None, form: str = "torch") -> dict[str, Content]:
    """The index files by name, streamed if they are large. ``form``: "torch", or "compact" without ``.metadata``."""
    made_of: list[object] = [form]
    made_of += [(p.table, p.places, p.objects, list(p.files), p.numbers, p.compressed) for p in written]
    if cache is not None and cache.index is not None and cache.index[0] == made_of:
        _, before, last = cache.index
        if all(data.count(before.encode()) == 1 for data in last.values()):
            return {name: data.replace(before.encode(), save_id.encode()) for name, data in last.items()}
    index = index_of_written(written, save_id)
    if cache is None or index.chunk_count > _CACHED_CHUNKS:
        return _streams(index, form)
    with collection_paused():
        files = {name: b"".join(pieces_of(data)) for name, data in _streams(index, form).items()}
    cache.index = made_of, save_id, files
    return dict(files)


def _streams(index: Index, form: str) -> dict[str, Content]:
    if form == "compact":
        return {compact_manifest.FILE_NAME: lambda: compact_manifest.encode(index, is_alone=True)}
    return {
        ".metadata": lambda: metadata.encode_parts(index),
        compact_manifest.FILE_NAME: lambda: compact_manifest.encode(index),
    }


def index_of_written(written: list[Written], save_id: str) -> Index:
    """What all ranks wrote, the chunks of a tensor in the order of their places. See ``Written``."""
    table = merge([part.table for part in written])
    row_M, order_M = table.main_rows()
    place_M2 = _int64(b"".join(part.places for part in written)).view(-1, 2)
    names = {name: None for part in written for name in part.files}  # several ranks may link one file
    numbers = {name: number for number, name in enumerate(names)}
    file_F = torch.tensor([numbers[name] for part in written for name in part.files], dtype=torch.int64, device="cpu")
    number_M = _int64(b"".join(part.numbers or bytes(len(part.places) // 2) for part in written))
    counts_R = torch.tensor([len(part.places) // 16 for part in written], dtype=torch.int64, device="cpu")
    firsts_R = torch.tensor([0, *accumulate(len(part.files) for part in written)][:-1], dtype=torch.int64, device="cpu")
    return Index(
        tensors=table.kinds,
        tensor_N=table.rows_NW[:, 0],
        offsets_ND=table.offsets_ND,
        sizes_ND=table.sizes_ND,
        files=[*names],
        file_N=file_F[number_M + torch.repeat_interleave(firsts_R, counts_R)],
        start_N=place_M2[:, 0],
        length_N=place_M2[:, 1],
        objects=dict(entry for part in written for entry in part.objects),
        save_id=save_id,
        order=(row_M, order_M),
        compressed=frozenset[str]().union(*(part.compressed for part in written)),
    )


def _int64(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.int64)
        if data
        else torch.empty(0, dtype=torch.int64, device="cpu")
    )


def _digests(written: list[Written]) -> dict[str, FileDigest]:
    return {name: digest for part in written for name, digest in part.files.items()}


class _Unfinished(LocalStore):
    """A folder that somebody else makes a checkpoint of."""

    def begin(self, save_id: str, *_: Any) -> Save:
        return Save(save_id=save_id, target=self.name, staging=self.name)

    def abandon(self, save: Save) -> None:
        pass


def share_of_records(state: Mapping[Any, Any], folder: Path, exchange: Exchange) -> Share:
    """The records of all ranks for an existing folder: all but common data, ``metadata.json`` and the commit.

    For strategies that wrap this format; collective. ``integrity.json`` covers what is written here.
    """
    store = _Unfinished(folder)
    return Share(agree_on(SaveRequest(state, store, group=exchange.group, timeout_s=exchange.timeout_s)))


@dataclass(slots=True)
class Share:
    """This rank's part of a save into an existing folder, in two steps."""

    agreed: Agreed
    written: Written | None = None

    def write(self) -> Written:
        """Write the frames. No group."""
        self.written = self.agreed.write(False, None)
        return self.written

    def index(self) -> None:
        """Write what says where they lie; collective, when all ranks have written."""
        self.agreed.exchange.all_reduce(lambda: (None, self.written or self.write()), self._write_index)

    def _write_index(self, by_rank: list[Written]) -> None:
        written, save = self.agreed.with_tables(by_rank), self.agreed.ticket.save
        consistency.check_crcs(self.agreed.content.crcs, [part.crcs for part in written])
        write_small(self.agreed.content.store, save, _digests(written), index_of(written, save.save_id, None))
