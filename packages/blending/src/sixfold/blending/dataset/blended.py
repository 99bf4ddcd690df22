"""Several datasets as one dataset, in the proportions of their weights.

    orders/ --> Positions --> batches/reader.py --> BlendedDataset (this file)

In the stateless order nothing is built or stored, and every process computes any position. So the number of ranks, the
batch size, the weights and the datasets can change at any step. In the others two arrays hold the order. Samples of
all datasets are read into one set of rows, and the arrays are made of the whole batch at once.
"""

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sixfold.blending.batches.gpt_arrays import Batch, output_array
from sixfold.blending.batches.reader import BatchReader, Drop
from sixfold.blending.blend.position_shuffle import Shuffle
from sixfold.blending.blend.schedule import Schedule
from sixfold.blending.cache.file_names import Identifiers, blend_identifiers
from sixfold.blending.config.config import BlendedMegatronDatasetConfig
from sixfold.blending.config.prefixes import text_of
from sixfold.blending.dataset.base import MegatronDataset, epoch_limit_of
from sixfold.blending.dataset.checkpoint_state import (
    STATE_VERSION,
    State,
    index_state,
    refuse_other_past,
    saved_position,
    stream_state,
)
from sixfold.blending.dataset.epoch_limit import ENDLESS, EpochLimit
from sixfold.blending.dataset.provenance import Why, positions_that_read
from sixfold.blending.dataset.stream import Samples, one_sequence_length
from sixfold.blending.documents.source import AbsentSource
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import Positions, checked_positions, first_repeated, whole_number
from sixfold.blending.numbers.kernels import F64, I64
from sixfold.blending.numbers.weights import Weights
from sixfold.blending.orders.interface import Positions as BlendPositions


