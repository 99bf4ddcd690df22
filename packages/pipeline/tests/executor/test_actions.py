"""What each action does beside F and B: steps, recomputes, autocast, checkpoints, values that are no tensors."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from schedule_helpers import FLUSH
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sixfold.pipeline import (
    Costs,
    PipelineRunner,
    Program,
    ScheduleError,
    Stage,
    gpipe,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_v,
)
from sixfold.pipeline.passes import optimizer_step, recompute, split_backward, unshard


def runner_of(modules: list[nn.Module], program: Program, **options: Any) -> PipelineRunner:
    return PipelineRunner(
        program, [Stage(module, i) for i, module in enumerate(modules)], **{"loss_fn": square_loss} | options
    )


def same(ours: list[nn.Module], theirs: list[nn.Module]) -> bool:
    return all(equal_bits(gradients(a), gradients(b)) for a, b in zip(ours, theirs, strict=True))


# ---- STEP


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("program", [optimizer_step(gpipe(2, 4)), optimizer_step(zb_v(2, 4))], ids=["gpipe", "zb_v"])
def test_a_step_is_the_optimizers_of_the_plain_loop_and_leaves_no_gradients(program):
    modules, oracle = layers(program.stages), layers(program.stages)
    stages = [Stage(module, i, optimizer=sgd(module)) for i, module in enumerate(modules)]
    runner = PipelineRunner(program, stages, loss_fn=square_loss)
    theirs = [sgd(module) for module in oracle]
    for seed in (1, 2):
        x, y = batch(8, seed)
        runner.step(x, y)
        plain_loop(oracle, list(x.tensor_split(4)), list(y.tensor_split(4)))
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    for ours, other in zip(modules, oracle, strict=True):
        assert equal_bits([p.data for p in ours.parameters()], [p.data for p in other.parameters()])
        assert gradients(ours) == [None, None]


def test_a_program_may_step_several_times_and_each_mean_is_that_of_its_batch():
    text = "".join(
        f"{s}: " + " ".join(f"{s}F{k} {s}F{k + 1} {s}B{k} {s}B{k + 1} {s}STEP{k // 2}" for k in (0, 2)) + "\n"
        for s in (0, 1)
    )
    modules, oracle = layers(2), layers(2)
    stages = [Stage(module, i, optimizer=sgd(module)) for i, module in enumerate(modules)]
    x, y = batch(8)
    PipelineRunner(Program.parse(text), stages, loss_fn=square_loss).step(x, y)
    theirs = [sgd(module) for module in oracle]
    for half in (slice(0, 4), slice(4, 8)):
        plain_loop(oracle, list(x[half].tensor_split(2)), list(y[half].tensor_split(2)))
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    for ours, other in zip(modules, oracle, strict=True):
        assert equal_bits([p.data for p in ours.parameters()], [p.data for p in other.parameters()])


def test_tokens_are_counted_per_batch_where_a_program_steps_several_times():
    text = "0: 0F0 0B0 0STEP0 0F1 0B1 0STEP1"
    counted = lambda o, t: (((o - t) ** 2).sum(), 10 if t[0, 0] == 0 else 1000)  # noqa: E731
    (module,), (oracle,) = layers(1), layers(1)
    stage = Stage(module, 0, optimizer=torch.optim.SGD(module.parameters(), lr=1.0))
    x, y = batch(4)
    y[0, 0], y[2, 0] = 0, 1
    PipelineRunner(Program.parse(text), [stage], loss_fn=counted, scale="token").step(x, y)
    optimizer = torch.optim.SGD(oracle.parameters(), lr=1.0)
    for half, count in ((slice(0, 2), 10.0), (slice(2, 4), 1000.0)):
        ((oracle(x[half]) - y[half]) ** 2).sum().backward()
        for parameter in oracle.parameters():
            parameter.grad.div_(count)
        optimizer.step()
        optimizer.zero_grad()
    assert equal_bits([p.data for p in module.parameters()], [p.data for p in oracle.parameters()])


def test_an_empty_stage_steps_without_an_optimizer_and_a_step_that_fails_breaks_the_runner():
    class Fails(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            raise ZeroDivisionError

    (module,) = layers(1)
    for optimizer, words in ((sgd(module), None), (Fails(module.parameters()), r"1STEP0: ZeroDivisionError")):
        stages = [Stage(None, 0), Stage(module, 1, optimizer=optimizer)]
        runner = PipelineRunner(optimizer_step(gpipe(2, 2)), stages, loss_fn=square_loss)
        if words is None:
            runner.step(*batch(4))
            continue
        with pytest.raises(ScheduleError, match=words):
            runner.step(*batch(4))
        with pytest.raises(ScheduleError, match="this runner failed before"):
            runner.step(*batch(4))


# ---- RECOMPUTE, checkpoints, random numbers


def noisy(stages: int) -> list[nn.Module]:
    return [nn.Sequential(module, nn.Dropout(0.5)) for module in layers(stages)]


class _Tells(nn.Module):
    """Writes down the state of the random numbers at each first forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.states = module, {}

    def forward(self, x: Tensor, *, k: int) -> Tensor:
        self.states.setdefault(k, torch.get_rng_state())
        return self.module(x)


