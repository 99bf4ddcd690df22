"""A mixture of experts in place of a layer's feed-forward part.

    (b, s, hidden) --> router --> choices --> expert_dispatch.py --> grouped_experts.py --> back --> (b, s, hidden)
                            `-> weights -----------------------------------------------------^        (this file)

No token is dropped: each goes to the experts that it chose, however many chose the same. Each tensor-parallel rank
routes its own share of the tokens: with sequence parallelism those that it has, else an equal part of them.

[Note: balance] The load-balancing loss of a microbatch is

    router_aux_loss * experts * sum over e of (f_e * P_e) * tokens

f_e is the share of (token, choice) pairs that went to expert e. The f of a layer sum to 1, as in Megatron-Core (in
transformers they sum to experts_per_token). P_e is the mean of its probability. Both are of the whole microbatch, over
the ranks of cp and tp. f_e has no gradient, so each probability's gradient is router_aux_loss * experts * f_e. The
backward of the probabilities adds it. So it never travels between stages, and no reported loss has it. All gradients
are divided by the number of targets, which makes it a mean like the loss.

[Note: bias] With ``expert_bias`` no loss balances. The bias is added to scores where experts are chosen, and not where
their results are weighed. Its gradient is 0. After each step engine/expert_bias.py lowers it for experts that got more
than an equal share of the step's tokens, and raises it for the others (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # which imports torch._dynamo when it is called, not here
from torch.autograd.function import once_differentiable

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.model.grouped_experts import Segments, feed_forward
from sixfold.gpt.parallel.axes import ALONE, Axes, Axis
from sixfold.gpt.parallel.expert_dispatch import (
    Route,
    TokenOrder,
    combine,
    exchange_rows,
    gather_shares,
    own_share,
    permute,
)
from sixfold.gpt.parallel.lost_ranks import group_collective

if TYPE_CHECKING:
    from sixfold.gpt.model.attention import Rows


class Weight(nn.Module):
    """A parameter ``weight`` under a name of its own; who uses it says how."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device="meta"))


class Router(Weight):
    """Scores of experts are ``weight`` times a token; ``bias`` has a part in the choice alone. [Note: bias]"""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.num_experts, config.hidden_size)
        if config.expert_bias:
            self.bias = nn.Parameter(torch.empty(config.num_experts, device="meta"))


class Experts(nn.Module):
    """Weights of this rank's experts, a leading axis of experts each; of their ffn columns it has tp's part."""

    def __init__(self, config: GPTConfig, axes: Axes = ALONE) -> None:
        super().__init__()
        here, width = config.num_experts // axes.ep.size, config.moe_ffn_hidden_size // axes.tp.size
        self.gate = Weight(here, width, config.hidden_size)
        self.up = Weight(here, width, config.hidden_size)
        self.down = Weight(here, config.hidden_size, width)


