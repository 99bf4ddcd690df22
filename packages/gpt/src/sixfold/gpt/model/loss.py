"""Cross entropy per token, in float32, a chunk of tokens at a time.

    head's logits in the model's dtype --> token_losses (this file) --> (b, s) float32, summed by the train loop

Float32 logits of the whole micro-batch never exist: a chunk is cast, used and dropped, in backward once more.
Tensor-parallel ranks have columns of the logits each. Two numbers of a token travel, in two all-reduces: its largest
logit, then the sum of exponentials behind it together with its target's logit; backward sends nothing.

[Note: terms of the gradient] A z-loss and label smoothing are in the gradient alone. What is returned, logged and
compared stays the plain cross entropy in nats, so that curves with and without them mean the same.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sixfold.gpt.parallel.axes import ALONE, Axis
from sixfold.gpt.parallel.lost_ranks import axis_collective

# Float32 elements of a chunk. On a CPU a chunk stays in the cache; elsewhere few launches count more.
_CHUNK_ELEMENTS = {"cpu": 2**18}
_CHUNK_ELEMENTS_ELSEWHERE = 2**26


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """What the gradient has beside the cross entropy; see [Note: terms of the gradient].

    Attributes:
        z_loss: weight of log(sum of exponentials)^2 of a token (PaLM, arXiv 2204.02311, section 5; there 1e-4).
        label_smoothing: share of a target that all of the vocabulary has alike, as torch's ``cross_entropy``.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0

    def gradient(self, shares: Tensor, normaliser: Tensor, targets: Tensor, hits: Tensor | float, vocab: int) -> Tensor:
        """Of a chunk's logits, made in place of ``shares``, its softmax.

        Args:
            normaliser: log of the sum of exponentials of each row. targets: (rows, 1), a column here.
            hits: 1 where that column is the target, else 0. vocab: columns of all ranks.
        """
        if self.z_loss:
            shares.mul_(torch.add(1.0, normaliser, alpha=2 * self.z_loss).unsqueeze(1))
        if self.label_smoothing:
            shares.sub_(self.label_smoothing / vocab)
            hits = hits * (1 - self.label_smoothing)
        # not scatter_add_, which has no fixed order on a GPU
        return shares.scatter_(1, targets, shares.gather(1, targets) - hits)


PLAIN = LossTerms()


def token_losses(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None,
    vocab_size: int,
    axis: Axis = ALONE.tp,
    terms: LossTerms = PLAIN,
) -> Tensor:
    """-log softmax(logits)[label] of each token.

    Args:
        logits: (b, s, padded vocabulary / ranks of ``axis``), any floating dtype: this rank's columns. Columns of the
            whole from ``vocab_size`` on are padding and take no part; a rank may have no others.
        labels: (b, s) int64 in [0, vocab_size) where the mask is not 0; elsewhere of no account.
        loss_mask: (b, s), 0 where a target does not count; None counts all.
        axis: the tensor-parallel ranks. They have the same labels, get the same losses, and give the same gradients.
        terms: what else the gradient has.
    Returns:
        (b, s) float32, exactly 0 where masked. Padding and masked tokens get gradient 0.
    """
    if axis.size > 1:
        shared: Tensor = _SharedLosses.apply(logits, labels, loss_mask, vocab_size, axis, terms)  # type: ignore[no-untyped-call]
        return shared
    losses: Tensor = _TokenLosses.apply(logits, labels, loss_mask, vocab_size, terms)  # type: ignore[no-untyped-call]
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, loss_mask: Tensor | None, vocab_size: int, terms: LossTerms
    ) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        targets = labels.reshape(-1)
        if loss_mask is not None:
            dropped = loss_mask.reshape(-1) == 0
            targets = targets.masked_fill(dropped, 0)  # any column: its loss is dropped
        normaliser = torch.empty(flat.shape[0], dtype=torch.float32, device=flat.device)
        losses = torch.empty_like(normaliser)
        for rows in _chunks(flat):
            chunk = flat[rows, :vocab_size].float()
            normaliser[rows] = torch.logsumexp(chunk, -1)
            losses[rows] = normaliser[rows] - chunk.gather(1, targets[rows].unsqueeze(1)).squeeze(1)
        if loss_mask is not None:
            losses.masked_fill_(dropped, 0.0)
            ctx.save_for_backward(flat, targets, normaliser, dropped)
        else:
            ctx.save_for_backward(flat, targets, normaliser)
        ctx.vocab_size, ctx.shape, ctx.terms = vocab_size, logits.shape, terms
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        flat, targets, normaliser, *masked = ctx.saved_tensors
        upstream = gradients[0].reshape(-1, 1)
        if masked:
            upstream = upstream.masked_fill(masked[0].unsqueeze(1), 0.0)
        grad = torch.empty_like(flat)
        grad[:, ctx.vocab_size :] = 0
        for rows in _chunks(flat):
            chunk = (flat[rows, : ctx.vocab_size].float() - normaliser[rows].unsqueeze(1)).exp_()
            ctx.terms.gradient(chunk, normaliser[rows], targets[rows].unsqueeze(1), 1.0, ctx.vocab_size)
            grad[rows, : ctx.vocab_size] = chunk.mul_(upstream[rows]).to(grad.dtype)
        return grad.view(ctx.shape), None, None, None, None


