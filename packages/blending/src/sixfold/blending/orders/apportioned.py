"""Exact counts: so many samples of each dataset by largest remainder, then one keyed shuffle of all positions.

    megatron/index_order.py, blend/exact_counts.py --> ORDER (this file)

The datasets have megatron-core's three indices, in files under names of their own; see ``cache/index_files.py``.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sixfold.blending.blend.exact_counts import ApportionedBlend
from sixfold.blending.blend.position_shuffle import Shuffle
from sixfold.blending.cache.indices import refuse_too_many_samples
from sixfold.blending.config.config import BlendedMegatronDatasetConfig
from sixfold.blending.errors import BlendingError
from sixfold.blending.megatron.index_order import IndexOrder
from sixfold.blending.numbers.largest_remainder import apportion
from sixfold.blending.numbers.weights import refuse_too_many_datasets
from sixfold.blending.orders.interface import Order, Positions, check_fields_of_indices, refuse_no_samples, some
from sixfold.blending.orders.megatron import samples_of_indices

if TYPE_CHECKING:
    from sixfold.blending.dataset.base import MegatronDataset
    from sixfold.blending.dataset.blended import BlendedDataset


class Apportioned(Order):
    """See the module."""

    name = "apportioned"
    indexed = True
    one_record = True

    def check(self, config: BlendedMegatronDatasetConfig) -> None:
        check_fields_of_indices(config)

    def samples(self, dataset: "MegatronDataset") -> IndexOrder:
        return samples_of_indices(dataset)

    def blend(
        self, blend: "BlendedDataset", datasets: "Sequence[MegatronDataset]", shuffle: Shuffle | None
    ) -> ApportionedBlend:
        """By largest remainder, or every sample of every dataset if there is no size."""
        config, weights, size = blend.config, blend.weights, blend.size
        held = [len(dataset) for dataset in datasets]
        try:
            refuse_too_many_datasets(len(datasets))
            if size is None:
                counts_D = np.array(held if weights is None else weights, dtype=np.int64)
                refuse_no_samples(counts_D.tolist(), config)
            else:
                tokens = [dataset.part.tokens for dataset in datasets]
                counts_D = apportion(tokens if weights is None else weights, size)
        except BlendingError as error:
            raise BlendingError(f"{error} (the datasets, from 0: {some(blend.names)})") from None
        total = int(counts_D.sum())
        if shuffle is None or shuffle.size != total:
            shuffle = Shuffle(int(config.random_seed), total)
        exact = ApportionedBlend(counts_D, shuffle, config.sequence_length)
        refuse_too_many_samples(exact, held, blend.names, config.mid_level_dataset_surplus)
        return exact

    def identifying(self, dataset: "MegatronDataset") -> dict[str, Any]:
        return {"order": self.name, "data": dataset.index_facts}

    def in_sample_order(self, positions: Positions) -> None:
        return None

    def arrays_of_blend(self, blend: "BlendedDataset") -> dict[str, Any]:
        return {"size": blend.size, "counts": blend.schedule.counts(len(blend)).tolist()}

    def shuffle(self, config: BlendedMegatronDatasetConfig, size: int) -> Shuffle:
        return Shuffle(int(config.random_seed), size)

    def weights(
        self, weights: Sequence[float] | None, size: int | None, tokens: Callable[[], Sequence[int]]
    ) -> Sequence[float] | None:
        return tokens() if weights is None and size is not None else weights

    def samples_to_build(
        self, weights: Sequence[float], size: int, config: BlendedMegatronDatasetConfig
    ) -> Sequence[int]:
        counts: list[int] = apportion(weights, size).tolist()
        return counts


ORDER = Apportioned()
