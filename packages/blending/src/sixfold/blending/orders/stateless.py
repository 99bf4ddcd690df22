"""The order that is computed from positions: a quota tree over datasets, chunks of a shuffled line of documents.

    blend/schedule.py, samples/chunk_grid.py --> ORDER (this file)

Nothing is built and nothing is kept. Blends, datasets and sequence lengths change at any position.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sixfold.blending.blend.position_shuffle import Shuffle
from sixfold.blending.blend.schedule import Schedule, eras_of
from sixfold.blending.config.config import BlendedMegatronDatasetConfig
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.weights import Weights
from sixfold.blending.orders.interface import Order, Samples, refuse_no_samples, some
from sixfold.blending.samples.chunk_grid import SampleOrder
from sixfold.blending.samples.document_shuffle import token_line_of

if TYPE_CHECKING:
    from sixfold.blending.dataset.base import MegatronDataset
    from sixfold.blending.dataset.blended import BlendedDataset


class Stateless(Order):
    """See the module."""

    name = "stateless"

    def warn(self, config: BlendedMegatronDatasetConfig) -> None:
        if config.path_to_cache:
            warnings.warn(
                f'path_to_cache is {config.path_to_cache!r} and order is "stateless", which has no files: nothing is '
                'read there or written; to go on with the order of a Megatron cache set order="megatron"',
                stacklevel=5,
            )

    def samples(self, dataset: "MegatronDataset") -> Samples:
        config = dataset.config
        seed, split = int(config.random_seed), dataset.index_split.name
        line = token_line_of(dataset.part, seed, dataset.name, split, config.document_shuffle)
        return SampleOrder(line, dataset.lengths, chunks=dataset.samples_per_epoch if dataset.is_one_epoch else None)

    def blend(
        self, blend: "BlendedDataset", datasets: "Sequence[MegatronDataset]", shuffle: Shuffle | None
    ) -> Schedule:
        config, weights = blend.config, blend.weights
        paths = [dataset.dataset_path or "" for dataset in datasets]
        try:
            if blend.size is None:
                counts = [dataset.samples_per_epoch for dataset in datasets] if weights is None else list(weights)
                refuse_no_samples([*map(int, counts)], config)
                return Schedule.one_epoch([*map(int, counts)], config.sequence_length)
            sizes = [self.size_of(dataset) for dataset in datasets]
            first = sizes if weights is None else weights
            changes = config.changes_of(blend.index_split)
            eras = eras_of(paths, sizes, first, config.sequence_length, changes, config.place_of)
            return Schedule([replace(era, weights=self.in_samples(era.weights, datasets)) for era in eras])
        except BlendingError as error:
            raise BlendingError(f"{error} (the datasets, from 0: {some(paths)})") from None

    def in_samples(self, weights: Weights, datasets: "Sequence[MegatronDataset]") -> Weights:
        """Weights of samples; those that were given are of samples already, which all have as many tokens."""
        return weights


ORDER = Stateless()
