"""One update: program, the sums that are gpt's, one division, norm, clip, optimizer.

    token_stream.py --> runner.step --> finish_grad_sync --> tied embedding --> / count --> norm --> clip --> AdamW
                                              (this file)

[Note: who sums what] fsdp sums every gradient over dp x cp, experts' over the ranks that share them (SUM, never mean).
Weights that tensor-parallel ranks have whole and use in part (weight_sharding.py) are summed over tp, the tied
embedding, when its two copies live on different ranks, over that pair. The number of unmasked targets is summed over dp
x cp and divides once. fsdp sums the squares for the norm over dp x cp, and this file over tp and pp, without copies.
Loss, stop flag and memory are in the same sum, so a step has one host read. It comes before the optimizer, because a
non-finite value must stop it.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from sixfold.fsdp import FullyShardedDataParallel
from sixfold.gpt.data.exact_losses import from_grids, on_grids, sum_on_grids
from sixfold.gpt.data.loss_by_dataset import mean_by_dataset, sums_by_dataset
from sixfold.gpt.data.token_stream import Microbatch
from sixfold.gpt.engine.expert_bias import balance_experts
from sixfold.gpt.engine.nonfinite import Place, nonfinite_gradient
from sixfold.gpt.engine.rank_model import TIED, RankModel, canonical
from sixfold.gpt.engine.weight_versions import VersionedModel, run_batch
from sixfold.gpt.model.moe import extremes, take_loads
from sixfold.gpt.observe.straggler import communicates
from sixfold.gpt.parallel.axes import Axis
from sixfold.gpt.parallel.lost_ranks import axis_collective, group_collective
from sixfold.gpt.parallel.weight_sharding import summed_over_tp
from sixfold.pipeline import Program, StepResult

AGREED = "sum of loss, norm and stop flag"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asks:
    """What a rank asks for after a step.

    Attributes:
        stop: it was asked to stop; one rank is enough.
        save: by its clock a save is due; all ranks have to say so, for their clocks differ.
    """

    stop: bool = False
    save: bool = False


_NOTHING = Asks()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What a step tells: the same on every rank.

    Attributes:
        loss: nats per unmasked target of the global batch.
        grad_norm: global norm before clipping.
        stop: some rank was asked to stop; all of them know it at this step.
        save: by the clock of every rank a save is due.
        memory_bytes: of the largest rank.
        loss_by_dataset: the same loss of the targets of one dataset, by its number; those without a target left out.
        expert_load: (least, most) of a layer's tokens that an expert got, relative to an equal share, by its number.
        ran, program: what the runner returned on this rank, and what it ran.
    """

    loss: float
    grad_norm: float
    stop: bool
    save: bool
    memory_bytes: int
    loss_by_dataset: dict[int, float]
    expert_load: dict[int, tuple[float, float]]
    ran: StepResult
    program: Program


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFinite:
    """A step that was stopped before the optimizer; loss and norm are the same on every rank.

    Attributes:
        gradient: this rank's part of a non-finite gradient.
    """

    loss: float
    grad_norm: float
    gradient: Place | None


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this rank: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@communicates
def _sum_tied_embedding(rank: RankModel) -> None:
    """Add the gradients of the two copies of the tied embedding; two terms have one sum in any order."""
    if rank.tied_here is not None:
        mains = dict(rank.model.main_parameters())
        first, second = (mains.get(name) for name in rank.tied_here)
        if first is not None and second is not None and first.requires_grad:
            assert first.grad is not None and second.grad is not None, f"{TIED} has no gradient after finish_grad_sync"
            first.grad.add_(second.grad)
    if rank.tied_group is None:
        return
    for name, parameter in rank.model.main_parameters():
        if canonical(name) == TIED and parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient after finish_grad_sync"
            with group_collective(rank.tied_group, "sum of the tied embedding's gradient over its two stages"):
                dist.all_reduce(parameter.grad, group=rank.tied_group)


@communicates
def _sum_over_tensor_parallel(rank: RankModel) -> None:
    """Add the parts of gradients of weights that every tensor-parallel rank has whole; one message for all of them."""
    tp = rank.mesh.axes.tp
    if tp.group is None:
        return
    sequence = rank.mesh.axes.sequence
    parts = []
    for name, parameter in rank.model.main_parameters():
        if parameter.requires_grad and summed_over_tp(canonical(name), sequence=sequence):
            assert parameter.grad is not None, f"{name} has no gradient after finish_grad_sync"
            parts.append(parameter.grad)
    if not parts:
        return
    together = torch.cat([part.reshape(-1).float() for part in parts])
    with axis_collective(tp, "sum of gradients of whole weights over tp"):
        together = _summed_over_tp(together, tp, in_order=rank.config.grad_sum != "backend")
    totals = torch.split_with_sizes(together, [part.numel() for part in parts])
    for part, total in zip(parts, totals, strict=True):
        part.copy_(total.view_as(part))


