"""Stage handles under a driven program: several stages, micro-batches in flight, split backward."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import VOCABULARY, Block, same
from torch import nn

from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

pytestmark = pytest.mark.usefixtures("as_sharded")

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WIDTH, MICROBATCHES = 8, 4


class FirstStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


class LastStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, *, weight):
        for layer in self.layers:
            x = layer(x)
        return (self.norm(x) * weight).sum()


def container() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"0": FirstStage(), "1": LastStage()})


def tokens(microbatch: int, step: int = 0):
    return torch.randint(0, VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(10 * step + microbatch))


ONE_F_ONE_B = [
    "0F0",
    "1F0",
    "0F1",
    "1F1",
    "1B0",
    "0B0",
    "0F2",
    "1F2",
    "1B1",
    "0B1",
    "0F3",
    "1F3",
    "1B2",
    "0B2",
    "1B3",
    "0B3",
]
GPIPE = [f"{s}F{k}" for k in range(4) for s in (0, 1)] + [f"{s}B{k}" for k in range(4) for s in (1, 0)]


def run_program(actions, call, stages, step=0, on_backward=lambda stage, microbatch: None):
    """A tiny runner: the activations between stages are leaves, as a pipeline's are."""
    inputs, outputs = {}, {}
    for action in actions:
        stage, kind, k = int(action[0]), action[1], int(action[2])
        if kind == "F":
            x = tokens(k, step) if stage == 0 else outputs[0, k].detach().requires_grad_()
            inputs[stage, k] = x
            kwargs = {"weight": torch.tensor(0.5 + k)} if stage == 1 else {}
            outputs[stage, k] = call(stage, stages[stage], x, kwargs)
        else:
            on_backward(stage, k)
            if stage == 1:
                outputs[1, k].backward()
            else:
                outputs[0, k].backward(inputs[1, k].grad)


def plain_gradients(actions, steps=1):
    net = container()
    run_program(actions, lambda stage, module, x, kwargs: module(x, **kwargs), [net["0"], net["1"]])
    return {name: p.grad.view(-1).clone() for name, p in net.named_parameters()}


def drive(model, handles, actions, step=0):
    last = {stage: max(int(a[2]) for a in actions if a[0] == str(stage)) for stage in (0, 1)}

    def before(stage, k):
        if k == last[stage]:
            handles[stage].before_last_backward()

    run_program(actions, lambda stage, handle, x, kwargs: handle.call(x, **kwargs), handles, step, before)
    for k in range(MICROBATCHES):
        for handle in handles:
            handle.after_backward(k)
    for handle in reversed(handles):
        handle.reduce_grad()
    model.finish_grad_sync()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("actions", [ONE_F_ONE_B, GPIPE], ids=["1f1b", "gpipe"])
@pytest.mark.slow
def test_gradients_of_a_two_stage_program_equal_the_plain_program(strategy, actions):
    net = container()
    units = [Block, net["0"].embedding]
    model = FullyShardedDataParallel(net, strategy=strategy, fsdp_unit_modules=units, grad_divisor=1.0)
    handles = [model.stage_handle(net["0"], fused=True), model.stage_handle(net["1"], fused=True)]
    expected = plain_gradients(actions)
    for _ in range(3):  # first order unknown, then recorded
        drive(model, handles, actions)
        assert same(expected, {name: main.grad for name, main in model.main_parameters()}) == []
        model.zero_grad()
    assert model.report()["reductions"] == 3 * 7  # one per unit and step: six units and the root


@pytest.mark.parametrize(
    ("grad_reduce", "per_step"), [("auto", MICROBATCHES), ("last", 1), ("microbatch", MICROBATCHES)]
)
def test_one_local_stage_with_fused_backward_reduces_by_micro_batch_unless_told(grad_reduce, per_step):
    net = nn.ModuleDict({"0": LastStage()})
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], grad_divisor=1.0, grad_reduce=grad_reduce)
    handle = model.stage_handle(net["0"], fused=True)
    for _ in range(2):
        for k in range(MICROBATCHES):
            if k == MICROBATCHES - 1:
                handle.before_last_backward()
            handle.call(torch.randn(1, 2, WIDTH), weight=torch.tensor(1.0)).backward()
            handle.after_backward(k)
        handle.reduce_grad()
        model.finish_grad_sync()
    assert model.report()["reductions"] == 2 * 3 * per_step


def test_a_parameter_without_gradient_makes_no_backward_a_split_one():
    net = nn.ModuleDict({"0": nn.Sequential(Block(WIDTH), Block(WIDTH))})
    net["0"][1].spare = nn.Parameter(torch.ones(3))
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    handle = model.stage_handle(net["0"], fused=True)
    for k in range(MICROBATCHES):
        handle.call(torch.randn(1, 2, WIDTH)).sum().backward()
        handle.after_backward(k)
    handle.reduce_grad()
    model.finish_grad_sync()
    assert model.report()["reductions"] == 2 * MICROBATCHES
    assert model.report()["bytes"]["local_gradients"] == 0, "no full-size sum was made"