def check_masks(program: Program, **options: Any) -> Tensor:
    """A step of noisy stages has the bits of forwards and backwards under the states that its forwards drew from."""
    m, n = program.microbatches, program.stages
    modules, oracle = [_Tells(module) for module in noisy(n)], noisy(n)
    x, y = batch(2 * m)
    torch.manual_seed(7)
    stages = [Stage(module, i, **options) for i, module in enumerate(modules)]
    PipelineRunner(program, stages, loss_fn=square_loss).step(x, y, kwargs=[{"k": k} for k in range(m)])
    after = torch.get_rng_state()
    for k, (a, b) in enumerate(zip(x.tensor_split(m), y.tensor_split(m), strict=True)):
        hidden = a
        for module, told in zip(oracle, modules, strict=True):
            torch.set_rng_state(told.states[k])
            hidden = module(hidden)
        (square_loss(hidden, b) / m).backward()
    assert same(modules, oracle)
    return after


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_v", "dualpipe_v"])
@pytest.mark.slow
def test_a_recomputed_forward_draws_the_random_numbers_of_the_first_one(name):
    program = FLUSH[name](2, 4)
    after = check_masks(program)
    for changed in (recompute(program), recompute(program, microbatches=[1, 3])):
        assert torch.equal(check_masks(changed), after)  # a recompute takes no numbers of its own


@pytest.mark.parametrize("program", [gpipe(2, 4), zb_h1(2, 4), recompute(gpipe(2, 4))], ids=str)
def test_a_checkpointed_stage_has_the_bits_of_one_that_is_not(program):
    check_masks(program, checkpoint=True)


class Counts(torch.autograd.Function):
    """Saves a tensor of its own, and keeps a weak reference to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[Any]) -> Tensor:
        own = x + 1
        made.append(weakref.ref(own))
        ctx.save_for_backward(own)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors  # noqa: B018
        return gradient * 2, None


class Counting(nn.Module):
    def __init__(self, module: nn.Module, seen: Callable[[int], None]) -> None:
        super().__init__()
        self.module, self.made, self.seen = module, [], seen

    def forward(self, x: Tensor) -> Tensor:
        y = Counts.apply(self.module(x), self.made)
        self.seen(sum(ref() is not None for ref in self.made))
        return y


@pytest.mark.parametrize("program", [gpipe(2, 4), recompute(gpipe(2, 4)), split_backward(gpipe(2, 4))], ids=str)
def test_a_recomputed_microbatch_holds_nothing_between_its_forward_and_its_recompute(program):
    held: list[int] = []
    runner_of([Counting(module, held.append) for module in layers(2)], program).step(*batch(8))
    assert max(held) == (1 if "RECOMPUTE" in str(program) else 4)


# ---- autocast


@pytest.mark.parametrize("program", [one_f_one_b(2, 4), zb_v(2, 4), recompute(gpipe(2, 4))], ids=lambda p: p.name)
def test_autocast_holds_for_forwards_and_not_for_backwards(program):
    modules, oracle = layers(program.stages), layers(program.stages)
    x, y = batch(8)
    with torch.autocast("cpu", torch.bfloat16):
        losses = runner_of(modules, program).step(x, y).losses
    expected = []
    for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = a
            for module in oracle:
                hidden = module(hidden)
            loss = square_loss(hidden, b)
        (loss / 4).backward()
        expected.append(loss.detach())
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert same(modules, oracle)


class Fan(nn.Module):
    """Three layers of one input, in full precision behind them; notes how many of its inputs live."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.inputs: list[weakref.ref[Tensor]] = []
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(weakref.ref(x if x._base is None else x._base))
        self.most = max(self.most, sum(ref() is not None for ref in self.inputs))
        return nn.functional.layer_norm(sum(torch.tanh(part(x)) for part in self.parts).float(), (8,))


