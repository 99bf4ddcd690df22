"""Records, start values and replicas over several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, batch, emulate, loss_of, make_adamw, make_net, same
from torch.distributed.device_mesh import init_device_mesh

from ranktest import run_ranks
from sixfold.fsdp import FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer


def train(model, optimizer, rank, steps):
    for step in steps:
        for k in range(2):
            with model.microbatch(last=k == 1):
                loss_of(model(batch(step, k, rank)), batch(step, k, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def make(net=None, units=(Block,), **options):
    net = net or make_net(tied=True)
    options.setdefault("process_group", dist.group.WORLD)
    model = FullyShardedDataParallel(net, fsdp_unit_modules=units, **options)
    return model, fully_shard_optimizer(make_adamw(net.parameters()), model)


GRAINS = {"element": lambda n, p: "element", "row": lambda n, p: "row", "tensor": lambda n, p: "tensor"}


def save_and_resume(rank, ranks, strategy, grain):
    model, optimizer = make(strategy=strategy, granularity=GRAINS[grain])
    train(model, optimizer, rank, [0])
    records = model.state_records(optimizer)
    extents = [(r.name, r.key, tuple(r.global_shape), r.start, r.stop, r.replica) for r in records]
    saved = {(r.name, r.key): r.tensor.clone() for r in records}
    train(model, optimizer, rank, [1])
    again_model, again = make(strategy=strategy, granularity=GRAINS[grain])
    again_model.materialize_state(again)
    for record in again_model.state_records(again):
        record.tensor.copy_(saved[record.name, record.key])
    for state in again.state.values():
        state["step"].fill_(1.0)
    again_model.refresh()
    train(again_model, again, rank, [1])
    return extents, same(model.full_state_dict(), again_model.full_state_dict())


@pytest.mark.parametrize(
    ("strategy", "grain"),
    [("no_shard", "element"), ("optim", "row"), ("optim_grads_params", "tensor"), ("optim_grads_params", "element")],
)
@pytest.mark.slow
def test_records_cover_each_element_once_and_resume_bitwise(strategy, grain):
    results = run_ranks(save_and_resume, 2, strategy, grain)
    covered = {}
    for extents, differing in results:
        assert differing == []
        for name, key, shape, start, stop, replica in extents:
            if replica == 0:
                seen = covered.setdefault((name, key), torch.zeros(torch.Size(shape).numel(), dtype=torch.int32))
                seen[start:stop] += 1
    names = {name for name, _ in make_net(tied=True).named_parameters()}
    assert set(covered) == {(name, key) for name in names for key in ("param", "exp_avg", "exp_avg_sq")}
    assert all(bool((seen == 1).all()) for seen in covered.values())


def replicate_and_shard(rank, ranks, strategy, grad_sum):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = make(
        mesh=mesh, process_group=None, strategy=strategy, mixed_precision=MixedPrecision(grad_sum=grad_sum)
    )
    train(model, optimizer, rank, [0, 1])
    replicas = {r.replica for r in model.state_records(optimizer)}
    return model.full_state_dict(), replicas, float(model.report()["ranks"]["replicate"])


def emulate_replicas(steps, per_microbatch):
    """Shard groups (0, 1) and (2, 3) first, then the sum over replicas."""
    net = make_net(tied=True)
    optimizer = make_adamw(net.parameters())
    for step in range(steps):
        total = {}
        for group in [[0], [1]] if per_microbatch else [[0, 1]]:
            sums = []
            for rank in range(4):
                net.zero_grad()
                for k in group:
                    loss_of(net(batch(step, k, rank)), batch(step, k, rank)).backward()
                sums.append({name: p.grad.clone() for name, p in net.named_parameters()})
            for name in sums[0]:
                mean = ((sums[0][name] + sums[1][name]) + (sums[2][name] + sums[3][name])) / 4
                total[name] = total[name] + mean if name in total else mean
        for name, p in net.named_parameters():
            p.grad = total[name]
        optimizer.step()
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "grad_sum"), [("optim_grads_params", "backend"), ("optim", "rank_order"), ("no_shard", "rank_order")]
)
@pytest.mark.slow
def test_hybrid_sharding_sums_the_shard_group_first_and_then_the_replicas(strategy, grad_sum):
    results = run_ranks(replicate_and_shard, 4, strategy, grad_sum)
    expected = emulate_replicas(2, per_microbatch=strategy == "optim_grads_params")
    for values, _, _ in results:
        assert same(expected, values) == []
    if strategy == "no_shard":
        assert [replicas for _, replicas, _ in results] == [{0}, {1}, {2}, {3}]
    else:
        assert [replicas for _, replicas, _ in results] == [{0}, {0}, {1}, {1}]


def broadcast_start(rank, ranks):
    torch.manual_seed(rank)
    from fsdp_helpers import Net

    return make(Net(tied=True), initial="broadcast")[0].full_state_dict()


def test_broadcast_gives_all_ranks_the_start_values_of_the_first():
    first, second = run_ranks(broadcast_start, 2)
    expected = make_net(tied=True).state_dict()
    assert same(expected, first) == [] and same(expected, second) == []


def clip(rank, ranks, strategy):
    model, _ = make(strategy=strategy)
    loss_of(model(batch(0, 0, rank)), batch(0, 0, rank)).backward()
    total = model.clip_grad_norm_(1e-3)
    return float(total), float(model.grad_square_sum(lambda name: "norm" not in name)), float(model.grad_square_sum())


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_the_norm_counts_each_element_once_and_is_the_same_on_all_ranks(strategy):
    results = run_ranks(clip, 2, strategy)
    assert results[0] == results[1]
    net = make_net(tied=True)
    for rank in range(2):
        (loss_of(net(batch(0, 0, rank)), batch(0, 0, rank)) / 2).backward()
    exact = sum(float((p.grad.double() ** 2).sum()) for p in net.parameters()) ** 0.5
    total, without_norms, after = results[0]
    assert total == pytest.approx(exact, rel=1e-6)
    assert after**0.5 == pytest.approx(1e-3, rel=1e-3)
    assert 0 < without_norms < after


def ask_for_state_dict(rank, ranks):
    with pytest.raises(FsdpError, match=r"state_records\(\).*full_state_dict\(\)"):
        make()[0].state_dict()


def test_half_a_state_dict_is_refused():
    run_ranks(ask_for_state_dict, 2)


def no_local_parameters(rank, ranks):
    net = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(net.weight)
    model, optimizer = make(net=torch.nn.Sequential(net), units=(), granularity=GRAINS["tensor"])
    model(torch.ones(1, 2) * (rank + 1)).sum().backward()
    model.materialize_state(optimizer)
    norm = model.clip_grad_norm_(1e9)
    optimizer.step()
    return len(list(model.main_parameters())), float(norm), model.full_state_dict()["0.weight"]


def test_a_rank_without_local_parameters_takes_part():
    results = run_ranks(no_local_parameters, 2)
    assert sorted(count for count, _, _ in results) == [0, 1]
    assert results[0][1] == results[1][1] == pytest.approx(3.0)
    assert torch.equal(results[0][2], results[1][2]) and not torch.equal(results[0][2], torch.ones(2, 2))


def test_the_oracle_of_replicas_agrees_with_the_other_oracle_to_rounding():
    one = emulate(ranks=4, steps=2, accumulate=2, net_options={"tied": True}, per_microbatch=True)
    other = emulate_replicas(2, per_microbatch=True)
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)


class Counted(torch.nn.Linear):
    """As TransformerEngine's layers: state that is neither a parameter nor a buffer."""

    extra: object = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def load_a_part(rank, ranks, givers):
    torch.manual_seed(0)
    net = torch.nn.Sequential(Counted(3, 5), torch.nn.Linear(5, 2))
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[torch.nn.Linear])
    given = {
        "0.weight": torch.full((5, 3), 2.0),
        "0._extra_state": {"amax": torch.tensor([1.0])},
        "more": torch.ones(1),
    }
    left_out = model.load_full_state_dict(given if rank in givers else None, strict=False)
    state = model.full_state_dict()
    return tuple(left_out), state["0.weight"].unique().tolist(), net[0].extra["amax"].tolist(), state["1.bias"].tolist()


def test_a_state_that_is_not_strict_and_extra_state_come_alike_from_one_rank_and_from_all():
    one, all_of = run_ranks(load_a_part, 2, (1,)), run_ranks(load_a_part, 2, (0, 1))
    assert one[0] == one[1] == all_of[0] == all_of[1]
    (missing, unexpected), values, amax, _ = one[0]
    assert (set(missing), unexpected) == ({"0.bias", "1.weight", "1.bias"}, ["more"])
    assert (values, amax) == ([2.0], [1.0])
