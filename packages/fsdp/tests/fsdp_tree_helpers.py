"""``grad_sum="tree"`` beside plain torch in one process: the oracle adds pairs of microbatches, then pairs of pairs.

    tests --> plain_run (oracle), sharded_run (this file) --> what a Run holds, compared bit by bit

``plain_run`` imports nothing of sixfold. Microbatch g of a batch is ``batch(step, g, 0)``, whatever the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net
from torch import Tensor, nn

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WAYS = ("last", "no_sync", "neither")
Named = dict[str, Tensor]


@dataclass
class Run:
    """Whole tensors by name (plain), or ``(start, stop, part)`` of them (sharded); gradients of each step."""

    weights: Named = field(default_factory=dict)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    state: dict[tuple[str, str], Any] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)  # names of which this rank has a part


def tree_sum(leaves: Mapping[int, Tensor]) -> Tensor:
    """Leaves 0, 1, 2 ... in pairs, pairs in pairs; a missing one is left out."""

    def node(start: int, width: int) -> Tensor | None:
        if width == 1:
            return leaves.get(start)
        left, right = node(start, width // 2), node(start + width // 2, width // 2)
        if left is None or right is None:
            return right if left is None else left
        return left + right

    total = node(0, 1 << max(leaves).bit_length())
    assert total is not None, "no leaf"
    return total


def gradients_of(net: nn.Module, run: Callable[[], Tensor]) -> Named:
    """What one backward gives, in fp32."""
    net.zero_grad()
    run().backward()
    found = {name: p.grad.to(torch.float32).clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return found


def tree_of(leaves: Iterable[Named], divisor: float = 1.0) -> Named:
    """By name; a parameter without a gradient in a microbatch is a missing leaf."""
    by_name: dict[str, dict[int, Tensor]] = {}
    for g, gradients in enumerate(leaves):
        for name, gradient in gradients.items():
            by_name.setdefault(name, {})[g] = gradient
    return {name: tree_sum(one) / torch.tensor(divisor) for name, one in by_name.items()}


def plain_run(
    microbatches: int,
    *,
    steps: int = 3,
    divisor: float | None = None,
    net: nn.Module | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = make_adamw,
    loss: Callable[[nn.Module, int, int], Tensor] | None = None,
) -> Run:
    """The oracle: each microbatch alone, the tree, one division, one step of torch's optimizer."""
    net = make_net() if net is None else net
    optimizer, run = make_optimizer(list(net.named_parameters())), Run()
    for step in range(steps):
        leaves = [
            gradients_of(net, lambda step=step, g=g: (loss or plain_loss)(net, step, g)) for g in range(microbatches)
        ]
        total = tree_of(leaves, microbatches if divisor is None else divisor)
        run.gradients.append(total)
        for name, p in net.named_parameters():
            p.grad = total.get(name)
            p.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
    run.weights = {name: value.detach().clone() for name, value in net.named_parameters(remove_duplicate=False)}
    names = {p: name for name, p in net.named_parameters()}
    run.state = {(names[p], key): value for p, one in optimizer.state.items() for key, value in one.items()}
    return run


def plain_loss(net: nn.Module, step: int, g: int) -> Tensor:
    return loss_of(net(batch(step, g, 0)), batch(step, g, 0))


# ---- sharded


def wrap(net: nn.Module, microbatches: int, **options: Any) -> Any:
    """As a user would: units are blocks and the embedding, the divisor is the number of microbatches."""
    from sixfold.fsdp import FullyShardedDataParallel, MixedPrecision

    precision = {"grad_sum": "tree", **options.pop("precision", {})}
    options.setdefault("grad_divisor", float(microbatches))
    options.setdefault("fsdp_unit_modules", [Block, nn.Embedding])
    if options.get("mesh") is None:
        options.setdefault("process_group", dist.group.WORLD if dist.is_initialized() else None)
    return FullyShardedDataParallel(net, mixed_precision=MixedPrecision(**precision), **options)


def hint(model: Any, way: str, last: bool) -> AbstractContextManager[Any]:
    """What a user says of a microbatch."""
    if way == "last":
        return model.microbatch(last=last)
    return model.no_sync() if way == "no_sync" and not last else nullcontext()


def gradients_here(model: Any) -> dict[str, Any]:
    """``(start, stop, main gradient)`` of this rank, by name; without those that are None."""
    mains = dict(model.main_parameters())
    found = {}
    for record in model.state_records():
        if record.name in mains and mains[record.name].grad is not None:
            found[record.name] = (record.start, record.stop, mains[record.name].grad.detach().clone().view(-1))
    return found


def held_here(model: Any) -> set[str]:
    """Names of trained parameters of which this rank has a part."""
    mains = dict(model.main_parameters())
    return {record.name for record in model.state_records() if record.name in mains and record.stop > record.start}


def state_here(model: Any, optimizer: Any) -> dict[tuple[str, str], Any]:
    """``(start, stop, part)`` of this rank's moments."""
    return {
        (record.name, record.key): (record.start, record.stop, record.tensor.clone().view(-1))
        for record in model.state_records(optimizer)
        if record.key != "param"
    }


def sharded_run(
    rank: int,
    ranks: int,
    microbatches: int,
    *,
    way: str = "last",
    steps: int = 3,
    net: nn.Module | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = make_adamw,
    loss: Callable[[Any, int, int], Tensor] | None = None,
    between: Callable[[Any, Any, int, int], None] | None = None,
    **options: Any,
) -> Run:
    """Rank r has microbatches r, r + N, r + 2 N ...; ``between`` runs after each backward."""
    from sixfold.fsdp import fully_shard_optimizer

    net = make_net() if net is None else net
    model = wrap(net, microbatches, **options)
    optimizer, run = fully_shard_optimizer(make_optimizer(list(net.named_parameters())), model), Run()
    run.held = held_here(model)
    for step in range(steps):
        mine = range(rank, microbatches, ranks)
        for g in mine:
            with hint(model, way, g == mine[-1]):
                (loss or plain_loss)(model, step, g).backward()
            if between is not None:
                between(model, optimizer, step, g)
        run.gradients.append(gradients_here(model))
        optimizer.step()
        model.zero_grad()  # also of parameters that the optimizer does not have
    run.weights = model.full_state_dict()
    run.state = state_here(model, optimizer)
    return run


# ---- beside each other


def bits(tensor: Tensor) -> Tensor:
    """So that -0 is not 0."""
    kinds = {4: torch.int32, 2: torch.int16, 8: torch.int64}
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(kinds[flat.element_size()])


def differ(left: Tensor, right: Tensor) -> bool:
    return left.dtype != right.dtype or not torch.equal(bits(left), bits(right))


def wrong(expected: Run, found: Run) -> list[str]:
    """What has other bits than plain torch's; empty is what a test wants."""
    bad = [f"weights {name}" for name, one in found.weights.items() if differ(expected.weights[name], one)]
    assert len(found.gradients) == len(expected.gradients), f"{len(found.gradients)} steps"
    for step, (plain, here) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        bad += [f"gradient {name} of step {step}, which is None" for name in (plain.keys() & found.held) - here.keys()]
        bad += [f"gradient {name} of step {step}, which is not None" for name in here.keys() - plain.keys()]
        bad += [
            f"gradient {name} of step {step}"
            for name, (start, stop, part) in here.items()
            if name in plain and differ(plain[name].view(-1)[start:stop], part)
        ]
    for (name, key), (start, stop, part) in found.state.items():
        whole = expected.state[name, key].view(-1)
        if differ(whole[start:stop], part):
            bad.append(f"{key} of {name}")
    return bad
