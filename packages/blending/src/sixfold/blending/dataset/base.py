"""One part of one dataset, by sample number. A subclass says what the samples look like.

    source + split --> orders/ --> MegatronDataset (this file) --> gpt.py, blended.py

In the stateless order nothing is built. A dataset opens in microseconds whatever its size, and any sample is computed
from its number. The other orders look it up in their indices. ``batches/reader.py`` is the only path from numbers to
token ids, and ``why`` shows the same ranges.
"""

from abc import abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sixfold.blending.batches.gpt_arrays import Batch, TokenRows
from sixfold.blending.batches.reader import BatchReader
from sixfold.blending.blend.quota_tree import PERIOD
from sixfold.blending.blend.schedule import Era, Schedule
from sixfold.blending.cache.file_names import Identifiers, dataset_identifiers
from sixfold.blending.config.config import BlendedMegatronDatasetConfig
from sixfold.blending.config.splits import Split
from sixfold.blending.dataset.checkpoint_state import (
    STATE_VERSION,
    State,
    index_state,
    refuse_other_past,
    saved_position,
    stream_state,
)
from sixfold.blending.dataset.epoch_limit import ENDLESS, EpochLimit, samples_within, tokens_given
from sixfold.blending.dataset.provenance import TokenRange, Why, positions_that_read
from sixfold.blending.dataset.stream import Samples, one_sequence_length
from sixfold.blending.documents.idx_bin import open_prefix
from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import AbsentSource, DocumentSource, several_sequences
from sixfold.blending.numbers.checks import Positions, checked_positions, whole_number
from sixfold.blending.numbers.kernels import F64, I64
from sixfold.blending.orders.interface import Samples as SampleTokens


