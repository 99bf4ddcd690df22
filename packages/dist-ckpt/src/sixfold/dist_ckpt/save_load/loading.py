"""Loading: the story of ``load``, and what a checkpoint holds without reading a tensor.

state dicts + folder --> describe --> agree --> verify and read --> assemble (this file) --> result
path --> common data, listings (this file) --> serialization.py, strategies

[Note: no rank merges alone] The ``merge_fn`` of a factory is a user's and may wait for other ranks. So none is called
before all have read. Without factories a rank assembles its result with the read, and one exchange is spared.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sixfold.dist_ckpt.checkpoint.opening import Checkpoint, open_checkpoint
from sixfold.dist_ckpt.collectives.exchange import Exchange, Group
from sixfold.dist_ckpt.errors import CorruptError, MismatchError, ShardingError, StorageError, typed
from sixfold.dist_ckpt.formats import weights_only
from sixfold.dist_ckpt.formats.integrity import Span
from sixfold.dist_ckpt.geometry.box import intersect, whole
from sixfold.dist_ckpt.geometry.manifest import Stored
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
from sixfold.dist_ckpt.save_load import replicated_tensors, requested_keys
from sixfold.dist_ckpt.save_load.dtype_conversion import copy_values
from sixfold.dist_ckpt.save_load.host_view import HostView, Shares, open_host_view
from sixfold.dist_ckpt.save_load.reader import WINDOW_BYTES, Reader
from sixfold.dist_ckpt.save_load.requested_keys import StrictHandling
from sixfold.dist_ckpt.state import dcp_names, factory, in_place, stateful, tree
from sixfold.dist_ckpt.state.placeholders import with_placeholders, without_placeholders
from sixfold.dist_ckpt.state.records import ShardedObject, ShardedTensor, check_data
from sixfold.dist_ckpt.state.tensor_memory import has_values
from sixfold.dist_ckpt.storage.store import Store
from sixfold.dist_ckpt.strategies.base import LoadEngine

if TYPE_CHECKING:
    from sixfold.dist_ckpt.collectives.relay import Relay

Values = dict[tree.KeyPath, Any]  # what was loaded, by place
Result = tuple[Any, list[tuple[Any, Any]]]  # of a load, and what its Stateful objects are to get

_log = logging.getLogger("sixfold.dist_ckpt")
_DOUBTFUL_BYTES = 1 << 26  # before as much is allocated, the claimed shape is compared with what is stored
_SHORT_BYTES = 1 << 30  # read before garbage matters: the plan of many small tensors is walked through by no collection
_RELAY_WINDOW_BYTES = 1 << 24  # what is read is sent on while the next 16 MiB are read


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """What a call of ``load`` asks for; strategies apart. ``serialization.load`` says what each is."""

    state: Mapping[Any, Any]
    store: Store
    validate_access_integrity: bool = True
    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    group: Group
    dtype_policy: str = "exact"
    verify: str = "touched"
    safe_globals: Sequence[Any] = ()
    timeout_s: float = 600.0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        plan.check_policy(self.dtype_policy)


class _Report(NamedTuple):
    """What a rank tells the first one before anything is read."""

    table: Encoded
    objects: list[ShardedObject]  # without data
    unexpected: set[str]
    mismatches: list[str]
    touched: list[Span]
    cpus: tuple[str, int]
    identity: tuple[str | None, str]  # save id and digest of the keys of the checkpoint
    checkpoint: Checkpoint | None  # of the first rank only, which sends it nowhere
    has_stateful: bool
    has_factories: bool
    room: tuple[str, int] | None  # where a mirror lies, and the bytes that are free there
    owners: frozenset[str]  # see requested_keys.py
    local: frozenset[str]
    plain_missing: set[str]
    other_wrappers: Mapping[str, str]
    has_slices: bool  # see collectives/mesh_slices.py
    plain: frozenset[str]  # keys whose values are common data, asked for or not
    asked_plain: frozenset[str]  # such keys that are asked for: below modules, and all if missing ones count
    not_of_modules: frozenset[str]  # and those that this rank's modules have not


class _Decision(NamedTuple):
    """What the first rank decides, besides which blocks each rank hashes: the key sets, with how many threads they
    hash; whether any rank has Stateful objects, or factories."""

    missing: set[str]
    unexpected: set[str]
    threads: int
    has_stateful: bool
    has_factories: bool


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What this rank wants of a checkpoint that it has looked into."""

    view: HostView
    checkpoint: Checkpoint
    asked: in_place.Leaves  # of the caller's state dict
    expanded: Any
    leaves: in_place.Leaves  # of ``expanded``
    merges: list[factory.Merge]
    parts: tree.Split
    tensors: list[ShardedTensor]
    table: Encoded
    reads: plan.LoadPlan
    common: dict[Any, Any]
    relay: Relay | None = None
    replicated: tuple[tuple[ShardedTensor, torch.Tensor], ...] = ()  # saved whole as common data, each with its part
    tied: in_place.Tied = field(default_factory=in_place.Tied)
    extra: Mapping[tree.KeyPath, ShardedTensor] = field(default_factory=dict)  # see replicated_tensors.not_asked_for
    attributes: Mapping[tree.KeyPath, Mapping[str, Any]] = field(default_factory=dict)  # of OrderedDicts, as saved


