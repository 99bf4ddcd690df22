"""Stages that are DistributedDataParallel, or sharded by torch's fully_shard, beside the plain loop under them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import square_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ranktest import run_ranks
from sixfold.pipeline import (
    PipelineRunner,
    PipelineTimeout,
    Program,
    ScheduleError,
    Stage,
    interleaved,
    one_f_one_b,
    passes,
    zb_h1,
    zb_v,
)

M = 4
WIDTH = 6


class Part(nn.Module):
    """A stage with a buffer, a frozen parameter, two types, and a parameter that only some ranks use."""

    def __init__(self, buffers: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(8) if buffers else nn.LayerNorm(8)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.rarely, self.never = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.use = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.norm(self.a(x)))) + self.frozen(x)
        x = (x * self.scale).float()
        return x * self.rarely if self.use else x


def parts(stages: int, rank: int, *, use: bool, buffers: bool = True) -> list[Part]:
    torch.manual_seed(5)
    made = [Part(buffers) for _ in range(stages)]
    for part in made:
        part.use = use and rank == 1
    return made


def batch(rank: int, step: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    draw = [torch.randn(3, WIDTH, generator=generator) for _ in range(2 * M)]
    return draw[:M], draw[M:]


@contextlib.contextmanager
def unsynced(modules: list[DistributedDataParallel]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.no_sync())
        yield


def torch_loop(modules: list[DistributedDataParallel], xs: list[Tensor], ys: list[Tensor]) -> None:
    """As a user of DDP accumulates: the last microbatch alone is reduced."""
    for k, (hidden, y) in enumerate(zip(xs, ys, strict=True)):
        with unsynced(modules) if k < M - 1 else contextlib.nullcontext():
            for module in modules:
                hidden = module(hidden)
            (square_loss(hidden, y) / M).backward()


def check_alike(ours: list[nn.Module], theirs: list[nn.Module], name: str) -> None:
    for s, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for (key, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{name}: stage {s} {key} has {p.grad}, DDP {q.grad}"
            assert p.grad is None or torch.equal(p.grad, q.grad), f"{name}: stage {s} {key} differs"
        for (key, p), q in zip(a.named_buffers(), b.buffers(), strict=True):
            assert torch.equal(p, q), f"{name}: stage {s} buffer {key} differs"


PROGRAMS: list[Callable[[], Program]] = [
    lambda: one_f_one_b(1, M),
    lambda: interleaved(2, M),
    lambda: zb_h1(2, M),
    lambda: zb_v(2, M),
]


def check_replicas(rank: int, ranks: int) -> None:
    """Every pipeline is in one process; its replica in the other."""
    options = [{"find_unused_parameters": True}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}]
    for number, make in enumerate(PROGRAMS):
        program = make()
        found = [
            [DistributedDataParallel(p, bucket_cap_mb=0.0003, **options[number % 2]) for p in made]
            for made in (parts(program.stages, rank, use=number > 0) for _ in range(2))
        ]
        ours, theirs = found
        runner = PipelineRunner(program, [Stage(m, s) for s, m in enumerate(ours)], None, square_loss, timeout_s=20)
        for step in range(2):
            torch_loop(theirs, *batch(rank, step))
            runner.step(*batch(rank, step))
            check_alike(ours, theirs, f"{program.name}, step {step}")
        before = [None if p.grad is None else p.grad.clone() for m in ours for p in m.parameters()]
        with unsynced(ours):
            runner.step(*batch(rank, 2))
        with unsynced(theirs):
            torch_loop(theirs, *batch(rank, 2))
        after = [p.grad for m in ours for p in m.parameters()]
        assert any(a is not None and not torch.equal(a, b) for a, b in zip(after, before, strict=True))
        # What the other rank used alone has no gradient in this one's loop, and zeros in its DDP: only used ones.
        for a, b in zip(after, (p.grad for m in theirs for p in m.parameters()), strict=True):
            assert a is None or b is None or torch.equal(a, b)


def check_static_graph(rank: int, ranks: int) -> None:
    program = zb_h1(2, M)
    ours = [DistributedDataParallel(p, static_graph=True) for p in parts(2, rank, use=False)]
    theirs = [DistributedDataParallel(p, find_unused_parameters=True) for p in parts(2, rank, use=False)]
    runner = PipelineRunner(program, [Stage(m, s) for s, m in enumerate(ours)], None, square_loss)
    runner.step(*batch(rank, 0))
    torch_loop(theirs, *batch(rank, 0))
    check_alike(ours, theirs, "static graph")


def check_replaced(rank: int, ranks: int) -> None:
    """What was replaced behind the wrap is reduced and shared, as by a DDP that is made then."""
    program = zb_h1(2, M)
    ours = [DistributedDataParallel(p) for p in parts(2, rank, use=False)]
    runner = PipelineRunner(program, [Stage(m, s) for s, m in enumerate(ours)], None, square_loss)
    runner.step(*batch(rank, 0))
    torch.manual_seed(7)
    for part in ours:
        values = {name: value.clone() for name, value in part.module.state_dict().items()}
        part.module.load_state_dict(values, assign=True)
        part.module.b = nn.Linear(8, WIDTH)
        part.module.frozen.requires_grad_(True)
        part.module.norm.running_mean = torch.full((8,), float(rank))
        part.zero_grad()
    theirs = [DistributedDataParallel(copy.deepcopy(p.module), find_unused_parameters=True) for p in ours]
    for part in ours:  # the wrap of theirs has shared it
        part.module.norm.running_mean = torch.full((8,), float(rank))
    runner.step(*batch(rank, 1))
    torch_loop(theirs, *batch(rank, 1))
    check_alike(ours, theirs, "replaced")


def check_refused(rank: int, ranks: int) -> None:
    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(nn.Linear(2, 2))

    hooked = wrapped()
    hooked.register_comm_hook(None, lambda state, bucket: bucket.get_future())  # type: ignore[attr-defined]
    builtin = wrapped()
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    sparse = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    for module, words in (
        (hooked, "DistributedDataParallel with a communication hook"),
        (builtin, "DistributedDataParallel with a communication hook"),
        (sparse, "DistributedDataParallel with sparse gradients"),
        (nn.Sequential(wrapped()), "holds a DistributedDataParallel"),
    ):
        with pytest.raises(ScheduleError, match=words):
            Stage(module, 0)
    with pytest.raises(ScheduleError, match="give one of them"):
        Stage(wrapped(), 0, data_parallel=Stage(wrapped(), 0).data_parallel)


def check_deadline(rank: int, ranks: int) -> None:
    """A replica that does not come is told within the runner's deadline."""
    module = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    runner = PipelineRunner(one_f_one_b(1, M), [Stage(module, 0)], None, square_loss, timeout_s=0.3)
    if rank == 0:
        with pytest.raises((PipelineTimeout, ScheduleError), match="waited for its replicas on ranks"):
            runner.step(*batch(rank, 0))


