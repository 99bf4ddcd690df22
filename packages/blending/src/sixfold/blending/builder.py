"""From a config to the datasets of the three parts.

    config, sizes --> BlendedMegatronDatasetBuilder (this file) --> [train, valid, test]

With a process group every rank builds for itself; nothing is sent but errors.
"""

from collections.abc import Callable, Sequence
from os import fspath
from typing import TYPE_CHECKING

from sixfold.blending.apportion import apportion
from sixfold.blending.blended import BlendedDataset
from sixfold.blending.checks import whole_number
from sixfold.blending.config import BlendedMegatronDatasetConfig
from sixfold.blending.dataset import MegatronDataset
from sixfold.blending.errors import BlendingError
from sixfold.blending.megatron.weights import normalized, targets, with_surplus
from sixfold.blending.shuffle import Shuffle
from sixfold.blending.source import DocumentSource, Part
from sixfold.blending.splits import Bookends, Split, part_range

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Built = MegatronDataset | BlendedDataset | list[MegatronDataset] | None
_WHOLE = (0.0, 1.0)


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
    ) -> None:
        """Say what to build.

        Args:
            cls: ``GPTDataset`` or another ``MegatronDataset``.
            sizes: samples of train, valid, test; None is one epoch.
            is_built_on_rank: false gives Nones on this rank; ignored without a group.
            group: all its ranks build together, and an error of one is raised on all.
        Raises:
            BlendingError: sizes that are not three counts, no blend, or weights without a size.
        """
        if len(sizes) != len(Split):
            raise BlendingError(f"sizes is {list(sizes)}; it is three counts >= 0 or None: train, valid, test")
        if config.blend is None and config.blend_per_split is None:
            raise BlendingError("the config has neither blend nor blend_per_split; give one of them")
        self.cls = cls
        self.sizes = [
            None if size is None else whole_number(f"sizes[{split.value}] ({split.name})", size, 0)
            for split, size in zip(Split, sizes, strict=True)
        ]
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self.group = group
        self._opened: dict[str, DocumentSource] = {}
        self._shuffles: dict[Split, Shuffle] = {}
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

        One prefix without weights and without changes, or one in ``blend_per_split``, is a
        dataset of ``cls``; else a ``BlendedDataset``; with ``multiple_validation_sets`` valid is
        a list of datasets.

        Raises:
            BlendingError, or the error of the source that does not open; with a group a
            BlendingError on every rank.
        """
        if self.group is None:
            self._start_shuffles()
            return [self._part(split) for split in Split]
        from sixfold.blending.ranks import raise_together

        built: list[Built] = [None] * len(Split)
        problem: Exception | None = None
        try:
            if self.is_built_on_rank():
                self._start_shuffles()
                built = [self._part(split) for split in Split]
        except Exception as error:
            problem = error
        raise_together(problem, self.group)
        return built

    def _bookends(self, split: Split) -> Bookends | None:
        return _WHOLE if self.config.split_matrix is None else self.config.split_matrix[split.value]

    def _alone(self, split: Split) -> bool:
        """One dataset that is no blend and never becomes one."""
        blend = self.config.blend_of(split)
        one = blend is not None and len(blend[0]) == 1 and (blend[1] is None or self.config.blend_per_split is not None)
        return one and not self.config.changes_of(split)

    def _part(self, split: Split) -> Built:
        config, size, bookends = self.config, self.sizes[split.value], self._bookends(split)
        blend = config.blend_of(split)
        if blend is None or bookends is None:
            return None
        prefixes = [fspath(prefix) for prefix in blend[0]]
        if config.order == "stateless":
            prefixes = config.prefixes_of(split)
        if config.multiple_validation_sets and split is Split.valid:
            return [self._dataset(prefix, split, size, bookends) for prefix in prefixes]
        if self._alone(split):
            return self._dataset(prefixes[0], split, size, bookends)
        if config.order != "stateless":
            if size == 0 and not any(self._tokens(prefix, bookends) for prefix in prefixes):
                return None
            build = self._greedy_blend if config.order == "megatron" else self._apportioned_blend
            return build(prefixes, blend[1], split, bookends)
        # In an endless blend how many samples a dataset gives is the blend's to say.
        datasets = [self._dataset(prefix, split, None if size is None else 0, bookends) for prefix in prefixes]
        if size == 0 and not any(dataset.part.tokens for dataset in datasets):
            return None  # nothing is there and nothing is asked
        weights = blend[1]
        if weights is None and size is not None:
            weights = [dataset.part.tokens for dataset in datasets[: len(blend[0])]]
        blended = BlendedDataset(datasets, weights, size, config)
        if size is not None:
            for dataset, count in zip(blended.datasets, blended.counts(size).tolist(), strict=True):
                dataset.num_samples = count
        return blended

    def _greedy_blend(
        self, prefixes: list[str], weights: Sequence[float] | None, split: Split, bookends: Bookends
    ) -> BlendedDataset:
        """The blend of megatron-core's builder: a surplus of each dataset, and a few samples more than asked."""
        size = self.sizes[split.value]
        asked: list[int | None] = [None] * len(prefixes)
        if weights is not None:
            assert size is not None, "weights without a size are refused when the builder is made"
            weights = normalized(weights)
            target_D = targets(weights, size)
            size, asked = sum(target_D), [*with_surplus(target_D, self.config.mid_level_dataset_surplus)]
        parts = zip(prefixes, asked, strict=True)
        datasets = [self._dataset(prefix, split, samples, bookends) for prefix, samples in parts]
        if weights is None and size is not None:
            size = min(size, sum(map(len, datasets)))
        return BlendedDataset(datasets, weights, size, self.config)

    def _apportioned_blend(
        self, prefixes: list[str], weights: Sequence[float] | None, split: Split, bookends: Bookends
    ) -> BlendedDataset:
        """Each dataset with exactly its count, and all of them shuffled."""
        size = self.sizes[split.value]
        asked: list[int | None] = [None] * len(prefixes)
        if size is not None:
            if weights is None:
                weights = [self._tokens(prefix, bookends) for prefix in prefixes]
            asked = [*apportion(weights, size).tolist()]
        parts = zip(prefixes, asked, strict=True)
        datasets = [self._dataset(prefix, split, samples, bookends) for prefix, samples in parts]
        return BlendedDataset(datasets, weights, size, self.config, shuffle=self._shuffles.get(split))

    def _start_shuffles(self) -> None:
        """Begin what depends on sizes alone, before anything is opened."""
        for split in Split:
            size, there = self.sizes[split.value], self._bookends(split) is not None
            alone = self._alone(split) or (split is Split.valid and self.config.multiple_validation_sets)
            if self.config.order == "apportioned" and size and there and not alone and self.config.blend_of(split):
                self._shuffles[split] = Shuffle(int(self.config.random_seed), size).start()

    def _sequences(self, prefix: str, bookends: Bookends) -> tuple[DocumentSource, range]:
        if prefix not in self._opened:
            self._opened[prefix] = self.cls.build_low_level_dataset(fspath(prefix), self.config)
        source = self._opened[prefix]
        return source, part_range(bookends, self.cls.numel_low_level_dataset(source))

    def _tokens(self, prefix: str, bookends: Bookends) -> int:
        return Part(*self._sequences(prefix, bookends)).tokens

    def _dataset(self, prefix: str, split: Split, size: int | None, bookends: Bookends) -> MegatronDataset:
        source, sequences = self._sequences(prefix, bookends)
        return self.cls(source, prefix, sequences, size, split, self.config)
