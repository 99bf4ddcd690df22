"""Token ids into the arrays that a GPT trains on.

    gather.py --> TokenRows --> SampleLayout (this file) --> get_batch

A batch at a time, by the compiled kernel or numpy: B samples of S tokens. Meanings as in megatron-core's
``gpt_dataset.py``, but every array belongs to the caller: nothing is shared between samples.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.config.config import GPTDatasetConfig, special_token
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import kernels

Batch = dict[str, npt.NDArray[Any]]
NO_PAD = -1  # an id that no data has
_NONE = np.empty(0, dtype=np.int32)  # document ids that are not asked for
_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TokenRows:
    """B rows of S ids, C-contiguous. ``gather`` fills them; before, they are anything.

    Then ``tokens`` and ``labels`` are ``pad`` where there is no id, and ``begins`` is True where a range of a
    document begins, always in column 0.
    """

    tokens: npt.NDArray[Any]
    labels: npt.NDArray[Any]
    begins: npt.NDArray[np.bool_]
    pad: int
    counted: npt.NDArray[np.bool_] | None = None  # which labels count, where a source has a mask


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


def vocabulary(tokenizer: Any) -> int | None:
    """How many ids a tokenizer has, with those of its special tokens; None if it does not say."""
    size = special_token(tokenizer, "vocab_size")
    if not size or size < 0:
        return None
    named = [special_token(tokenizer, name) for name in ("eod", "pad", "eos")]
    return max(size, *(token + 1 for token in named if token is not None))


class SampleLayout:
    """The arrays of a batch, as a ``GPTDatasetConfig`` asks for them."""

    def __init__(self, config: GPTDatasetConfig) -> None:
        self.config = config
        eod = special_token(config.tokenizer, "eod")
        self.eod = None if eod == NO_PAD else eod  # no id of the data, and padding ends no document
        self.pad = pad_token(config.tokenizer, config.allow_ambiguous_pad_tokens)
        self.dtype = np.dtype(config.token_dtype)
        self.packs = config.ordering.packs  # a row is several documents, and each is by itself in every array
        self.ids = vocabulary(config.tokenizer)

    def new_rows(self, samples: int, sequence_length: int, out: Batch | None = None) -> TokenRows:
        """Rows to fill, in the arrays of ``out`` where it has them.

        Raises:
            BlendingError: an array of ``out`` does not fit, or is there under two names.
        """
        shape = (samples, sequence_length)
        _refuse_array_with_two_names(out)
        tokens, labels = output_array(out, "tokens", shape, self.dtype), output_array(out, "labels", shape, self.dtype)
        return TokenRows(tokens, labels, np.empty(shape, dtype=np.bool_), self.pad)

    def batch(self, rows: TokenRows, out: Batch | None = None) -> Batch:
        """The arrays of filled ``rows``.

        Args:
            rows: from ``new_rows``; their arrays become the batch's.
            out: arrays to write into, by name; their shapes and types must fit. ``cu_seqlens`` has
                another length in every batch and is always new.
        Returns:
            tokens, labels (B, S), loss_mask float32 (B, S), position_ids int64 (B, S). As
            configured: attention_mask bool (B, 1, S, S), cu_seqlens int32 of the flattened
            batch, document_ids int32 (B, S). ``out`` itself if given.
        """
        config, shape = self.config, rows.tokens.shape
        batch: Batch = {} if out is None else out
        loss_mask = output_array(out, "loss_mask", shape, np.dtype(np.float32))
        positions = output_array(out, "position_ids", shape, np.dtype(np.int64))
        numbers = output_array(out, "document_ids", shape, np.dtype(np.int32)) if config.create_document_ids else None
        mask = (
            output_array(out, "attention_mask", (shape[0], 1, shape[1], shape[1]), np.dtype(np.bool_))
            if (config.create_attention_mask)
            else None
        )
        if mask is not None:
            self._mask(rows, mask)
        native = kernels()
        if native is None or rows.tokens.dtype != np.int64:
            documents = self._by_numpy(rows, loss_mask, positions, numbers)
        else:
            documents = native.arrays_of_rows(
                self.eod or 0, self.pad, self._flags, shape[0], rows.tokens, rows.labels, rows.begins, loss_mask,
                positions, _NONE if numbers is None else numbers,
            )  # fmt: skip
        if rows.counted is not None:
            loss_mask *= rows.counted
        if self.packs and positions.reshape(-1)[np.flatnonzero(rows.begins)].any():
            _restart_at(rows.begins, positions)  # documents do not end with the eod, where positions restart already
        self._refuse_ids_beyond(rows)
        batch |= {"tokens": rows.tokens, "labels": rows.labels, "loss_mask": loss_mask, "position_ids": positions}
        if mask is not None:
            batch["attention_mask"] = mask
        if config.create_cu_seqlens:
            batch["cu_seqlens"] = _boundaries(rows.begins, documents)
        if numbers is not None:
            batch["document_ids"] = numbers
        return batch

    def _refuse_ids_beyond(self, rows: TokenRows) -> None:
        """BlendingError for an id that the vocabulary has not: an embedding would fail, or read other memory."""
        if self.ids is None or not rows.tokens.size:
            return
        unsigned = np.dtype(f"u{rows.tokens.itemsize}")
        last = rows.labels[:, -1]  # the other labels are tokens
        # Seen as unsigned, a negative id lies above all that a vocabulary has.
        if int(rows.tokens.view(unsigned).max()) < self.ids and int(last.astype(unsigned).max()) < self.ids:
            return
        whole = np.concatenate([rows.tokens, last[:, None]], axis=1)
        row, column = np.argwhere(whole.view(unsigned) >= self.ids)[0].tolist()
        raise BlendingError(
            f"sample {row} of the batch has the id {whole[row, column]} at token {column}, and tokenizer.vocab_size is "
            f"{self.ids}; the data comes from another tokenizer, or vocab_size does not count added tokens. "
            "len(tokenizer) of a Hugging Face tokenizer counts them"
        )

    @cached_property
    def _flags(self) -> int:
        """Options as ``native/gather.c`` numbers them."""
        config = self.config
        options = (
            not config.add_extra_token_to_sequence,
            self.eod is not None,
            config.eod_mask_loss,
            config.reset_position_ids or self.packs,
            config.create_cu_seqlens or config.create_document_ids or self.packs,
        )
        return sum(1 << place for place, option in enumerate(options) if option)

    def _behind_eod(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        behind = np.zeros(tokens.shape, dtype=np.bool_)
        if self.eod is not None:
            np.equal(tokens[:, :-1], self.eod, out=behind[:, 1:])
        return behind

    def _mask(self, rows: TokenRows, mask: npt.NDArray[Any]) -> None:
        """The dense mask, S x S for each sample."""
        S = rows.tokens.shape[1]
        mask[...] = np.triu(np.ones((S, S), dtype=np.bool_), k=1)
        if self.config.reset_attention_mask or self.packs:
            begins = self._behind_eod(rows.tokens)
            block = np.cumsum(begins | rows.begins if self.packs else begins, axis=1)
            mask |= block[:, None, :, None] != block[:, None, None, :]

    def _by_numpy(
        self,
        rows: TokenRows,
        loss_mask: npt.NDArray[Any],
        positions: npt.NDArray[Any],
        numbers: npt.NDArray[Any] | None,
    ) -> int:
        """What ``Kernels.arrays_of_rows`` does."""
        config, tokens, labels = self.config, rows.tokens, rows.labels
        if not config.add_extra_token_to_sequence:
            labels[:, -1] = self.pad
        behind_eod = self._behind_eod(tokens)
        is_pad = labels == self.pad
        unseen = is_pad | (tokens == self.eod) if config.eod_mask_loss and self.eod is not None else is_pad
        np.logical_not(unseen, out=loss_mask)
        tokens[tokens == self.pad] = 0
        labels[is_pad] = 0
        positions[...] = np.arange(tokens.shape[1])
        if config.reset_position_ids or self.packs:
            positions -= np.maximum.accumulate(np.where(behind_eod, positions, 0), axis=1)
        if not (config.create_cu_seqlens or config.create_document_ids or self.packs):
            return 0
        rows.begins[:, 0] = True
        np.logical_or(rows.begins, behind_eod, out=rows.begins)
        if numbers is not None:
            np.cumsum(rows.begins[:, 1:], axis=1, out=numbers[:, 1:])
            numbers[:, 0] = 0
        return int(np.count_nonzero(rows.begins))


def _restart_at(begins: npt.NDArray[np.bool_], positions: npt.NDArray[Any]) -> None:
    """Positions that restart wherever a document begins."""
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=begins.size)
    np.subtract(np.arange(begins.size), np.repeat(starts, lengths), out=positions.reshape(-1))


def _boundaries(begins: npt.NDArray[np.bool_], documents: int) -> npt.NDArray[Any]:
    """cu_seqlens of the flattened batch, (documents + 1,) int32.

    Raises:
        BlendingError: more tokens than int32 counts.
    """
    if begins.size > _INT32:
        raise BlendingError(
            f"a batch of {begins.shape[0]} samples of {begins.shape[1]} tokens has cu_seqlens up to {begins.size}; "
            "they are int32, below 2^31: ask for fewer samples at a time"
        )
    native = kernels()
    if native is None:
        return np.append(np.flatnonzero(begins), begins.size).astype(np.int32)
    boundaries = np.empty(documents + 1, dtype=np.int32)
    native.boundaries(begins, boundaries)
    return boundaries


def _refuse_array_with_two_names(out: Batch | None) -> None:
    names = {id(array): name for name, array in (out or {}).items()}
    if out is not None and len(names) < len(out):
        name, other = next((name, names[id(array)]) for name, array in out.items() if names[id(array)] != name)
        raise BlendingError(
            f"out[{name!r}] and out[{other!r}] are one array, and each would write over the other; make one for each"
        )


def output_array(out: Batch | None, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``out[name]`` if it is there and fits, else a new array; BlendingError if it does not fit."""
    if out is None or name not in out:
        return np.empty(shape, dtype=dtype)
    array = out[name]
    if not isinstance(array, np.ndarray):
        raise BlendingError(
            f"out[{name!r}] is a {type(array).__name__}; it is a numpy array: of a tensor give .numpy()"
        )
    if array.shape != shape or array.dtype != dtype:
        raise BlendingError(f"out[{name!r}] is {array.dtype} {array.shape}; this batch needs {dtype} {shape}")
    flags = array.flags
    if not (flags.c_contiguous and flags.writeable and flags.aligned):
        raise BlendingError(f"out[{name!r}] is not writable or not C-contiguous; give an array as np.empty makes it")
    return array
