"""Muon over pieces of matrices on 2, 3 and 4 ranks, against torch's Muon in one process that emulates them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, Net, batch, loss_of, resumed, same
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

OPTIONS = {
    "default": {},
    "all": {"nesterov": False, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"},
}
STEPS = 3


def make_net():
    """Blocks 0 and 1 share shapes; block 2 has its own, and each has an odd number of elements."""
    torch.manual_seed(0)
    net = Net(width=13, layers=2)
    net.blocks.append(Block(13, hidden=19))
    return net


def optimizers(net, **options):
    inside = [p for p in net.blocks.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if all(p is not one for one in inside)]
    groups = [{"params": inside[:1], "lr": 0.05}, {"params": inside[1:]}]
    return [torch.optim.Muon(groups, lr=0.02, **options), torch.optim.AdamW(rest, lr=1e-2)]


def emulate(ranks, **options):
    """Gradients of ranks 0, 1, 2 ... from left to right, one true division; torch's own optimizers."""
    net = make_net()
    used = optimizers(net, **options)
    for step in range(STEPS):
        total = []
        for rank in range(ranks):
            net.zero_grad()
            loss_of(net(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            mine = [p.grad.clone() for p in net.parameters()]
            total = mine if rank == 0 else [a + b for a, b in zip(total, mine, strict=True)]
        for p, gradient in zip(net.parameters(), total, strict=True):
            p.grad = gradient / ranks
        for one in used:
            one.step()
    momenta = {name: used[0].state[p]["momentum_buffer"] for name, p in net.named_parameters() if p in used[0].state}
    return net.state_dict(), momenta


class CountAllToAll(TorchDispatchMode):
    """Calls, and bytes sent by this rank."""

    def __init__(self):
        super().__init__()
        self.calls = self.nbytes = self.others = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("c10d"):
            if "alltoall" in str(func):
                self.calls += 1
                self.nbytes += args[1].nbytes
            else:
                self.others += 1
        return func(*args, **(kwargs or {}))


def train(rank, ranks, options, granularity=None, strategy="optim_grads_params", mesh=None, mesh_for=None, **precision):
    net = make_net()
    model = FullyShardedDataParallel(
        net,
        process_group=None if mesh else dist.group.WORLD,
        mesh=mesh,
        fsdp_unit_modules=[Block],
        strategy=strategy,
        mixed_precision=MixedPrecision(grad_sum="rank_order", **precision),
        buffers=BufferConfig(align_bytes=16),
        granularity=granularity,
        mesh_for=mesh_for,
    )
    used = [fully_shard_optimizer(one, model) for one in optimizers(net, **options)]
    for step in range(STEPS):
        loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
        with CountAllToAll() as count:
            for one in used:
                one.step()
        model.zero_grad()
    records = [r for r in model.state_records(used[0]) if r.key == "momentum_buffer"]
    momenta = [(r.name, r.global_shape, r.start, r.stop, r.replica, r.tensor.clone()) for r in records]
    return model.full_state_dict(), momenta, (count.calls, count.nbytes, count.others), model.report()


def train_all(rank, ranks):
    return [train(rank, ranks, options) for options in OPTIONS.values()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.slow
def test_pieces_of_uneven_matrices_give_torchs_bits(ranks):
    results = run_ranks(train_all, ranks)
    for at, options in enumerate(OPTIONS.values()):
        weights, momenta = emulate(ranks, **options)
        covered = dict.fromkeys(momenta, 0)
        for result in results:
            assert same(weights, result[at][0]) == []
            for name, shape, start, stop, replica, tensor in result[at][1]:
                assert replica == 0 and shape == tuple(momenta[name].shape)
                assert torch.equal(tensor, momenta[name].view(-1)[start:stop])
                covered[name] += stop - start
        assert covered == {name: momentum.numel() for name, momentum in momenta.items()}


@pytest.mark.slow
def test_a_step_sends_each_element_twice_as_bfloat16_and_twice_per_shape():
    results = run_ranks(train, 2, {})
    shapes = {tuple(momentum.shape) for momentum in emulate(2)[1].values()}
    elements = sum(momentum.numel() for momentum in emulate(2)[1].values())
    for _, _, (calls, nbytes, others), report in results:
        assert calls == 2 * len(shapes) and others == 0
        (stated,) = report["muon"]
        assert (stated["exchanges"], stated["sent_bytes"]) == (calls, nbytes)
    out_and_back = sum(nbytes for _, _, (_, nbytes, _), _ in results)
    assert out_and_back == 2 * elements * 2


def whole(name, parameter):
    return "tensor"


def mixed(name, parameter):
    return "tensor" if "up" in name else "row"


def train_grains(rank, ranks):
    element = train(rank, ranks, {})[0]
    results = [train(rank, ranks, {}, grain) for grain in (whole, mixed)]
    results.append(train(rank, ranks, {}, None, "no_shard"))
    return [same(element, one[0]) for one in results], [one[2] for one in results], [one[3] for one in results]


@pytest.mark.slow
def test_whole_and_mixed_matrices_and_unsharded_ones_give_the_same_bits():
    for differing, counts, reports in run_ranks(train_grains, 2):
        ((whole_calls, _, others), (mixed_calls, _, _), (unsharded, _, _)) = counts
        assert differing == [[], [], []]
        assert whole_calls == others == 0 and mixed_calls > 0 and unsharded == 0
        assert [len(report["muon"]) for report in reports] == [0, 1, 1]
        (owners,) = reports[0]["whole_tensors"]
        assert owners["ranks"] == 2 and 1.0 <= owners["imbalance"] < 1.3 and reports[2]["whole_tensors"] == []


def train_replicas(rank, ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(rank, ranks, {}, mesh=mesh)


@pytest.mark.slow
def test_replicas_step_alike():
    results = run_ranks(train_replicas, 4)
    first = results[0][0]
    assert all(same(first, weights) == [] for weights, *_ in results)
    assert [{r[4] for r in momenta} for _, momenta, *_ in results] == [{0}, {0}, {1}, {1}]


def train_experts(rank, ranks):
    """``up`` of each block is two experts, of ranks 0 and 1 and of ranks 2 and 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "copy"))["copy"]
    mesh_for = lambda name: mesh if "up.weight" in name else None  # noqa: E731
    element, tensor = (train(rank, ranks, {}, grain, mesh_for=mesh_for) for grain in (None, whole))
    ups = {name: value for name, value in element[0].items() if "up.weight" in name}
    return same(element[0], tensor[0]), ups, len(element[3]["muon"])


@pytest.mark.slow
def test_matrices_on_a_mesh_of_their_own_are_exchanged_there():
    results = run_ranks(train_experts, 4)
    assert [(differing, exchanges) for differing, _, exchanges in results] == [([], 2)] * 4
    ups = [found for _, found, _ in results]
    assert same(ups[0], ups[1]) == same(ups[2], ups[3]) == []
    assert len(same(ups[0], ups[2])) == len(ups[0]) == 3


def train_formats(rank, ranks):
    formats = [{"param_dtype": torch.bfloat16}, {"param_dtype": torch.bfloat16, "fp8": lambda name: "up.w" in name}]
    pairs = [[train(rank, ranks, {}, grain, **one)[0] for grain in (None, whole)] for one in formats]
    return [same(element, tensor) for element, tensor in pairs], len(same(pairs[0][0], pairs[1][0]))


@pytest.mark.slow
def test_bf16_and_fp8_weights_have_the_bits_of_whole_matrices():
    for differing, apart in run_ranks(train_formats, 2):
        assert differing == [[], []] and apart > 0


def resume(rank, ranks):
    def build():
        net = make_net()
        model = FullyShardedDataParallel(net, process_group=dist.group.WORLD, fsdp_unit_modules=[Block])
        inside = [p for p in net.blocks.parameters() if p.ndim == 2]
        return model, fully_shard_optimizer(torch.optim.Muon(inside, lr=0.02), model)

    return resumed(build, rank)


@pytest.mark.slow
def test_momentum_is_saved_and_loaded_by_records():
    assert run_ranks(resume, 2) == [([], []), ([], [])]
