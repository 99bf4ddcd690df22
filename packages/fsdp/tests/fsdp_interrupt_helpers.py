"""A loop that skips a batch on any exception, and an exception at the k-th operation, or call, within one batch.

    engine/test_interruptions.py, ranks/test_interruptions_ranks.py --> sweep (this file)

The oracle is a plain net that trains the batches that were not skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from fsdp_helpers import batch, loss_of, make_adamw, make_net, same
from torch.utils._python_dispatch import TorchDispatchMode

from sixfold.fsdp import FsdpError

BATCHES = 4
MICROBATCHES = 2


class RaisesAtOperation(TorchDispatchMode):
    """Within it the k-th tensor operation raises; ``count``: operations that came."""

    def __init__(self, k: int, error: type[BaseException]) -> None:
        super().__init__()
        self.k, self.count, self.error = k, 0, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.k:
            raise self.error(f"injected at operation {self.k}, {func}")
        return func(*args, **(kwargs or {}))


class RaisesAtCall:
    """Within it the k-th call of ``owner.name`` raises; ``count``: calls that came."""

    def __init__(self, k: int, error: type[BaseException], owner: type, name: str) -> None:
        self.k, self.count, self.error, self.owner, self.name = k, 0, error, owner, name

    def __enter__(self) -> RaisesAtCall:
        self.is_own = self.name in vars(self.owner)  # not of a base class
        self.plain = plain = getattr(self.owner, self.name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.k:
                raise self.error(f"injected at call {self.k} of {self.name}")
            return plain(*args, **kwargs)

        setattr(self.owner, self.name, counted)
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_own:
            setattr(self.owner, self.name, self.plain)
        else:
            delattr(self.owner, self.name)


def gradients(model: Any, step: int, rank: int) -> None:
    for k in range(MICROBATCHES):
        tokens = batch(step, k, rank)
        with model.microbatch(last=k == MICROBATCHES - 1):
            loss_of(model(tokens), tokens).backward()
    model.clip_grad_norm_(100.0)  # scales by one


def plain_weights(ranks: int, *, without: int, by_microbatch: bool) -> dict[str, torch.Tensor]:
    """Of a plain net, all ranks' gradients added in fp32, two addends at a time."""
    plain = make_net()
    optimizer = make_adamw(plain.parameters())
    for step in range(BATCHES):
        if step == without:
            continue
        outer, inner = (MICROBATCHES, ranks) if by_microbatch else (ranks, MICROBATCHES)
        total: list[torch.Tensor] | None = None
        for one in range(outer):
            plain.zero_grad()
            for other in range(inner):
                k, rank = (one, other) if by_microbatch else (other, one)
                loss_of(plain(batch(step, k, rank)), batch(step, k, rank)).backward()
            mine = [parameter.grad.clone() / (ranks if by_microbatch else 1) for parameter in plain.parameters()]
            total = mine if total is None else [sum_.add_(new) for sum_, new in zip(total, mine, strict=True)]
        for parameter, gradient in zip(plain.parameters(), total or (), strict=True):
            parameter.grad = gradient / (1 if by_microbatch else ranks)
        optimizer.step()
    return dict(plain.state_dict())


def outcome(
    wrap: Callable[[], tuple[Any, Any]],
    rank: int,
    k: int,
    error: type[BaseException],
    at: int,
    raises: Any = RaisesAtOperation,
) -> tuple[str, dict[str, torch.Tensor], int]:
    """("skipped", "ended" or "unhurt", weights, what was counted in batch ``at``) with ``error`` at the ``k``-th."""
    model, optimizer = wrap()
    found, count = "unhurt", 0
    try:
        for step in range(BATCHES):
            try:
                if step == at:
                    with raises(k, error) as counter:
                        try:
                            gradients(model, step, rank)
                        finally:
                            count = counter.count
                else:
                    gradients(model, step, rank)
            except error:
                found = "skipped"
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        return found, model.full_state_dict(), count
    except FsdpError as told:
        rule = "nobody can know what it left there; restart from the last checkpoint"
        return "ended" if rule in str(told) else f"ended by {told}", {}, count


def sweep(
    wrap: Callable[[], tuple[Any, Any]],
    rank: int,
    ranks: int,
    choose: Callable[[range], Iterable[int]],
    error: type[BaseException],
    at: int,
    *,
    by_microbatch: bool,
    raises: Any = RaisesAtOperation,
) -> dict[str, int]:
    """How often each outcome came; fails where weights differ from the oracle's.

    Args:
        choose: at which of all operations, or calls, of batch ``at`` there is one run with ``error``.
        by_microbatch: the order in which the strategy adds gradients, for the oracle.
    """
    whole = plain_weights(ranks, without=-1, by_microbatch=by_microbatch)
    without = plain_weights(ranks, without=at, by_microbatch=by_microbatch)
    found, weights, operations = outcome(wrap, rank, 0, error, at, raises)
    assert found == "unhurt" and same(whole, weights) == [], "the oracle is right where nothing is injected"
    outcomes: dict[str, int] = {}
    for k in choose(range(1, operations + 1)):
        found, weights, _ = outcome(wrap, rank, k, error, at, raises)
        assert found in ("skipped", "ended"), f"operation {k} of {operations}: {found}"
        assert found == "ended" or same(without, weights) == [], f"operation {k} of {operations}: {found}"
        outcomes[found] = outcomes.get(found, 0) + 1
    return outcomes
