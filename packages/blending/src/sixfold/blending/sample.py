"""Token ids into the arrays that a GPT trains on.

    gather.py --> TokenRows --> SampleLayout (this file) --> get_batch

Pure numpy, a batch at a time: B samples of S tokens. Meanings as in megatron-core's
``gpt_dataset.py``, but every array belongs to the caller: nothing is shared between samples.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.config import GPTDatasetConfig, special_token
from sixfold.blending.errors import BlendingError

Batch = dict[str, npt.NDArray[Any]]
NO_PAD = -1  # an id that no data has


@dataclass(frozen=True, slots=True)
class TokenRows:
    """B rows of S ids while they are filled.

    ``tokens`` and ``labels`` start as padding everywhere. ``begins`` is True where a range of a
    document begins, always in column 0.
    """

    tokens: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    begins: npt.NDArray[np.bool_]


def pad_token(tokenizer: Any, allow_ambiguous: bool) -> int:
    """The id that padding has before it becomes 0: ``tokenizer.pad``, or -1.

    -1 if there is none, or if it is also another special token and masking it would mask real
    text (megatron-core ``megatron_dataset.py``).
    """
    pad = special_token(tokenizer, "pad")
    if pad is None:
        return NO_PAD
    named = getattr(tokenizer, "special_tokens_dict", None) or {}
    others = [token for name, token in named.items() if name != "pad_token"]
    if not others:
        others = [special_token(tokenizer, name) for name in ("eos", "eod")]
    return NO_PAD if pad in others and not allow_ambiguous else pad


class SampleLayout:
    """The arrays of a batch, as a ``GPTDatasetConfig`` asks for them."""

    def __init__(self, config: GPTDatasetConfig) -> None:
        self.config = config
        self.eod = special_token(config.tokenizer, "eod")
        self.pad = pad_token(config.tokenizer, config.allow_ambiguous_pad_tokens)
        self.dtype = np.dtype(config.token_dtype)

    def new_rows(self, samples: int, sequence_length: int, out: Batch | None = None) -> TokenRows:
        """Rows to fill, in the arrays of ``out`` where it has them."""
        shape = (samples, sequence_length)
        tokens, labels = (output_array(out, name, shape, self.dtype) for name in ("tokens", "labels"))
        tokens.fill(self.pad)
        labels.fill(self.pad)
        begins = np.zeros(shape, dtype=np.bool_)
        begins[:, 0] = True
        return TokenRows(tokens, labels, begins)

    def batch(self, rows: TokenRows, out: Batch | None = None) -> Batch:
        """The arrays of filled ``rows``.

        Args:
            rows: from ``new_rows``; their arrays become the batch's.
            out: arrays to write into, by name; their shapes and types must fit. ``cu_seqlens`` has
                another length in every batch and is always new.
        Returns:
            tokens, labels (B, S), loss_mask float32 (B, S), position_ids int64 (B, S) and, as
            configured, attention_mask bool (B, 1, S, S), cu_seqlens int32 of the flattened
            batch, document_ids int32 (B, S). ``out`` itself if given.
        """
        config, tokens, labels = self.config, rows.tokens, rows.labels
        shape = tokens.shape
        batch: Batch = {} if out is None else out
        if not config.add_extra_token_to_sequence:
            labels[:, -1] = self.pad
        is_eod = tokens == self.eod if self.eod is not None else np.zeros(shape, dtype=np.bool_)
        after_eod = np.zeros_like(is_eod)
        after_eod[:, 1:] = is_eod[:, :-1]
        loss_mask = output_array(out, "loss_mask", shape, np.dtype(np.float32))
        is_pad = labels == self.pad
        loss_mask[...] = ~(is_pad | is_eod) if config.eod_mask_loss else ~is_pad
        tokens[tokens == self.pad] = 0
        labels[is_pad] = 0
        positions = output_array(out, "position_ids", shape, np.dtype(np.int64))
        positions[...] = np.arange(shape[1])
        if config.reset_position_ids:
            positions -= np.maximum.accumulate(np.where(after_eod, positions, 0), axis=1)
        batch |= {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
        if config.create_attention_mask:
            mask = output_array(out, "attention_mask", (shape[0], 1, shape[1], shape[1]), np.dtype(np.bool_))
            mask[...] = np.triu(np.ones((shape[1], shape[1]), dtype=np.bool_), k=1)
            if config.reset_attention_mask:
                block = np.cumsum(after_eod, axis=1)
                mask |= block[:, None, :, None] != block[:, None, None, :]
            batch["attention_mask"] = mask
        begins = rows.begins | after_eod
        if config.create_cu_seqlens:
            batch["cu_seqlens"] = np.append(np.flatnonzero(begins), begins.size).astype(np.int32)
        if config.create_document_ids:
            numbers = output_array(out, "document_ids", shape, np.dtype(np.int32))
            np.cumsum(begins[:, 1:], axis=1, out=numbers[:, 1:])
            numbers[:, 0] = 0
            batch["document_ids"] = numbers
        return batch


def output_array(out: Batch | None, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``out[name]`` if it is there and fits, else a new array; BlendingError if it does not fit."""
    if out is None or name not in out:
        return np.empty(shape, dtype=dtype)
    array = out[name]
    if array.shape != shape or array.dtype != dtype:
        raise BlendingError(f"out[{name!r}] is {array.dtype} {array.shape}; this batch needs {dtype} {shape}")
    return array