class BlendedDataset(Samples):
    """A blend of D datasets; see the module.

    Attributes:
        datasets: D of them: the first blend's, then those that changes add.
        names: (D,) their names in the order.
        schedule: position <--> (dataset, sample).
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Weights | None,
        size: int | None,
        config: BlendedMegatronDatasetConfig,
        *,
        shuffle: Shuffle | None = None,
    ) -> None:
        """Blend ``datasets`` under ``config.changes``.

        Args:
            datasets: D datasets of one class and part. Changes name them by their ``dataset_path``.
            weights: of the first ``len(weights)`` datasets; the others come in by changes. None: their tokens.
            size: the length. None gives every sample once: one epoch of each dataset, or the first ``weights[i]``
                samples of dataset i, whole numbers (as megatron-core).
            shuffle: of ``size`` positions, already begun, for ``order="apportioned"``.
        Raises:
            BlendingError: there is no dataset, weights do not fit, or changes have no size. Or datasets have two
                classes, two parts or one name. Or a dataset without tokens must give samples. Or the blend needs more
                than one epoch of a dataset made with ``num_samples=None``.
        """
        if not datasets:
            raise BlendingError("there are no datasets to blend; give at least one")
        kinds = {(type(dataset).__name__, dataset.index_split.name) for dataset in datasets}
        if len(kinds) > 1:
            raise BlendingError(
                f"the datasets are of several kinds, {sorted(kinds)}; all datasets of a blend have one class and part"
            )
        split = datasets[0].index_split
        changes = config.changes_of(split)
        if size is None and changes:
            raise BlendingError(
                "changes are given without a size; without a size a blend is one epoch of every dataset"
            )
        self.names = [dataset.name for dataset in datasets]
        by_name = config.ordering.by_name
        twice = first_repeated(self.names) if by_name else None
        if twice is not None:  # each would give the samples of the other
            raise BlendingError(
                f"two datasets are named {twice!r}; name them apart by dataset_names, or give one entry with the sum "
                "of the weights if they are one"
            )
        _refuse_one_file_twice(datasets, as_peer=not by_name)
        if weights is not None:
            _refuse_another_number_of_weights(len(weights), datasets, config)
            if size is None:
                weights = _samples_of_each(weights, datasets)
        self.config = config
        self.size = None if size is None else whole_number("size", size, 0)
        self.weights = weights
        self.index_split = split
        self.datasets = list(datasets)
        self.schedule: BlendPositions = config.ordering.blend(self, self.datasets, shuffle)
        if isinstance(self.schedule, Schedule):
            self._give_lengths(self.schedule)
        self._drops = self._dropped()
        self.watch_epochs(len(self))

    def _give_lengths(self, schedule: Schedule) -> None:
        """The datasets with the sequence lengths that changes give them; refuse what they cannot give."""
        lengths = [schedule.lengths_of(number) for number in range(len(self.datasets))]
        self.datasets = [
            dataset if length == dataset.lengths else dataset.with_sequence_lengths(length)
            for dataset, length in zip(self.datasets, lengths, strict=True)
        ]
        for number, dataset in enumerate(self.datasets):
            given = any(segment.tree.quotas[number] for segment in schedule.segments)
            if self.size != 0 and not dataset.is_absent and given:
                dataset.order  # noqa: B018 - a dataset without tokens is refused now, not at its first sample
        if self.size is not None:
            _refuse_more_than_an_epoch(self.datasets, schedule.counts(len(self)).tolist())

    @cached_property
    def _reader(self) -> BatchReader:
        return BatchReader(self.datasets, pads=self.config.ordering.packs, drops=self._drops)

    def _dropped(self) -> list[Drop]:
        """What changes take out, by dataset and its own samples.

        Raises:
            BlendingError: documents of a dataset that is none of these, or that it does not have.
        """
        found = []
        numbers = {self.config.place_of(dataset.dataset_path or ""): n for n, dataset in enumerate(self.datasets)}
        for change in self.config.changes_of(self.index_split):
            for prefix, ids in (change.drop or {}).items():
                number = numbers.get(self.config.place_of(prefix))
                if number is None:
                    raise BlendingError(
                        f"the change at {change.at} drops documents of {text_of(prefix)!r}, which is none of the "
                        "datasets blended"
                    )
                if self.datasets[number].is_absent:
                    continue  # gone as a whole
                sequences = self.datasets[number].part.sequences_of(ids)
                found.append(Drop(number, int(self.schedule.counts(change.at)[number]), sequences))
        return found

    @property
    def unique_identifiers(self) -> Identifiers:
        """What names the cache files of a blend in megatron-core's order."""
        datasets = [dataset.unique_identifiers for dataset in self.datasets]
        return blend_identifiers(type(self).__name__, datasets, self.index_split.name, self.weights or [], self.size)

    @property
    def dataset_index(self) -> npt.NDArray[np.int16] | None:
        """(len,) dataset of each position; None in the stateless order."""
        return None if self.schedule.indices is None else self.schedule.indices[0]

    @property
    def dataset_sample_index(self) -> I64 | None:
        """(len,) its sample; None in the stateless order."""
        return None if self.schedule.indices is None else self.schedule.indices[1]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} samples, {self.index_split.name} of {', '.join(self.names)})"

    def __len__(self) -> int:
        if self.size is not None:
            return self.size
        assert self.schedule.end is not None, "a blend without a size is one epoch"
        return self.schedule.end

    def get_batch(self, positions: Positions, *, out: Batch | None = None) -> Batch:
        """The samples at ``positions`` as stacked arrays.

        Args:
            positions: (B,) whole numbers in any order; beyond ``len`` too, unless this is one epoch.
            out: arrays to write into, by name (see ``SampleLayout.batch``).
        Returns:
            the arrays of the datasets' class, and ``dataset_id`` (B,) int64.
        Raises:
            IndexError: a position that the stream does not have.
            BlendingError: positions of two sequence lengths.
            The source's error, if its data is damaged.
        """
        position_B = checked_positions(positions, self.schedule.end)
        if position_B.size:
            self.watch_epochs(int(position_B.max()) + 1)
        width = one_sequence_length(position_B, self.schedule)
        dataset_B, sample_B = self.schedule.locate(position_B)
        rows = self.datasets[0].new_rows(position_B.size, width, out)
        rows = self._reader.read(dataset_B, sample_B, rows)
        batch = self.datasets[0].make_batch(rows, out)
        batch["dataset_id"] = output_array(out, "dataset_id", dataset_B.shape, dataset_B.dtype)
        batch["dataset_id"][...] = dataset_B
        return batch

    @property
    def looks_ahead(self) -> bool:
        return self._reader.looks_ahead

    def look_ahead(self, positions: Positions) -> None:
        self._reader.look_ahead(*self.schedule.locate(checked_positions(positions, self.schedule.end)))

    @property
    def deals(self) -> bool:
        return self.config.ordering.deals

    @property
    def length_changes(self) -> tuple[int, ...]:
        if not isinstance(self.schedule, Schedule):
            return ()
        pairs = pairwise(self.schedule.segments)
        return tuple(later.begin for earlier, later in pairs if later.sequence_length != earlier.sequence_length)

    def locate(self, positions: npt.ArrayLike) -> tuple[I64, I64]:
        """(dataset (B,), sample (B,)) int64 of any positions."""
        return self.schedule.locate(checked_positions(positions, self.schedule.end))

    def find(self, dataset: int, sample: int) -> int:
        """The position at which ``dataset`` gives its ``sample``; the inverse of ``locate``.

        Raises:
            BlendingError: no position ever gives it.
        """
        if whole_number("dataset", dataset, 0) >= len(self.datasets):
            raise BlendingError(f"dataset {dataset} is none of the {len(self.datasets)} of this blend")
        return self.schedule.find(dataset, sample)

    def counts(self, n: int) -> I64:
        """Samples of each dataset among the first ``n`` positions, (D,) int64."""
        n = whole_number("n", n, 0)
        if self.schedule.end is not None and n > self.schedule.end:
            raise BlendingError(f"n is {n}; the blend has {self.schedule.end} positions")
        return self.schedule.counts(n)

    def why(self, n: int) -> Why:
        """Where the tokens of position ``n`` come from."""
        dataset_B, sample_B = self.locate([n])
        dataset, sample = int(dataset_B[0]), int(sample_B[0])
        some = [drop.sequences for drop in self._drops if drop.source == dataset and drop.first <= sample]
        ranges = self.datasets[dataset].token_ranges(sample, np.concatenate(some) if some else None)
        epochs = self.datasets[dataset].epochs_after(sample)
        return Why(int(n), dataset, self.names[dataset], sample, ranges, epochs)

    def find_line(self, file: str, line: int, end: int) -> list[int]:
        """The positions below ``end`` that read the document of ``line`` of ``file``, if a pair has provenance.

        Raises:
            BlendingError: no pair knows that file.
        Cost: a search of every position below ``end``; no id is read.
        """
        last = whole_number("end", end, 0)
        checked_positions([last - 1] if last else [], self.schedule.end)
        return positions_that_read(self.datasets, file, line, last, self.schedule.locate, self._drops)

    def epochs(self, n: int) -> F64:
        """How often the first ``n`` positions read each dataset's tokens, (D,)."""
        counts = self.counts(n).tolist()
        pairs = zip(self.datasets, counts, strict=True)
        return np.array([dataset.epochs_after(count) for dataset, count in pairs])

    @cached_property
    def _epoch_limit(self) -> EpochLimit | None:
        return None if self.size is None else epoch_limit_of(self.config, self.index_split, self.datasets)

    def watch_epochs(self, end: int) -> None:
        """Warn once of each dataset that the positions below ``end`` read more often than ``config.max_epochs``.

        Raises:
            BlendingError: there are some, and ``config.max_epochs_error``.
        """
        if self._epoch_limit is None or end <= self._epoch_limit.next:
            return
        behind, find = self._epoch_limit.next > 0, self.config.ordering.in_sample_order(self.schedule)
        self._epoch_limit.check(end, self.counts, self.epochs, find)
        if behind:  # an endless stream behind its size: not to look at every batch
            self._epoch_limit.skip_to_limit(self.schedule.find)

    def state_dict(self, position: int) -> State:
        """What a checkpoint keeps to continue at ``position``, some 100 bytes per dataset; see ``checkpoint_state``."""
        return self._state(position, STATE_VERSION)

    def _state(self, position: int, version: int) -> State:
        if not isinstance(self.schedule, Schedule):
            arrays = self.config.ordering.arrays_of_blend(self)
            return index_state(position, self.config, self.index_split, self.datasets, arrays, version)
        return stream_state(position, self.config, self.index_split, self.schedule, self.datasets, version)

    def load_state_dict(self, state: State) -> int:
        """The position of a saved state.

        Raises:
            BlendingError: something that fixed the positions before it differs here: what it was, what it is.
        """
        position, version = saved_position(state)
        refuse_other_past(state, self._state(position, version), self.datasets)
        for number, dataset in enumerate(self.datasets):
            if isinstance(dataset.indexed_dataset, AbsentSource) and self._is_read_from(number, position):
                raise dataset.indexed_dataset.asked()
        return position

    def _is_read_from(self, dataset: int, position: int) -> bool:
        """Whether a position from ``position`` on gives a sample of it, in the stateless order."""
        assert isinstance(self.schedule, Schedule), "only a blend that changes has datasets that left it"
        segments = self.schedule.segments
        ends = [*(segment.begin for segment in segments[1:]), ENDLESS]
        pairs = zip(segments, ends, strict=True)
        return any(end > position and segment.tree.quotas[dataset] for segment, end in pairs)