def load(asked: LoadRequest, engine: LoadEngine) -> Any:
    """``serialization.load`` by the built-in engine."""
    return Load(asked, engine).run()


class Load:
    """One load. Strategies of users do what ``opened`` and ``values`` do by themselves (user_strategies.py)."""

    def __init__(self, asked: LoadRequest, engine: LoadEngine) -> None:
        self.asked, self.engine = asked, engine
        self.exchange = Exchange(asked.group, asked.timeout_s)

    def run(self) -> Any:
        """The result, on every rank."""
        asked, exchange, mode = self.asked, self.exchange, self.asked.strict
        with open_host_view(asked.store, exchange) as view:
            if self.engine.parallel and view.mirror is None:  # which has been an exchange
                exchange.raise_errors_of_others()
            rank_load, decision, shares = exchange.reduce_scatter(
                lambda: self._requested(view), lambda reports: _agree(reports, asked, view)
            )

            def read() -> tuple[tuple[Values, Result | None], set[str]]:
                values, casts = self._read(rank_load, decision.threads, shares)
                return (values, None if decision.has_factories else _assembled(rank_load, values)), casts

            (values, done), casts = exchange.all_reduce(read, lambda casts: _of_one_save(view, casts))
        if casts and asked.dtype_policy == "cast":
            warnings.warn(f"values were converted to another dtype in {', '.join(casts)}", stacklevel=2)
        if exchange.rank == 0 and not mode.logs:
            _warn_of_stateful(rank_load, decision)
        if done is None:  # see [Note: no rank merges alone]
            done = exchange.run_on_all(lambda: _assembled(rank_load, values))
        result, found = done
        if decision.has_stateful:  # they get their values when no rank has an error left to raise
            exchange.run_on_all(lambda: stateful.hand_over_all(found))
        in_place.fill_plain(asked.state, rank_load.asked, result, exchange.rank == 0)
        missing = decision.missing if mode.minds_missing else set()
        if mode.logs:
            requested_keys.warn_of_keys(missing, decision.unexpected)
        if not mode.returns:
            return result
        stored = rank_load.checkpoint.manifest
        return (
            result,
            requested_keys.given_keys(missing, stored),
            requested_keys.given_keys(decision.unexpected, stored),
        )

    def opened(self, view: HostView) -> tuple[Checkpoint, dict[Any, Any], bool]:
        """The checkpoint, its common data, and whether each value was stored under its own name: by DCP, or its way."""
        checkpoint = view.opened(self.asked.verify)
        if not self.engine.with_common:
            return checkpoint, {}, False
        common, manifest = common_data(checkpoint, self.asked.safe_globals), checkpoint.manifest
        is_plain = manifest.save_id is None or any(map(dcp_names.is_plain, () if common else manifest.objects))
        return checkpoint, common, is_plain and not common

    def values(self, rank_load: RankLoad, threads: int, shares: Shares) -> tuple[Values, set[str]]:
        """What was loaded by place, and the keys whose dtype was converted. ``shares``: blocks to hash."""
        asked, view, checkpoint, relay = self.asked, rank_load.view, rank_load.checkpoint, rank_load.relay
        waits = relay is not None or view.mirror is not None
        pause = nullcontext() if waits or rank_load.reads.nbytes > _SHORT_BYTES else collection_paused()
        try:
            with view.giving_up(), pause:
                # A relay sends what is promised, come what may, and waits for ranks that wait for this one's blocks.
                with nullcontext() if relay is None else relay.running(), view.giving_up():
                    meter = None if asked.progress is None else Meter(asked.progress, lambda: rank_load.reads.nbytes)
                    moved = None if meter is None else meter.add
                    window_bytes = WINDOW_BYTES if relay is None else _RELAY_WINDOW_BYTES
                    reader = Reader(checkpoint, asked.dtype_policy, threads, window_bytes, moved)
                    view.start(shares, checkpoint.block_bytes)
                    has_digests = checkpoint.integrity is not None and checkpoint.verify != "off"
                    own = shares[self.exchange.rank] if has_digests else ()
                    blocks = [block for span in own for block in span.blocks()]
                    reader.run(rank_load.tensors, rank_load.reads, blocks, None if relay is None else relay.on_complete)
                values = _values(rank_load, reader, asked.safe_globals)
                if meter is not None:
                    meter.finish()
            return values, reader.cast_keys
        except CorruptError:  # which another save that takes the place meanwhile explains
            view.check_unchanged()
            raise
        finally:
            checkpoint.check_unchanged()

    def _read(self, rank_load: RankLoad, threads: int, shares: Shares) -> tuple[Values, set[str]]:
        with rank_load.view.errors_named():
            try:
                return typed(lambda: self._filled(rank_load, threads, shares))
            finally:
                records = (record for _, record in rank_load.parts.records)
                in_place.raise_versions(in_place.written_by(records, rank_load.asked))

    def _filled(self, rank_load: RankLoad, threads: int, shares: Shares) -> tuple[Values, set[str]]:
        values, casts = self.values(rank_load, threads, shares)
        for record, part in rank_load.replicated:
            assert record.data is not None, f"{record} was allocated"
            copy_values(record.key, part, record.data.detach(), self.asked.dtype_policy)
            if part.dtype != record.dtype:
                casts.add(record.key)
        rank_load.tied.settle(values)
        return values, casts

    def _requested(self, view: HostView) -> tuple[RankLoad, _Report]:
        """What this rank reads, and what the first one must know of that and of what this one wants."""
        with view.errors_named():
            return typed(lambda: self._shared(view) if self.engine.parallel else self._alone(view))

    @collection_paused()
    def _alone(self, view: HostView) -> tuple[RankLoad, _Report]:
        """``_requested`` where this rank reads what it wants."""
        wanted = self._describe(view)
        return wanted, self._report(wanted, wanted)

    def _shared(self, view: HostView) -> tuple[RankLoad, _Report]:
        """``_requested`` where ranks read for each other."""
        from sixfold.dist_ckpt.collectives.relay import Relay

        found: list[RankLoad] = []

        @collection_paused()
        def describe() -> tuple[list[ShardedTensor], dict[int, tuple[str, int]]]:
            """The tensors that can be loaded, and the place of the last frame that each of them needs."""
            found.append(self._describe(view))
            tensors, reads = found[0].tensors, found[0].reads
            wanted = {step.record for step in reads.reads} | {index for index, _ in reads.zeroed}
            number = {index: n for n, index in enumerate(sorted(wanted))}
            last = {number[s.record]: (s.chunk.frame.file, s.chunk.frame.offset) for s in reads.reads}
            return [tensors[index] for index in number], last

        group, exchange = self.engine.group, self.exchange
        within = exchange if group is None else Exchange(group, exchange.timeout_s)
        relay = Relay(describe, within, self.engine.memory)
        manifest = found[0].checkpoint.manifest
        with collection_paused():
            reads = plan.plan_load(relay.mine, manifest, dtype_policy=self.asked.dtype_policy)
            rank_load = replace(found[0], tensors=relay.mine, reads=reads, relay=relay)
            return rank_load, self._report(rank_load, found[0])

    def _describe(self, view: HostView) -> RankLoad:
        """What this rank wants of the checkpoint; records without data get some."""
        checkpoint, common, is_bare = self.opened(view)
        stored, objects = checkpoint.manifest.tensors, checkpoint.manifest.objects
        expanded, merges = factory.expand(
            tree.checked(self.asked.state),
            self.exchange.rank,
            self.exchange.ranks,
            stateful.Saved(stored, objects, common, tells=self.exchange.rank == 0),
        )
        if merges:
            requested_keys.check_have_memory(merges, expanded, common, stored)
        own = leaves = tree.leaves(expanded)
        if (stored or objects or is_bare) and not all(isinstance(leaf, ShardedTensor) for _, leaf in leaves):
            expanded = dcp_names.ask(expanded, common, dcp_names.Names(stored, objects, is_bare, self.exchange.rank))
            leaves = tree.leaves(expanded)
        parts = tree.split(expanded)
        tensors, replicated = list[ShardedTensor](), list[tuple[ShardedTensor, torch.Tensor]]()
        policy, asked = self.asked.dtype_policy, tree.leaves(self.asked.state)
        unlike = in_place.unlike(expanded, leaves, common, asked, stored)
        tied = in_place.Tied.of(parts.records)
        for number, (place, record) in enumerate(parts.records):
            if not isinstance(record, ShardedTensor):
                continue
            is_stored = record.key in stored
            part = None if is_stored else _replicated(record, place, common)
            if is_stored or part is not None:
                if record.data is None:
                    record = record.without_data()  # a copy: the caller's record stays without data
                    _allocate(record, stored.get(record.key))
                else:
                    check_data(record, record.data)
                    record = tied.apart(place, record)
                parts.records[number] = (place, record)
            if part is None:
                tensors.append(record)
                continue
            replicated.append((record, part))
            if problem := plan.mismatch(record, record.global_shape, part.dtype, policy):
                unlike.append(problem)
        table, pieces = tabulate(tensors)
        extra, attributes = dict[tree.KeyPath, ShardedTensor](), tree.attributes_of(common)
        if common:
            small = () if checkpoint.integrity is None else checkpoint.integrity.in_common
            extra = replicated_tensors.not_asked_for(common, own, parts.records, stored, frozenset(small), merges)
            common = without_placeholders(common, extra)
        if extra:
            parts.records.extend(extra.items())
            for record in extra.values():
                _allocate(record, stored[record.key])
            tensors += extra.values()
            pieces += tabulate([*extra.values()])[1]
        reads = plan.plan_load(tensors, checkpoint.manifest, dtype_policy=policy, pieces=pieces)
        if unlike:
            reads = replace(reads, mismatches=[*reads.mismatches, *unlike])
        if merges and reads.mismatches:
            reads = replace(reads, mismatches=requested_keys.told_of_buffers(reads.mismatches, merges))
        return RankLoad(
            view,
            checkpoint,
            asked,
            expanded,
            leaves,
            merges,
            parts,
            tensors,
            table.encode(),
            reads,
            common,
            replicated=tuple(replicated),
            tied=tied,
            extra=extra,
            attributes=attributes,
        )

    def _report(self, rank_load: RankLoad, wanted: RankLoad) -> _Report:
        """What others must know: of all that is ``wanted``, and of what this rank reads itself."""
        checkpoint, manifest = rank_load.checkpoint, rank_load.checkpoint.manifest
        objects = [record for _, record in wanted.parts.records if isinstance(record, ShardedObject)]
        strict, with_common = self.asked.strict, self.engine.with_common
        mismatches, unknown = list[str](), set[str]()
        if objects or manifest.objects:
            mismatches, unknown = requested_keys.object_mismatches(objects, manifest, strict)
            mismatches += requested_keys.asked_as_common(wanted.leaves, objects, manifest, wanted.common, strict)
        plain_missing, plain_unexpected = set[str](), set[str]()
        asked_plain, not_asked, not_stored = set[str](), set[str](), set[str]()
        if wanted.merges:
            asked_plain, not_asked, not_stored = factory.names_in_common(wanted.merges, wanted.expanded, wanted.common)
        if strict.minds_missing and with_common:
            plain_missing, plain_unexpected = requested_keys.plain_keys(wanted.expanded, wanted.leaves, wanted.common)
            asked_plain |= {*tree.names_of_tensors(wanted.common)} - plain_missing
        elif with_common:
            plain_unexpected = requested_keys.tensors_not_stored(wanted.leaves, wanted.common)
        unexpected = {wanted.tensors[index].key for index in wanted.reads.unexpected} | unknown
        plain_unexpected |= not_stored
        empty = factory.owners_without_values(wanted.merges, wanted.parts, wanted.common)
        below = tuple(f"{name}." for name in empty)
        unexpected |= empty | {name for name in plain_unexpected if not name.startswith(below)}
        others = dict[str, str]()
        if unexpected and strict.raises_unexpected:
            plain = tree.names_of_tensors(wanted.common)
            others = requested_keys.other_wrappers(unexpected, [*manifest.tensors, *plain])
        frames = {manifest.objects[record.unique_key] for record in objects if record.unique_key in manifest.objects}
        frames |= rank_load.reads.frames() | set(checkpoint.unread)
        return _Report(
            wanted.table,
            [record.without_data() for record in objects],
            unexpected,
            [*wanted.reads.mismatches, *mismatches],
            rank_load.view.touched(checkpoint, frames, self.exchange.ranks),
            (socket.gethostname(), len(os.sched_getaffinity(0))),
            checkpoint.content,
            checkpoint if self.exchange.rank == 0 else None,
            any(step.owner is not None for step in wanted.merges),
            any(step.is_factory for step in wanted.merges),
            rank_load.view.room(),
            # Weights alone, of Hugging Face say, are asked for in part as a rule.
            requested_keys.owners(self.asked.state, wanted.merges, wanted.parts, wanted.common)
            if manifest.save_id is not None or manifest.objects or wanted.common
            else frozenset(),
            requested_keys.local_names(wanted.parts),
            plain_missing,
            others,
            any(record.is_on_slice for record in wanted.tensors),
            frozenset(tree.names_of_tensors(wanted.common)),
            frozenset(asked_plain),
            frozenset(not_asked),
        )


