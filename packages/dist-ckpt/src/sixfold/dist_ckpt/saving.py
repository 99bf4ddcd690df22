"""Saving: the story of ``save``, from a state dict on every rank to one committed folder.

state dicts --> agree_on --> write --> commit (this file) --> the checkpoint

``agree_on`` is the collective half; ``write`` and ``commit`` know no group, so that a background save
(background.py) runs them in another process.
"""

from __future__ import annotations

import pickle
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from sixfold.dist_ckpt import factory, metadata, plan, storage, transfer, tree, validation, weights_only
from sixfold.dist_ckpt.errors import CheckpointError, ShardingError
from sixfold.dist_ckpt.exchange import Exchange, Group
from sixfold.dist_ckpt.frame import tensor_bytes
from sixfold.dist_ckpt.integrity import FILE_NAME, Integrity
from sixfold.dist_ckpt.manifest import ByteRange, Manifest, StoredChunk, StoredTensor
from sixfold.dist_ckpt.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from sixfold.dist_ckpt.strategies.base import SaveEngine, owns_file, save_engine


class _Report(NamedTuple):
    """What a rank tells the first one before anything is written."""

    tensors: list[plan.ShardReport]
    objects: list[plan.ObjectReport]
    nbytes: int
    common_digest: int


class Ticket(NamedTuple):
    """What the first rank decides: where to write."""

    save_id: str
    staging: str
    target: str
    if_exists: str
    common_differs: bool


@dataclass(frozen=True, slots=True)
class Content:
    """What this rank has to save."""

    records: list[ShardedTensor]
    writes: tuple[plan.Write, ...]
    objects: list[tuple[str, bytes]]
    common: dict[Any, Any]
    common_bytes: bytes
    nbytes: int


