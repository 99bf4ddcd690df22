"""The exponential moving average of a rank's main weights, which changes places with them for an evaluation.

    optimizer.ema_decay, updates done --> decay_after --> WeightAverage.update (this file), behind optimizer.step
    training_state.py <-- state_records;    an evaluation <-- swap

[Note: the rule] After update t of the run, each element of the average becomes ``average + (weight - average) *
(1 - d)`` with ``d = min(ema_decay, (1 + t) / (10 + t))``: the rule of TensorFlow's ExponentialMovingAverage with
num_updates. Without the second term (``optimizer.ema_warmup = false``) the first weights, which were drawn, count for
about 1 / (1 - d) updates.

Each element has three roundings of its own, so the bits do not depend on how weights are cut. An average is stored
beside its main weights, in their dtype and cut as they are. It depends on the weights and t alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sixfold.fsdp import StateRecord

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import OptimizerConfig

AVERAGE = "ema"  # the key of its records
_TOGETHER_BYTES = 64 * 2**20  # most differences that an update holds at a time, unless one tensor has more


def decay_after(config: OptimizerConfig, update: int) -> float:
    """What the average keeps of itself after update number ``update`` of the run, the first being 1."""
    if not config.ema_warmup:
        return config.ema_decay
    return min(config.ema_decay, (1 + update) / (10 + update))


class WeightAverage:
    """The average of the weights of one rank.

    Args:
        weights: gives the records of main weights, live; the same names in each call.
    """

    def __init__(self, weights: Callable[[], Sequence[StateRecord]]) -> None:
        self._weights = weights
        self._averages: dict[str, Tensor] = {}  # by the container's names; empty until it begins

    @property
    def has_begun(self) -> bool:
        """There are values, or room for those of a checkpoint."""
        return bool(self._averages)

    def begin(self) -> None:
        """Begin with the weights as they are."""
        self._averages = {record.name: record.tensor.detach().clone() for record in self._weights()}

    def make_room(self) -> None:
        """Make room for the values that a load writes."""
        self._averages = {record.name: torch.empty_like(record.tensor) for record in self._weights()}

    def forget(self) -> None:
        """Become as before it began."""
        self._averages = {}

    def state_records(self) -> list[StateRecord]:
        """Live aliases, as of main weights; none until it has begun."""
        if not self._averages:
            return []
        return [replace(one, key=AVERAGE, tensor=self._averages[one.name]) for one in self._weights()]

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Follow an update of the weights. [Note: the rule]"""
        for weights, averages in self._bundles():
            differences = list(torch._foreach_sub(weights, averages))
            torch._foreach_mul_(differences, 1.0 - decay)
            torch._foreach_add_(averages, differences)

    @torch.no_grad()
    def swap(self) -> None:
        """Weights and averages change places; twice leaves every bit where it was."""
        for record in self._weights():
            average = self._averages[record.name]
            weights = record.tensor.clone()
            record.tensor.copy_(average)
            average.copy_(weights)

    def _bundles(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Weights and their averages, ``_TOGETHER_BYTES`` at a time."""
        weights: list[Tensor] = []
        averages: list[Tensor] = []
        nbytes = 0
        for record in self._weights():
            if weights and nbytes + record.tensor.nbytes > _TOGETHER_BYTES:
                yield weights, averages
                weights, averages, nbytes = [], [], 0
            weights.append(record.tensor)
            averages.append(self._averages[record.name])
            nbytes += record.tensor.nbytes
        if weights:
            yield weights, averages
