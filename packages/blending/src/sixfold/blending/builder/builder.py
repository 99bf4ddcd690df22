"""From a config to the datasets of the three parts.

    config, sizes --> BlendedMegatronDatasetBuilder (this file) --> [train, valid, test]

With a process group every rank opens for itself and nothing is sent but errors and notes of files. Indices that are
kept in files are built once: each rank builds a share of them, then all load them.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sixfold.blending.blend.position_shuffle import Shuffle
from sixfold.blending.builder.rank_shares import build_cost, shares
from sixfold.blending.builder.threads import on_threads
from sixfold.blending.cache.file_names import record_name
from sixfold.blending.cache.index_files import (
    KnownFiles,
    Note,
    Record,
    Stamp,
    making_with,
    remove_abandoned,
    stamps_of,
    try_to_write,
)
from sixfold.blending.config.config import Blend, BlendedMegatronDatasetConfig, special_token
from sixfold.blending.config.prefixes import text_of
from sixfold.blending.config.splits import Bookends, Split, part_range
from sixfold.blending.dataset.base import MegatronDataset
from sixfold.blending.dataset.blended import BlendedDataset
from sixfold.blending.dataset.checkpoint_state import told_of
from sixfold.blending.dataset.mock import MockGPTDataset, refuse_a_blend
from sixfold.blending.documents.idx_bin import is_gone, pair_of
from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import AbsentSource, DocumentSource, several_sequences
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import whole_number
from sixfold.blending.numbers.kernels import I64
from sixfold.blending.orders.interface import Share

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Built = MegatronDataset | BlendedDataset | list[MegatronDataset] | None
Task = tuple[str, Split, int | None, Bookends]  # prefix, part, samples, what of the sequences
_WHOLE = (0.0, 1.0)
# Positions up to which the table of a shuffle is begun in advance: 64 MiB. A position of any blend is computed in less
# time than it is read from a table that large; beyond, the table is made when someone asks for it.
_TABLE_AHEAD = 2**24
_DEADLINE_S = 3600.0  # in which builder threads end at least one item
_ALIKE = (
    "order", "packing", "blend_unit", "random_seed", "sequence_length", "document_shuffle", "split_matrix",
    "mid_level_dataset_surplus", "multiple_validation_sets", "full_validation",
)  # fmt: skip
T = TypeVar("T")
S = TypeVar("S")


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """An error in this block says where it was raised: it may come from a class of the user's, or be out of memory."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {what}")
        raise