@pytest.mark.parametrize("program", [one_f_one_b(2, 6), zb_h1(2, 6), recompute(gpipe(2, 6))], ids=lambda p: p.name)
@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.slow
def test_autocast_casts_the_input_of_a_stage_as_it_does_in_one_graph(program, wants):
    modules = [Fan(seed) for seed in range(2)]
    oracle, (x, y) = copy.deepcopy(modules), batch(18)
    mine, theirs = ([part.clone().requires_grad_(wants) for part in x.split(3)] for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        runner_of(modules, program).step(mine, y)
    for a, b in zip(theirs, y.split(3), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = square_loss(oracle[1](oracle[0](a)), b)
        (loss / 6).backward()
    assert same(modules, oracle) and equal_bits([a.grad for a in mine], [a.grad for a in theirs])
    if program.name == "one_f_one_b":
        assert modules[1].most <= 2, "autocast keeps inputs whose backward has run"


class Tied(nn.Module):
    """An embedding and a head that are one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(tokens))).float()


def test_under_autocast_a_head_and_its_embedding_are_added_before_they_are_accumulated():
    ours, plain = Tied(), Tied()
    tokens = torch.randint(0, 32, (40, 6), generator=torch.Generator().manual_seed(1))

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    runner = PipelineRunner(zb_h1(1, 4), [Stage(ours, 0)], loss_fn=loss)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            runner.step(tokens, tokens)
        for part in tokens.split(10):
            with torch.autocast("cpu", torch.bfloat16):
                one = loss(plain(part), part)
            (one / 4).backward()
    assert same([ours], [plain])


def test_an_evaluation_under_the_same_autocast_does_not_cost_a_step_its_gradients():
    modules, oracle = layers(2), layers(2)
    runner = runner_of(modules, gpipe(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        runner.evaluate(*batch(4))
        runner.step(*batch(4))
    with torch.autocast("cpu", torch.bfloat16):
        runner_of(oracle, gpipe(2, 2)).step(*batch(4))
    assert same(modules, oracle)
    assert all(g is not None for module in modules for g in gradients(module))


# ---- values


class Tagged(nn.Module):
    """Adds to the numbers that travel beside its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *rest: Any) -> Any:
        self.seen.append(rest)
        count, share, flag = (rest[1] + 1, rest[2] / 2, not rest[3]) if rest else (0, 1.0, True)
        return self.layer(x), None, count, share, flag


def test_nones_and_numbers_pass_beside_tensors():
    modules: list[nn.Module] = [Tagged(), Tagged(), Tagged()]
    runner_of(modules, one_f_one_b(3, 2), loss_fn=lambda out, _: out[0].sum() * (out[2] + out[3])).step(batch(4)[0])
    assert [m.seen for m in modules[1:]] == [[(None, 0, 1.0, True)] * 2, [(None, 1, 0.5, False)] * 2]
    assert [type(value) for value in modules[2].seen[0]] == [type(None), int, float, bool]
    with pytest.raises(ScheduleError, match="the output of stage 0 holds a list; beside tensors stages exchange None"):
        runner_of([_Returns(([1],)), nn.Linear(8, 8)], gpipe(2, 1)).step(batch(2)[0])


class _Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value


def test_outputs_are_kept_beside_losses_when_asked_for():
    modules, oracle = layers(2), layers(2)
    runner = runner_of(modules, gpipe(2, 2))
    x, y = batch(4)
    result = runner.step(x, y, keep_outputs=True)
    assert all(
        torch.equal(out, oracle[1](oracle[0](part)))
        for out, part in zip(result.outputs, x.tensor_split(2), strict=True)
    )
    assert len(result.losses) == 2
    assert not any(out.requires_grad for out in result.outputs)
    assert runner.step(x, y).outputs == []


# ---- what remains


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_step_outlives_it(fails):
    class Fussy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, *, mask: Tensor, fail: bool = False) -> Tensor:
            if fail:
                raise ZeroDivisionError
            return self.layer(x) * mask

    runner = runner_of([Fussy(), Fussy()], zb_h1(2, 2))
    gc.collect()
    x, y = batch(4)
    parts, masks = [t.clone() for t in x.tensor_split(2)], [torch.ones(8) for _ in range(2)]
    kept = [weakref.ref(t) for t in (*parts, *masks)]
    kwargs = [{"mask": masks[0]}, {"mask": masks[1], "fail": fails}]
    try:
        runner.step(parts, list(y.tensor_split(2)), kwargs=kwargs)
    except ScheduleError:
        assert fails
    del parts, masks, kwargs
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_goes_on_as_it_is_and_breaks_the_runner(error):
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error("stop")

    runner = runner_of([nn.Linear(8, 8), Interrupted()], gpipe(2, 2))
    with pytest.raises(error):
        runner.step(*batch(4))
    with pytest.raises(ScheduleError, match=f"this runner failed before .{error.__name__}: stop"):
        runner.step(*batch(4))


