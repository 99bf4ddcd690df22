"""The loss of a step by dataset: which source costs how much.

    SampleLosses --> token_loss (this file), as the loss of the pipeline --> sums_by_dataset (this file) --> step.py

A sample is of one dataset of the blend. The loss function of the pipeline is handed each microbatch's ``SampleLosses``
as its target and leaves the samples' nats there; training takes the sum alone, with the bits that it has without this.
All of it is on the device, where token_stream.py has sent it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sixfold.gpt.data.exact_losses import from_grids, on_grids


@dataclass(kw_only=True, slots=True)
class SampleLosses:
    """The b samples of a microbatch, one by one.

    Attributes:
        dataset: (b,) int64, number of the dataset in the blend.
        targets: (b,) float64, unmasked targets; with context parallelism those of this rank's part of the rows.
        nats: (b,) float64, summed losses, of the same part: left by the forward where the last stage is, else None.
    """

    dataset: torch.Tensor
    targets: torch.Tensor
    nats: torch.Tensor | None = None


def token_loss(losses: torch.Tensor, rows: SampleLosses | None) -> torch.Tensor:
    """The sum of per-token ``losses``, what the backward starts from; each sample's share is left in ``rows``.

    Args:
        losses: (b, S) or flattened, 0 where masked. A provider's loss of another size is not shared out.
    """
    if rows is not None and losses.numel() % len(rows.dataset) == 0:
        rows.nats = losses.detach().reshape(len(rows.dataset), -1).sum(1, dtype=torch.float64)
    return losses.sum()


def sums_by_dataset(batch: Iterable[SampleLosses | None], datasets: int, device: torch.device) -> torch.Tensor:
    """(4, datasets) float64 on ``device``, over the microbatches whose loss is known here.

    Nats of each on three grids, and targets: they may be added over ranks in any order. [Note: losses on three grids]
    """
    totals = torch.zeros(4, datasets, dtype=torch.float64, device=device)
    for rows in batch:
        if rows is not None and rows.nats is not None:
            number = rows.dataset.to(device, non_blocking=True)
            totals[:3].index_add_(1, number, on_grids(rows.nats))
            totals[3].index_add_(0, number, rows.targets.to(device, non_blocking=True))
    return totals


def mean_by_dataset(sums: Sequence[Sequence[float]]) -> dict[int, float]:
    """Nats per target by dataset number; datasets without a target in the step are left out.

    Args:
        sums: (4, datasets) of ``sums_by_dataset``, added over ranks.
    """
    return {i: from_grids(nats) / count for i, (*nats, count) in enumerate(zip(*sums, strict=True)) if count}
