"""Remedies of docs/errors that code can follow: the error is provoked, its remedy is done, and gives what it promises.

Of fsdp, pipeline and dist-ckpt; the form of a case is in remedy_helpers.py.
"""

import re
from functools import partial

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from remedy_helpers import called, follow
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from sixfold import dist_ckpt
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard, fully_shard_optimizer
from sixfold.pipeline import (
    Action,
    Costs,
    PipelineRunner,
    Program,
    ScheduleError,
    Stage,
    gpipe,
    interleaved,
    one_f_one_b,
    partition,
    passes,
    plan,
    program_of,
    simulate,
    stages_of_sequential,
    verify,
)


class Block(nn.Module):
    def __init__(self, kind=nn.Linear):
        super().__init__()
        self.inside = kind(4, 4)

    def forward(self, x):
        return torch.relu(self.inside(x))


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 4))


def loss_of(model):
    return model(torch.ones(3, 4)).square().sum()


def stepped(model, optimizer):
    """Whether a step moves the weights."""
    before = {name: value.clone() for name, value in model.full_state_dict().items()}
    loss_of(model).backward()
    optimizer.step()
    return any(not torch.equal(value, before[name]) for name, value in model.full_state_dict().items())


# ---- fsdp


def an_option_of_torchs_wrappers():
    yield lambda: fully_shard(net(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    yield lambda: len(fully_shard(net(), fsdp_unit_modules=["Block"], root_units=False).units) == 3


def a_value_of_another_kind():
    yield lambda: fully_shard(net(), strategy=torch_fsdp.ShardingStrategy.FULL_SHARD)
    yield lambda: fully_shard(net(), strategy="optim_grads_params").report()["strategy"] == "optim_grads_params"


def a_group_that_is_none():
    yield lambda: fully_shard(net(), process_group="all")
    yield lambda: fully_shard(net()) and fully_shard(net(), process_group=None)


def another_norm():
    model = fully_shard(net())
    loss_of(model).backward()

    def largest():
        return max(main.grad.abs().max().item() for _, main in model.main_parameters())

    yield lambda: model.clip_grad_norm_(0.5, norm_type=float("inf"))
    model.scale_gradients(0.5 / largest())
    yield lambda: largest() == pytest.approx(0.5)


def a_later_group_of_the_optimizer():
    wrapped = net()
    first, (name, last) = next(iter(wrapped.parameters())), list(wrapped.named_parameters())[-1]
    model = fully_shard(wrapped)
    optimizer = fully_shard_optimizer(torch.optim.SGD([first], lr=0.1), model)
    optimizer.add_param_group({"params": [last]})
    yield optimizer.step
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": [dict(model.main_parameters())[name]]})
    before = model.full_state_dict()[name].clone()
    yield lambda: stepped(model, optimizer) and not torch.equal(model.full_state_dict()[name], before)


def a_member_of_the_wrapped_module():
    class Net(nn.Linear):
        def twice(self, x):
            return self(self(x))

    model = FullyShardedDataParallel(Net(4, 4))
    yield lambda: model.twice
    yield lambda: model.entry(model.module, method="twice")(torch.ones(1, 4)).shape == (1, 4)


def a_member_that_torchs_fsdp_has():
    model = fully_shard(net())
    yield lambda: model.set_requires_gradient_sync
    with model.no_sync():
        loss_of(model).backward()
    loss_of(model).backward()
    total = {name: main.grad.clone() for name, main in model.main_parameters()}
    once = fully_shard(net())
    loss_of(once).backward()
    yield lambda: all(torch.allclose(total[name], 2 * main.grad) for name, main in once.main_parameters())


def moving_or_converting_a_wrapped_model():
    yield lambda: fully_shard(net()).double()
    yield (
        lambda: (
            fully_shard(net().double(), mixed_precision=MixedPrecision(main_dtype=torch.float64))
            .full_state_dict()["2.bias"]
            .dtype
            is torch.float64
        )
    )


def parameters_wider_than_the_main_weights():
    yield lambda: fully_shard(net().double())
    yield lambda: fully_shard(net().double().float()).full_state_dict()["2.bias"].dtype is torch.float32


def an_optimizer_of_the_modules_own_parameters():
    wrapped = net()
    model = fully_shard(wrapped)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    loss_of(model).backward()
    yield optimizer.step
    optimizer = fully_shard_optimizer(torch.optim.AdamW(wrapped.parameters()), model)
    yield lambda: stepped(model, optimizer)


def an_optimizer_that_is_not_fresh():
    wrapped = net()
    model = fully_shard(wrapped)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(wrapped.parameters()), model)
    yield lambda: fully_shard_optimizer(optimizer, model)
    again = fully_shard_optimizer(torch.optim.AdamW(wrapped.parameters()), model)
    yield lambda: stepped(model, again)


def parameters_that_are_not_of_this_model():
    model = fully_shard(net())
    yield lambda: fully_shard_optimizer(torch.optim.SGD(net().parameters(), lr=0.1), model)
    yield lambda: stepped(model, fully_shard_optimizer(torch.optim.SGD(model.module.parameters(), lr=0.1), model))


def an_optimizer_of_sparse_gradients():
    wrapped = net()
    model = fully_shard(wrapped)
    yield lambda: fully_shard_optimizer(torch.optim.SparseAdam(list(wrapped.parameters())), model)
    yield lambda: stepped(model, fully_shard_optimizer(torch.optim.AdamW(wrapped.parameters()), model))


def a_state_that_does_not_fit():
    model = fully_shard(net())
    state = {f"module.{name}": value + 1 for name, value in net().state_dict().items()}
    yield lambda: model.load_full_state_dict(state)
    model.load_full_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    yield lambda: torch.equal(model.full_state_dict()["2.bias"], net().state_dict()["2.bias"] + 1)


def load_state_dict_of_a_wrapped_model():
    model, state = fully_shard(net()), {name: value + 1 for name, value in net().state_dict().items()}
    yield lambda: model.load_state_dict(state)
    model.load_full_state_dict(state)
    yield lambda: torch.equal(model.full_state_dict()["2.bias"], state["2.bias"])


def a_model_is_wrapped_once():
    model = FullyShardedDataParallel(net())
    yield lambda: FullyShardedDataParallel(model)
    yield lambda: FullyShardedDataParallel(net(), fsdp_unit_modules=[Block])


def lazy_modules():
    yield lambda: fully_shard(nn.Sequential(nn.LazyLinear(4)))
    lazy = nn.Sequential(nn.LazyLinear(4))
    lazy(torch.zeros(1, 4))
    yield lambda: loss_of(fully_shard(lazy)).isfinite()


def a_parameter_that_is_not_floating():
    def made(as_buffer):
        module = net()
        table = torch.arange(3)
        if as_buffer:
            module.register_buffer("table", table)
        else:
            module.table = nn.Parameter(table, requires_grad=False)
        return module

    yield lambda: fully_shard(made(False))
    yield lambda: torch.equal(fully_shard(made(True)).full_state_dict()["table"], torch.arange(3))


def numbers_and_names_of_options():
    yield lambda: BufferConfig(gathered_bytes="triple")
    yield lambda: fully_shard(net(), fsdp_unit_modules=[Block], buffers=BufferConfig(gathered_bytes=512 * 2**20))


def entries_of_fsdp_unit_modules():
    yield lambda: fully_shard(net(), fsdp_unit_modules=["LlamaBlock"])
    assert "Block" in {type(module).__name__ for module in net().modules()}
    yield lambda: len(fully_shard(net(), fsdp_unit_modules=["Block"], root_units=False).units) == 3


def modules_on_the_meta_device():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight

    def made():
        with torch.device("meta"):
            return nn.Sequential(Scale())

    yield lambda: fully_shard(made())
    model = fully_shard(made(), init_fn=lambda name, module: nn.init.constant_(module.weight, 3.0))
    yield lambda: torch.equal(model.full_state_dict()["0.weight"], torch.full((4,), 3.0))


def two_parameters_in_one_memory():
    def made(tie):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if tie:
            module[1].weight = module[0].weight
        else:
            module[1].weight.data = module[0].weight.data
        return module

    yield lambda: fully_shard(made(False))
    model = fully_shard(made(True))
    stepped(model, fully_shard_optimizer(torch.optim.SGD(model.module.parameters(), lr=0.1), model))
    yield lambda: torch.equal(model.full_state_dict()["0.weight"], model.full_state_dict()["1.weight"])


def user_buffers_cannot_be_had():
    yield lambda: fully_shard(net(), buffers=BufferConfig(user_buffers="require"))
    yield lambda: fully_shard(net(), buffers=BufferConfig(user_buffers="auto")).report()["user_buffers"]


def a_tree_and_a_narrower_sum():
    yield lambda: MixedPrecision(grad_sum="tree", reduce_dtype=torch.bfloat16)
    yield lambda: MixedPrecision(grad_sum="tree")


# ---- pipeline


def square(output, target):
    return (output - target).square().mean()


def an_argument_of_torchs_schedules():
    x = torch.randn(4, 4)
    yield lambda: PipelineRunner(gpipe(1, 2), [Stage(net(), 0)], None, square, n_microbatches=2)
    yield lambda: len(PipelineRunner(one_f_one_b(1, 2), [Stage(net(), 0)], None, square).step(x, x).losses) == 2


def a_step_of_a_program_with_steps():
    module, x = net(), torch.randn(4, 4)
    program = passes.optimizer_step(gpipe(1, 2))
    yield lambda: PipelineRunner(program, [Stage(module, 0)], None, square).step(x, x)
    stage = Stage(module, 0, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    PipelineRunner(program, [stage], None, square).step(x, x)
    yield lambda: not torch.equal(module[2].bias, net()[2].bias)


def a_lazy_layer():
    yield lambda: stages_of_sequential(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), 2)
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    model(torch.ones(1, 4))
    yield lambda: len(stages_of_sequential(model, 2)) == 2


def state_that_nothing_holds():
    state = {"calls": 0}

    class Counts(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.state = {"calls": 0} if held else None

        def forward(self, x):
            own = self.state or state
            own["calls"] += 1
            return self.layer(x) * own["calls"]

    x, again = torch.randn(4, 4), passes.recompute(gpipe(1, 2))
    yield lambda: PipelineRunner(again, [Stage(Counts(False), 0)], None, square).step(x, x)
    module = Counts(True)
    PipelineRunner(again, [Stage(module, 0)], None, square).step(x, x)
    yield lambda: module.state == {"calls": 2}


def a_cap_that_no_order_fits():
    costs = Costs([1, 1], [1, 1], [1, 1])
    with pytest.raises(ScheduleError) as raised:
        plan(costs, ranks=2, microbatches=4, memory_cap=0.1)
    least = float(re.search(r"needs is ([\d.]+)", str(raised.value)).group(1))
    yield lambda: plan(costs, ranks=2, microbatches=4, memory_cap=0.1)
    yield lambda: plan(costs, ranks=2, microbatches=4, memory_cap=least).program


ONE = [1, 1]
PIPELINE = {
    "a number is none, or below its least": (lambda: gpipe(1, 8 / 2), lambda: gpipe(1, 8 // 2)),
    "Costs do not fit": (lambda: Costs(ONE, [1], ONE), lambda: Costs(ONE, ONE, ONE, hop=0.1)),
    "costs are of another number of stages": (
        lambda: simulate(interleaved(2, 4), Costs(ONE, ONE, ONE)),
        lambda: simulate(interleaved(2, 4), Costs(ONE * 2, ONE * 2, ONE * 2)).makespan > 0,
    ),
    "verify's transport": (
        lambda: verify(gpipe(2, 2), transport="nccl"),
        lambda: verify(gpipe(2, 2), transport="rendezvous"),
    ),
    "layers cannot be cut into stages": (
        lambda: partition([1.0] * 3, 4),
        lambda: sum(partition([1.0] * 3, 4, allow_empty=True)) == 3,
    ),
    "there is no schedule of that name": (
        lambda: program_of("1f2b", 2, 4),
        lambda: program_of("1F1B", 2, 4) == one_f_one_b(2, 4),
    ),
    "a pass was applied twice, or to a program that has more": (
        lambda: passes.lower(passes.lower(gpipe(2, 2))),
        lambda: passes.lower(passes.reduce_grad(gpipe(2, 2))).lowered,
    ),
    "what a pass is told does not fit the program": (
        lambda: passes.recompute(gpipe(2, 8), microbatches=9),
        lambda: str(passes.recompute(gpipe(2, 8), microbatches=[0, 1])).count("RECOMPUTE") == 4,
    ),
    "a text is no action": (lambda: Action.parse("0X1"), lambda: str(Action.parse("3F0")) == "3F0"),
    "a text is no program": (
        lambda: Program.parse("0F0 0F1"),
        lambda: Program.parse(str(gpipe(2, 2))).ranks == gpipe(2, 2).ranks,
    ),
    "a program holds more than its memory cap": (
        lambda: verify(gpipe(2, 8), memory_cap=4),
        lambda: verify(one_f_one_b(2, 8), memory_cap=4),
    ),
    "a stage is no module, or not told what it takes": (
        lambda: Stage(lambda x: x, 0),
        lambda: Stage(net(), 0, optimizer=torch.optim.AdamW(net().parameters())),
    ),
    "stages that the program does not have here": (
        lambda: PipelineRunner(gpipe(1, 2), [Stage(net(), 1)], None, square),
        lambda: PipelineRunner(gpipe(1, 2), [Stage(net(), at) for at in gpipe(1, 2).stages_of(0)], None, square),
    ),
    "a schedule does not take that many stages or microbatches": (
        lambda: interleaved(4, 8, group=2),
        lambda: interleaved(4, 8),
    ),
}


# ---- dist-ckpt


def an_argument_of_torchs(folder):
    state = {"a": torch.arange(3.0)}
    yield partial(dist_ckpt.save, state, checkpoint_id=folder / "c")
    from sixfold.dist_ckpt import dcp

    dcp.save(state, checkpoint_id=folder / "c", no_dist=True)
    yield lambda: torch.equal(dist_ckpt.load_plain_tensors(folder / "c")["a"], state["a"])


def a_nan_that_is_not_saved(folder):
    state = {"w": torch.tensor([0.0, torch.nan])}
    dist_ckpt.save({"w": torch.zeros(2)}, folder / "step-00000001", check_finite=True)
    yield partial(dist_ckpt.save, state, folder / "step-00000002", check_finite=True)
    back = dist_ckpt.load_plain_tensors(dist_ckpt.retention.latest(folder))
    dist_ckpt.save(state, folder / "looked-at", check_finite=False)
    yield lambda: torch.equal(back["w"], torch.zeros(2)) and dist_ckpt.load_plain_tensors(folder / "looked-at")


def another_scheduler_of_learning_rates(folder):
    def made(kind, *arguments):
        return kind(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), *arguments)

    kinds = torch.optim.lr_scheduler
    saved = made(kinds.OneCycleLR, 1.0, 10)
    dist_ckpt.save({"schedule": saved}, folder / "c")
    yield lambda: dist_ckpt.load({"schedule": made(kinds.LambdaLR, lambda epoch: 1.0)}, folder / "c")
    same = made(kinds.OneCycleLR, 0.5, 10)
    dist_ckpt.load({"schedule": same}, folder / "c")
    yield lambda: same.state_dict() == saved.state_dict() and dist_ckpt.load({}, folder / "c")


def groups_and_deadlines(folder):
    yield lambda: dist_ckpt.save({"a": 1}, folder / "c", group=[0, 1])
    dist_ckpt.save({"a": 1}, folder / "c", group=None, timeout_s=float("inf"))
    yield lambda: dist_ckpt.load_common_state_dict(folder / "c") == {"a": 1}


def steps_and_retention(folder):
    yield lambda: dist_ckpt.retention.step_path(folder, 100.0)
    yield lambda: dist_ckpt.retention.step_path(folder, int(100.0)).name.startswith("step-")


CASES = {
    "fsdp": {
        "an option of torch's wrappers": an_option_of_torchs_wrappers,
        "a value of another kind": a_value_of_another_kind,
        "a group that is none": a_group_that_is_none,
        "another norm": another_norm,
        "a later group of the optimizer": a_later_group_of_the_optimizer,
        "a member of the wrapped module": a_member_of_the_wrapped_module,
        "a member that torch's FSDP has": a_member_that_torchs_fsdp_has,
        "moving or converting a wrapped model": moving_or_converting_a_wrapped_model,
        "parameters wider than the main weights": parameters_wider_than_the_main_weights,
        "an optimizer of the module's own parameters": an_optimizer_of_the_modules_own_parameters,
        "an optimizer that is not fresh": an_optimizer_that_is_not_fresh,
        "parameters that are not of this model": parameters_that_are_not_of_this_model,
        "an optimizer of sparse gradients": an_optimizer_of_sparse_gradients,
        "a state that does not fit": a_state_that_does_not_fit,
        "load_state_dict of a wrapped model": load_state_dict_of_a_wrapped_model,
        "a model is wrapped once": a_model_is_wrapped_once,
        "lazy modules": lazy_modules,
        "a parameter that is not floating": a_parameter_that_is_not_floating,
        "numbers and names of options": numbers_and_names_of_options,
        "entries of fsdp_unit_modules": entries_of_fsdp_unit_modules,
        "modules on the meta device": modules_on_the_meta_device,
        "two parameters in one memory": two_parameters_in_one_memory,
        "user buffers cannot be had": user_buffers_cannot_be_had,
        "a tree and a narrower sum": a_tree_and_a_narrower_sum,
    },
    "pipeline": {heading: partial(called, *calls) for heading, calls in PIPELINE.items()}
    | {
        "an argument of torch's": an_argument_of_torchs_schedules,
        "a program with STEPs, a stage without optimizer": a_step_of_a_program_with_steps,
        "a lazy layer that has no shape yet": a_lazy_layer,
        "a second run made another output than its forward": state_that_nothing_holds,
        "no order fits the memory cap": a_cap_that_no_order_fits,
    },
    "dist-ckpt": {
        "an argument of torch's": an_argument_of_torchs,
        "a NaN that is not saved": a_nan_that_is_not_saved,
        "another scheduler of learning rates": another_scheduler_of_learning_rates,
        "groups and deadlines": groups_and_deadlines,
        "steps and retention": steps_and_retention,
    },
}


@pytest.mark.parametrize(("package", "heading"), [(name, heading) for name in CASES for heading in CASES[name]])
def test_the_remedy_of_an_error_gives_what_it_promises(package, heading, tmp_path):
    case = CASES[package][heading]
    follow(package, heading, case(tmp_path) if package == "dist-ckpt" else case())