class BlendedMegatronDatasetBuilder:
    """Builds the datasets of a config; the arguments are megatron-core's, plus the group."""

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
        *,
        group: "ProcessGroup | None" = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Say what to build.

        Args:
            cls: ``GPTDataset`` or another ``MegatronDataset``.
            sizes: samples of train, valid, test. None is one epoch.
            is_built_on_rank: returns whether this rank builds. If not, its parts are None. Ignored without a group.
            group: all ranks of it build together. An error on one rank is raised on all.
            state: of training, where a run goes on. What it says of a dataset that has left the blend stands for its
                files, which may be deleted.
        Raises:
            BlendingError: sizes that are not three counts, no blend, or weights without a size.
        """
        if len(sizes) != len(Split):
            raise BlendingError(f"sizes is {list(sizes)}; it is three counts >= 0 or None: train, valid, test")
        if config.mock and cls.build_low_level_dataset is MegatronDataset.build_low_level_dataset:
            raise BlendingError(
                f"the config has neither blend nor blend_per_split, and {cls.__name__} reads prefixes; give one of "
                "them, or build a MockGPTDataset, which makes its data up"
            )
        if not config.mock and cls.build_low_level_dataset is MockGPTDataset.build_low_level_dataset:
            refuse_a_blend(config)
        self.cls = cls
        self.sizes = [
            None if size is None else whole_number(f"sizes[{split.value}] ({split.name})", size, 0)
            for split, size in zip(Split, sizes, strict=True)
        ]
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self._has_indices = config.ordering.indexed
        self.group = group
        self._state = state
        self._opened: dict[str, DocumentSource] = {}
        self._stamps: dict[str, list[Stamp] | None] = {}
        self._indexed: dict[Task, MegatronDataset] = {}
        self._records: dict[Split, Record] = {}
        self._shuffles: dict[Split, Shuffle] = {}
        self._rows: dict[tuple[str, Split], I64] = {}  # of windows of packed documents, counted by all ranks
        self._number = 0  # among the ranks that build
        for split in Split:
            self._refuse_sizes_that_do_not_fit(split)

    def _refuse_sizes_that_do_not_fit(self, split: Split) -> None:
        blend, size = self.config.blend_of(split), self.sizes[split.value]
        if blend is None or self._bookends(split) is None:
            return
        several = bool(self.config.multiple_validation_sets) and split is Split.valid
        if several and self.config.full_validation and size is not None:
            raise BlendingError(f"the valid size is {size} with full_validation; it is None, one epoch of each set")
        if size is None and not several and not self._alone(split):
            if blend[1] is None and not self.config.changes_of(split):
                return
            what = "weights" if blend[1] is not None else "changes"
            raise BlendingError(f"{split.name} has {what} but no size; give a size, or None for the weights")

    def build(self) -> list[Built]:
        """[train, valid, test], None where a part is absent.

        A part with one prefix, without weights and changes, is a dataset of ``cls``; so is one with one
        prefix in ``blend_per_split``. Any other part is a ``BlendedDataset``. With
        ``multiple_validation_sets`` valid is a list of datasets.

        Raises:
            BlendingError, or the error of the source that does not open; with a group a
            BlendingError on every rank.
        """
        if self.config.mock:
            return self._mock_parts()
        if self.group is None:
            return self._parts()
        from sixfold.blending.builder.rank_agreement import (
            builder_number,
            gather_together,
            refuse_differences,
            together,
        )

        here = together(self.is_built_on_rank, self.group)
        refuse_differences(gather_together(lambda: self._alike_on_all_ranks() if here else None, self.group))
        if self.config.ordering.packs:
            self._number, builders = builder_number(here, self.group)
            self._rows = _joined(gather_together(lambda: self._count_share(builders) if here else {}, self.group))
        if self._has_indices:
            number, builders = builder_number(here, self.group)
            if here:
                self._start_shuffles()
            found = gather_together(lambda: self._build_share(number, builders), self.group)
            together(lambda: self._write_records(found, number), self.group)
            together(lambda: self._build_blends(number, builders), self.group)
        return together(lambda: self._parts() if here else [None] * len(Split), self.group)

    def _alike_on_all_ranks(self) -> dict[str, Any]:
        """What all ranks have to have alike, in the order in which a difference is told: the config, then the data."""
        config = self.config
        facts: dict[str, Any] = {name: getattr(config, name) for name in _ALIKE} | {"sizes": self.sizes}
        facts |= {f"tokenizer.{name}": special_token(config.tokenizer, name) for name in ("eod", "pad")}
        for split in Split:
            blend = config.blend_of(split)
            facts[f"blend of {split.name}"] = None if blend is None else self._named(blend)
        facts["changes"] = [
            [
                change.at,
                None if change.blend is None else self._named(change.blend),
                change.sequence_length,
                change.drop,
            ]
            for change in config.changes
        ]
        if not config.mock:
            self._open()
            for prefix, source in self._opened.items():
                if not isinstance(source, AbsentSource):
                    part = Part(source, range(self.cls.numel_low_level_dataset(source)))
                    facts[f"the data of {config.name_of(prefix)}"] = part.short_fingerprint
        return facts

    def _named(self, blend: Blend) -> list[Any]:
        return [[self.config.name_of(prefix) for prefix in blend[0]], None if blend[1] is None else list(blend[1])]

    def _mock_parts(self) -> list[Built]:
        """Parts of one source without a path, made up by every rank for itself."""

        def make() -> list[Built]:
            try:
                source = self.cls.build_low_level_dataset(None, self.config)
            except Exception as error:
                raise BlendingError(
                    "the config has neither blend nor blend_per_split, and without a prefix "
                    f"{self.cls.__name__}.build_low_level_dataset fails: {type(error).__name__} {error}"
                ) from error
            numel, parts = self.cls.numel_low_level_dataset(source), list[Built]()
            for split, size in zip(Split, self.sizes, strict=True):
                bookends = self._bookends(split)
                sequences = None if bookends is None else part_range(bookends, numel)
                made = None if sequences is None else self.cls(source, None, sequences, size, split, self.config)
                parts.append(made)
            return parts

        if self.group is None:
            return make()
        from sixfold.blending.builder.rank_agreement import together

        return together(lambda: make() if self.is_built_on_rank() else [None] * len(Split), self.group)

    def _parts(self) -> list[Built]:
        self._start_shuffles()
        self._open()
        if not self._has_indices:
            parts = [self._part(split) for split in Split]
            if self.config.ordering.packs and self.config.cache_folder and self._number == 0:
                remove_abandoned(self.config.cache_folder)
            return parts
        tasks = self._tasks()
        self._start_records(tasks)
        self._build(tasks)
        parts = self._each(self._part, Split)
        if self.group is None:
            self._write_records([], 0)
        return parts

    def _each(self, function: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """``function`` of every item on the config's threads; the error of the first item that has one."""
        threads = self.config.num_dataset_builder_threads
        if threads == 1:
            return [function(item) for item in items]
        return on_threads(function, items, threads, _DEADLINE_S)

    def _open(self) -> None:
        """Open every prefix of every part, once."""
        prefixes: dict[str, None] = {}
        for split in Split:
            blend = self.config.blend_of(split)
            if blend is not None and self._bookends(split) is not None:
                prefixes |= dict.fromkeys(self._prefixes(split, blend))
        self._each(self._source, prefixes)

    def _prefixes(self, split: Split, blend: Blend) -> list[str]:
        """Those of its blend, and in the order that has changes those that they add."""
        return [text_of(prefix) for prefix in blend[0]] if self._has_indices else self.config.prefixes_of(split)

    def _build(self, tasks: Sequence[Task]) -> None:
        """The datasets of ``tasks``, each with its indices, built or from the cache."""
        missing = [task for task in tasks if task not in self._indexed]
        self._indexed |= zip(missing, self._each(self._made, missing), strict=True)

    def _start_records(self, tasks: Sequence[Task]) -> None:
        """One file per blend of exact counts tells what its files were built from; see ``cache/index_files.py``."""
        folder = self.config.cache_folder
        if not self.config.ordering.one_record or not folder:
            return
        fields = {name: getattr(self.config, name) for name in self.cls._key_config_attributes()}
        for split in {task[1] for task in tasks} - self._records.keys():
            if not self._separate(split):
                samples = {task[0]: task[2] for task in tasks if task[1] is split}
                name = record_name(self.cls.__name__, samples, split.name, fields)
                self._records[split] = Record(f"{folder}/{name}")

    def _build_share(self, number: int, builders: int) -> dict[Split, dict[str, Note]]:
        """Build and cache this rank's share of the datasets; all load them afterwards.

        Returns:
            notes of the files, for the others.
        """
        if number >= builders:
            return {}
        self._open()
        tasks = self._tasks()
        self._start_records(tasks)
        costs = []
        for prefix, _, samples, bookends in tasks:
            part = Part(*self._sequences(prefix, bookends))
            kept = self.config.cache_folder or getattr(part.source, "path_prefix", None)
            # What cannot be kept is built by every rank for itself, at the end.
            cost = build_cost(len(part), part.tokens, samples, self.config.sequence_length) if kept else 0
            costs.append(cost)
        self._build([tasks[at] for at in shares(costs, builders)[number] if costs[at]])
        for record in self._records.values():
            record.flush()
        return {split: record.notes for split, record in self._records.items()}

    def _count_share(self, builders: int) -> dict[tuple[str, Split], Share]:
        """What this rank counts of all parts before they are made; see ``Order.share_of_counts``."""
        self._open()
        shares = {}
        for split in Split:
            blend, bookends = self.config.blend_of(split), self._bookends(split)
            if blend is None or bookends is None:
                continue
            for prefix in self._prefixes(split, blend):
                part, named = Part(*self._sequences(prefix, bookends)), (self.config.name_of(prefix), split.name)
                share = self.config.ordering.share_of_counts(self.config, named, part, self._number, builders)
                if share is not None:
                    shares[prefix, split] = share
        return shares

    def _write_records(self, found: Sequence[dict[Split, dict[str, Note]]], number: int) -> None:
        """Take the notes of all ranks; the first rank writes them down, and tidies the folder."""
        for notes in found:
            for split, some in notes.items():
                if split in self._records:
                    self._records[split].notes |= some
        if number == 0:
            for record in self._records.values():
                try_to_write(record)
            if self.config.cache_folder:
                remove_abandoned(self.config.cache_folder)

    def _build_blends(self, number: int, builders: int) -> None:
        """The same for blends that have an index of their own in the cache."""
        if not self.config.ordering.keeps_blend or not self.config.path_to_cache:
            return
        for split in Split:
            if number < builders and split.value % builders == number:
                self._part(split)

    def _tasks(self) -> list[Task]:
        """What is built for all parts, each thing once."""
        tasks: dict[Task, None] = {}
        for split in Split:
            blend, bookends = self.config.blend_of(split), self._bookends(split)
            if blend is not None and bookends is not None and not self._absent(split, bookends):
                prefixes = [text_of(prefix) for prefix in blend[0]]
                for prefix, samples in zip(prefixes, self._asked(split, bookends), strict=True):
                    tasks[prefix, split, samples, bookends] = None
        return list(tasks)

    def _bookends(self, split: Split) -> Bookends | None:
        return _WHOLE if self.config.split_matrix is None else self.config.split_matrix[split.value]

    def _alone(self, split: Split) -> bool:
        """One dataset that is no blend and never becomes one."""
        blend = self.config.blend_of(split)
        one = blend is not None and len(blend[0]) == 1 and (blend[1] is None or self.config.blend_per_split is not None)
        return one and not self.config.changes

    def _part(self, split: Split) -> Built:
        config, size, bookends = self.config, self.sizes[split.value], self._bookends(split)
        blend = config.blend_of(split)
        if blend is None or bookends is None:
            return None
        prefixes = self._prefixes(split, blend)
        if config.multiple_validation_sets and split is Split.valid:
            return [self._dataset(prefix, split, size, bookends) for prefix in prefixes]
        if self._alone(split):
            alone = self._dataset(prefixes[0], split, size, bookends)
            alone.watch_epochs(size or 0)
            return alone
        if self._has_indices:
            return None if self._absent(split, bookends) else self._indexed_blend(split, bookends)
        # In an endless blend how many samples a dataset gives is the blend's to say.
        datasets = [self._dataset(prefix, split, None if size is None else 0, bookends) for prefix in prefixes]
        if size == 0 and not any(dataset.part.tokens for dataset in datasets):
            return None  # nothing is there and nothing is asked
        weights = blend[1]
        if weights is None and size is not None:
            weights = [self.config.ordering.size_of(dataset) for dataset in datasets[: len(blend[0])]]
        blended = BlendedDataset(datasets, weights, size, config)
        if size is not None:
            for dataset, count in zip(blended.datasets, blended.counts(size).tolist(), strict=True):
                dataset.num_samples = count
        return blended

    def _absent(self, split: Split, bookends: Bookends) -> bool:
        """A blend of which nothing is asked, and that has nothing."""
        blend = self.config.blend_of(split)
        if blend is None or self.sizes[split.value] != 0 or self._separate(split):
            return blend is None
        return not any(self._tokens(text_of(prefix), bookends) for prefix in blend[0])

    def _separate(self, split: Split) -> bool:
        """Datasets that are no blend: one alone, or several validation sets."""
        return self._alone(split) or (bool(self.config.multiple_validation_sets) and split is Split.valid)

    def _weights(self, split: Split, bookends: Bookends) -> Sequence[float] | None:
        """Of a blend with indices, as its order builds it."""
        blend = self.config.blend_of(split)
        assert blend is not None, f"{split.name} has a blend"
        prefixes, weights = blend

        def tokens() -> list[int]:
            return [self._tokens(text_of(prefix), bookends) for prefix in prefixes]

        return self.config.ordering.weights(weights, self.sizes[split.value], tokens)

    def _asked(self, split: Split, bookends: Bookends) -> list[int | None]:
        """Samples that each dataset of a part is built with, in the orders that have indices; None is one epoch."""
        blend, size = self.config.blend_of(split), self.sizes[split.value]
        assert blend is not None, f"{split.name} has a blend"
        if self._separate(split):
            return [size] * len(blend[0])
        weights = self._weights(split, bookends)
        if weights is None or size is None:
            return [None] * len(blend[0])
        return list(self.config.ordering.samples_to_build(weights, size, self.config))

    def _indexed_blend(self, split: Split, bookends: Bookends) -> BlendedDataset:
        """As megatron-core's builder, a surplus of each dataset and a few positions more; or exact counts."""
        blend, size = self.config.blend_of(split), self.sizes[split.value]
        assert blend is not None, f"{split.name} has a blend"
        weights = self._weights(split, bookends)
        parts = zip(blend[0], self._asked(split, bookends), strict=True)
        datasets = [self._dataset(text_of(prefix), split, samples, bookends) for prefix, samples in parts]
        if size is not None:
            size = self.config.ordering.size(weights, size, [*map(len, datasets)])
        return BlendedDataset(datasets, weights, size, self.config, shuffle=self._shuffles.get(split))

    def _start_shuffles(self) -> None:
        """Begin what depends on sizes alone, before anything is opened."""
        for split in Split:
            size, there = self.sizes[split.value], self.config.blend_of(split) and self._bookends(split)
            if not size or not there or self._separate(split) or split in self._shuffles:
                continue
            shuffle = self.config.ordering.shuffle(self.config, size)
            if shuffle is not None:
                self._shuffles[split] = shuffle.start() if size <= _TABLE_AHEAD else shuffle

    def _source(self, prefix: str) -> DocumentSource:
        if prefix not in self._opened:
            path = self.config.path_of(prefix)
            if (
                self._has_indices or self.config.ordering.packs
            ):  # before: data that is replaced meanwhile must not vouch for an index
                self._stamps[prefix] = stamps_of(pair_of(path))
            if not self._has_indices:
                self._warn_of_unused_cache(path)
            try:
                with _naming(f"{prefix} was opened"):
                    self._opened[prefix] = self.cls.build_low_level_dataset(path, self.config)
            except BlendingError:
                if not self._has_left(prefix) or not is_gone(path):
                    raise
                warnings.warn(
                    f"{prefix} has left the blend and its files are missing: positions before the change that removes "
                    "it cannot be read",
                    stacklevel=2,
                )
                self._opened[prefix] = AbsentSource(path, self._told_of(prefix))
                return self._opened[prefix]
            boundaries = several_sequences(self._opened[prefix])
            if boundaries is not None:
                warnings.warn(
                    f"{prefix} has {len(self._opened[prefix].sequence_lengths)} sequences in {len(boundaries) - 1} "
                    "documents. Sequences are shuffled one by one, as in megatron-core: write each document as one "
                    "sequence to keep it together",
                    stacklevel=2,
                )
        return self._opened[prefix]

    def _told_of(self, prefix: str) -> dict[str, Any] | None:
        """What the state of the run says of a dataset."""
        return None if self._state is None else told_of(self._state, self.config.name_of(prefix))

    def _has_left(self, prefix: str) -> bool:
        """Whether only training reads it, by weights that are known, and not from the last change of the blend on."""
        config, place = self.config, self.config.place_of(prefix)
        if self.cls.build_low_level_dataset is not MegatronDataset.build_low_level_dataset:
            return False  # what a path means is the class's
        others = [
            config.blend_of(split)
            for split in (Split.valid, Split.test)
            if self._bookends(split) is not None and self.sizes[split.value] != 0
        ]
        changed = [change.blend for change in config.changes if change.blend is not None]
        *earlier, last = [config.blend_of(Split.train), *changed]
        if not earlier or any(blend is not None and self._reads(blend, place) for blend in (last, *others)):
            return False
        if self._told_of(prefix) is not None:
            return True
        return all(blend is None or blend[1] is not None or not self._reads(blend, place) for blend in earlier)

    def _reads(self, blend: Blend, place: str) -> bool:
        prefixes, weights = blend
        pairs = zip(prefixes, [1] * len(prefixes) if weights is None else weights, strict=True)
        return any(weight and self.config.place_of(prefix) == place for prefix, weight in pairs)

    def _warn_of_unused_cache(self, path: str) -> None:
        folder = f"{path}/cache/{self.cls.__name__}_indices"
        if os.path.isdir(folder):
            warnings.warn(
                f'{folder} has indices of another order, and order is "stateless", which reads none: to go on with a '
                'run of Megatron set order="megatron"',
                stacklevel=2,
            )

    def _sequences(self, prefix: str, bookends: Bookends) -> tuple[DocumentSource, range]:
        source = self._source(prefix)
        return source, part_range(bookends, self.cls.numel_low_level_dataset(source))

    def _tokens(self, prefix: str, bookends: Bookends) -> int:
        return Part(*self._sequences(prefix, bookends)).tokens

    def _dataset(self, prefix: str, split: Split, size: int | None, bookends: Bookends) -> MegatronDataset:
        task = (prefix, split, size, bookends)
        if not self._has_indices:
            return self._made(task)
        if task not in self._indexed:
            self._indexed[task] = self._made(task)
        return self._indexed[task]

    def _made(self, task: Task) -> MegatronDataset:
        prefix, split, samples, bookends = task
        source, sequences = self._sequences(prefix, bookends)
        opened_here = getattr(source, "path_prefix", None) == self.config.path_of(prefix)
        stamps = self._stamps.get(prefix) if opened_here else None
        keeps = self._number == 0
        known = KnownFiles(self._records.get(split), stamps, self._rows.get((prefix, split)), keeps)
        with making_with(known), _naming(f"the {split.name} part of {prefix} was made"):
            dataset = self.cls(source, prefix, sequences, samples, split, self.config)
            if self.config.ordering.packs and dataset.part.tokens:
                dataset.order  # noqa: B018 - while its files and counts are known
            return dataset


def _joined(shares: Sequence[dict[tuple[str, Split], Share]]) -> dict[tuple[str, Split], I64]:
    """The counts of all ranks that build, in the order of these: whole ones, or every so many-th of each."""
    built = [share for share in shares if share]
    whole: dict[tuple[str, Split], I64] = {}
    for key in built[0] if built else ():
        counts = [share[key] for share in built]
        kept = next((one.counts for one in counts if one.is_whole), None)
        if kept is None:
            kept = np.empty(sum(one.counts.size for one in counts), dtype=np.int64)
            for number, one in enumerate(counts):
                kept[number :: len(counts)] = one.counts
        whole[key] = kept
    return whole
