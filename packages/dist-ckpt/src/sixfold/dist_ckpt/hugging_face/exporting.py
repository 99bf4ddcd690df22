"""Export of a model as all ranks hold it: safetensors with an index, as transformers writes them.

    state dict of each rank --> records, tied names --> ExportPlan
    pieces of all ranks --> batches, sent to the rank that writes the file (this file) --> FilesWriter --> one rename

No rank holds more than a few batches of ``BATCH_BYTES``. What each rank has, and that it fits together, is agreed on
as for a save; nothing is saved.

[Note: one batch at a time] In a step each rank packs what it holds of one batch of each writer, all swap, and each
writer puts its batch together. Packing, and writing the batch before, happen in one exchange, so that an error of any
rank ends the export on all of them before the next swap.

[Note: one name of tied weights] Two names of one tensor are written once: readers of safetensors expect that, and
transformers ties them again. The name that stands first in the state dict stays. See [Note: tied on every rank].
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.collectives.exchange import Exchange, Group, errors_to_all
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.geometry.box import Box, intersect
from sixfold.dist_ckpt.hugging_face.key_map import KeyMap
from sixfold.dist_ckpt.hugging_face.model_files import (
    MAX_SHARD_BYTES,
    ExportPlan,
    FilesWriter,
    Options,
    abandoned_on_error,
    check_no_tensor,
    converted,
    dtype_of,
    library,
    publish,
)
from sixfold.dist_ckpt.hugging_face.tied_names import Ties, name_of, state_of, tied
from sixfold.dist_ckpt.progress import Meter, Progress
from sixfold.dist_ckpt.save_load import saving
from sixfold.dist_ckpt.save_load.saving import SaveRequest
from sixfold.dist_ckpt.save_load.writer import RankContent
from sixfold.dist_ckpt.state import factory, module_names, tree
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedBase, ShardedTensor, is_main_replica
from sixfold.dist_ckpt.state.tensor_memory import check_readable
from sixfold.dist_ckpt.storage.local import LocalStore, local_path
from sixfold.dist_ckpt.storage.store import Save
from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy

BATCH_BYTES = 64 * 2**20  # of one file; a rank may hold parts of one batch of each file that is written


def export(
    source: torch.nn.Module | Mapping[Any, Any],
    folder: str | Path,
    *,
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = MAX_SHARD_BYTES,
    keys: str = "*",
    extras: Sequence[Any] = (),
    group: Group = "world",
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a model that all ranks hold together as a folder of Hugging Face; each rank writes some of the files.

    Collective over ``group``. The folder appears complete or not at all. How the model is cut, and on how many ranks,
    changes no byte. ``tools.convert(..., to="safetensors")`` does the same with a checkpoint on disk.

    Args:
        source: a module, or a state dict as ``save`` takes it: FSDP2, tensor parallel, records, plain. Its tensors
            alone are written.
        folder: one that does not exist or is empty, on a file system that all ranks share.
        key_map: names in the files by names in the state dict; None keeps them.
        dtype: values of floating-point numbers are converted to it, but for float8; None keeps theirs.
        max_shard_bytes: most bytes of values in a file, unless one tensor alone is larger. More files are shared
            among more ranks. None: one file.
        keys: a glob; other names are left out.
        extras: what else belongs to the model: objects with ``save_pretrained(folder)``, such as ``model.config`` and
            a tokenizer. The first rank calls it before the folder appears. Of a ``config.json`` the dtype becomes that
            of the files, and ``architectures`` the class of ``source``, if it is a model of transformers with that
            configuration.
        group, timeout_s: as in ``save``.
        progress: called with bytes that this rank has written and its total, the last time before the folder appears.
    Returns:
        dst, tensors (their number), nbytes (of values), files (names), tied: the names that were left out, each with
        the name of the same tensor that was written.
    Raises:
        ShardingError: as ``save``. MismatchError: ``key_map`` or ``keys`` does not fit the names; a finite value that
        ``dtype`` would make infinite. StorageError: the folder is not empty; the disk is full. CheckpointError: what
        the format has no form for, or ``extras``. LostPeerError. Each is raised on all ranks.
    """
    with errors_to_all(group, timeout_s):
        options = Options(key_map, dtype, max_shard_bytes)
        library()
        if lacking := [extra for extra in extras if not callable(getattr(extra, "save_pretrained", None))]:
            raise CheckpointError(f"extras hold a {type(lacking[0]).__name__}; each has save_pretrained(folder)")
        place = local_path(folder, "safetensors are written into a local folder", "folder")
    exchange = Exchange(group, timeout_s)
    state, ties = _tensors(source, keys, exchange)
    engine = TorchDistSaveShardedStrategy(cached_metadata=False)  # the plan of the next save is not this one
    request = SaveRequest(state, place, engine, if_exists="error", group=group, timeout_s=timeout_s)
    content = saving.agree_on(request, begins_later=True).content
    store = content.store
    assert isinstance(store, LocalStore), f"{place} is a path"
    pieces, agreed = exchange.all_reduce(
        lambda: _held(content, options, keys), lambda reports: _agreed(reports, options, store)
    )
    architecture = _architecture(source, extras)
    with abandoned_on_error(store, agreed.save, exchange.rank):
        _Transfer(exchange, store, agreed, pieces, progress).run()
        exchange.all_reduce(
            lambda: (None, None), lambda _: publish(store, agreed.save, agreed.plan, extras, architecture)
        )
    plan = agreed.plan
    found = {"dst": store.name, "tensors": len(plan.sources), "nbytes": plan.nbytes, "files": sorted(plan.names)}
    return {**found, "tied": ties}


