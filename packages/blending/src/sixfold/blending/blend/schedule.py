"""Which dataset gives which position through all changes of a blend.

    config.changes --> eras --> Schedule (this file): position <--> (dataset, sample) --> dataset/blended.py

Pure. A segment is the stretch of positions between two changes. It has its own tree, and the number of
samples that each dataset gave before it. So every dataset continues from its own count.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sixfold.blending.blend.quota_tree import QuotaTree
from sixfold.blending.config.config import BlendChange
from sixfold.blending.config.prefixes import Prefix, text_of
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import whole_number
from sixfold.blending.numbers.kernels import I64
from sixfold.blending.numbers.weights import Weights


@dataclass(frozen=True, slots=True)
class Era:
    """What the user said for the positions from ``begin`` on: weights by dataset, tokens per sample."""

    begin: int
    weights: Weights
    sequence_length: int


@dataclass(frozen=True, slots=True)
class Segment:
    """An era with its tree and the samples that each dataset gave before, (D,)."""

    begin: int
    sequence_length: int
    tree: QuotaTree
    before: I64


def eras_of(
    paths: Sequence[str],
    tokens: Sequence[int],
    weights: Weights,
    sequence_length: int,
    changes: Sequence[BlendChange],
    place_of: Callable[[Prefix], str],
) -> list[Era]:
    """The eras of a blend of D datasets.

    Args:
        paths: (D,) prefixes: those of the first blend, then those that changes add.
        tokens: (D,) tokens of each dataset's part: the weights of a blend that gives none.
        weights: of the first blend, at most D.
        place_of: one text for every way to write a path.
    Raises:
        BlendingError: a change names a dataset that is not among ``paths``.
    """
    numbers = {place_of(path): number for number, path in enumerate(paths)}
    eras = [Era(0, _padded(weights, len(paths)), sequence_length)]
    for change in changes:
        if change.blend is None and change.sequence_length is None:
            continue  # documents that are dropped leave every position where it was
        last = eras[-1]
        after = last.weights if change.blend is None else _weights_by_dataset(change, numbers, tokens, place_of)
        eras.append(Era(int(change.at), after, change.sequence_length or last.sequence_length))
    return [era for era, later in zip(eras, [*eras[1:], None], strict=True) if later is None or later.begin > era.begin]


def _padded(weights: Weights, datasets: int) -> Weights:
    return [*weights, *([0] * (datasets - len(weights)))]


def _weights_by_dataset(
    change: BlendChange, numbers: Mapping[str, int], tokens: Sequence[int], place_of: Callable[[Prefix], str]
) -> Weights:
    assert change.blend is not None, "the caller looks at blends"
    prefixes, weights = change.blend
    by_dataset: list[float] = [0] * len(tokens)
    for number, prefix in enumerate(prefixes):
        dataset = numbers.get(place_of(prefix))
        if dataset is None:
            raise BlendingError(
                f"the change at {change.at} names {text_of(prefix)!r}, which is none of the datasets blended"
            )
        by_dataset[dataset] = tokens[dataset] if weights is None else weights[number]
    return by_dataset


class Schedule:
    """Position <--> (dataset, sample), with exact counts through every change.

    Attributes:
        segments: ascending, the first begins at 0.
        end: positions in all; None for an endless stream.
    """

    def __init__(self, eras: Sequence[Era]) -> None:
        """An endless stream."""
        self.end: int | None = None
        self.segments: list[Segment] = []
        for era in eras:
            if self.segments:
                last = self.segments[-1]
                before = last.before + last.tree.counts(era.begin - last.begin)
            else:
                before = np.zeros(len(era.weights), dtype=np.int64)
            self.segments.append(Segment(era.begin, era.sequence_length, QuotaTree(era.weights), before))
        self._begins = np.array([segment.begin for segment in self.segments], dtype=np.int64)

    @classmethod
    def one_epoch(cls, counts: Sequence[int], sequence_length: int) -> "Schedule":
        """Every sample of every dataset once: ``counts[i]`` of dataset i."""
        schedule = cls([])
        tree = QuotaTree.from_counts(counts)
        schedule.end = tree.period
        schedule.segments = [Segment(0, sequence_length, tree, np.zeros(len(counts), dtype=np.int64))]
        schedule._begins = np.zeros(1, dtype=np.int64)
        return schedule

    @property
    def indices(self) -> None:
        """Nothing is stored."""
        return None

    @cached_property
    def only_length(self) -> int | None:
        """The sequence length of every sample; None if it changes."""
        lengths = {segment.sequence_length for segment in self.segments}
        return lengths.pop() if len(lengths) == 1 else None

    def sequence_lengths(self, positions: I64) -> I64:
        """Tokens per sample at each position."""
        lengths = np.array([segment.sequence_length for segment in self.segments], dtype=np.int64)
        return lengths[np.searchsorted(self._begins, positions, side="right") - 1]

    def lengths_of(self, dataset: int) -> tuple[tuple[int, int], ...]:
        """(first sample, sequence length) of ``dataset``, one for each change of the sequence length."""
        lengths = [(0, self.segments[0].sequence_length)]
        for segment in self.segments[1:]:
            if segment.sequence_length != lengths[-1][1]:
                lengths.append((int(segment.before[dataset]), segment.sequence_length))
        return tuple(lengths)

    def locate(self, positions: I64) -> tuple[I64, I64]:
        """(dataset, sample) of each position, int64."""
        if len(self.segments) == 1:
            return self.segments[0].tree.locate(positions)
        dataset_P, sample_P = np.empty_like(positions), np.empty_like(positions)
        number_P = np.searchsorted(self._begins, positions, side="right") - 1
        for number in np.unique(number_P).tolist():
            segment, here = self.segments[number], number_P == number
            dataset, sample = segment.tree.locate(positions[here] - segment.begin)
            dataset_P[here], sample_P[here] = dataset, sample + segment.before[dataset]
        return dataset_P, sample_P

    def find(self, dataset: int, sample: int) -> int:
        """The position of a dataset's sample.

        Raises:
            BlendingError: no whole number >= 0, or no position ever gives it.
        """
        sample = whole_number("sample", sample, 0)
        befores = [int(segment.before[dataset]) for segment in self.segments]
        number = max(bisect_right(befores, sample) - 1, 0)  # the last segment that begins with no more samples
        segment = self.segments[number]
        quota = int(segment.tree.quotas[dataset])
        if quota == 0 or (self.end is not None and sample >= quota):
            raise BlendingError(f"sample {sample} of dataset {dataset} comes at no position of this blend")
        return segment.begin + segment.tree.find(dataset, sample - befores[number])

    def counts(self, n: int) -> I64:
        """Samples of each dataset among the first ``n`` positions, (D,) int64."""
        segment = self.segments[max(int(np.searchsorted(self._begins, n, side="right")) - 1, 0)]
        return segment.before + segment.tree.counts(n - segment.begin)