class _SharedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None,
        vocab_size: int,
        axis: Axis,
        terms: LossTerms,
    ) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        first = axis.rank * flat.shape[1]
        real = min(max(vocab_size - first, 0), flat.shape[1])
        targets = labels.reshape(-1)
        dropped = torch.zeros_like(targets, dtype=torch.bool) if loss_mask is None else loss_mask.reshape(-1) == 0
        torch._assert_async((dropped | ((targets >= 0) & (targets < vocab_size))).all())
        targets = targets - first
        here = (targets >= 0) & (targets < real) & ~dropped
        targets = targets.masked_fill(~here, 0)
        largest = torch.full((flat.shape[0],), -math.inf, dtype=torch.float32, device=flat.device)
        if real:
            for rows in _chunks(flat):
                largest[rows] = flat[rows, :real].amax(-1).float()
        with axis_collective(axis, "largest logit of each token over tp"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)
        sums = torch.zeros(2, flat.shape[0], dtype=torch.float32, device=flat.device)
        for rows in _chunks(flat) if real else ():
            chunk = flat[rows, :real].float()
            sums[1, rows] = chunk.gather(1, targets[rows].unsqueeze(1)).squeeze(1)
            sums[0, rows] = (chunk - largest[rows].unsqueeze(1)).exp_().sum(-1)  # chunk may be the logits themselves
        sums[1].masked_fill_(~here, 0.0)
        with axis_collective(axis, "sums of the cross entropy over tp"):
            dist.all_reduce(sums, group=axis.group)
        normaliser = sums[0].log_().add_(largest)
        losses = (normaliser - sums[1]).masked_fill_(dropped, 0.0)
        ctx.save_for_backward(flat, targets, here, normaliser.clone(), dropped)
        ctx.real, ctx.shape, ctx.vocab_size, ctx.terms = real, logits.shape, vocab_size, terms
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        flat, targets, here, normaliser, dropped = ctx.saved_tensors
        upstream = gradients[0].reshape(-1).masked_fill(dropped, 0.0).unsqueeze(1)
        grad = torch.empty_like(flat)
        grad[:, ctx.real :] = 0
        for rows in _chunks(flat) if ctx.real else ():
            chunk = (flat[rows, : ctx.real].float() - normaliser[rows].unsqueeze(1)).exp_()
            hits = here[rows].unsqueeze(1).float()
            ctx.terms.gradient(chunk, normaliser[rows], targets[rows].unsqueeze(1), hits, ctx.vocab_size)
            grad[rows, : ctx.real] = chunk.mul_(upstream[rows]).to(grad.dtype)
        return grad.view(ctx.shape), None, None, None, None, None


def _chunks(flat: Tensor) -> list[slice]:
    """Slices of rows that together are all of them."""
    elements = _CHUNK_ELEMENTS.get(flat.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    size = max(1, elements // flat.shape[1])
    return [slice(begin, min(begin + size, flat.shape[0])) for begin in range(0, flat.shape[0], size)]
