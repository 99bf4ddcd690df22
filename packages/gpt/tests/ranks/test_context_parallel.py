"""Attention and the model over context-parallel ranks, against one process."""

import pytest
import torch
import torch.distributed as dist
from context_helpers import cut, put_back
from model_helpers import boundaries, naive_attention, small

import ranktest
from sixfold.gpt.attention import plan_rows
from sixfold.gpt.axes import Axes, Axis
from sixfold.gpt.model import GPTModel

ROW = 32
WAYS = [("all_gather", "blocks"), ("all_gather", "sdpa"), ("p2p", "blocks")]
PACKED = {
    "rows": [],
    "across borders": [5, 7, 20, 33, 40, 62],
    "on borders": [8, 16, 48],
    "short": list(range(0, 64, 3)),
}


def axes_of(rank, ranks, comm):
    return Axes(cp=Axis(rank, ranks, dist.group.WORLD), cp_comm_type=comm)


def projections(groups):
    generator = torch.Generator().manual_seed(groups)
    q, k, v, g = (torch.randn(2, ROW, n, 8, generator=generator) for n in (4, groups, groups, 4))
    return q, k, v, g


def attended(rank, ranks, cases):
    """The rank's outputs and gradients of q, k, v of each case."""
    found = []
    for comm, backend, groups, inner in cases:
        config, cu = small(num_query_groups=groups), boundaries(2, ROW, PACKED[inner])
        q, k, v, g = (cut(t, rank, ranks) for t in projections(groups))
        hidden = torch.zeros(2, ROW // ranks, 32)
        rows = plan_rows(
            config, hidden, position_ids=None, cu_seqlens=cu, backend=backend, axes=axes_of(rank, ranks, comm)
        )
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = rows.attend(*leaves)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, g)))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_over_ranks_equals_one_process_forward_and_backward(ranks):
    cases = [(*way, groups, inner) for way in WAYS for groups in (4, 2, 1) for inner in PACKED]
    by_rank = ranktest.run_ranks(attended, ranks, cases)
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        found = [put_back(list(each)) for each in zip(*parts, strict=True)]
        q, k, v, g = projections(case[2])
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        out = naive_attention(*leaves, boundaries(2, ROW, PACKED[case[3]]))
        expected = [out.detach(), *torch.autograd.grad(out, leaves, g.double())]
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() < 1e-6 * other.norm(), case


def batch():
    """tokens, labels, loss_mask of two rows."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 100, (2, 2, ROW), generator=generator)
    return tokens, labels, (torch.rand(2, ROW, generator=generator) < 0.8).float()


def trained(model, recompute, cu, tokens, labels, loss_mask):
    """Losses and the gradients of their sum."""
    model.recompute = recompute
    model.zero_grad()
    losses = model(tokens, labels=labels, loss_mask=loss_mask, cu_seqlens=cu)
    losses.sum().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def trained_part(rank, ranks, cases):
    """Of each case what the rank has of losses and gradients."""
    found = []
    for comm, recompute, inner in cases:
        model = GPTModel(small(qk_norm=True), axes=axes_of(rank, ranks, comm))
        cu = None if inner is None else boundaries(2, ROW, PACKED[inner])
        found.append(trained(model, recompute, cu, *(cut(t, rank, ranks) for t in batch())))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_over_ranks_has_the_losses_and_summed_gradients_of_one_process(ranks):
    packed = "across borders"
    cases = [(comm, again, packed) for comm in ("all_gather", "p2p") for again in ("none", "selective", "full")]
    cases += [("all_gather", "none", None), ("p2p", "none", None)]
    by_rank = ranktest.run_ranks(trained_part, ranks, cases)
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        cu = None if case[2] is None else boundaries(2, ROW, PACKED[case[2]])
        losses, gradients = trained(GPTModel(small(qk_norm=True)), "none", cu, *batch())
        torch.testing.assert_close(put_back([part[0] for part in parts]), losses, rtol=1e-6, atol=1e-6)
        assert float(sum(part[0].sum() for part in parts)) == pytest.approx(float(losses.sum()), rel=1e-6)
        for name, expected in gradients.items():
            summed = sum(part[1][name] for part in parts)
            assert (summed - expected).norm() < 2e-6 * expected.norm(), (case, name)
