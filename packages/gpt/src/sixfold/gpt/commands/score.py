"""How well a model predicts a whole text, in nats per byte.

    PREFIX-valid --> windows --> model --> sum of -log p / bytes   (this file) --> demo.py
    rows --> document_arguments (this file) --> harness_model.py

Windows of ``seq_length`` inputs that do not overlap; every id but the very first is predicted exactly once, the ends of
documents included. The nats of all of them are divided by the bytes of the text: what a compressor built on the model
would need.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from sixfold.gpt.model.decoder import GPTModel

BATCH = 8


def windows(
    ids: npt.NDArray[np.integer], seq_length: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Inputs and labels, (B, S) each, that cover ``ids`` once; the last batch may be smaller and its rows shorter."""
    flat = ids.astype(np.int64)
    whole = (len(flat) - 1) // seq_length * seq_length
    inputs, labels = flat[:whole].reshape(-1, seq_length), flat[1 : whole + 1].reshape(-1, seq_length)
    for row in range(0, len(inputs), BATCH):
        yield inputs[row : row + BATCH], labels[row : row + BATCH]
    if whole + 1 < len(flat):
        yield flat[None, whole:-1], flat[None, whole + 1 :]


def boundaries(inputs: npt.NDArray[np.int64], eod: int) -> npt.NDArray[np.int32]:
    """cu_seqlens of the flattened batch: every row start, after every end of document, and the end."""
    begins = np.zeros(inputs.size + 1, dtype=bool)
    begins[:: inputs.shape[1]] = True
    begins[1:] |= inputs.ravel() == eod
    return np.flatnonzero(begins).astype(np.int32)


def document_arguments(inputs: npt.NDArray[np.int64], eod: int, document_mask: bool) -> dict[str, torch.Tensor]:
    """Arguments of ``GPTModel.forward`` that keep documents apart; none if it was trained without a mask."""
    from sixfold.gpt.data.token_stream import positions_in_documents

    if not document_mask:
        return {}
    cu_seqlens = boundaries(inputs, eod)
    positions = positions_in_documents(cu_seqlens, inputs.shape[1])
    return {"cu_seqlens": torch.from_numpy(cu_seqlens), "position_ids": torch.from_numpy(positions)}


def nats_per_byte(
    model: GPTModel,
    ids: npt.NDArray[np.integer],
    *,
    seq_length: int,
    eod: int,
    document_mask: bool = True,
    share: tuple[int, int] = (0, 1),
) -> float:
    """The loss of ``model`` on a text of byte tokens.

    Args:
        ids: (N,), N > 1: documents, each ended by ``eod``; every other id is one byte.
        document_mask: as the model was trained.
        share: (k, n) counts the k-th of n parts of the windows only; the n results add up to that of (0, 1).
    """
    part = islice(windows(ids, seq_length), share[0], None, share[1])
    return sum(_nats(model, *rows, eod, document_mask) for rows in part) / int((ids != eod).sum())


@torch.inference_mode()
def _nats(
    model: GPTModel, inputs: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], eod: int, document_mask: bool
) -> float:
    targets = torch.from_numpy(np.ascontiguousarray(labels))
    apart = document_arguments(inputs, eod, document_mask)
    return float(model(torch.from_numpy(np.ascontiguousarray(inputs)), labels=targets, **apart).double().sum())