def _architecture(source: Any, extras: Sequence[Any]) -> str | None:
    """The class of a model of transformers whose own configuration is among the extras; ``fully_shard`` renames it."""
    model = module_names.inside(source)
    config = getattr(model, "config", None) if isinstance(getattr(type(model), "config_class", None), type) else None
    is_told = config is not None and any(extra is config for extra in extras)
    return type(model).__name__.removeprefix("FSDP") if is_told else None


def _tensors(source: Any, keys: str, exchange: Exchange) -> tuple[dict[Any, Any], Ties]:
    """The tensors of a state dict whose name fits, each once, and the names of the same tensors that were left out."""

    def own() -> Any:
        expanded, _ = factory.expand(tree.checked(state_of(source)), exchange.rank, exchange.ranks)
        kept = tree.mapped(expanded, lambda path, leaf: _kept(path, leaf, keys), same=tree.BRANCHES)
        return {} if kept is tree.GONE else kept

    state, ties = tied(exchange, own)
    if ties:
        state = tree.mapped(
            state, lambda path, leaf: tree.GONE if name_of(path, leaf) in ties else leaf, same=tree.BRANCHES
        )
    return state, ties


def _kept(path: tree.KeyPath, leaf: Any, keys: str) -> Any:
    """A tensor that is exported, or GONE."""
    if not fnmatchcase(name := name_of(path, leaf), keys):
        return tree.GONE
    if isinstance(leaf, torch.Tensor):
        check_readable(name, leaf)
    elif not isinstance(leaf, ShardedTensor):
        if not isinstance(leaf, ShardedBase | LocalNonpersistentObject):
            check_no_tensor(name, leaf)
        return tree.GONE
    return leaf


class _Piece(NamedTuple):
    """A box of a tensor that this rank holds and gives away, and its values."""

    box: Box
    values: torch.Tensor


Held = dict[str, list[_Piece]]  # by our key


class _Report(NamedTuple):
    """What a rank tells the first one: what it was asked for, dtype and shape of each tensor, which boxes it gives."""

    asked: dict[str, str]
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    boxes: dict[str, list[Box]]


class _Agreed(NamedTuple):
    """What the first rank decides. ``boxes``: who gives which part of each tensor, by our key."""

    plan: ExportPlan
    save: Save
    boxes: dict[str, list[tuple[int, Box]]]


def _held(content: RankContent, options: Options, keys: str) -> tuple[Held, _Report]:
    for path, leaf in tree.leaves(content.common):
        if isinstance(leaf, torch.Tensor):  # and no placeholder
            name = tree.key_text(path)
            raise CheckpointError(f"{name}: two tensors of the state dict have this name; give one of them another")
    held = defaultdict[str, list[_Piece]](list)
    for write in content.writes:
        record = content.records[write.record]
        assert isinstance(record, ShardedTensor) and is_main_replica(record.replica_id), f"{record} is written"
        held[write.key].append(_Piece(write.piece.box, record.view(write.piece)))
    tensors = {r.key: (r.dtype, r.global_shape) for r in content.records if isinstance(r, ShardedTensor)}
    asked = {name: str(getattr(options, name)) for name in ("key_map", "dtype", "max_shard_bytes")} | {"keys": keys}
    return held, _Report(asked, tensors, {key: [piece.box for piece in pieces] for key, pieces in held.items()})


def _agreed(reports: Sequence[_Report], options: Options, store: LocalStore) -> _Agreed:
    for rank, report in enumerate(reports):
        for name, value in report.asked.items():
            if value != (first := reports[0].asked[name]):
                raise MismatchError(
                    f"{name} of an export is {first} on rank 0 and {value} on rank {rank}; give all one"
                )
    found = {key: kind for report in reports for key, kind in report.tensors.items()}
    if not found:
        raise MismatchError("no tensor of the state dict has a name that fits keys; an export has one at least")
    boxes = defaultdict[str, list[tuple[int, Box]]](list)
    for rank, report in enumerate(reports):
        for key, own in report.boxes.items():
            boxes[key] += [(rank, box) for box in own]
    whole = {
        key: ShardedTensor(key, None, dtype, shape, shape, (0,) * len(shape), None)
        for key, (dtype, shape) in found.items()
    }
    plan = options.planned(whole)
    return _Agreed(plan, store.begin(secrets.token_hex(8), plan.nbytes, "error"), dict(boxes))