class MixtureOfExperts(nn.Module):
    """Router, experts and, where there is one, the expert that every token passes.

    Args:
        number: of the layer, global.
        shared: the shared expert: a dense feed-forward part of ``config.shared_ffn_hidden_size``.
    """

    def __init__(
        self, config: GPTConfig, axes: Axes = ALONE, *, number: int = 0, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.config, self.axes, self.number = config, axes, number
        self.router = Router(config)
        self.experts = Experts(config, axes)
        self.shared = shared
        if config.shared_expert_gate:
            self.shared_gate = Weight(1, config.hidden_size)
        self.load = Load()

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Hidden states as between blocks -> the same."""
        shared = None if self.shared is None else self.shared(x, rows)
        return _mixed_uncompiled(self, x, shared) if torch.compiler.is_compiling() else _mixed(self, x, shared)

    def routed(self, tokens: Tensor) -> Tensor:
        """(tokens, hidden) of this rank -> what their experts make of them."""
        config = self.config
        logits = _Logits.apply(tokens, self.router.weight)  # type: ignore[no-untyped-call]
        probabilities = logits.sigmoid() if config.scoring_func == "sigmoid" else torch.softmax(logits, -1)
        choices = self._choices(probabilities.detach())
        order = TokenOrder.of(choices, config.num_experts)
        balance = self._balance(order.counts) if probabilities.requires_grad else None
        weights: Tensor = _Chosen.apply(probabilities, choices, order.counts, balance, self.load)  # type: ignore[no-untyped-call]
        if config.expert_bias:
            weights = _Unlearned.apply(weights, self.router.bias)  # type: ignore[no-untyped-call]
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        if config.routed_scaling_factor != 1:
            weights = weights * config.routed_scaling_factor
        route = Route.of(order.counts, self.axes)
        rows = exchange_rows(permute(tokens, order), route, outward=True)
        experts = self.experts
        segments = Segments(route.ends, route.known)
        rows = feed_forward(rows, experts.gate.weight, experts.up.weight, experts.down.weight, segments)
        return combine(exchange_rows(rows, route, outward=False), weights, order)

    def _choices(self, scores: Tensor) -> Tensor:
        """(tokens, experts) -> (tokens, k): the experts of each token, out of its best groups."""
        config = self.config
        if config.expert_bias:
            scores = scores + self.router.bias.detach().float()
        if config.n_group > 1:
            groups = scores.unflatten(-1, (config.n_group, -1))  # type: ignore[no-untyped-call]
            best = top(groups.topk(2, -1).values.sum(-1), config.topk_group)
            taken = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
            scores = groups.masked_fill(~taken.unsqueeze(-1), -math.inf).flatten(1)
        return top(scores, config.experts_per_token)

    def _balance(self, counts: Tensor) -> Tensor | None:
        """The gradient that the load-balancing loss adds to each expert's probability. [Note: balance]"""
        if not self.config.router_aux_loss:
            return None
        group = self.axes.statistics.group
        if group is not None:
            counts = counts.clone()
            with group_collective(group, "count of each expert's tokens over cp and tp"):
                dist.all_reduce(counts, group=group)
        return counts * (self.config.router_aux_loss * self.config.num_experts / counts.sum())


def _mixed(module: MixtureOfExperts, x: Tensor, shared: Tensor | None) -> Tensor:
    axis = Axis() if module.axes.sequence else module.axes.tp  # whose ranks have the same tokens
    flat = x.reshape(-1, x.shape[-1])
    tokens = own_share(flat, axis)
    mixed = module.routed(tokens)
    if shared is not None:
        beside = own_share(shared.reshape(flat.shape), axis)
        if module.config.shared_expert_gate:
            beside = torch.sigmoid(F.linear(tokens, module.shared_gate.weight)) * beside
        mixed = mixed + beside
    return gather_shares(mixed, len(flat), axis).view(x.shape)


# Numbers of rows are data, and rows travel: no part of it is compiled.
_mixed_uncompiled = _disable_dynamo(_mixed)


def top(probabilities: Tensor, k: int) -> Tensor:
    """(tokens, experts) -> (tokens, k): the experts that tokens go to, best first; of equal ones the lower number."""
    return probabilities.sort(dim=-1, descending=True, stable=True)[1][:, :k].contiguous()


class Load:
    """Tokens that each expert got in backward passes since they were last taken.

    Counted in backward, which comes once for each microbatch of training: neither an evaluation nor the second forward
    of what is recomputed counts.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def add(self, counts: Tensor) -> None:
        """(experts,) of a microbatch, of the tokens that this rank routed."""
        self._counts = counts.clone() if self._counts is None else self._counts.add_(counts)

    def take(self) -> Tensor | None:
        """The sum, which starts anew; None if there was no backward."""
        counts, self._counts = self._counts, None
        return counts


def take_loads(module: nn.Module, config: GPTConfig, device: torch.device) -> Tensor:
    """(layers with experts, experts) float64: tokens that this rank routed in the step; 0 for layers elsewhere."""
    layers = config.expert_layers
    loads = torch.zeros(len(layers), config.num_experts, dtype=torch.float64, device=device)
    for part in module.modules():
        if isinstance(part, MixtureOfExperts) and (counts := part.load.take()) is not None:
            loads[part.number - layers.start] = counts.to(loads)
    return loads


def extremes(loads: list[float], config: GPTConfig) -> dict[int, tuple[float, float]]:
    """By layer the least and the most that an expert got, relative to an equal share; ``loads`` as flattened rows."""
    found = {}
    for place, layer in enumerate(config.expert_layers):
        of_layer = loads[place * config.num_experts : (place + 1) * config.num_experts]
        if equal := sum(of_layer) / config.num_experts:
            found[layer] = (min(of_layer) / equal, max(of_layer) / equal)
    return found


class _Unlearned(torch.autograd.Function):
    """Weights as they are; the gradient of the bias is 0 and there, so that every rank reduces the same tensors."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias.shape, bias.dtype
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = ctx.bias
        return gradients[0], gradients[0].new_zeros(shape, dtype=dtype)


class _Logits(torch.autograd.Function):
    """Tokens times router in float32; what is kept for backward is in the tokens' own dtype."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return F.linear(tokens.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        tokens, weight = ctx.saved_tensors
        (g,) = gradients
        return (g @ weight.float()).to(tokens.dtype), (g.t() @ tokens.float()).to(weight.dtype)


class _Chosen(torch.autograd.Function):
    """Probabilities of the chosen experts; in backward the balance is added, and the load counted."""

    @staticmethod
    def forward(
        ctx: Any, probabilities: Tensor, choices: Tensor, counts: Tensor, balance: Tensor | None, load: Load
    ) -> Tensor:
        ctx.experts, ctx.counts, ctx.balance, ctx.load = probabilities.shape[1], counts, balance, load
        ctx.save_for_backward(choices)
        return probabilities.gather(1, choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (choices,) = ctx.saved_tensors
        ctx.load.add(ctx.counts)
        (g,) = gradients
        whole = g.new_zeros(len(g), ctx.experts).scatter_(1, choices, g)
        if ctx.balance is not None:
            whole += ctx.balance
        return whole, None, None, None, None