class OneLayer(nn.Module):
    """A stage whose output is its only unit's output; the embedding, if any, is a unit of its own."""

    def __init__(self, embedding):
        super().__init__()
        if embedding:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = Block(WIDTH)

    def forward(self, x):
        return self.layer(self.embedding(x) if hasattr(self, "embedding") else x)


def test_a_prefetch_leaves_the_slot_of_the_unit_whose_backward_begins():
    # Three units on two slots: the embedding and stage 1's layer share one. Behind stage 1's backward comes stage 0's
    # forward, so the recorded order asks for the embedding while the layer's backward is about to run.
    def stages():
        torch.manual_seed(0)
        return nn.ModuleDict({"0": OneLayer(True), "1": OneLayer(False)})

    def run(call, zero_to_one):
        inputs, outputs = {}, {}
        for action in ("0F0", "1F0", "1B0", "0F1", "0B0", "1F1", "1B1", "0B1"):
            stage, kind, k = int(action[0]), action[1], int(action[2])
            if kind == "F":
                inputs[stage, k] = tokens(k) if stage == 0 else outputs[0, k].detach().requires_grad_()
                outputs[stage, k] = call(stage, inputs[stage, k])
            else:
                outputs[stage, k].backward(zero_to_one if stage == 1 else inputs[1, k].grad)

    net, gradient = stages(), torch.linspace(0, 1, 2 * 3 * WIDTH).view(2, 3, WIDTH)
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block, net["0"].embedding], grad_divisor=1.0)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.0), model)
    handles = [model.stage_handle(net["0"], fused=True), model.stage_handle(net["1"], fused=True)]
    plain = stages()
    run(lambda stage, x: plain[str(stage)](x), gradient)
    expected = {name: p.grad.view(-1) for name, p in plain.named_parameters()}
    for _ in range(3):  # first order unknown, then recorded
        run(lambda stage, x: handles[stage].call(x), gradient)
        for handle in handles:
            handle.reduce_grad()
        model.finish_grad_sync()
        assert same(expected, {name: main.grad for name, main in model.main_parameters()}) == []
        optimizer.step()  # ends the step: from here on its order is followed
        model.zero_grad()


class Deferred(torch.autograd.Function):
    """A linear whose weight gradient is kept for later, as a split backward does."""

    @staticmethod
    def forward(ctx, x, weight, later):
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.later.append((gradient.flatten(0, -2).t() @ x.flatten(0, -2)).detach())
        return gradient @ weight, None, None


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.later = []

    def forward(self, x):
        return self.norm(Deferred.apply(x, self.linear.weight, self.later))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_deferred_weight_gradients_enter_the_same_fp32_sums(strategy, dtype):
    torch.manual_seed(0)
    net = nn.ModuleDict({"0": nn.Sequential(Split(), Split())})
    model = FullyShardedDataParallel(
        net,
        strategy=strategy,
        fsdp_unit_modules=[Split],
        grad_divisor=1.0,
        mixed_precision=MixedPrecision(param_dtype=dtype),
    )
    handle = model.stage_handle(net["0"], fused=False)
    for _ in range(2):
        model.zero_grad()
        expected = {}
        for k in range(3):
            handle.call(torch.randn(2, 3, WIDTH)).sum().backward()
            if k == 2:
                handle.before_last_backward()
            for i, part in enumerate(net["0"]):
                gradient = part.later.pop()
                handle.accumulate(part.linear.weight, gradient)
                name = f"0.{i}.linear.weight"
                expected[name] = expected[name] + gradient.float() if name in expected else gradient.float()
            handle.after_backward(k)
        handle.reduce_grad()
        model.finish_grad_sync()
        mains = dict(model.main_parameters())
        assert all(torch.equal(mains[name].grad, value.view(-1)) for name, value in expected.items())
        assert all(main.grad is not None for main in mains.values())
    assert model.report()["reductions"] == 2 * 2, "a split backward reduces once per unit and step"


def test_split_backward_with_reduction_by_micro_batch_is_refused_when_the_handle_is_made():
    net = nn.ModuleDict({"0": Split()})
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Split], grad_reduce="microbatch")
    with pytest.raises(
        FsdpError, match=r"stage '0' has split backwards \(fused=False\), and grad_reduce is 'microbatch'"
    ):
        model.stage_handle(net["0"], fused=False)
    handle = model.stage_handle(net["0"], fused=True)
    with pytest.raises(FsdpError, match="not of this model"):
        handle.accumulate(nn.Parameter(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize("grad_reduce", ["auto", "microbatch"])
def test_a_deferred_gradient_after_a_backward_said_to_be_fused_is_refused(grad_reduce):
    net = nn.ModuleDict({"0": Split()})
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Split], grad_reduce=grad_reduce)
    handle = model.stage_handle(net["0"], fused=True)
    handle.call(torch.randn(2, 3, WIDTH)).sum().backward()
    with pytest.raises(FsdpError, match=r"linear\.weight: accumulate.* after a backward with fused=True"):
        handle.accumulate(net["0"].linear.weight, net["0"].later.pop())


