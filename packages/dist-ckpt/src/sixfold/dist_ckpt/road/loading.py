"""Loading: the story of ``load``.

state dicts + folder --> look --> agree --> verify and read --> assemble (this file) --> result
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from sixfold.dist_ckpt.errors import CorruptError, MismatchError, ShardingError, StorageError, typed
from sixfold.dist_ckpt.files.integrity import Span
from sixfold.dist_ckpt.geometry.box import intersect, whole
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, Stored
from sixfold.dist_ckpt.pause import collection_paused
from sixfold.dist_ckpt.plans import plan, validation
from sixfold.dist_ckpt.plans.table import Encoded, merge, tabulate
from sixfold.dist_ckpt.plans.validation import StrictHandling
from sixfold.dist_ckpt.progress import Meter
from sixfold.dist_ckpt.ranks.exchange import Exchange
from sixfold.dist_ckpt.road.hosts import Seen, Shares, block_bytes, seen_at
from sixfold.dist_ckpt.road.looking import common_data
from sixfold.dist_ckpt.road.reader import WINDOW_BYTES, Reader
from sixfold.dist_ckpt.road.request import LoadRequest
from sixfold.dist_ckpt.state import by_name, factory, tree
from sixfold.dist_ckpt.state.dense import check_writable
from sixfold.dist_ckpt.state.records import ShardedObject, ShardedTensor
from sixfold.dist_ckpt.stores.folder import Checkpoint
from sixfold.dist_ckpt.strategies.base import LoadEngine

if TYPE_CHECKING:
    from sixfold.dist_ckpt.ranks.relay import Relay

Values = dict[tree.KeyPath, Any]  # what was loaded, by place

_log = logging.getLogger("sixfold.dist_ckpt")
_DOUBTFUL_BYTES = 1 << 26  # before as much is allocated, the claimed shape is compared with what is stored
_SHORT_BYTES = 1 << 30  # read before garbage matters: the plan of many small tensors is walked through by no collection
_RELAY_WINDOW_BYTES = 1 << 24  # what is read is sent on while the next 16 MiB are read


class _Report(NamedTuple):
    """What a rank tells the first one before anything is read."""

    table: Encoded
    objects: list[ShardedObject]  # without data
    unexpected: set[str]
    mismatches: list[str]
    touched: list[Span]
    cpus: tuple[str, int]
    seen: tuple[str | None, str]  # save id and digest of the keys of the checkpoint
    manifest: Manifest | None  # of the first rank only, which sends it nowhere
    has_stateful: bool
    room: tuple[str, int] | None  # where a mirror lies, and the bytes that are free there
    block_bytes: int


class _Decision(NamedTuple):
    """What the first rank decides, besides which blocks each rank hashes: the key sets, with how many threads they
    hash; whether any rank has Stateful objects."""

    missing: set[str]
    unexpected: set[str]
    threads: int
    has_stateful: bool


@dataclass(frozen=True, slots=True)
class Looked:
    """What this rank wants of a checkpoint that it has looked into."""

    seen: Seen
    checkpoint: Checkpoint
    expanded: Any
    merges: list[factory.Merge]
    parts: tree.Split
    tensors: list[ShardedTensor]
    table: Encoded
    reads: plan.LoadPlan
    common: dict[Any, Any]
    relay: Relay | None = None

    def shareable(self) -> tuple[list[ShardedTensor], dict[int, tuple[str, int]]]:
        """The tensors that can be loaded, and the place of the last frame that each of them needs."""
        known = {step.record for step in self.reads.reads} | {index for index, _ in self.reads.zeroed}
        kept = sorted(known)
        number = {index: n for n, index in enumerate(kept)}
        last = {number[s.record]: (s.chunk.frame.file, s.chunk.frame.offset) for s in self.reads.reads}
        return [self.tensors[index] for index in kept], last


class Ways(NamedTuple):
    """How a load opens a checkpoint and reads what it wants: what a strategy of a user does for itself.

    Attributes:
        open: gives the checkpoint, its common data, and whether each value is stored under its own name.
        read: gives the values by place, and the keys whose dtype was converted. Its further arguments: threads, the
            blocks to hash, this rank.
    """

    open: Callable[[Seen, LoadRequest], tuple[Checkpoint, dict[Any, Any], bool]]
    read: Callable[[Looked, LoadRequest, int, Shares, int], tuple[Values, set[str]]]


def load(asked: LoadRequest, engine: LoadEngine, ways: Ways | None = None) -> Any:
    """``serialization.load``. ``ways``: None for those of the built-in engine."""
    exchange = Exchange(asked.group, asked.timeout_s)
    ways = ways or Ways(_opened if engine.with_common else _opened_without_common, _read_one_save)
    with seen_at(asked.store, exchange) as seen:
        looked, decision, values, casts = _loaded(asked, engine, ways, exchange, seen)
    mode = asked.strict
    if casts and asked.dtype_policy == "cast":
        warnings.warn(f"values were converted to another dtype in {', '.join(casts)}", stacklevel=2)
    if exchange.rank == 0 and not mode.logs:
        _warn_of_stateful(looked, decision)
    result = _finished(
        lambda: _assembled(looked.expanded, looked.merges, looked.parts, looked.common, values),
        exchange if decision.has_stateful else None,
    )
    missing = decision.missing if mode.minds_missing else set()
    if mode.logs and (missing or decision.unexpected):
        _warn_of_keys(missing, decision.unexpected)
    return (result, missing, decision.unexpected) if mode.returns else result


def _loaded(
    asked: LoadRequest, engine: LoadEngine, ways: Ways, exchange: Exchange, seen: Seen
) -> tuple[Looked, _Decision, Values, list[str]]:
    """What was asked for and decided, the values by place, and the keys whose dtype was converted."""

    def requested() -> tuple[Looked, _Report]:
        with seen.told():
            return typed(lambda: _requested(asked, engine, ways, exchange, seen))

    def agreed(reports: list[_Report]) -> tuple[_Decision, list[Shares]]:
        return _agree(reports, asked.strict, asked.validate_access_integrity, seen)

    def read() -> tuple[Values, set[str]]:
        with seen.told():
            return typed(lambda: ways.read(looked, asked, decision.threads, shares, exchange.rank))

    def of_one_save(casts: list[set[str]]) -> list[str]:
        seen.check_unchanged()
        return sorted(set().union(*casts))

    with ExitStack() as pause:
        if engine.parallel and seen.mirror is None:  # which has been an exchange
            exchange.hear()
        pause.enter_context(collection_paused())
        looked, decision, shares = exchange.apart(requested, agreed)
        if looked.reads.nbytes > _SHORT_BYTES:
            pause.close()
        values, casts = exchange.together(read, of_one_save)
    return looked, decision, values, casts


def _requested(
    asked: LoadRequest, engine: LoadEngine, ways: Ways, exchange: Exchange, seen: Seen
) -> tuple[Looked, _Report]:
    found: list[Looked] = []

    def look() -> tuple[list[ShardedTensor], dict[int, tuple[str, int]]]:
        found.append(_look(asked, ways, exchange.rank, seen))
        return found[0].shareable()

    if engine.parallel:
        from sixfold.dist_ckpt.ranks.relay import relay_through

        within = exchange if engine.group is None else Exchange(engine.group, exchange.timeout_s)
        relay = relay_through(look, within, engine.memory)
        wanted = found[0]
        reads = plan.plan_load(relay.mine, wanted.checkpoint.manifest, dtype_policy=asked.dtype_policy)
        looked = replace(wanted, tensors=relay.mine, reads=reads, relay=relay)
    else:
        look()
        wanted = looked = found[0]
    return looked, _report(looked, wanted, exchange)


def _look(asked: LoadRequest, ways: Ways, rank: int, seen: Seen) -> Looked:
    """What this rank wants of the checkpoint; records without data get some."""
    checkpoint, common, is_bare = ways.open(seen, asked)
    expanded, merges = factory.expand(tree.checked(asked.state))
    stored = checkpoint.manifest.tensors
    expanded = by_name.ask(expanded, common, by_name.Names(stored, checkpoint.manifest.objects, is_bare, rank))
    parts = tree.split(expanded)
    tensors = list[ShardedTensor]()
    for number, (place, record) in enumerate(parts.records):
        if not isinstance(record, ShardedTensor):
            continue
        if record.key in stored and record.data is None:
            record = record.without_data()  # a copy: the caller's record stays without data
            _allocate(record, stored[record.key])
            parts.records[number] = (place, record)
        elif record.key in stored and record.data is not None:
            check_writable(record, record.data)
        tensors.append(record)
    table, pieces = tabulate(tensors)
    reads = plan.plan_load(tensors, checkpoint.manifest, dtype_policy=asked.dtype_policy, pieces=pieces)
    return Looked(seen, checkpoint, expanded, merges, parts, tensors, table.encode(), reads, common)


def _opened(seen: Seen, asked: LoadRequest) -> tuple[Checkpoint, dict[Any, Any], bool]:
    """See ``Ways``. Each value was stored under its own name by DCP, or through its interface."""
    checkpoint = seen.opened(asked.verify)
    common = common_data(checkpoint, asked.safe_globals)
    names = map(by_name.record_of, () if common else checkpoint.manifest.objects)
    without_id = checkpoint.manifest.save_id is None
    return checkpoint, common, not common and (without_id or any(isinstance(n, by_name.PlainObject) for n in names))


def _opened_without_common(seen: Seen, asked: LoadRequest) -> tuple[Checkpoint, dict[Any, Any], bool]:
    return seen.opened(asked.verify), {}, False


def _allocate(record: ShardedTensor, stored: Stored) -> None:
    """Make the tensor of a record, unless ``.metadata`` claims a shape that nothing is stored of."""
    nbytes = prod(record.local_shape) * record.dtype.itemsize
    alike = nbytes > _DOUBTFUL_BYTES and len(record.global_shape) == len(stored.shape)
    wanted = intersect(record.box, whole(stored.shape)) if alike else None
    if wanted is not None and wanted.volume > sum(chunk.box.volume for chunk in stored.near(wanted)):
        raise CorruptError(f"{record.key}: the chunks of the checkpoint do not fill its shape {stored.shape}")
    try:
        record.init_data("cpu")
    except RuntimeError as error:  # of torch's allocator
        raise StorageError(f"{record}: no memory for a tensor of {nbytes} bytes", errno.ENOMEM) from error


def _report(looked: Looked, wanted: Looked, exchange: Exchange) -> _Report:
    """What others must know: of all that is ``wanted``, and of what this rank reads itself."""
    checkpoint, tensors, manifest = looked.checkpoint, wanted.tensors, looked.checkpoint.manifest
    objects = [record for _, record in wanted.parts.records if isinstance(record, ShardedObject)]
    mismatches, unknown = _object_mismatches(objects, manifest)
    unexpected = {tensors[index].key for index in wanted.reads.unexpected} | unknown
    unexpected |= factory.owners_without_values(wanted.merges, wanted.parts, wanted.common)
    return _Report(
        wanted.table,
        [record.without_data() for record in objects],
        unexpected,
        [*wanted.reads.mismatches, *mismatches],
        looked.seen.touched(checkpoint, _frames(looked, objects), exchange.ranks),
        (socket.gethostname(), len(os.sched_getaffinity(0))),
        (manifest.save_id, manifest.keys_digest),
        manifest if exchange.rank == 0 else None,
        any(step.owner is not None for step in wanted.merges),
        looked.seen.room(),
        block_bytes(checkpoint),
    )


def _object_mismatches(objects: Sequence[ShardedObject], manifest: Manifest) -> tuple[list[str], set[str]]:
    """Objects whose grid is another than the saved one, and objects that are not stored at all."""
    absent = [record for record in objects if record.unique_key not in manifest.objects]
    if not absent:
        return [], set()
    grids: dict[str, tuple[int, ...]] = {}
    for stored_key in manifest.objects:
        try:
            record = ShardedObject.empty_from_unique_key(stored_key)
        except ShardingError:  # bytes of plain DCP, which have no grid
            continue
        grids[record.key] = record.global_shape
    lines, unknown = [], set()
    for record in absent:
        if record.key in grids and grids[record.key] != record.global_shape:
            lines.append(
                f"{record.key}: asked for a grid {record.global_shape} of objects, saved was {grids[record.key]}; "
                "objects cannot be cut anew"
            )
        else:
            unknown.add(record.unique_key)
    return lines, unknown


def _frames(looked: Looked, objects: Sequence[ShardedObject]) -> set[ByteRange]:
    """What this rank reads itself."""
    stored = looked.checkpoint.manifest.objects
    own = {stored[record.unique_key] for record in objects if record.unique_key in stored}
    return looked.reads.frames() | own | set(looked.checkpoint.unread)


def _agree(
    reports: list[_Report], strict: StrictHandling, validate_access_integrity: bool, seen: Seen
) -> tuple[_Decision, list[Shares]]:
    if len({report.seen for report in reports}) > 1:
        raise CorruptError(
            "the ranks see different checkpoints under this path: they share no file system, or a save replaced it "
            "while they opened it. Load it again"
        )
    table = merge([report.table for report in reports])
    asked = table.keys | {cell.unique_key for report in reports for cell in report.objects}
    unexpected: set[str] = set().union(*(report.unexpected for report in reports))
    manifest = reports[0].manifest
    assert manifest is not None, "the first rank's report"
    # All keys are looked at only if they are asked about: for a mode that minds them, or for a guess at what was meant.
    counts = strict.minds_missing or (unexpected and strict.raises_unexpected) or any(r.has_stateful for r in reports)
    missing = {key for keys in (manifest.tensors, manifest.objects) for key in keys} - asked if counts else set[str]()
    validation.check_keys(strict, missing, unexpected)
    mismatches = list(dict.fromkeys(line for report in reports for line in report.mismatches))
    validation.raise_problems(mismatches, "asked for", MismatchError)
    if validate_access_integrity:
        problems = validation.table_problems(table, "asked for")
        problems += validation.object_problems([report.objects for report in reports], "asked for")
        validation.raise_problems(problems, "asked for", ShardingError)
    shares = seen.shares([report.touched for report in reports])
    seen.check_room(shares, [report.room for report in reports], reports[0].block_bytes)
    threads = threads_of([report.cpus for report in reports])
    decision = _Decision(missing, unexpected, threads, any(report.has_stateful for report in reports))
    return decision, seen.parts(shares)


def threads_of(cpus: Sequence[tuple[str, int]]) -> int:
    """Threads for each rank: the cores of the fullest node shared among its ranks, at most 4."""
    ranks = Counter(host for host, _ in cpus)
    return min(4, *(max(1, count // ranks[host]) for host, count in cpus))


def _read_one_save(
    looked: Looked, asked: LoadRequest, threads: int, shares: Shares, rank: int
) -> tuple[Values, set[str]]:
    """``_read``, unless another save takes the folder's place meanwhile, which explains any other error too."""
    try:
        window_bytes = WINDOW_BYTES if looked.relay is None else _RELAY_WINDOW_BYTES
        meter = Meter(asked.progress, lambda: looked.reads.nbytes)
        reader = Reader(looked.checkpoint, asked.dtype_policy, threads, window_bytes, meter.add)
        looked.seen.start(shares, block_bytes(looked.checkpoint))
        values = _read(looked, reader, shares[rank], asked.safe_globals)
        meter.finish()
        return values, reader.cast_keys
    except CorruptError:
        looked.seen.check_unchanged()
        raise
    finally:
        looked.checkpoint.check_unchanged()


