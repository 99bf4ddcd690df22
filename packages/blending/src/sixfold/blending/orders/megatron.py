"""megatron-core's order, bit for bit: three indices of each dataset, two of the blend, in its cache files.

megatron/index_order.py, blend/index_arrays.py, cache/indices.py --> ORDER (this file)
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sixfold.blending.blend.index_arrays import BlendIndex
from sixfold.blending.blend.position_shuffle import Shuffle
from sixfold.blending.cache.indices import blend_index, index_order, refuse_too_many_samples
from sixfold.blending.config.config import BlendedMegatronDatasetConfig
from sixfold.blending.errors import BlendingError
from sixfold.blending.megatron.document_index import plan_epochs, refuse_document
from sixfold.blending.megatron.index_order import IndexOrder
from sixfold.blending.megatron.sample_counts import normalized, targets, with_surplus
from sixfold.blending.numbers.checks import plain
from sixfold.blending.numbers.weights import refuse_weights
from sixfold.blending.orders.interface import Order, check_fields_of_indices, some
from sixfold.blending.samples.token_line import no_tokens

if TYPE_CHECKING:
    from sixfold.blending.dataset.base import MegatronDataset
    from sixfold.blending.dataset.blended import BlendedDataset


def samples_of_indices(dataset: "MegatronDataset") -> IndexOrder:
    """The three indices of a dataset, cached or built.

    Raises:
        BlendingError: it has no tokens, or more documents than an index numbers.
    """
    config, part = dataset.config, dataset.part
    if part.tokens == 0 and dataset.num_samples != 0:
        raise no_tokens(part, dataset.name, dataset.index_split.name)
    refuse_document(part.last)  # before anything as long as the documents is made
    options = dataset.index_options
    plan = plan_epochs(
        part.tokens,
        dataset.num_samples,
        config.sequence_length,
        options["extra_tokens"],
        keep_partial=options["keeps_partial"],
    )
    return index_order(
        part,
        plan,
        seed=int(config.random_seed),
        identifiers=dataset.unique_identifiers,
        facts=dataset.index_facts,
        path_to_cache=config.cache_folder,
    )


class Megatron(Order):
    """See the module."""

    name = "megatron"
    indexed = True
    by_name = False
    keeps_blend = True
    deals = False  # ranks take positions in turn, as under the peer

    def check(self, config: BlendedMegatronDatasetConfig) -> None:
        check_fields_of_indices(config)

    def samples(self, dataset: "MegatronDataset") -> IndexOrder:
        return samples_of_indices(dataset)

    def blend(
        self, blend: "BlendedDataset", datasets: "Sequence[MegatronDataset]", shuffle: Shuffle | None
    ) -> BlendIndex:
        """Cached or built; ``weights`` become those that the peer's description has."""
        held = [len(dataset) for dataset in datasets]
        given = held if blend.weights is None else blend.weights
        try:
            refuse_weights(given)
        except BlendingError as error:
            raise BlendingError(f"{error} (the datasets, from 0: {some(blend.names)})") from None
        blend.weights = given if blend.size is None else normalized(given)
        index = blend_index(
            blend.weights,
            blend.size,
            blend.config.sequence_length,
            identifiers=blend.unique_identifiers,
            path_to_cache=blend.config.cache_folder,
        )
        refuse_too_many_samples(index, held, blend.names, blend.config.mid_level_dataset_surplus)
        return index

    def arrays_of_blend(self, blend: "BlendedDataset") -> dict[str, Any]:
        """Counts do not fix the order of a greedy blend, so its weights are there too."""
        weights = [plain(weight) for weight in blend.weights or []]
        return {"size": blend.size, "counts": blend.schedule.counts(len(blend)).tolist(), "weights": weights}

    def weights(
        self, weights: Sequence[float] | None, size: int | None, tokens: Callable[[], Sequence[int]]
    ) -> Sequence[float] | None:
        return None if weights is None else normalized(weights)

    def samples_to_build(
        self, weights: Sequence[float], size: int, config: BlendedMegatronDatasetConfig
    ) -> Sequence[int]:
        return with_surplus(targets(weights, size), config.mid_level_dataset_surplus)

    def size(self, weights: Sequence[float] | None, size: int, held: Sequence[int]) -> int:
        return min(size, sum(held)) if weights is None else sum(targets(weights, size))


ORDER = Megatron()