def test_an_interrupt_on_one_rank_ends_the_step_on_all():
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    def rank(transport: Any) -> None:
        module = Interrupted() if transport.rank else nn.Linear(8, 8)
        runner = PipelineRunner(gpipe(2, 2), [Stage(module, transport.rank)], transport, square_loss, timeout_s=20)
        runner.step(*batch(4))

    other, mine = on_threads(2, rank)
    assert isinstance(mine, KeyboardInterrupt)
    assert isinstance(other, ScheduleError)
    assert re.match(r"rank 1 failed at \[\d/\d+\] 1F0: KeyboardInterrupt", str(other))


# ---- what a stage may be


class Encoder(nn.Module):
    """Reads the source, and passes the target's ids on for the decoder; ``None`` stands for a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Any, ...]:
        return self.layer(self.embed(source)).tanh(), target, None, 1


class Middle(nn.Module):
    """Still encodes; the target passes by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, memory: Tensor, target: Tensor, mask: None, step: int) -> tuple[Any, ...]:
        assert mask is None
        return self.layer(memory).tanh(), target, None, step + 1


class Bridge(nn.Module):
    """Two outputs that want gradients: the memory, and the embedded target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)

    def forward(self, memory: Tensor, target: Tensor, mask: None, step: int) -> tuple[Tensor, Tensor, float]:
        return memory, self.embed(target), step / 2


class Decoder(nn.Module):
    """Attends to the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, memory: Tensor, hidden: Tensor, scale: float) -> Tensor:
        return (self.layer(hidden) @ memory.transpose(-1, -2) * scale).softmax(-1) @ memory


def translators() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Encoder(), Middle(), Bridge(), Decoder()]