def _summed_over_tp(mine: torch.Tensor, tp: Axis, *, in_order: bool) -> torch.Tensor:
    """``in_order``: of ranks; a back end's order depends on the place in the message, and so on how weights are cut."""
    if not in_order or tp.size == 2:
        dist.all_reduce(mine, group=tp.group)
        return mine
    parts = [torch.empty_like(mine) for _ in range(tp.size)]
    dist.all_gather(parts, mine, group=tp.group)
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0]


def _sum_targets(rank: RankModel, batch: Sequence[Microbatch]) -> tuple[torch.Tensor, dist.Work | None]:
    """Start the sum of unmasked targets over dp x cp; it travels while the program runs."""
    count = torch.tensor(sum(m.targets for m in batch), dtype=torch.float64, device=rank.device)
    if rank.mesh.data is None:
        return count, None
    return count, dist.all_reduce(count, group=rank.mesh.data, async_op=True)


def _await_targets(rank: RankModel, counted: dist.Work | None) -> None:
    if counted is not None:
        with group_collective(rank.mesh.data, "sum of the number of targets over dp and cp"):
            counted.wait()


def _square_sum(rank: RankModel, model: FullyShardedDataParallel) -> torch.Tensor:
    """Squares of gradients of the ranks of dp x cp, for the sum over tp and pp that ``_agree`` makes.

    With a tree it is one sum over all ranks and rounded once; the first rank of tp and pp brings it, the others 0.
    """
    if rank.config.grad_sum != "tree":
        return model.grad_square_sum(rank.counts_in_norm)

    def beyond(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        _over_model(rank, tensor, op, "sum of squares for the norm")

    square = model.grad_square_sum(rank.counts_in_norm, beyond)
    return square if rank.mesh.axes.tp.rank == rank.mesh.pp_rank == 0 else torch.zeros_like(square)


@communicates
def _over_model(rank: RankModel, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, what: str) -> None:
    """Reduce ``tensor`` over the ranks that hold other parts of the model."""
    for group, axis in ((rank.mesh.axes.tp.group, "tp"), (rank.mesh.pipeline, "pp")):
        if group is not None:
            with group_collective(group, f"{what} over {axis}"):
                dist.all_reduce(tensor, op, group=group)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Agreed:
    """What ``_agree`` has summed.

    Attributes:
        sources: (4, datasets) of ``sums_by_dataset``. loads: of the step's backwards, by expert.
    """

    loss: float
    stops: float
    saves: float
    square: float
    memory: list[float]
    sources: list[list[float]]
    loads: list[float]


@communicates
def _agree(
    rank: RankModel,
    losses: Sequence[torch.Tensor],
    count: torch.Tensor,
    square: torch.Tensor,
    asks: Asks,
    sources: torch.Tensor,
) -> _Agreed:
    """Sums over ranks that hold a part. Those of losses do not depend on who holds what.

    Args:
        count: unmasked targets of the global batch, by which the loss is divided.
        square: of ``_square_sum``.
    """
    mesh, tp = rank.mesh, rank.mesh.axes.tp
    loads = take_loads(rank.model.module, rank.config.model, rank.device)
    first = 7 + mesh.size
    values = torch.zeros(first + sources.numel() + loads.numel(), dtype=torch.float64, device=rank.device)
    values[first + sources.numel() :] = loads.flatten()  # tensor-parallel ranks route a share of the tokens each
    if tp.rank == 0:  # the others have the same losses
        values[:3] = sum_on_grids(losses, rank.device)
        values[first : first + sources.numel()] = sources.flatten()
    values[3], values[4] = float(asks.stop), float(asks.save)
    values[7 + mesh.rank] = float(memory_bytes(rank.device))
    if mesh.data is not None:
        with group_collective(mesh.data, f"{AGREED} over dp and cp"):
            dist.all_reduce(values, group=mesh.data)
    values[5] = square  # fsdp has summed it over dp x cp already; copies of other tensor-parallel ranks are not in it
    if tp.rank == mesh.pp_rank == 0:
        values[6] = count
    _over_model(rank, values, dist.ReduceOp.SUM, AGREED)
    found = values.tolist()
    stops, saves, total, targets = found[3:7]
    datasets = sources.shape[1]
    rest = found[first:]
    return _Agreed(
        loss=from_grids(found[:3]) / targets if targets else math.nan,
        stops=stops,
        saves=saves,
        square=total,
        memory=found[7:first],
        sources=[rest[at * datasets : (at + 1) * datasets] for at in range(4)],
        loads=rest[4 * datasets :],
    )


def train_step(
    rank: RankModel,
    batch: Sequence[Microbatch],
    lr: float,
    asks: Asks = _NOTHING,
    *,
    timed: bool = False,
    ema_decay: float = 0.0,
) -> StepOutcome | NonFinite:
    """Run one update on this rank's microbatches. Collective over the mesh.

    Args:
        batch: this rank's microbatches, in order.
        lr: learning rate of this update.
        asks: what this rank wants after it.
        timed: the outcome's ``ran`` has events, for which the host waits for its device.
        ema_decay: of the average of weights in this update, where the rank has one.
    Returns:
        The outcome; or, on every rank alike, that loss or norm are not finite. Weights are then untouched.
    """
    count, counted = _sum_targets(rank, batch)
    if isinstance(rank.model, VersionedModel):
        _await_targets(rank, counted)
        return _versioned_step(rank, rank.model, batch, lr, count, asks)
    for group in rank.optimizer.param_groups:
        group["lr"] = lr
    program = rank.follow(len(batch))
    result = rank.run_program(batch, program, timed=timed)
    rank.model.finish_grad_sync()
    _sum_over_tensor_parallel(rank)
    _sum_tied_embedding(rank)
    _await_targets(rank, counted)
    rank.model.divide_gradients(count)
    sources = sums_by_dataset([m.rows for m in batch], len(rank.config.data.train_prefixes), rank.device)
    agreed = _agree(rank, result.losses, count, _square_sum(rank, rank.model), asks, sources)
    rank.runner.check()  # after the host's one read: what missed its deadline meanwhile is neither judged nor applied
    rank.model.check()
    norm = math.sqrt(agreed.square) if agreed.square >= 0 else agreed.square
    if not (math.isfinite(agreed.loss) and math.isfinite(norm)):
        stopped_by = NonFinite(loss=agreed.loss, grad_norm=norm, gradient=nonfinite_gradient(rank))
        rank.model.zero_grad()
        return stopped_by
    if rank.config.train.clip_grad > 0:
        coefficient = rank.config.train.clip_grad / (torch.tensor(norm, dtype=torch.float32) + 1e-6)
        rank.model.scale_gradients(float(coefficient.clamp(max=1.0)))
    if rank.before_update is not None:
        rank.before_update()
    balance_experts(rank, agreed.loads)
    rank.optimizer.step()
    rank.copy_table()
    if rank.average is not None:
        rank.average.update(ema_decay)
    rank.model.zero_grad()
    return _outcome(rank, agreed, norm, result, program)


def _outcome(rank: RankModel, agreed: _Agreed, norm: float, ran: StepResult, program: Program) -> StepOutcome:
    return StepOutcome(
        loss=agreed.loss,
        grad_norm=norm,
        stop=agreed.stops > 0,
        save=agreed.saves == rank.mesh.size,
        memory_bytes=int(max(agreed.memory)),
        loss_by_dataset=mean_by_dataset(agreed.sources),
        expert_load=extremes(agreed.loads, rank.config.model),
        ran=ran,
        program=program,
    )


def _versioned_step(
    rank: RankModel, model: VersionedModel, batch: Sequence[Microbatch], lr: float, count: torch.Tensor, asks: Asks
) -> StepOutcome | NonFinite:
    """As ``train_step``; earlier stages have updates of the batch ahead of them. There is no norm of all gradients."""
    result, program = run_batch(rank, model, batch, lr, count)
    sources = sums_by_dataset([m.rows for m in batch], len(rank.config.data.train_prefixes), rank.device)
    agreed = _agree(rank, result.losses, count, torch.zeros(()), asks, sources)
    rank.runner.check()
    if not math.isfinite(agreed.loss):
        return NonFinite(loss=agreed.loss, grad_norm=math.nan, gradient=None)
    return _outcome(rank, agreed, math.nan, result, program)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """``module`` in eval mode; afterwards each module inside has the mode that it had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def evaluate(
    rank: RankModel, batches: Iterable[Sequence[Microbatch]], stop: Callable[[], bool] = lambda: False
) -> tuple[float, float] | None:
    """(nats per target, targets) over several global batches; leaves no trace in training. Collective over the mesh.

    Args:
        stop: asked before each batch, answers alike on all ranks; evaluation is then given up, and None returned.
    """
    totals = torch.zeros(4, dtype=torch.float64, device=rank.device)  # nats on three grids, targets
    if isinstance(rank.model, VersionedModel) and rank.model.delayed:
        rank.settle()  # else stages have weights of different batches; no later bit depends on it
    with evaluating(rank.model.module):
        for batch in batches:
            if stop():
                return None
            result = rank.runner.evaluate(
                [m.tokens for m in batch] if rank.is_first else None,
                None,
                kwargs=[m.kwargs for m in batch],
                program=rank.program(len(batch)),
                profile=False,
            )
            for loss in result.losses:
                totals[:3] += on_grids(loss)
            if rank.is_last:
                totals[3] += sum(m.targets for m in batch)
    for group, axes in ((rank.mesh.data, "dp and cp"), (rank.mesh.pipeline, "pp")):
        if group is not None:
            with group_collective(group, f"sum of the evaluation's loss over {axes}"):
                dist.all_reduce(totals, group=group)
    *nats, targets = totals.tolist()
    return from_grids(nats) / targets if targets else math.nan, targets
