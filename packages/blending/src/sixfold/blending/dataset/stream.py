"""What a dataset and a blend both offer: samples by position.

positions --> Samples (this file) <-- base.py, blended.py; position_sampler.py and batches/prefetch.py read it
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np

from sixfold.blending.batches.gpt_arrays import Batch
from sixfold.blending.dataset.provenance import Why
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import Positions, checked_positions
from sixfold.blending.numbers.kernels import I64


class HasSequenceLengths(Protocol):
    """Whatever says how long the samples at positions are."""

    @property
    def only_length(self) -> int | None:
        """The sequence length of every sample; None if there are several."""

    def sequence_lengths(self, positions: I64, /) -> I64:
        """Of each position."""


def one_sequence_length(positions: I64, order: HasSequenceLengths) -> int:
    """The sequence length that all samples of a batch have.

    Raises:
        BlendingError: they have two.
    """
    if order.only_length is not None:
        return order.only_length
    lengths = order.sequence_lengths(positions if positions.size else np.zeros(1, dtype=np.int64))
    other = np.flatnonzero(lengths != lengths[0])
    if other.size:
        raise BlendingError(
            f"positions {positions[0]} and {positions[other[0]]} have sequence lengths {lengths[0]} and "
            f"{lengths[other[0]]}; a batch has one: put the change on a batch's edge"
        )
    return int(lengths[0])


class Samples(ABC):
    """What a dataset and a blend both offer: ``len``, ``[n]``, ``[[n, m]]``, ``get_batch``, ``why``, pickling."""

    @abstractmethod
    def __len__(self) -> int:
        """Samples asked for. An order without an end gives later positions too, to ``get_batch``."""

    @abstractmethod
    def get_batch(self, positions: Positions, *, out: Batch | None = None) -> Batch:
        """The samples at any positions as stacked arrays."""

    @property
    @abstractmethod
    def looks_ahead(self) -> bool:
        """Whether ``look_ahead`` helps: some ids come from afar, as from a URL."""

    @abstractmethod
    def look_ahead(self, positions: Positions) -> None:
        """Begin to fetch what ``get_batch`` of these positions reads, and return; `Prefetcher` calls it.

        Raises:
            IndexError: a position that the stream does not have.
            The source's error: its data is damaged, or its cache is too small for the positions.
        """

    @abstractmethod
    def why(self, n: int) -> Why:
        """Where the tokens of position ``n`` come from."""

    @property
    def length_changes(self) -> tuple[int, ...]:
        """Positions from which on samples have another length."""
        return ()

    @property
    @abstractmethod
    def deals(self) -> bool:
        """Whether a sampler permutes the positions of a step before ranks share them."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the reader, whose handles are of this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_reader"}

    def __getitem__(self, index: int | Positions | None) -> dict[str, Any]:
        """One sample without the batch axis, or ``get_batch`` of a list of positions.

        None gives sample 0 without loss: it fills a batch up (as megatron-core).

        Raises:
            IndexError: outside ``0 .. len - 1``.
        """
        if isinstance(index, bool):
            raise BlendingError(f"positions are bool, {index}; they are whole numbers below 2^63")
        if index is not None and not isinstance(index, int | np.integer):
            return self.get_batch(index)
        number = 0 if index is None else int(index)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} is not in 0..{len(self) - 1}")
        batch = self.get_batch([number])
        sample: dict[str, Any] = {name: array if name == "cu_seqlens" else array[0] for name, array in batch.items()}
        if index is None:
            sample["loss_mask"][...] = 0
        return sample

    def __getitems__(self, positions: Positions) -> list[dict[str, Any]]:
        """The samples at ``positions``, read as one batch. A torch loader with ``batch_sampler=`` calls it.

        Raises:
            IndexError: a position that the stream does not have; as of ``get_batch``, and not of ``[n]``.
        """
        numbers = checked_positions(positions, None)
        batch = self.get_batch(numbers)
        rows = [
            {name: array[row] for name, array in batch.items() if name != "cu_seqlens"} for row in range(len(numbers))
        ]
        if "cu_seqlens" in batch:
            width = batch["tokens"].shape[1]
            boundaries = batch["cu_seqlens"]
            edges = np.searchsorted(boundaries, np.arange(len(numbers) + 1) * width)
            for row, sample in enumerate(rows):
                sample["cu_seqlens"] = boundaries[edges[row] : edges[row + 1] + 1] - row * width
        return rows
