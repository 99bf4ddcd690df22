"""What an order is asked (this file): by the config, by a dataset, by a blend, by the builder.

    stateless.py, megatron.py, apportioned.py --> Order --> config, dataset, builder

An order is one object without a state of its own. It makes the two values that hold everything: of a dataset its
``Samples`` (sample --> tokens), of a blend its ``Positions`` (position <--> dataset, sample).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy.typing as npt

from sixfold.blending.batches import reader
from sixfold.blending.blend.position_shuffle import Shuffle
from sixfold.blending.config.config import BlendedMegatronDatasetConfig
from sixfold.blending.documents.part import Part
from sixfold.blending.errors import BlendingError
from sixfold.blending.megatron.greedy import BlendIndices
from sixfold.blending.numbers.kernels import I64
from sixfold.blending.samples.token_line import Ranges

if TYPE_CHECKING:
    from sixfold.blending.dataset.base import MegatronDataset
    from sixfold.blending.dataset.blended import BlendedDataset


class Samples(reader.Order, Protocol):
    """Which tokens the n-th sample of one dataset is."""

    @property
    def only_length(self) -> int | None:
        """The sequence length of every sample; None if there are several."""

    @property
    def document_shuffle(self) -> str:
        """How the documents are shuffled: "global" or "block"."""

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its indices by name; none of an order that computes."""

    def sequence_lengths(self, samples: I64, /) -> I64:
        """Of each sample."""

    def ranges_of(self, sample: int, /) -> Ranges:
        """The tokens of one sample; epoch -1 where an order does not say."""


class Positions(Protocol):
    """Which dataset and sample each position of a blend is."""

    @property
    def end(self) -> int | None:
        """Positions in all; None for an endless stream."""

    @property
    def only_length(self) -> int | None:
        """The sequence length of every sample; None if there are several."""

    @property
    def indices(self) -> BlendIndices | None:
        """(dataset, sample) of every position; None of an order that computes."""

    def sequence_lengths(self, positions: I64, /) -> I64:
        """Tokens per sample at each position."""

    def locate(self, positions: I64, /) -> tuple[I64, I64]:
        """(dataset, sample) of each position."""

    def find(self, dataset: int, sample: int) -> int:
        """The position of a dataset's sample."""

    def counts(self, n: int) -> I64:
        """Samples of each dataset among the first ``n`` positions."""


@dataclass(frozen=True)
class Share:
    """What one rank counted: ``counts`` of all, or of every so many-th from its number on."""

    counts: I64
    is_whole: bool