def check_fully_shard(rank: int, ranks: int) -> None:
    """FSDP2 counts on gradients in I, and gets them there: nothing of its stage is deferred."""
    program = zb_v(2, M)
    torch.manual_seed(5)
    plain = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(program.stages)]
    ours, theirs = ([fully_shard(copy.deepcopy(p)) for p in plain] for _ in range(2))
    runner = PipelineRunner(program, [Stage(m, s) for s, m in enumerate(ours)], None, square_loss)
    runner.step(*batch(rank, 0))
    for x, y in zip(*batch(rank, 0), strict=True):
        for module in theirs:
            x = module(x)
        (square_loss(x, y) / M).backward()
    for a, b in zip(ours, theirs, strict=True):
        for (key, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), key
            assert p.grad is None or torch.equal(p.grad.to_local(), q.grad.to_local()), key


def summed_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return ((output - target) ** 2).sum(), target.numel()


def check_evaluations_around_shards(rank: int, ranks: int) -> None:
    """A forward leaves FSDP2's root gathered; losses, norms, gradients and weights are still the whole model's."""
    for scale, loss_fn in (("mean", nn.functional.mse_loss), ("token", summed_loss)):
        torch.manual_seed(5)
        plain = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(2)]
        ours = [fully_shard(copy.deepcopy(p)) for p in plain]
        theirs = nn.Sequential(*plain)
        runner = PipelineRunner(
            one_f_one_b(2, M), [Stage(m, s) for s, m in enumerate(ours)], None, loss_fn, scale=scale
        )
        trained = torch.optim.SGD([p for m in ours for p in m.parameters()], lr=0.5)
        oracle = torch.optim.SGD(theirs.parameters(), lr=0.5)
        seen, _ = batch(rank, 7)
        for step in range(2):
            outputs = runner.forward(seen).outputs
            assert torch.allclose(torch.cat(outputs), theirs(torch.cat(seen)), atol=1e-6), f"{scale}, step {step}"
            runner.step(*batch(rank, step))
            for other in range(ranks):
                x, y = map(torch.cat, batch(other, step))
                (nn.functional.mse_loss(theirs(x), y) / ranks).backward()
            runner.evaluate(*batch(rank, 8))
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
            assert torch.allclose(runner.clip_grad_norm_(0.1), norm, atol=1e-6), f"{scale}, step {step}"
            for a, b in zip((p for m in ours for p in m.parameters()), theirs.parameters(), strict=True):
                assert torch.allclose(a.grad.full_tensor(), b.grad, atol=1e-6), f"{scale}, step {step}"
            runner.evaluate(*batch(rank, 8))
            for optimizer in (trained, oracle):
                optimizer.step()
                optimizer.zero_grad()


