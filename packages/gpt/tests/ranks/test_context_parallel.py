"""Attention and the model over context-parallel ranks, against one process."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from context_helpers import cut, put_back
from gpt_helpers import tiny_config
from model_helpers import boundaries, naive_attention, small
from run_helpers import lines, losses, run, run_all
from torch.utils._python_dispatch import TorchDispatchMode

import ranktest
from sixfold.gpt.model.attention import plan_rows
from sixfold.gpt.model.decoder import GPTModel
from sixfold.gpt.parallel.axes import Axes, Axis

ROW = 32
WAYS = [("all_gather", "blocks"), ("all_gather", "sdpa"), ("p2p", "blocks")]
WINDOWS = (0, 2, 6, 13)
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
    for comm, backend, groups, inner, window, cap in cases:
        config = small(num_query_groups=groups, sliding_window=window, attn_logit_softcapping=cap)
        cu = boundaries(2, ROW, PACKED[inner])
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
@pytest.mark.slow
def test_attention_over_ranks_equals_one_process_forward_and_backward(request, ranks):
    shares = (4, 2, 1) if request.config.getoption("--context-matrix") else (2,)  # key heads
    cases = [
        (*way, groups, inner, window, 0.0)
        for way in WAYS
        for groups in shares
        for inner in PACKED
        for window in WINDOWS
    ]
    ways = [way for way in WAYS if "sdpa" not in way]
    cases += [(*way, 2, inner, window, 0.7) for way in ways for inner in ("rows", "short") for window in (0, 6)]
    by_rank = ranktest.run_ranks(attended, ranks, cases)
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        found = [put_back(list(each)) for each in zip(*parts, strict=True)]
        q, k, v, g = projections(case[2])
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        out = naive_attention(*leaves, boundaries(2, ROW, PACKED[case[3]]), window=case[4], cap=case[5])
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
@pytest.mark.slow
def test_a_model_over_ranks_has_the_losses_and_summed_gradients_of_one_process(request, ranks):
    packed = "across borders"
    again = ("none", "selective", "full") if request.config.getoption("--context-matrix") else ("selective",)
    cases = [(comm, recompute, packed) for comm in ("all_gather", "p2p") for recompute in again]
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


class Largest(TorchDispatchMode):
    """Notes the largest tensor that anything inside makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def held(rank, ranks, comm, row):
    """Elements of the largest tensor of a forward and backward, and of the largest one kept between them."""
    q, k, v = (torch.ones(1, row // ranks, 1, 64, requires_grad=True) for _ in range(3))
    kept = []
    config = small(num_attention_heads=1, num_query_groups=1)
    rows = plan_rows(
        config, q.flatten(2), position_ids=None, cu_seqlens=None, backend="sdpa", axes=axes_of(rank, ranks, comm)
    )
    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
            out = rows.attend(q, k, v)
        out.sum().backward()
    return largest.numel, max(kept)


@pytest.mark.slow
def test_in_the_ring_no_rank_holds_the_keys_of_two():
    row, ranks = 64, 4
    keys = row // ranks * 64
    assert ranktest.run_ranks(held, ranks, "p2p", row) == [(2 * keys, keys)] * ranks, "keys and values of one rank"
    assert ranktest.run_ranks(held, ranks, "all_gather", row) == [(ranks * 2 * keys, ranks * keys)] * ranks


def left_alone(rank, ranks):
    """Rank 0 attends, the other never comes: (way, seconds until it says so) of each."""
    found = []
    groups = {
        (comm, backwards): dist.new_group(timeout=timedelta(seconds=0.5))
        for comm in ("all_gather", "p2p")
        for backwards in (False, True)
    }
    for (comm, backwards), group in groups.items():
        q, k, v = (torch.ones(1, 8, 2, 8, requires_grad=True) for _ in range(3))
        axes = Axes(cp=Axis(rank, ranks, group), cp_comm_type=comm)
        config = small(num_attention_heads=2, num_query_groups=2)
        attend = plan_rows(config, torch.zeros(1, 8, 16), position_ids=None, cu_seqlens=None, axes=axes).attend
        out = attend(q, k, v).sum() if backwards else None
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(RuntimeError):
                (attend(q, k, v) if out is None else out).sum().backward()
            found.append(time.monotonic() - start)
        dist.barrier()
    return found


def test_every_wait_for_keys_and_their_gradients_has_the_deadline_of_the_group():
    waited, _ = ranktest.run_ranks(left_alone, 2)
    assert len(waited) == 4
    assert all(0.4 < seconds < 20 for seconds in waited), "they waited for 0.5 s; the rest is a busy machine"


@pytest.mark.slow
def test_a_run_over_ranks_trains_as_one_process_does(tmp_path):
    short = ("model.num_layers=2", "train.steps=2", "train.global_batch_size=4", "eval.every=1", "eval.batches=2")
    ways = [
        ("parallel.cp_comm_type=p2p", "train.recompute=selective"),
        ("parallel.cp_comm_type=all_gather", "train.recompute=full"),
    ]
    configs = [tiny_config(tmp_path, "parallel.cp=2", *short, *way, run=f"run{n}") for n, way in enumerate(ways)]
    alone = tiny_config(tmp_path, *short, run="alone")
    run_all([(2, config) for config in configs])
    run(alone, 1)
    expected = [entry["loss_by_dataset"] for entry in lines(alone, "step")]
    for config in configs:
        assert losses(config) == pytest.approx(losses(alone), rel=1e-6)
        assert [e["loss"] for e in lines(config, "eval")] == pytest.approx(
            [e["loss"] for e in lines(alone, "eval")], rel=1e-6
        )
        assert [e["tokens"] for e in lines(config, "eval")] == [e["tokens"] for e in lines(alone, "eval")]
        for entry, other in zip(lines(config, "step"), expected, strict=True):
            assert entry["loss_by_dataset"] == pytest.approx(other, rel=1e-6)