class Bare(nn.Module):
    """A unit whose only weight gets its gradient in W: its backward accumulates nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.later = []

    def forward(self, x):
        return Deferred.apply(x.requires_grad_(), self.linear.weight, self.later)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_that_leave_every_gradient_to_w_are_gathered_for_i_and_reduced_once(strategy):
    torch.manual_seed(0)
    net = nn.ModuleDict({"0": nn.Sequential(Bare(), Bare(), Bare()), "1": nn.Sequential(Bare(), Bare())})
    weights = {name: value.detach().clone() for name, value in net.named_parameters()}
    model = FullyShardedDataParallel(net, strategy=strategy, fsdp_unit_modules=[Bare], grad_divisor=1.0)
    handles = [model.stage_handle(net[name], fused=False) for name in ("0", "1")]
    for _ in range(2):
        expected = {}
        model.zero_grad()
        for _ in range(3):
            x = torch.randn(6, WIDTH)
            middle = handles[0].call(x.clone())
            second = middle.detach().requires_grad_()
            handles[1].call(second).sum().backward()
            middle.backward(second.grad)
            inputs = [x]
            for weight in weights.values():
                inputs.append(inputs[-1] @ weight.t())
            upstream = torch.ones(6, WIDTH)
            for i, (name, weight) in reversed(list(enumerate(weights.items()))):
                gradient = upstream.t() @ inputs[i]
                upstream = upstream @ weight
                expected[name] = expected[name] + gradient if name in expected else gradient
            for stage, handle in enumerate(handles):
                for part in net[str(stage)]:
                    handle.accumulate(part.linear.weight, part.later.pop())
        for handle in handles:
            handle.before_last_backward()
            handle.reduce_grad()
        model.finish_grad_sync()
        found = {name: main.grad for name, main in model.main_parameters()}
        assert same({name: value.view(-1) for name, value in expected.items()}, found) == []
    assert model.report()["reductions"] == 2 * 5


def test_a_second_handle_of_a_stage_takes_the_place_of_the_first():
    net = nn.ModuleDict({"0": LastStage()})
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], grad_reduce="last")
    model.stage_handle(net["0"], fused=True)
    handle = model.stage_handle(net["0"], fused=True)
    handle.call(torch.randn(1, 2, WIDTH), weight=torch.tensor(1.0)).backward()
    handle.reduce_grad()
    assert model.report()["reductions"] == 3, "the root unit waits for no handle that nobody uses"


def test_unshard_gathers_kept_units_ahead_and_is_a_hint_with_two_slots():
    for gathered, ahead in (("all", 5), ("double", 0)):
        net = nn.ModuleDict({"0": FirstStage(), "1": LastStage()})
        model = FullyShardedDataParallel(
            net, fsdp_unit_modules=[Block], buffers=BufferConfig(gathered_bytes=gathered), initial="trust"
        )
        for name in ("0", "1"):
            handle = model.stage_handle(net[name], fused=True)
            handle.unshard()
        assert model.report()["gathers"] == ahead
        handle.reshard()


def test_evaluation_through_a_handle_leaves_the_recorded_order_alone():
    net = container()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], grad_divisor=1.0)
    handles = [model.stage_handle(net["0"], fused=True), model.stage_handle(net["1"], fused=True)]
    expected = plain_gradients(ONE_F_ONE_B)
    for _ in range(2):
        with torch.no_grad():
            x = handles[0].call(tokens(0))
            handles[1].call(x, weight=torch.tensor(1.0))
        drive(model, handles, ONE_F_ONE_B)
        assert same(expected, {name: main.grad for name, main in model.main_parameters()}) == []
        model.zero_grad()


def test_a_step_that_was_given_up_leaves_the_next_one_its_sums():
    """Its last backward was announced and never came; what follows is summed before it is divided."""
    net = container()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], grad_divisor=3.0)
    handles = [model.stage_handle(net["0"], fused=True), model.stage_handle(net["1"], fused=True)]
    expected = {name: gradient / torch.tensor(3.0) for name, gradient in plain_gradients(ONE_F_ONE_B).items()}
    for handle in handles:
        handle.before_last_backward()
    model.zero_grad()
    drive(model, handles, ONE_F_ONE_B)
    assert same(expected, {name: main.grad for name, main in model.main_parameters()}) == []
    assert model.report()["reductions"] == len(model.units)