def epoch_limit_of(
    config: BlendedMegatronDatasetConfig, split: Split, datasets: "Sequence[MegatronDataset]"
) -> EpochLimit | None:
    """What watches over the epochs of a stream of training; None where there is no limit."""
    if config.max_epochs is None or split is not Split.train:
        return None
    times, over = Fraction(config.max_epochs).as_integer_ratio()

    def within_limit(dataset: MegatronDataset) -> int:
        if dataset.is_absent:
            return ENDLESS
        rows = config.ordering.rows_per_epoch(dataset)
        if rows is not None:
            return rows * times // over
        return samples_within(dataset.part.tokens * times // over, dataset.lengths)

    within = [within_limit(dataset) for dataset in datasets]
    return EpochLimit([dataset.name for dataset in datasets], within, config.max_epochs, config.max_epochs_error)


class MegatronDataset(Samples):
    """The samples of one part of one dataset; extend it with ``new_rows`` and ``make_batch``.

    ``build_low_level_dataset`` and ``numel_low_level_dataset`` say where tokens come from, ``_key_config_attributes``
    what of the config names cached indices; the contract is in docs/guide/blending-own-datasets.md.

    Attributes:
        num_samples: the length asked for; None is one epoch.
        lengths: (first sample, sequence length) of each change of it; one without a blend that changes it.
        indices: numbers of the part's sequences, a range or an array.
    """

    def __init__(
        self,
        indexed_dataset: DocumentSource,
        dataset_path: str | None,
        indexed_indices: "range | npt.ArrayLike",
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        """Arguments as megatron-core's.

        Args:
            indexed_dataset: anything that is a ``DocumentSource``.
            dataset_path: the prefix; the name in the order is ``config.name_of`` of it.
            indexed_indices: the part's sequences.
            num_samples: None for one epoch, else the length of an endless stream; with indices the least
                number of samples to build.
        Raises:
            BlendingError: ``num_samples`` is not a count, or samples are asked of a part without tokens.
        """
        if num_samples is not None:
            num_samples = whole_number("num_samples", num_samples, 0)
        self.indexed_dataset = indexed_dataset
        self.dataset_path = dataset_path
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.part = Part(indexed_dataset, indexed_indices)
        self.name = config.name_of(dataset_path or "")
        self.lengths: tuple[tuple[int, int], ...] = ((0, config.sequence_length),)
        self.is_one_epoch = num_samples is None
        if num_samples != 0 or self._indexed:
            self.order  # noqa: B018 - indices are built, and a part without tokens is refused, now

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Fields of the config that name the cache files; a subclass adds those that its indices depend on."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: DocumentSource) -> int:
        """What a split divides: sequences, all of them or the first so many."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> DocumentSource:
        """Open a prefix; override it for data that ``sixfold.indexed_data`` does not read, or that is made up.

        Args:
            dataset_path: None where the config has no blend.
        """
        assert dataset_path is not None, "the builder refuses a config without prefixes"
        return open_prefix(dataset_path, mmap=config.mmap_bin_files)

    @abstractmethod
    def new_rows(self, samples: int, sequence_length: int, out: Batch | None = None) -> TokenRows:
        """Rows of ids to fill."""

    @abstractmethod
    def make_batch(self, rows: TokenRows, out: Batch | None = None) -> Batch:
        """The arrays of filled rows, of one dataset or of a blend."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index_split.name} of {self.name})"

    @property
    def is_absent(self) -> bool:
        """Whether its data was deleted after it had left the blend."""
        return isinstance(self.indexed_dataset, AbsentSource)

    @property
    def tokens(self) -> int:
        """Of its part; of a deleted one as a state tells."""
        told = self.indexed_dataset.told if isinstance(self.indexed_dataset, AbsentSource) else None
        return self.part.tokens if told is None else int(told["tokens"])

    @property
    def indices(self) -> range | I64:
        return self.part.indices

    @property
    def _indexed(self) -> bool:
        """Whether the order is made of indices, which end."""
        return self.config.ordering.indexed

    @property
    def _end(self) -> int | None:
        """Positions that there are; None for an endless stream."""
        return len(self) if self.is_one_epoch or self._indexed else None

    @property
    def _extra_tokens(self) -> int:
        """Tokens that a sample reads behind its own, for its last label."""
        return 1

    @property
    def _keeps_partial(self) -> bool:
        """Whether one epoch ends with a padded sample."""
        return False

    @property
    def document_index(self) -> npt.NDArray[np.int32] | None:
        """(epochs * sequences,) sequence in each place; None in the stateless order, as the two others."""
        return self._array("document_index")

    @property
    def sample_index(self) -> npt.NDArray[Any] | None:
        """(samples + 1, 2) place in ``document_index`` and offset at which each sample begins."""
        return self._array("sample_index")

    @property
    def shuffle_index(self) -> npt.NDArray[Any] | None:
        """(samples,) row of ``sample_index`` of each position."""
        return self._array("shuffle_index")

    def _array(self, name: str) -> npt.NDArray[Any] | None:
        return self.order.arrays.get(name)

    @cached_property
    def unique_identifiers(self) -> Identifiers:
        """What names the cache files of this dataset, and is part of what names its blend's."""
        keys = {name: getattr(self.config, name) for name in self._key_config_attributes()}
        keys |= self.config.ordering.identifying(self)
        return dataset_identifiers(
            type(self).__name__, self.dataset_path, self.num_samples, self.index_split.name, keys
        )

    @property
    def index_options(self) -> dict[str, Any]:
        """Options that indices depend on beside ``unique_identifiers``."""
        return {"extra_tokens": self._extra_tokens, "keeps_partial": self._keeps_partial}

    @property
    def index_facts(self) -> dict[str, Any]:
        """What indices depend on beside ``unique_identifiers``, which has nothing of the data."""
        return self.index_options | self.part.fingerprint_of_lengths

    @property
    def document_shuffle(self) -> str:
        """How the documents are shuffled: "global" or "block" in the stateless order, "global" in the others."""
        return self.order.document_shuffle

    @property
    def samples_per_epoch(self) -> int:
        """(T - x) // S at the first sequence length; rounded up if the last one is kept, padded. Or packed rows."""
        rows = self.config.ordering.rows_per_epoch(self)
        if rows is not None:
            return rows
        tokens, S = max(0, self.part.tokens - self._extra_tokens), self.lengths[0][1]
        return -(-tokens // S) if self._keeps_partial else tokens // S

    @cached_property
    def order(self) -> SampleTokens:
        """Which tokens are which sample."""
        if isinstance(self.indexed_dataset, AbsentSource):
            raise self.indexed_dataset.asked()
        return self.config.ordering.samples(self)

    @cached_property
    def _reader(self) -> BatchReader:
        """What reads its samples."""
        return BatchReader([self], pads=self.config.ordering.packs)

    @cached_property
    def schedule(self) -> Schedule:
        """This dataset alone as a blend, for ``state_dict``."""
        if self.is_one_epoch and self.samples_per_epoch:
            return Schedule.one_epoch([self.samples_per_epoch], self.lengths[0][1])
        return Schedule([Era(0, [PERIOD], self.lengths[0][1])])

    def with_sequence_lengths(self, lengths: tuple[tuple[int, int], ...]) -> Self:
        """The same data and name with (first sample, sequence length) of each change."""
        other = object.__new__(type(self))
        other.__dict__ = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("order", "schedule", "_reader", "_epoch_limit")
        }
        other.lengths = lengths
        return other

    def __len__(self) -> int:
        if self._indexed:
            return self.order.arrays["shuffle_index"].size
        return self.samples_per_epoch if self.num_samples is None else self.num_samples

    def get_batch(self, positions: Positions, *, out: Batch | None = None) -> Batch:
        """The samples at ``positions`` as stacked arrays.

        Args:
            positions: (B,) whole numbers in any order; beyond ``len`` too, unless this is one epoch.
            out: arrays to write into, by name (see ``SampleLayout.batch``).
        Raises:
            IndexError: a position that the stream does not have.
            BlendingError: positions of two sequence lengths.
            The source's error, if its data is damaged.
        """
        sample_B = checked_positions(positions, self._end)
        if sample_B.size:
            self.watch_epochs(int(sample_B.max()) + 1)
        rows = self.new_rows(sample_B.size, one_sequence_length(sample_B, self.order), out)
        rows = self._reader.read(np.zeros(sample_B.size, dtype=np.int64), sample_B, rows)
        return self.make_batch(rows, out)

    @property
    def looks_ahead(self) -> bool:
        return self._reader.looks_ahead

    def look_ahead(self, positions: Positions) -> None:
        sample_B = checked_positions(positions, self._end)
        self._reader.look_ahead(np.zeros(sample_B.size, dtype=np.int64), sample_B)

    def why(self, n: int) -> Why:
        """Where the tokens of sample ``n`` come from."""
        checked_positions([n], self._end)
        return Why(int(n), 0, self.name, int(n), self.token_ranges(int(n)), self.epochs_after(int(n)))

    def find_line(self, file: str, line: int, end: int) -> list[int]:
        """The samples below ``end`` that read the document of ``line`` of ``file``, if the pair has provenance.

        Raises:
            BlendingError: the pair does not know that file.
        Cost: a search of every sample below ``end``; no id is read.
        """
        last = whole_number("end", end, 0)
        checked_positions([last - 1] if last else [], self._end)
        return positions_that_read([self], file, line, last, lambda position_B: (np.zeros_like(position_B), position_B))

    @property
    def deals(self) -> bool:
        return self.config.ordering.deals

    @property
    def length_changes(self) -> tuple[int, ...]:
        return tuple(first for first, _ in self.lengths[1:])

    def epochs_after(self, samples: int) -> float:
        """How often the first ``samples`` samples read the part's tokens; 0 of a part without any."""
        if self.part.tokens == 0:
            return 0.0
        rows = self.config.ordering.rows_per_epoch(self)
        epochs = tokens_given(samples, self.lengths) / self.part.tokens if rows is None else samples / rows
        return min(1.0, epochs) if self.is_one_epoch else epochs

    def epochs(self, n: int) -> F64:
        """How often the first ``n`` positions read the dataset, (1,)."""
        return np.array([self.epochs_after(whole_number("n", n, 0))])

    @cached_property
    def _epoch_limit(self) -> EpochLimit | None:
        return epoch_limit_of(self.config, self.index_split, [self]) if not self.is_one_epoch else None

    def watch_epochs(self, end: int) -> None:
        """Tell once that the positions below ``end`` read the dataset more often than ``config.max_epochs``.

        Raises:
            BlendingError: they do, and ``config.max_epochs_error``.
        """
        if self._epoch_limit is not None and end > self._epoch_limit.next:
            self._epoch_limit.check(end, lambda n: np.array([n]), self.epochs, lambda _, sample: sample)

    def token_ranges(self, sample: int, dropped: I64 | None = None) -> tuple[TokenRange, ...]:
        """The ranges of a sample's tokens, in order, without padding; those of sequences ``dropped`` say so."""
        ranges = self.order.ranges_of(sample)
        first = self.part.first_token(ranges.sequence)
        source = self.part.source  # of a view its pair
        prefix = getattr(source, "path_prefix", None)
        provenance = getattr(source, "provenance", None)
        itemsize = np.dtype(source.dtype).itemsize
        document_R, sequence_R = self.part.documents_of(ranges.sequence)
        boundaries, in_source_R = several_sequences(source), ranges.sequence
        if boundaries is not None:
            in_source_R = np.searchsorted(boundaries, ranges.sequence, side="right") - 1
        found = []
        for number in range(ranges.piece.size):
            offset, length = int(ranges.offset[number]), int(ranges.length[number])
            known = first is not None and prefix is not None
            begin = (int(first[number]) + offset) * itemsize if known and first is not None else None
            found.append(
                TokenRange(
                    epoch=int(ranges.epoch[number]) if ranges.epoch[number] >= 0 else None,
                    document=int(document_R[number]),
                    offset=offset,
                    length=length,
                    path=f"{prefix}.bin" if known else None,
                    byte_begin=begin,
                    byte_end=None if begin is None else begin + length * itemsize,
                    sequence=None if sequence_R is None else int(sequence_R[number]),
                    dropped=dropped is not None and bool(np.isin(ranges.sequence[number], dropped)),
                    origin=None if provenance is None else provenance.of(int(in_source_R[number])),
                )
            )
        return tuple(found)

    def state_dict(self, position: int) -> State:
        """What a checkpoint keeps to continue at ``position``; see ``checkpoint_state.py``."""
        return self._state(position, STATE_VERSION)

    def _state(self, position: int, version: int) -> State:
        if self._indexed:
            return index_state(position, self.config, self.index_split, [self], {"samples": len(self)}, version)
        return stream_state(position, self.config, self.index_split, self.schedule, [self], version)

    def load_state_dict(self, state: State) -> int:
        """The position of a saved state.

        Raises:
            BlendingError: something that fixed the positions before it differs here.
        """
        position, version = saved_position(state)
        refuse_other_past(state, self._state(position, version), [self])
        return position
