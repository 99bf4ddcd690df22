"""How many samples a step trains on, and how many are trained by then.

    train.global_batch_size, train.batch_ramp --> batch_size, samples_before (this file) --> data order, rules.py

Pure: a resumed run asks for the same number and gets the same answer, so there is no state to save.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig


def batch_size(config: "TrainConfig", step: int) -> int:
    """Global batch of ``step`` in samples: the last entry of train.batch_ramp at or before it."""
    reached = [batch for start, batch in config.train.batch_ramp if start <= step]
    return reached[-1] if reached else config.train.global_batch_size


def batch_sizes(config: "TrainConfig") -> list[tuple[str, int]]:
    """Every global batch size of the run in samples, with the key that sets it."""
    entries = config.train.batch_ramp
    ramp = [(f"train.batch_ramp[{index}][1]", batch) for index, (_, batch) in enumerate(entries)]
    if entries and entries[0][0] == 0:  # train.global_batch_size is one of them, and no step reads it
        return ramp
    return [("train.global_batch_size", config.train.global_batch_size), *ramp]


def samples_before(config: "TrainConfig", step: int) -> int:
    """Samples that ``step`` updates have consumed."""
    return samples_of(config.train.global_batch_size, config.train.batch_ramp, step)


def samples_of(first: int, ramp: Iterable[Sequence[int]], step: int) -> int:
    """Samples of ``step`` updates: each has ``first`` until the ramp's [step, batch] say otherwise."""
    starts = [(0, first), *ramp, (step, 0)]
    total = 0
    for (begin, batch), (end, _) in pairwise(starts):
        total += max(min(end, step) - begin, 0) * batch
    return total
