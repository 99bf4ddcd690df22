"""Documents packed into rows and not cut: the stateless order with other samples.

    samples/packed_rows.py, cache/row_counts.py --> ORDER (this file)

``packing="best_fit"`` in the config chooses it. Which dataset gives a position is as in the stateless order, through
all changes. A sample is a row: whole documents, and perhaps padding. A weight counts rows or tokens (``blend_unit``).
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from sixfold.blending.cache.row_counts import kept_row_counts, row_counts
from sixfold.blending.config.config import BlendedMegatronDatasetConfig
from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import AbsentSource
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.weights import Weights
from sixfold.blending.orders.interface import Share
from sixfold.blending.orders.stateless import Stateless
from sixfold.blending.samples.document_shuffle import is_shuffled_whole
from sixfold.blending.samples.packed_rows import PackedRows, Windows

if TYPE_CHECKING:
    from sixfold.blending.dataset.base import MegatronDataset


def windows_of(config: BlendedMegatronDatasetConfig, named: tuple[str, str], part: Part) -> Windows:
    """The windows of one part: ``named`` are the dataset and its split."""
    shuffle = "global" if is_shuffled_whole(len(part), config.document_shuffle) else "block"
    return Windows(part, (int(config.random_seed), *named), config.sequence_length, shuffle)


class BestFit(Stateless):
    """See the module."""

    name = "best_fit"
    packs = True

    def check(self, config: BlendedMegatronDatasetConfig) -> None:
        for number, change in enumerate(config.changes):
            if change.sequence_length is not None:
                raise BlendingError(
                    f'changes[{number}].sequence_length is {change.sequence_length} with packing="{self.name}", whose '
                    "rows are packed for one length; leave it out, and begin a run of another length at position 0"
                )

    def warn(self, config: BlendedMegatronDatasetConfig) -> None:
        """``path_to_cache`` has an effect here."""

    def samples(self, dataset: "MegatronDataset") -> PackedRows:
        config = dataset.config
        windows = windows_of(config, (dataset.name, dataset.index_split.name), dataset.part)
        return PackedRows(windows, row_counts(windows, config.cache_folder), one_epoch=dataset.is_one_epoch)

    def rows_per_epoch(self, dataset: "MegatronDataset") -> int:
        source = dataset.indexed_dataset
        if isinstance(source, AbsentSource):
            return 0 if source.told is None else int(source.told["rows"])
        if dataset.part.tokens == 0:
            return 0
        assert isinstance(dataset.order, PackedRows), "this order made it"
        return dataset.order.rows

    def state_of(self, dataset: "MegatronDataset") -> dict[str, Any]:
        return {"rows": self.rows_per_epoch(dataset)}

    def size_of(self, dataset: "MegatronDataset") -> int:
        """Its rows, so that all epochs end together; in tokens as many as fill them."""
        return dataset.tokens if dataset.config.blend_unit == "tokens" else self.rows_per_epoch(dataset)

    def in_samples(self, weights: Weights, datasets: "Sequence[MegatronDataset]") -> Weights:
        if datasets[0].config.blend_unit == "rows":
            return weights
        found: list[Any] = [0] * len(weights)
        for number, (weight, dataset) in enumerate(zip(weights, datasets, strict=True)):
            if weight:  # tokens, over the tokens of a row in the mean of an epoch
                if dataset.tokens == 0:
                    dataset.order  # noqa: B018 - BlendingError of one that is absent or empty
                found[number] = Fraction(weight) * self.rows_per_epoch(dataset) / dataset.tokens
        return found

    def share_of_counts(
        self, config: BlendedMegatronDatasetConfig, named: tuple[str, str], part: Part, rank: int, ranks: int
    ) -> Share | None:
        if part.tokens == 0:
            return None
        windows = windows_of(config, named, part)
        kept = kept_row_counts(windows, config.cache_folder)
        if kept is not None:
            return Share(kept, is_whole=True)
        return Share(windows.rows(range(rank, len(windows), ranks)), is_whole=False)


ORDER = BestFit()