def _read(looked: Looked, reader: Reader, share: Sequence[Span], safe_globals: Sequence[Any]) -> Values:
    checkpoint, relay = looked.checkpoint, looked.relay
    has_digests = checkpoint.integrity is not None and checkpoint.verify != "off"
    blocks = [block for span in share for block in span.blocks()] if has_digests else []
    if relay is None:
        reader.run(looked.tensors, looked.reads, blocks)
    else:
        try:
            reader.run(looked.tensors, looked.reads, blocks, relay.on_complete)
        finally:
            relay.finish()
    values: Values = {path: leaf.unwrap() for path, leaf in looked.parts.local}
    for path, record in looked.parts.records:
        if isinstance(record, ShardedTensor) and record.key in checkpoint.manifest.tensors:
            assert record.data is not None, f"{record} has no data after init_data"
            values[path] = record.data.detach()
        elif isinstance(record, ShardedObject) and record.unique_key in checkpoint.manifest.objects:
            frame = checkpoint.manifest.objects[record.unique_key]
            values[path] = reader.read_object(record.unique_key, frame, safe_globals)
    return values


def _finished(assemble: Callable[[], tuple[Any, list[tuple[Any, Any]]]], exchange: Exchange | None) -> Any:
    """The result. Stateful objects get their values when no rank has an error left to raise.

    ``exchange`` is None if no rank has such objects.
    """
    if exchange is None:
        return assemble()[0]
    (result, found), _ = exchange.together(lambda: (assemble(), None), lambda _: None)

    def hand_over() -> tuple[None, None]:
        for owner, own in found:
            owner.load_state_dict(own)
        return None, None

    exchange.together(hand_over, lambda _: None)
    return result