def _replicated(record: ShardedTensor, place: tree.KeyPath, common: Any) -> torch.Tensor | None:
    """The part that a record wants of a tensor that was saved as common data at its place, as a plain model's are.

    Its shape is that of the record's global tensor, or ``load`` says that it is not stored.
    """
    found = tree.get(common, place)
    if found is tree.GONE and place and isinstance(place[-1], int):  # one of several blocks of a DTensor
        found = tree.get(common, place[:-1])
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != record.global_shape or not has_values(found):
        return None
    part = found.detach()[record.global_slice()]
    flat = record.flattened_range
    return part if flat is None else part.reshape(-1)[flat.start : flat.stop]


def _allocate(record: ShardedTensor, stored: Stored | None) -> None:
    """Make the tensor of a record, unless ``.metadata`` claims a shape that nothing is stored of."""
    nbytes = prod(record.local_shape) * record.dtype.itemsize
    if stored is not None and nbytes > _DOUBTFUL_BYTES and len(record.global_shape) == len(stored.shape):
        wanted = intersect(record.box, whole(stored.shape))
        if wanted is not None and wanted.volume > sum(chunk.box.volume for chunk in stored.near(wanted)):
            raise CorruptError(f"{record.key}: the chunks of the checkpoint do not fill its shape {stored.shape}")
    try:
        record.init_data("cpu")
    except RuntimeError as error:  # of torch's allocator
        raise StorageError(f"{record}: no memory for a tensor of {nbytes} bytes", errno.ENOMEM) from error