def counted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rows whose target is none of -100."""
    kept = (target[:, 0] != -100).to(output.dtype)
    return (((output - target) ** 2).mean(1) * kept).sum(), kept.sum()


def check_kept_back(sharded: list[Any], program: Program, given: tuple[list[Tensor], list[Tensor]]) -> None:
    """What FSDP2 keeps back for a later step would not be divided."""
    for switch in (type(sharded[0]).set_requires_gradient_sync, type(sharded[0]).set_requires_all_reduce):
        runner = PipelineRunner(
            program, [Stage(m, s) for s, m in enumerate(sharded)], None, counted_loss, scale="token", timeout_s=20
        )
        switch(sharded[1], False)
        with pytest.raises(ScheduleError, match=r"stage 1 has set_requires_gradient_sync\(False\), or"):
            runner.step(*given)
        switch(sharded[1], True)


def check_tokens_of_all_replicas(rank: int, ranks: int) -> None:
    """Ranks whose batches have other numbers of tokens have the gradient of the mean over all tokens."""
    batches = [batch(other, 0) for other in range(ranks)]
    for other, (_, targets) in enumerate(batches):
        for y in targets[: len(targets) - 1 if other else 0]:
            y[:] = -100.0
    for program, wrap in (
        (one_f_one_b(2, M), fully_shard),
        (one_f_one_b(2, M), DistributedDataParallel),
        (zb_h1(2, M), DistributedDataParallel),
    ):
        torch.manual_seed(5)
        plain = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(2)]
        theirs = nn.Sequential(*copy.deepcopy(plain))
        ours = [wrap(module) for module in plain]
        runner = PipelineRunner(
            program, [Stage(m, s) for s, m in enumerate(ours)], None, counted_loss, scale="token", timeout_s=20
        )
        if wrap is fully_shard:
            check_kept_back(ours, program, batches[rank])
        sums, counts = zip(*(counted_loss(theirs(torch.cat(x)), torch.cat(y)) for x, y in batches), strict=True)
        (sum(sums) / sum(counts)).backward()
        for steps in (1, 2):  # gradients add up, and those that are there are not divided again
            runner.step(*batches[rank])
            for a, b in zip((p for m in ours for p in m.parameters()), theirs.parameters(), strict=True):
                gradient = a.grad.full_tensor() if hasattr(a.grad, "full_tensor") else a.grad
                assert torch.allclose(gradient, steps * b.grad, atol=1e-6), f"{wrap}, {steps}"
    with unsynced(ours), pytest.raises(ScheduleError, match=r"stage 0 is within no_sync\(\)"):
        runner.step(*batches[rank])
    runner = PipelineRunner(
        zb_h1(2, M), [Stage(m, s) for s, m in enumerate(ours)], None, counted_loss, scale="token", timeout_s=20
    )
    before = [p.grad.clone() for m in ours for p in m.parameters()]
    for _ in range(2):  # as the message says
        runner.step(*batches[rank])
    for was, p, b in zip(before, (p for m in ours for p in m.parameters()), theirs.parameters(), strict=True):
        assert torch.allclose(p.grad - was, 2 * b.grad, atol=1e-6)


def check_norm_beside_shards(rank: int, ranks: int) -> None:
    """One stage of a process is sharded, the other is whole."""
    torch.manual_seed(5)
    plain = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    theirs = nn.Sequential(*copy.deepcopy(plain))
    ours = [fully_shard(plain[0]), plain[1]]
    runner = PipelineRunner(one_f_one_b(2, M), [Stage(m, s) for s, m in enumerate(ours)], None, square_loss)
    runner.step(*batch(0, 0))  # of all ranks the same
    x, y = map(torch.cat, batch(0, 0))
    square_loss(theirs(x), y).backward()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    assert torch.allclose(runner.clip_grad_norm_(0.1), norm, atol=1e-6)
    for a, b in zip((p for m in ours for p in m.parameters()), theirs.parameters(), strict=True):
        gradient = a.grad.full_tensor() if hasattr(a.grad, "full_tensor") else a.grad
        assert torch.allclose(gradient, b.grad, atol=1e-6)


def check_autocast_around_shards(rank: int, ranks: int) -> None:
    """Autocast remembers its casts of weights through a step; each microbatch's gradients are reduced with it still."""
    torch.manual_seed(5)
    plain = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(2)]
    theirs = [fully_shard(copy.deepcopy(p)) for p in plain]
    for x, y in zip(*batch(rank, 0), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = square_loss(theirs[1](theirs[0](x)), y) / M
        loss.backward()
    program = one_f_one_b(2, M)
    for made, checkpoint in ((program, False), (program, True), (passes.recompute(program), False)):
        ours = [fully_shard(copy.deepcopy(p)) for p in plain]
        stages = [Stage(m, s, checkpoint=checkpoint) for s, m in enumerate(ours)]
        runner = PipelineRunner(made, stages, None, square_loss)
        with torch.autocast("cpu", torch.bfloat16):
            runner.step(*batch(rank, 0))
        for a, b in zip(ours, theirs, strict=True):
            for (key, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
                assert torch.equal(p.grad.to_local(), q.grad.to_local()), f"{key}, {checkpoint}, {made.name}"


class Table(nn.Module):
    """A stage with a table, of the first or the last."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)), head

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T if self.head else self.weight[x]


def check_tied_shards(rank: int, ranks: int) -> None:
    """Copies of a tied table on two ranks, each under fully_shard."""
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("pp", "dp"))
    mine = fully_shard(Table(head=rank == 1), mesh=mesh["dp"])
    runner = PipelineRunner(
        one_f_one_b(2, M),
        Stage(mine, rank, tied={"table": mine.weight}),
        mesh["pp"],
        nn.functional.cross_entropy,
        timeout_s=20,
    )
    theirs = Table(head=True)
    x, y = torch.arange(3 * M) % 5, torch.arange(3 * M) % 3
    for step in range(2):
        runner.evaluate(x, y)
        runner.step(x, y)
        nn.functional.cross_entropy(theirs(theirs.weight[x]), y).backward()
        assert torch.allclose(mine.weight.grad.full_tensor(), theirs.weight.grad, atol=1e-6), step
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        assert torch.allclose(runner.clip_grad_norm_(0.1), norm, atol=1e-6), step


def check_everything(rank: int, ranks: int) -> None:
    """One job: starting ranks costs more than what they do here."""
    check_replicas(rank, ranks)
    check_static_graph(rank, ranks)
    check_replaced(rank, ranks)
    check_refused(rank, ranks)
    check_fully_shard(rank, ranks)
    check_evaluations_around_shards(rank, ranks)
    check_tokens_of_all_replicas(rank, ranks)
    check_norm_beside_shards(rank, ranks)
    check_autocast_around_shards(rank, ranks)
    check_tied_shards(rank, ranks)
    check_deadline(rank, ranks)


@pytest.mark.slow
def test_replicas_and_shards_have_the_gradients_of_the_plain_loop():
    run_ranks(check_everything, 2)


class Counting(nn.Linear):
    """Counts the gradients of its weight, and those that are there when the gradient of its input is."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.made, self.seen = 0, []
        self.weight.register_post_accumulate_grad_hook(self.count)

    def count(self, _: Tensor) -> None:
        self.made += 1

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.seen.append(self.made))
        return super().forward(x)


class Sharding:
    """As an object that reduces when a microbatch's gradients are there."""

    def nothing(self) -> None:
        """There are no shards."""

    unshard = reshard = before_last_backward = reduce_grad = nothing


def test_a_sharded_stage_has_its_weights_gradients_under_autocast_when_those_of_its_input_are_there():
    modules = [Counting(), Counting()]
    stages = [Stage(module, s, data_parallel=Sharding()) for s, module in enumerate(modules)]
    with torch.autocast("cpu", torch.bfloat16):
        PipelineRunner(one_f_one_b(2, M), stages, None, square_loss).step(*batch(0, 0))
    assert modules[1].seen == list(range(1, M + 1))