def _assembled(
    expanded: Any, merges: Sequence[factory.Merge], parts: tree.Split, common: Any, values: Values
) -> tuple[Any, list[tuple[Any, Any]]]:
    """The result of a load, and what its Stateful objects are to get."""
    values = factory.keep_own(values, merges, parts, common)
    result = tree.assemble(common, expanded, values)
    wanted = [path for path, _ in (*parts.records, *parts.local)]
    found = factory.merge(result, merges, [path for path in wanted if path not in values])
    return ({} if result is tree.GONE else result), found


def _warn_of_stateful(looked: Looked, decision: _Decision) -> None:
    """What is stored of a Stateful object and not in its own state dict, such as that of a fresh optimizer."""
    owners = tuple(f"{tree.key_text(step.path)}." for step in looked.merges if step.owner is not None)
    if lost := sorted(key for key in decision.missing if owners and key.startswith(owners)):
        _log.warning("Not in the state dicts of the objects that load, and so not loaded: %s", ", ".join(lost))


def _warn_of_keys(missing: set[str], unexpected: set[str]) -> None:
    """One line on the logger ``sixfold.dist_ckpt`` for each kind of keys; a warning would be shown only once."""
    if unexpected:
        _log.warning("Unexpected keys (asked for, not found in the checkpoint): %s", ", ".join(sorted(unexpected)))
    if missing:
        _log.warning("Missing keys (in the checkpoint, asked for by no rank): %s", ", ".join(sorted(missing)))