def _refuse_another_number_of_weights(
    weights: int, datasets: Sequence[MegatronDataset], config: BlendedMegatronDatasetConfig
) -> None:
    later = {config.place_of(prefix) for change in config.changes if change.blend for prefix in change.blend[0]}
    added = [config.place_of(dataset.dataset_path or "") for dataset in datasets[weights:]]
    if weights > len(datasets) or not later.issuperset(added):
        raise BlendingError(
            f"there are {weights} weights for {len(datasets)} datasets; give one for each dataset, except those "
            "that only changes name"
        )


def _refuse_one_file_twice(datasets: Sequence[MegatronDataset], *, as_peer: bool) -> None:
    """BlendingError for two datasets with sequences of one file in common, under any names; the peer's order warns."""
    found: dict[tuple[int, int], list[MegatronDataset]] = {}
    for dataset in datasets:
        prefix = getattr(dataset.part.source, "path_prefix", None)  # of a view its pair
        with suppress(OSError, TypeError):
            status = os.stat(f"{prefix}.idx")
            found.setdefault((status.st_dev, status.st_ino), []).append(dataset)
    for group in found.values():
        for number, dataset in enumerate(group):
            for other in group[:number]:
                if not other.part.shares_members(dataset.part):
                    continue
                problem = (
                    f"{other.dataset_path!r} and {dataset.dataset_path!r} are one file under two names; give it one "
                    "entry with the sum of the weights"
                )
                if not as_peer:
                    raise BlendingError(problem)
                if other.dataset_path != dataset.dataset_path:  # else the config has told it
                    warnings.warn(f"{problem}: now its samples repeat", stacklevel=3)