def sentences(m: int) -> tuple[list[Any], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(10, (2, n), generator=generator)  # noqa: E731
    pairs = [(draw(3 + k % 2), draw(2 + k % 3)) for k in range(m)]  # lengths of their own
    return pairs, [torch.randn(2, pair[1].shape[1], 8, generator=generator) for pair in pairs]


@pytest.mark.parametrize("program", [one_f_one_b(4, 4), zb_v(2, 4), recompute(zb_h1(4, 4))], ids=lambda p: p.name)
def test_an_encoder_and_a_decoder_pass_tuples_on_with_the_bits_of_the_plain_loop(program):
    oracle, (inputs, targets) = translators(), sentences(4)
    for pair, target in zip(inputs, targets, strict=True):
        values: Any = pair
        for module in oracle:
            values = module(*values)
        (square_loss(values, target) / 4).backward()
    modules = translators()
    runner_of(modules, program).step(inputs, targets)
    assert same(modules, oracle)
    modules = translators()

    def rank(transport: Any) -> None:
        mine = [Stage(modules[s], s) for s in program.stages_of(transport.rank)]
        PipelineRunner(program, mine, transport, square_loss, timeout_s=20).step(inputs, targets)

    values_or_raise(on_threads(len(program.ranks), rank))
    assert same(modules, oracle)


# ---- an outside sharding library


class Accumulates:
    """Keeps the sums of a stage's gradients itself, those of W by ``accumulate``, others by a hook."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.log = module, []
        self.sums: dict[Any, Tensor] = {}
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._hook)

    def _hook(self, parameter: Any) -> None:
        self.accumulate(parameter, parameter.grad)
        parameter.grad = None

    def accumulate(self, parameter: Any, gradient: Tensor) -> None:
        self.sums[parameter] = self.sums[parameter] + gradient if parameter in self.sums else gradient

    def unshard(self) -> None:
        self.log.append("unshard")

    def reshard(self) -> None:
        self.log.append("reshard")

    def before_last_backward(self) -> None:
        self.log.append("last")

    def after_backward(self, microbatch: int) -> None:
        self.log.append(f"after{microbatch}")

    def reduce_grad(self) -> None:
        self.log.append("reduce")


@pytest.mark.parametrize("program", [gpipe(2, 3), zb_h1(2, 3), zb_v(2, 3)], ids=lambda p: p.name)
def test_a_sharding_library_gets_every_gradient_and_is_told_of_the_last_backward(program):
    modules, oracle = layers(program.stages), layers(program.stages)
    handles = [Accumulates(module) for module in modules]
    stages = [Stage(m, i, data_parallel=h) for i, (m, h) in enumerate(zip(modules, handles, strict=True))]
    x, y = batch(6)
    PipelineRunner(unshard(program, max_active=1), stages, loss_fn=square_loss).step(x, y)
    plain_loop(oracle, list(x.tensor_split(3)), list(y.tensor_split(3)))
    for module, handle, theirs in zip(modules, handles, oracle, strict=True):
        assert equal_bits([handle.sums[p] for p in module.parameters()], gradients(theirs))
        assert gradients(module) == [None] * 2
        told = [entry for entry in handle.log if not entry.endswith("shard")]
        assert told == ["after0", "after1", "last", "after2", "reduce"]
        assert handle.log.count("unshard") == handle.log.count("reshard") > 0


# ---- live tensors


LIVE = {
    **FLUSH,
    "gpipe recomputed": lambda p, m: recompute(gpipe(p, m)),
    "zb_v recomputed": lambda p, m: recompute(zb_v(p, m)),
}


@pytest.mark.parametrize("name", LIVE)
@pytest.mark.slow
def test_live_activations_of_each_rank_are_those_of_the_simulator(name):
    program = LIVE[name](3, 6)
    most = [0] * 3
    made: list[tuple[int, Any]] = []

    class Holds(nn.Module):
        def __init__(self, module: nn.Module, rank: int) -> None:
            super().__init__()
            self.module, self.rank = module, rank

        def forward(self, x: Tensor) -> Tensor:
            own: list[Any] = []
            y = Counts.apply(self.module(x), own)
            made.append((self.rank, own[0]))
            alive = sum(ref() is not None for rank, ref in made if rank == self.rank)
            most[self.rank] = max(most[self.rank], alive)
            return y

    modules: list[nn.Module] = [Holds(module, program.placement[i]) for i, module in enumerate(layers(program.stages))]
    runner_of(modules, program, scale="sum").step(*batch(6))
    costs = replace(
        Costs.per_rank(program, forward=1.0, backward_input=1.0, backward_weight=1.0),
        activation=(1.0,) * program.stages,
        input_share=1.0,  # what these functions save is free behind I; the inputs of linear layers are not
    )
    assert most == list(simulate(program, costs).peak_activations)


@pytest.mark.parametrize("name", FLUSH)
@pytest.mark.slow
def test_live_outputs_of_each_rank_are_those_of_the_simulator(name):
    program = FLUSH[name](3, 6)
    most = [0] * 3
    made: list[list[StorageWeakRef]] = [[] for _ in most]

    class Scales(nn.Module):
        """Autograd saves its output, and its input until I."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.weight, self.rank = nn.Parameter(torch.ones(8)), rank

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x * self.weight)
            mine = made[self.rank]
            mine.append(StorageWeakRef(y.untyped_storage()))
            most[self.rank] = max(most[self.rank], sum(not ref.expired() for ref in mine))
            return y

    runner_of([Scales(rank) for rank in program.placement], program).step(*batch(6))
    assert tuple(most) == simulate(program, Costs.per_rank(program)).peak_outputs
    assert all(ref.expired() for mine in made for ref in mine)


# ---- gradients that autograd lets share memory


class Scalar(nn.Module):
    """Its output is a view of a parameter plus something: autograd gives the parameter a view of what it was handed."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + self.shift.squeeze(0)


def test_a_parameter_that_takes_the_losss_gradient_for_its_own_does_not_change_that_of_other_losses():
    module, oracle = Scalar(), Scalar()
    x, _ = batch(6)
    runner = runner_of([module], gpipe(1, 3), loss_fn=lambda o, _: o)
    for _ in range(2):
        runner.step(x)
        for part in x.tensor_split(3):
            (oracle(part) / 3).backward()
    assert same([module], [oracle])


class Positions(nn.Module):
    """Adds what is learned per place: with one row its gradient and its input's are one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x.squeeze(0) + self.places.view(8)).unsqueeze(0)


@pytest.mark.parametrize("kinds", ["B", "IW"])
def test_a_gradient_on_its_way_is_not_added_to_by_a_parameter_that_shares_its_memory(kinds):
    back = lambda s: " ".join(f"{s}{kind}{k}" for k in range(3) for kind in kinds)  # noqa: E731
    program = Program.parse(f"0: 0F0 0F1 0F2 1F0 1F1 1F2 {back(1)} {back(0)}")
    modules: list[nn.Module] = [nn.Linear(8, 8), Positions()]
    oracle: list[nn.Module] = [nn.Linear(8, 8), Positions()]
    oracle[0].load_state_dict(modules[0].state_dict())
    x, y = batch(3)
    runner_of(modules, program).step(x, y)
    plain_loop(oracle, list(x.tensor_split(3)), list(y.tensor_split(3)))
    assert same(modules, oracle)