class Order(ABC):
    """One order; see the module.

    Attributes:
        name: in configs, states and cache files.
        indexed: it is made of arrays. They are built for one blend and one size, kept in files, and they end.
        by_name: the names of the datasets are in its keys, so no two datasets have one name.
        one_record: one metadata file tells of all index files of a blend; see ``cache/index_files.py``.
        keeps_blend: the blend has index files of its own.
        deals: a sampler permutes the positions of a step before ranks share them; see ``blend/deal.py``.
        packs: a sample is a row of whole documents; chosen by ``packing`` in the config.
    """

    name: ClassVar[str]
    indexed: ClassVar[bool] = False
    by_name: ClassVar[bool] = True
    one_record: ClassVar[bool] = False
    keeps_blend: ClassVar[bool] = False
    deals: ClassVar[bool] = True
    packs: ClassVar[bool] = False

    def check(self, config: BlendedMegatronDatasetConfig) -> None:  # noqa: B027 - most fit
        """Refuse fields that do not fit, with a BlendingError."""

    def warn(self, config: BlendedMegatronDatasetConfig) -> None:  # noqa: B027 - most have an effect
        """Warn of fields without an effect, when all has been checked."""

    @abstractmethod
    def samples(self, dataset: "MegatronDataset") -> Samples:
        """Which tokens each sample of a dataset is.

        Raises:
            BlendingError: samples are asked of a part that has no tokens.
        """

    @abstractmethod
    def blend(
        self, blend: "BlendedDataset", datasets: "Sequence[MegatronDataset]", shuffle: Shuffle | None
    ) -> Positions:
        """Which dataset gives which position; sets ``blend.weights`` to those that files and states have.

        Args:
            shuffle: of the positions, if one was begun.
        Raises:
            BlendingError: weights or sizes do not fit.
        """

    def size_of(self, dataset: "MegatronDataset") -> int:
        """The weight of a dataset in a blend without weights."""
        return dataset.tokens

    def rows_per_epoch(self, dataset: "MegatronDataset") -> int | None:
        """Samples of every epoch of a dataset; None of an order that cuts epochs by tokens."""
        return None

    def state_of(self, dataset: "MegatronDataset") -> dict[str, Any]:
        """For a state: what its samples depend on beside the documents and their shuffle."""
        return {}

    def identifying(self, dataset: "MegatronDataset") -> dict[str, Any]:
        """What the names of cache files depend on beside what the peer's depend on."""
        return {}

    def in_sample_order(self, positions: Positions) -> Callable[[int, int], int] | None:
        """``positions.find`` if a dataset's later samples have later positions; else None."""
        return positions.find

    def arrays_of_blend(self, blend: "BlendedDataset") -> dict[str, Any]:
        """For a state: what the arrays of a blend depend on beside the datasets, JSON values."""
        raise AssertionError(f"order {self.name} has no arrays")

    # ---- asked by a builder

    def share_of_counts(
        self, config: BlendedMegatronDatasetConfig, named: tuple[str, str], part: Part, rank: int, ranks: int
    ) -> Share | None:
        """What a rank counts of a part before it is opened: all where a file has it, else every ``ranks``-th.

        Args:
            named: the dataset and its split.
        """
        return None

    # ---- of the orders with indices alone

    def shuffle(self, config: BlendedMegatronDatasetConfig, size: int) -> Shuffle | None:
        """What of a blend of ``size`` positions can begin before a dataset is opened."""
        return None

    def weights(
        self, weights: Sequence[float] | None, size: int | None, tokens: Callable[[], Sequence[int]]
    ) -> Sequence[float] | None:
        """Weights of a blend as it is built; ``tokens`` opens the datasets and counts theirs."""
        return weights

    def samples_to_build(
        self, weights: Sequence[float], size: int, config: BlendedMegatronDatasetConfig
    ) -> Sequence[int]:
        """Samples that each dataset is built with."""
        raise AssertionError(f"order {self.name} builds no indices")

    def size(self, weights: Sequence[float] | None, size: int, held: Sequence[int]) -> int:
        """Positions of a blend of which ``size`` are asked; ``held`` are samples of the datasets."""
        return size


_SEEDS_OF_INDICES = 2**32  # numpy.random.RandomState takes no others


def check_fields_of_indices(config: BlendedMegatronDatasetConfig) -> None:
    """BlendingError for fields that do not fit an order with indices."""
    if config.document_shuffle == "block":
        raise BlendingError(
            f'document_shuffle is "block" with order "{config.order}", which shuffles all documents of a dataset '
            'together; leave it out, or use order="stateless"'
        )
    if not 0 <= config.random_seed < _SEEDS_OF_INDICES:
        raise BlendingError(
            f'random_seed is {config.random_seed}; order "{config.order}" takes the seeds of numpy.random.RandomState: '
            "0 to 2^32 - 1"
        )
    if config.changes:
        raise BlendingError(
            f'changes are given with order "{config.order}", whose index is built for one blend; '
            'use order="stateless", the one that can change'
        )
    if not 0 <= config.mid_level_dataset_surplus < float("inf"):
        raise BlendingError(f"mid_level_dataset_surplus is {config.mid_level_dataset_surplus}; it is finite and >= 0")


def some(names: Sequence[str]) -> str:
    """The first names, for a message."""
    return f"{', '.join(names[:8])}{' ...' * (len(names) > 8)}"


def refuse_no_samples(counts: Sequence[int], config: BlendedMegatronDatasetConfig) -> None:
    """BlendingError for one epoch of datasets that are all shorter than a sample."""
    if not any(counts):
        raise BlendingError(
            f"one epoch of {len(counts)} datasets gives no sample: each has fewer tokens than sequence_length "
            f"{config.sequence_length} needs; give a shorter sequence_length or a size"
        )
