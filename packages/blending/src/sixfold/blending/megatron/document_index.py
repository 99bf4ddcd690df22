"""How many epochs are built, and the two shuffles: of documents and of samples.

    tokens, samples asked --> plan_epochs, document_index, shuffle_index (this file) --> sample_index.py, index_order.py

Source: megatron-core 0.16.1 ``gpt_dataset.py``. One ``RandomState`` draws in this order: the document
index, its last epoch if that is shuffled alone, the shuffle index, its last epoch.
n is the number of samples.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import kernels

_SEPARATE_BELOW = 0.80  # share of an epoch's samples below which the last epoch is shuffled alone
_KERNEL_FROM = 1_000  # items; for fewer, taking the state out and putting it back costs more than it gains
_LARGEST_DOCUMENT = 2**31 - 1  # the document index is int32


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What of one part is built.

    Attributes:
        epochs: E, copies of the part.
        tokens: T, of one epoch.
        sequence_length: S.
        extra: x, 1 if a sample holds one token more, for its last label.
        samples: n.
        before_last: samples before the last epoch if that one is shuffled alone, else None.
    """

    epochs: int
    tokens: int
    sequence_length: int
    extra: int
    samples: int
    before_last: int | None

    @property
    def total_tokens(self) -> int:
        """E * T."""
        return self.epochs * self.tokens


def plan_epochs(
    tokens: int, num_samples: int | None, sequence_length: int, extra: int, *, keep_partial: bool = False
) -> EpochPlan:
    """The fewest epochs that hold ``num_samples`` samples.

    Args:
        tokens: of one epoch; 0 only if ``num_samples`` is 0.
        num_samples: None for one epoch.
        sequence_length, extra: see ``EpochPlan``.
        keep_partial: the last samples may be shorter than ``sequence_length``.
    """
    assert tokens > 0 or num_samples == 0, f"{num_samples} samples of no tokens"
    wanted = 0 if num_samples is None else num_samples * sequence_length + extra
    epochs = max(1, -(-wanted // tokens)) if tokens else 1
    samples = _samples(epochs * tokens - extra, sequence_length, keep_partial)
    if epochs == 1 or num_samples is None:
        return EpochPlan(epochs, tokens, sequence_length, extra, samples, None)
    before_last = ((epochs - 1) * tokens - extra) // sequence_length
    per_epoch = (tokens - extra) // sequence_length
    separate = num_samples - before_last < int(_SEPARATE_BELOW * per_epoch)
    return EpochPlan(epochs, tokens, sequence_length, extra, samples, before_last if separate else None)


def _samples(tokens: int, sequence_length: int, keep_partial: bool) -> int:
    if tokens < 0:
        return 0
    if not keep_partial:
        return tokens // sequence_length
    # In float32 as helpers.cpp: above 2^24 tokens it is off, and a cache of the peer has as many rows.
    return int(np.ceil(np.int64(tokens).astype(np.float32) / np.float32(sequence_length)))


def document_index(ids: npt.NDArray[np.int64], plan: EpochPlan, random: np.random.RandomState) -> npt.NDArray[np.int32]:
    """Document of each place, (E * documents,): all epochs shuffled together, or the last alone.

    Raises:
        BlendingError: a document's number does not fit int32.
    """
    refuse_document(int(ids.max(initial=0)))
    index = np.tile(ids.astype(np.int32), plan.epochs)
    last = index.size - ids.size if plan.before_last is not None else index.size
    _shuffle(random, index[:last])
    if plan.before_last is not None:
        _shuffle(random, index[last:])
    return index


def _shuffle(random: np.random.RandomState, items: npt.NDArray[Any]) -> None:
    """``random.shuffle(items)``: the same order, and the same state left."""
    native = kernels() if items.size >= _KERNEL_FROM else None
    state = random.get_state(legacy=False) if native is not None else {}
    if native is None or state["bit_generator"] != "MT19937":
        random.shuffle(items)
        return
    twister = state["state"]
    twister["pos"] = native.shuffle(twister["key"], twister["pos"], items, 1)
    random.set_state(state)


def refuse_document(largest: int) -> None:
    """BlendingError for documents whose numbers a document index cannot hold."""
    if largest > _LARGEST_DOCUMENT:
        raise BlendingError(
            f"the dataset has a document {largest}; orders with an index number documents up to {_LARGEST_DOCUMENT}: "
            'use order="stateless", or split the dataset'
        )


def shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> npt.NDArray[Any]:
    """Sample of each position, (n,): uint32, or int64 from 2^32 - 2 samples on."""
    index = np.arange(plan.samples, dtype=shuffle_dtype(plan.samples))
    last = plan.samples if plan.before_last is None else plan.before_last
    _shuffle(random, index[:last])
    if last < plan.samples:
        _shuffle(random, index[last:])
    return index


def shuffle_dtype(samples: int) -> np.dtype[Any]:
    """The type of a shuffle index of so many samples."""
    return np.dtype(np.int64 if samples >= 2**32 - 2 else np.uint32)