def save(
    sharded_state_dict: Mapping[Any, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[dict[Any, Any]], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    group: Group = "world",
    if_exists: str = "replace",
    check_finite: bool = False,
    timeout_s: float = 600.0,
) -> None:
    """Save a state dict, every rank of ``group`` its shards, as one torch_dist folder.

    Collective over ``group``. The folder appears complete or not at all, and replaces an older
    checkpoint in one step. The state dict is not changed.

    Args:
        sharded_state_dict: nested dicts and lists of records; everything else is common data,
            written by the first rank of the group.
        checkpoint_dir: the folder; parents are made.
        sharded_strategy: None or ``("torch_dist", 1)``. common_strategy: None or ``("torch", 1)``.
        validate_access_integrity: accepted for the guide's sake; a save is always validated.
        preprocess_common_before_consistancy_check: applied to the common data before it is
            compared between ranks.
        content_metadata: saved with the common data under ``content_metadata``.
        group: a process group, None for this process alone, or "world".
        if_exists: "replace" a checkpoint in the folder, or "error" if it is not empty.
        check_finite: NaN or infinity in a tensor is an error.
        timeout_s: longest wait for one peer, seconds.
    Raises:
        ShardingError: holes, overlaps, unlike shapes or dtypes, data that would not be read back.
        StorageError: full disk, a target that holds other files, any error of the system.
        LostPeerError: a rank is dead or late. Any error is raised on every rank.
    """
    agreed = agree_on(
        sharded_state_dict,
        checkpoint_dir,
        sharded_strategy,
        common_strategy,
        preprocess_common_before_consistancy_check,
        content_metadata,
        group=group,
        if_exists=if_exists,
        timeout_s=timeout_s,
    )
    exchange, content, ticket = agreed.exchange, agreed.content, agreed.ticket
    try:
        exchange.together(
            lambda: (None, write(content, ticket, exchange.rank, check_finite)),
            lambda written: commit(written, content, ticket),
        )
    except BaseException:
        agreed.abandon()
        raise


@dataclass(frozen=True, slots=True)
class Agreed:
    """A save that all ranks agree on; its empty staging folder exists, nothing is written."""

    exchange: Exchange
    content: Content
    ticket: Ticket

    def abandon(self) -> None:
        """Remove the staging folder."""
        if self.exchange.rank == 0:
            storage.discard(Path(self.ticket.staging))


def agree_on(
    sharded_state_dict: Mapping[Any, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any,
    common_strategy: Any,
    preprocess: Callable[[dict[Any, Any]], Any] | None,
    content_metadata: dict[str, Any] | None,
    *,
    group: Group,
    if_exists: str,
    timeout_s: float,
) -> Agreed:
    """The collective half of a save: what each rank has, whether it fits together, where it goes.

    Args and errors: as ``save``.
    """
    engine = save_engine(sharded_strategy, common_strategy)
    if engine is None:
        raise CheckpointError(f"the built-in engine does not save with {sharded_strategy}, {common_strategy}")
    if if_exists not in ("replace", "error"):
        raise CheckpointError(f"if_exists is {if_exists!r}; it is 'replace' or 'error'")
    exchange = Exchange(group, timeout_s)
    target = Path(checkpoint_dir).resolve()
    staged: list[Path] = []
    try:
        content, ticket = exchange.together(
            lambda: _describe(sharded_state_dict, content_metadata, exchange, engine, preprocess),
            lambda reports: _agree(reports, target, if_exists, staged),
        )
        if ticket.common_differs:
            _warn_of_differences(exchange, content, preprocess)
    except BaseException:
        for staging in staged:
            storage.discard(staging)
        raise
    return Agreed(exchange, content, ticket)


def _describe(
    state: Mapping[Any, Any],
    content_metadata: dict[str, Any] | None,
    exchange: Exchange,
    engine: SaveEngine,
    preprocess: Callable[..., Any] | None,
) -> tuple[Content, _Report]:
    sorted_out: list[tree.Split] = []

    def own_records() -> list[ShardedBase]:
        expanded, _ = factory.expand(tree.checked(state))
        sorted_out.append(tree.split(expanded))
        return [record for _, record in sorted_out[0].records]

    records = own_records() if engine.arrange is None else engine.arrange(own_records, exchange)
    parts, rank = sorted_out[0], exchange.rank
    tensors = [record for record in records if isinstance(record, ShardedTensor)]
    objects = [record for record in records if isinstance(record, ShardedObject)]
    for record in tensors:
        if record.data is None and is_main_replica(record.replica_id) and any(record.pieces()):
            raise ShardingError(f"{record}: data is None on rank {rank}; a save needs the tensor")
    common = dict(parts.common)
    if content_metadata is not None:
        common["content_metadata"] = content_metadata
    writes = plan.plan_save(tensors)
    stored = [
        (record.unique_key, weights_only.dump([record.data], f"the object {record}"))
        for record in objects
        if is_main_replica(record.replica_id)
    ]
    common_bytes = b"" if rank else weights_only.dump(common, "common data")
    nbytes = plan.total_bytes(writes) + sum(len(data) for _, data in stored) + len(common_bytes)
    report = _Report(
        [plan.report(record) for record in tensors],
        [object_report(record) for record in objects],
        nbytes,
        crc32(repr(sorted(_leaf_digests(common, preprocess).items())).encode()),
    )
    return Content(tensors, writes, stored, common, common_bytes, nbytes), report


def object_report(record: ShardedObject) -> plan.ObjectReport:
    """What travels of an object."""
    main = is_main_replica(record.replica_id)
    return plan.ObjectReport(record.key, record.unique_key, record.global_shape, record.global_offset, main)


def _check_together(reports: list[_Report]) -> None:
    """ShardingError unless the records of all ranks describe each tensor and each grid once and whole."""
    tensors, objects = [report.tensors for report in reports], [report.objects for report in reports]
    problems = [
        *validation.tensor_problems(tensors, "saved"),
        *validation.object_problems(objects, "saved"),
        *validation.name_clashes(
            (shard.key for shards in tensors for shard in shards),
            (cell.stored_key for cells in objects for cell in cells),
        ),
    ]
    validation.raise_problems(problems, "saved", ShardingError)


def _agree(reports: list[_Report], target: Path, if_exists: str, staged: list[Path]) -> Ticket:
    _check_together(reports)
    storage.check_target(target, if_exists, owns_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    storage.check_space(target.parent, sum(report.nbytes for report in reports))
    save_id = secrets.token_hex(8)
    staged.append(storage.stage(target, save_id))
    differs = len({report.common_digest for report in reports}) > 1
    return Ticket(save_id, str(staged[0]), str(target), if_exists, differs)


def write(content: Content, ticket: Ticket, rank: int, check_finite: bool) -> transfer.Written:
    """Write this rank's share into the staging folder. No group: any process that sees the data may do it."""
    staging = Path(ticket.staging)
    with storage.full_disk_told(staging, content.nbytes):
        return transfer.write(
            staging, rank, content.records, content.writes, content.objects, check_finite=check_finite
        )


def commit(written: list[transfer.Written], content: Content, ticket: Ticket) -> None:
    """Write the small files, metadata.json last, and move the folder into place: what the first rank does.

    Args:
        written: what each rank wrote, in rank order; content: the first rank's.
    """
    staging, target = Path(ticket.staging), Path(ticket.target)
    with storage.full_disk_told(staging, content.nbytes):
        _write_small_files(staging, written, content, ticket)
    # Again: data took a while to write, and nothing foreign may go.
    storage.check_target(target, ticket.if_exists, owns_file)
    storage.commit(staging, target, ticket.save_id)


def _write_small_files(staging: Path, written: list[transfer.Written], content: Content, ticket: Ticket) -> None:
    _write_index(
        staging, written, ticket.save_id, {"common.pt": content.common_bytes, "metadata.json": metadata.encode_config()}
    )


def _write_index(staging: Path, written: list[transfer.Written], save_id: str, small: dict[str, bytes]) -> None:
    """Write ``.metadata``, the ``small`` files in their order, and ``integrity.json`` over all of them."""
    files = {name: digest for part in written for name, digest in part.files.items()}
    for name, digest in files.items():
        if (staging / name).stat().st_size != digest.size:
            raise CheckpointError(f"{staging / name} is not the file that its rank wrote; it wrote {digest.size} bytes")
    for name, data in ({".metadata": metadata.encode(_manifest(written, save_id))} | small).items():
        files[name] = storage.write_file(staging, name, data)
    storage.write_file(staging, FILE_NAME, Integrity(save_id=save_id, files=files).encode())


def save_records(state: Mapping[Any, Any], folder: Path, exchange: Exchange, save_id: str) -> None:
    """Write the records of all ranks into an existing folder: all but common data, ``metadata.json`` and the commit.

    For strategies that wrap this format; collective. ``integrity.json`` covers what is written here.
    """

    def check(reports: list[_Report]) -> Ticket:
        _check_together(reports)
        return Ticket(save_id, str(folder), str(folder), "replace", False)

    content, ticket = exchange.together(lambda: _describe(state, None, exchange, SaveEngine(), None), check)
    exchange.together(
        lambda: (None, write(content, ticket, exchange.rank, False)),
        lambda written: _write_index(folder, written, ticket.save_id, {}),
    )


def _manifest(written: list[transfer.Written], save_id: str) -> Manifest:
    chunks: dict[str, list[StoredChunk]] = {}
    kinds: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for part in written:
        kinds.update(part.empty)
        for key, dtype, shape, chunk in part.chunks:
            kinds[key] = (dtype, shape)
            chunks.setdefault(key, []).append(chunk)
    tensors = {key: StoredTensor(*kinds[key], tuple(sorted(chunks.get(key, [])))) for key in kinds}
    objects: dict[str, ByteRange] = dict(entry for part in written for entry in part.objects)
    return Manifest(tensors, objects, save_id, needs_metadata_json=True)


def _leaf_digests(common: dict[Any, Any], preprocess: Callable[..., Any] | None) -> dict[str, int]:
    compared = preprocess(common) if preprocess else common
    return {tree.path_text(path): _leaf_digest(leaf) for path, leaf in tree.leaves(compared)}


def _leaf_digest(leaf: Any) -> int:
    if hasattr(leaf, "untyped_storage"):
        tensor = leaf.detach().cpu().contiguous()
        return crc32(tensor_bytes(tensor), crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode()))
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, protocol=4)
    pickler.fast = True  # without a memo equal values give equal bytes, whatever they share
    try:
        pickler.dump(leaf)
    except Exception:  # the first rank's dump reports what cannot be pickled, with its path
        return 0
    return crc32(buffer.getvalue())


def _warn_of_differences(exchange: Exchange, content: Content, preprocess: Callable[..., Any] | None) -> None:
    def differing(digests: list[dict[str, int]]) -> list[str]:
        paths = {path for found in digests for path in found}
        return sorted(path for path in paths if len({found.get(path) for found in digests}) > 1)

    _, paths = exchange.together(lambda: (None, _leaf_digests(content.common, preprocess)), differing)
    if exchange.rank == 0:
        shown = ", ".join(paths[:20]) + (", ..." if len(paths) > 20 else "")
        warnings.warn(f"common data differs between ranks at {shown}; the first rank's was saved", stacklevel=4)