Batch = list[ShardedTensor]


class _Transfer:
    """Moves what all ranks hold into files. See [Note: one batch at a time]."""

    def __init__(
        self, exchange: Exchange, store: LocalStore, agreed: _Agreed, held: Held, progress: Progress | None
    ) -> None:
        self._exchange, self._store, self._agreed, self._held = exchange, store, agreed, held
        own = agreed.plan.of_rank(exchange.rank, exchange.ranks)
        self._nbytes = sum(file.nbytes for file in own)
        self._meter = Meter(progress, lambda: self._nbytes)
        self._writer = FilesWriter(Path(agreed.save.staging), own, self._meter)

    def run(self) -> None:
        """All batches of all files."""
        exchange, plan, ranks = self._exchange, self._agreed.plan, range(self._exchange.ranks)
        exchange.run_on_all(lambda: self._store.join(self._agreed.save))
        ready = list[torch.Tensor]()
        with self._writer:
            for batches in zip_longest(*(plan.batches(plan.of_rank(r, len(ranks)), BATCH_BYTES) for r in ranks)):
                step = {rank: batch for rank, batch in enumerate(batches) if batch is not None}
                sends = exchange.run_on_all(partial(self._written_and_packed, ready, step))
                receives = self._empty(step.get(exchange.rank, []))
                own = sends.pop(exchange.rank, None)
                exchange.swap(sends, receives)
                if own is not None:
                    receives[exchange.rank] = own
                ready = self._put_together(step.get(exchange.rank, []), receives)
            exchange.run_on_all(lambda: self._finish(ready))

    def _written_and_packed(self, ready: list[torch.Tensor], step: Mapping[int, Batch]) -> dict[int, torch.Tensor]:
        self._write(ready)
        packed = {rank: self._packed(batch) for rank, batch in step.items()}
        return {rank: data for rank, data in packed.items() if data is not None}

    def _write(self, ready: list[torch.Tensor]) -> None:
        with self._store.told(self._agreed.save, self._nbytes):
            while ready:
                self._writer.add(ready.pop(0))

    def _finish(self, ready: list[torch.Tensor]) -> None:
        self._write(ready)
        with self._store.told(self._agreed.save, self._nbytes):
            self._writer.finish()
        self._meter.finish()

    def _packed(self, batch: Batch) -> torch.Tensor | None:
        """The bytes that this rank holds of a batch, as they are written, in the order of ``_boxes``."""
        found = list[torch.Tensor]()
        for part in batch:
            for box, values in self._held.get(part.key, ()):
                if (common := intersect(part.box, box)) is not None:
                    mine = converted(part.key, values[_within(common, box)], self._agreed.plan.dtype)
                    flat = mine.to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
                    found.append(flat.view(torch.uint8))
        if not found:
            return None
        message, at = torch.empty(sum(_room(len(data)) for data in found), dtype=torch.uint8, device="cpu"), 0
        for data in found:
            message[at : at + len(data)] = data
            at += _room(len(data))
        return message

    def _boxes(self, batch: Batch) -> Iterator[tuple[int, int, int, Box]]:
        """What a batch is put together from: the rank that gives it, the place in the batch, its bytes, the box."""
        for at, part in enumerate(batch):
            for rank, box in self._agreed.boxes.get(part.key, ()):
                if (common := intersect(part.box, box)) is not None:
                    yield rank, at, common.volume * self._dtype(part).itemsize, common

    def _empty(self, batch: Batch) -> dict[int, torch.Tensor]:
        """Memory for what other ranks send of a batch."""
        room = defaultdict[int, int](int)
        for rank, _, nbytes, _ in self._boxes(batch):
            room[rank] += _room(nbytes)
        room.pop(self._exchange.rank, None)
        return {rank: torch.empty(count, dtype=torch.uint8, device="cpu") for rank, count in room.items()}

    def _put_together(self, batch: Batch, received: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        parts = [torch.empty(part.local_shape, dtype=self._dtype(part), device="cpu") for part in batch]
        used = defaultdict[int, int](int)
        for rank, at, nbytes, box in self._boxes(batch):
            start = used[rank]
            used[rank] += _room(nbytes)
            values = received[rank][start : start + nbytes].view(parts[at].dtype).view(box.size)
            parts[at][_within(box, batch[at].box)] = values
        assert all(used[rank] == len(data) for rank, data in received.items()), f"{used} of {received.keys()}"
        return parts

    def _dtype(self, part: ShardedTensor) -> torch.dtype:
        return dtype_of(part, self._agreed.plan.dtype)


def _room(nbytes: int) -> int:
    """Bytes of a message for a part of it: each begins where a number of any dtype may lie."""
    return -(-nbytes // 8) * 8


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Index of a box in a tensor that holds ``outer``."""
    return tuple(
        slice(start - base, start - base + length)
        for start, base, length in zip(box.offset, outer.offset, box.size, strict=True)
    )