@collection_paused()
def _agree(reports: list[_Report], request: LoadRequest, view: HostView) -> tuple[_Decision, list[Shares]]:
    if len({report.identity for report in reports}) > 1:
        raise CorruptError(
            "the ranks see different checkpoints under this path: they share no file system, or a save replaced it "
            "while they opened it. Load it again"
        )
    table, objects = merge([report.table for report in reports]), [report.objects for report in reports]
    checkpoint, strict = reports[0].checkpoint, request.strict
    assert checkpoint is not None, "the first rank's report"
    unexpected = set[str]().union(*(report.unexpected for report in reports))
    owners = set[str]().union(*(report.owners for report in reports))
    local = set[str]().union(*(report.local for report in reports))
    asked_plain = set[str]().union(*(report.asked_plain for report in reports))
    plain_missing = set[str]().union(*(report.plain_missing for report in reports)) - asked_plain
    wrappers = {key: other for report in reports for key, other in report.other_wrappers.items()}
    mismatches = list(dict.fromkeys(line for report in reports for line in report.mismatches))
    missing = set[str]()
    if owners or strict.minds_missing:  # all keys are looked at only if they are asked about
        missing = {*checkpoint.manifest.tensors, *checkpoint.manifest.objects}
        plain_missing -= (keys := table.keys)
        missing -= keys | {cell.unique_key for cells in objects for cell in cells}
        missing = missing.difference(*(report.plain for report in reports))
        missing |= set[str]().union(*(r.not_of_modules for r in reports)) - asked_plain
    requested_keys.check_wrappers(wrappers)
    requested_keys.check_keys(strict, missing | plain_missing, unexpected, checkpoint.manifest.tensors)
    if mismatches:
        raise_problems(mismatches, "asked for", MismatchError)
    if strict is StrictHandling.ASSUME_OK_UNEXPECTED:
        requested_keys.check_whole(missing, owners, local)
    missing |= plain_missing
    if request.validate_access_integrity:
        copies = any(report.has_slices for report in reports)  # each rank is filled, whoever else holds a copy
        problems = table_problems(table, "asked for", copies=copies, is_load=True)
        problems += object_problems(objects, "asked for")
        raise_problems(problems, "asked for", ShardingError)
    threads = threads_of([report.cpus for report in reports])
    has = any(report.has_stateful for report in reports), any(report.has_factories for report in reports)
    shares = view.shares([report.touched for report in reports])
    view.check_room(shares, [report.room for report in reports], checkpoint.block_bytes)
    return _Decision(missing, unexpected, threads, *has), view.parts(shares)