def _refuse_more_than_an_epoch(datasets: Sequence[MegatronDataset], asked: Sequence[int]) -> None:
    """BlendingError where a blend of a size goes on behind the one epoch that a dataset was made for."""
    for number, (dataset, count) in enumerate(zip(datasets, asked, strict=True)):
        if dataset.num_samples is None and (count > dataset.samples_per_epoch or len(dataset.lengths) > 1):
            more = f"{count} samples" if len(dataset.lengths) == 1 else "a second sequence length"
            raise BlendingError(
                f"the blend needs {more} of dataset {number} ({dataset.name}), which was made for one epoch of "
                f"{dataset.samples_per_epoch} samples; make it with num_samples=0, not None: a blend with a size then "
                "reads it as often as it needs"
            )


def _samples_of_each(weights: Weights, datasets: Sequence[MegatronDataset]) -> list[int]:
    """Weights without a size, which are numbers of samples."""
    for number, (weight, dataset) in enumerate(zip(weights, datasets, strict=True)):
        whole = isinstance(weight, int | np.integer | float | np.floating) and float(weight).is_integer()
        if not whole or isinstance(weight, bool) or weight < 0:
            rule = "without a size weights are whole numbers of samples"
            raise BlendingError(f"weight {number} is {weight!r}; {rule}: give a size, or None for the weights")
        has = len(dataset) if dataset.num_samples else dataset.samples_per_epoch
        if weight > has:
            raise BlendingError(
                f"the blend needs {weight} samples of dataset {number} ({dataset.name}), which has {has} in an epoch"
            )
    return [int(weight) for weight in weights]