def threads_of(cpus: Sequence[tuple[str, int]]) -> int:
    """Threads for each rank: the cores of the fullest node shared among its ranks, at most 4."""
    ranks = Counter(host for host, _ in cpus)
    return min(4, *(max(1, count // ranks[host]) for host, count in cpus))


def _of_one_save(view: HostView, casts: list[set[str]]) -> list[str]:
    """The keys whose dtype was converted on any rank."""
    view.check_unchanged()
    return sorted(set().union(*casts))


def _values(rank_load: RankLoad, reader: Reader, safe_globals: Sequence[Any]) -> Values:
    """What is at each place when all tensors are filled; objects are read now."""
    manifest = rank_load.checkpoint.manifest
    values: Values = {path: leaf.unwrap() for path, leaf in rank_load.parts.local}
    replicated = {id(record) for record, _ in rank_load.replicated}
    for path, record in rank_load.parts.records:
        if isinstance(record, ShardedTensor) and (record.key in manifest.tensors or id(record) in replicated):
            assert record.data is not None, f"{record} has no data after init_data"
            values[path] = record.data.detach()
        elif isinstance(record, ShardedObject) and record.unique_key in manifest.objects:
            frame = manifest.objects[record.unique_key]
            values[path] = reader.read_object(record.unique_key, frame, safe_globals)
    return values


def _assembled(rank_load: RankLoad, values: Values) -> Result:
    common, parts = rank_load.common, rank_load.parts
    if rank_load.extra:
        replicated_tensors.fill(common, rank_load.extra)
    values = factory.keep_own(values, rank_load.merges, parts, common)
    result = tree.assemble(common, rank_load.expanded, values)
    if rank_load.merges and result is not tree.GONE:
        factory.fit_modules(result, rank_load.merges, rank_load.expanded)
    factory.restore_attributes(result, rank_load.attributes, rank_load.merges, rank_load.expanded)
    wanted = [path for path, _ in (*parts.records, *parts.local)]
    found = factory.merge(result, rank_load.merges, [path for path in wanted if path not in values])
    return ({} if result is tree.GONE else result), found


def _warn_of_stateful(rank_load: RankLoad, decision: _Decision) -> None:
    """What is stored of a Stateful object and not in its own state dict, such as that of a fresh optimizer."""
    owners = tuple(f"{tree.key_text(step.path)}." for step in rank_load.merges if step.owner is not None)
    if lost := sorted(key for key in decision.missing if owners and key.startswith(owners)):
        _log.warning("Not in the state dicts of the objects that load, and so not loaded: %s", ", ".join(lost))


def common_data(checkpoint: Checkpoint, safe_globals: Sequence[Any], *, copies: bool = False) -> dict[Any, Any]:
    """What a checkpoint holds besides tensors and objects; {} for a plain DCP folder.

    Placeholders stand for tensors of the checkpoint; with ``copies`` not for those whose values are there.
    """
    if checkpoint.common not in (None, ("torch", 1)):
        raise MismatchError(f"unknown backend {checkpoint.common} of common data; ('torch', 1) is read here")
    data = checkpoint.small_file("common.pt")
    path = checkpoint.folder / "common.pt"
    if data is None:
        if checkpoint.common is not None:
            raise CorruptError(f"{path} is missing; every checkpoint with a metadata.json has one")
        return {}
    is_checked = checkpoint.integrity is not None and checkpoint.verify != "off"
    common = weights_only.load(data, str(path), safe_globals, trusted_bytes=is_checked)
    if not isinstance(common, dict):
        raise CorruptError(f"{path} holds a {type(common).__name__}, not a dict")
    names = () if copies or checkpoint.integrity is None else checkpoint.integrity.in_common
    return with_placeholders(common, frozenset(names)) if names else common


def load_common_state_dict(
    checkpoint_dir: str | Path, *, safe_globals: Sequence[Any] = (), copies: bool = True
) -> dict[Any, Any]:
    """``common_data`` of a folder: what decides on config and version before any tensor is read."""
    return typed(lambda: common_data(open_checkpoint(checkpoint_dir), safe_globals, copies=copies))


def load_tensors_metadata(checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
    """Every tensor as one shard without data, with its true dtype and shape: a state dict to load with."""
    found = load_sharded_metadata(checkpoint_dir)
    return {key: record for key, record in found.items() if isinstance(record, ShardedTensor)}


def load_sharded_metadata(checkpoint_dir: str | Path) -> dict[str, ShardedTensor | ShardedObject]:
    """``load_tensors_metadata`` plus the objects by stored key, bytes of plain DCP under their own."""
    manifest = open_checkpoint(checkpoint_dir).manifest
    objects = {key: dcp_names.record_of(key) for key in manifest.objects}
    return {key: dcp_names.whole(key, stored) for key, stored in manifest.tensors.items()} | objects
