"""Parameters that several stages hold a copy of: one initial value, one gradient.

    Stage(tied=) of all ranks --> holders of each name --> sum in ascending stage order (this file) --> .grad

The holders of a name are a chain, ascending by stage. A sum goes up the chain, each holder adding its own, and the
total comes down again, over the edges between those ranks alone. With it go some values and the norms of 64 parts.
They show that a copy, or a row of it, was loaded or changed alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.pipeline.compiler.token_scaling import SetAside
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.failures.deadlines import PeerLost
from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.stage.distributed_data_parallel import Replicas
from sixfold.pipeline.stage.side_effects import differs, part_of
from sixfold.pipeline.stage.stage import Stage
from sixfold.pipeline.transport.agreement import all_know
from sixfold.pipeline.transport.protocol import Control, Lane, Links, Receipt

__all__ = ["Ties", "tie"]

Told = list[list[Any]]  # name, stage, rank, form
_NUMBER = 2**55  # of their lanes; programs have hashes
_PARTS = 64  # whose norms are compared
_FROZEN = "are not both trained, so one was frozen alone; set requires_grad of stage.tied alike on every stage"
_OTHER_VALUES = (
    "have other values, so one was loaded or changed alone; make a new runner on all ranks, which gives each copy the "
    "lowest stage's value (tie() of a runner does it before a call fails), and give the optimizers the parameters of "
    "every stage (stage.parameters())"
)
_ONE_FORM = (
    "tied parameters have one shape and dtype: cut the model again if its stages were cut from one (a cast or a resize "
    "of it does not reach their copies), else change all copies alike, and make a new optimizer and runner"
)


@dataclass(frozen=True)
class _Holder:
    stage: int
    rank: int
    form: str  # shape and dtype


def tie(stages: Iterable[Stage], placement: Sequence[int], links: Mapping[int, Links], here: int) -> Ties | None:
    """Find out who holds what, and give every holder the value of the lowest stage; None if nobody ties anything.

    All ranks call it together.

    Args:
        placement: rank of each stage.
        links: of each rank that is here.
        here: this rank; where several are here, any of them.
    Raises:
        ScheduleError: holders of a name differ in shape or dtype, or one of several stages alone has it.
        PeerLost: a rank did not take part before the deadline.
    """
    mine: dict[tuple[str, int], Stage] = {}  # by name and stage
    for stage in sorted(stages, key=lambda stage: stage.index):
        mine.update(((name, stage.index), stage) for name in stage.tied)
    told: Told = [[name, at, placement[at], _form(stage.tied[name])] for (name, at), stage in mine.items()]
    if len(links) == 1:
        told = _all_told(told, links[here].control, here, links[here].ranks)
    holders: dict[str, list[_Holder]] = {}
    for entry in sorted(told, key=lambda entry: entry[:2]):
        holders.setdefault(entry[0], []).append(_Holder(*entry[1:]))
    chains: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name, found in sorted(holders.items()):
        if other := next((holder for holder in found if holder.form != found[0].form), None):
            raise ScheduleError(
                f"tied[{name!r}] is {found[0].form} on stage {found[0].stage} and {other.form} on stage {other.stage}; "
                f"{_ONE_FORM}"
            )
        if len(found) == 1 and len(placement) > 1:
            known = ", ".join(map(repr, sorted(holders)))
            raise ScheduleError(
                f"tied[{name!r}] is on stage {found[0].stage} alone, and nothing is tied to it (names here: {known}); "
                "give it one name on every stage that holds a copy"
            )
        if len(found) > 1:
            chains.setdefault(tuple((holder.stage, holder.rank) for holder in found), []).append(name)
    if not chains:
        return None
    ties = Ties([_Chain(holders, names, mine, links, n) for n, (holders, names) in enumerate(chains.items())])
    ties.share()
    return ties


def _form(parameter: Tensor) -> str:
    whole = f"{parameter.dtype} {list(parameter.shape)}"
    if (mine := _mine(parameter)) is parameter:
        return whole
    return f"{whole} as {getattr(parameter, 'placements', ())}, here {list(mine.shape)}"


def _mine(tensor: Tensor) -> Tensor:
    """What this rank holds of it: its shard of a DTensor, in the same memory."""
    if not hasattr(tensor, "to_local"):
        return tensor
    sharded: Any = tensor.detach()
    mine: Tensor = sharded.to_local()
    return mine


def _marks(held: Iterable[nn.Parameter]) -> list[Tensor]:
    """Of each parameter some values, then of each the norms of parts that hold all of it: one row may change alone."""
    values = [_mine(parameter).detach() for parameter in held]
    return [part_of(value)[0] for value in values] + [_norms(value) for value in values]


def _norms(value: Tensor) -> Tensor:
    """Of equal parts of its elements and of the few behind them."""
    if value.layout is not torch.strided or not (value.is_floating_point() or value.is_complex()):
        return torch.empty(0)
    flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)
    size = flat.numel() // _PARTS
    kind = torch.float64 if flat.dtype is torch.float64 else torch.float32
    parts, rest = flat[: _PARTS * size].view(_PARTS, size), flat[_PARTS * size :].view(1, -1)
    return torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=kind) for part in (parts, rest)])


def _far(below: Tensor, norms: Tensor, value: Tensor) -> Tensor:
    """Whether norms differ by more than the rounding of two optimizers: of n elements that is the root of n less."""
    size = max(1, value.numel() // _PARTS)
    rounding = max(64 * torch.finfo(norms.dtype).eps, 8 * torch.finfo(value.dtype).eps / size**0.5)
    limit = norms.nan_to_num(0.0).amax() * rounding
    far: Tensor = ((below - norms).abs() > limit) | (below.isnan() != norms.isnan())
    return far.any()


def _frozen(held: Sequence[nn.Parameter]) -> Tensor:
    return torch.tensor([not parameter.requires_grad for parameter in held], device=_mine(held[0]).device)


def _doubt(verdict: Tensor | bool, error: ScheduleError) -> Iterator[tuple[Tensor, ScheduleError]]:
    """What is not known before a device has compared. Raises ``error``: it is known."""
    if isinstance(verdict, Tensor) and verdict.device.type != "cpu":
        yield verdict, error
    elif verdict:
        raise error


def _as(parameter: Tensor, mine: Tensor) -> Tensor:
    """``mine`` as a gradient of ``parameter``."""
    if _mine(parameter) is parameter:
        return mine
    sharded = torch.empty_like(parameter).detach()
    _mine(sharded).copy_(mine)
    return sharded


def _all_told(mine: Told, control: Control, here: int, ranks: int) -> Told:
    """What all ranks hold; where nobody holds anything that is one small exchange."""
    counts = control.gather(len(mine))
    told = list(mine)
    for peer in range(ranks):
        if peer != here and mine:
            control.send(json.dumps(mine).encode(), peer)
        elif peer != here and any(counts):
            control.send(b"[]", peer)
    for peer in range(ranks):
        if peer != here and any(counts):
            told += json.loads(control.receive(peer))
    if any(counts):
        all_know(control)
    return told


class Ties:
    """All tied parameters that this process holds."""

    def __init__(self, chains: list[_Chain]) -> None:
        self._chains = chains
        self._before = SetAside()
        self._doubts: list[tuple[Tensor, ScheduleError]] = []  # what a device has compared

    def share(self) -> None:
        """Every holder gets the value of the lowest stage."""
        for chain in self._chains:
            chain.share()

    def copies(self) -> set[nn.Parameter]:
        """Those that are here and not a chain's first holder."""
        return {parameter for chain in self._chains for parameter in chain.copies()}

    def begin(self) -> None:
        """A new step: there are no gradients, those from before are set aside.

        Raises:
            ScheduleError: copies of the step before differed, as a device has found out since; or one has another
                form than it had, or a gradient hook.
        """
        doubts, self._doubts = self._doubts, []
        for verdict, error in doubts:
            if verdict.item():
                raise error
        self._before.begin(p for chain in self._chains for p in chain.parameters())

    def add_up(self) -> None:
        """The step went through: every holder's gradient becomes the sum of all, and is added to what was there."""
        for chain in self._chains:
            self._doubts += chain.add_up()
        self._before.commit()

    def compare(self) -> None:
        """An evaluation went through: its result is of one model. Raises ScheduleError: copies differ."""
        for verdict, error in [doubt for chain in self._chains for doubt in chain.compare()]:
            if verdict.item():
                raise error

    def restore(self) -> None:
        """The step failed."""
        self._before.restore()


class _Chain:
    """The names with the same holders, of those that are here."""

    def __init__(
        self,
        holders: tuple[tuple[int, int], ...],
        names: list[str],
        mine: Mapping[tuple[str, int], Stage],
        links: Mapping[int, Links],
        number: int,
    ) -> None:
        self._ranks = [rank for _, rank in holders]
        # By place in the chain.
        self._stages = {at: mine[names[0], stage] for at, (stage, rank) in enumerate(holders) if rank in links}
        self._names, self._holders = names, holders
        self._forms = [_form(parameter) for parameter in self._of(next(iter(self._stages)))] if self._stages else []
        self._lanes: dict[int, Lane] = {
            rank: mine.lane(self._ranks, 1, backward=True, number=_NUMBER + number, dynamic_shapes=False)
            for rank, mine in links.items()
        }
        self._ends: dict[tuple[Kind, int], Any] = {}

    def parameters(self) -> Iterable[nn.Parameter]:
        """Those that are here."""
        for at, stage in self._stages.items():
            if isinstance(stage.data_parallel, Replicas):
                stage.data_parallel.check_synced("the averages of its tied parameters are summed over stages")
            for name, parameter, form in zip(self._names, self._of(at), self._forms, strict=True):
                if _form(parameter) != form:
                    rule = f"was {form} and is {_form(parameter)}; {_ONE_FORM}"
                    raise ScheduleError(f"tied[{name!r}] of stage {stage.index} {rule}")
                if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                    raise ScheduleError(
                        f"tied[{name!r}] of stage {stage.index} has a gradient hook, which would get that stage's part "
                        "of the gradient alone; remove it, and change .grad of every copy behind step()"
                    )
                yield parameter

    def _of(self, at: int) -> list[nn.Parameter]:
        """The parameters at a place of the chain, as its module has them now."""
        tied = self._stages[at].tied
        return [tied[name] for name in self._names]

    def copies(self) -> Iterable[nn.Parameter]:
        """Those that are here and not the first."""
        first = set(map(id, self._of(0))) if 0 in self._stages else set()  # one object on two stages is no copy
        return (p for at in self._stages if at for p in self._of(at) if id(p) not in first)

    def share(self) -> None:
        """Up the chain goes the value of its first holder."""

        def copied(at: int, held: list[nn.Parameter], values: list[Tensor] | None) -> list[Tensor]:
            if values is None:
                return [_mine(parameter).detach().clone() for parameter in held]
            with torch.no_grad():
                for parameter, value in zip(held, values, strict=True):
                    _mine(parameter).copy_(value)
            return values

        self._up(copied)

    def add_up(self) -> list[tuple[Tensor, ScheduleError]]:
        """Up the chain goes the sum, down the total.

        Returns:
            per copy on a device whether it differs from the one below, and the error if so.
        Raises:
            ScheduleError: copies differ.
        """
        taken: set[int] = set()  # one object on two stages has one gradient
        doubts: list[tuple[Tensor, ScheduleError]] = []

        def added(at: int, held: list[nn.Parameter], values: list[Tensor] | None) -> list[Tensor]:
            new = [id(parameter) not in taken for parameter in held]
            taken.update(map(id, held))
            own = [torch.zeros_like(_mine(p)) if p.grad is None else _mine(p.grad) for p in held]
            marks = [*_marks(held), _frozen(held)]
            if values is None:
                return own + marks
            doubts.extend(self._doubts(at, values[len(held) :], marks))
            sums = zip(values[: len(held)], own, new, strict=True)
            return [value + mine if is_new else value for value, mine, is_new in sums] + marks

        made = self._up(added)
        total = None if made is None else made[: len(self._names)]
        last = len(self._ranks) - 1
        for at in sorted(self._stages, reverse=True):
            if at < last and self._ranks[at + 1] != self._ranks[at]:
                total = self._receive(Action(at, Kind.RECV_B, 0), at)
            assert total is not None, f"place {at} of the chain has no total"
            if at and self._ranks[at - 1] != self._ranks[at]:
                self._send(Action(at, Kind.SEND_B, 0), at, total)
            for parameter, value in zip(self._of(at), total, strict=True):
                if parameter.requires_grad:
                    parameter.grad = _as(parameter, value.detach().clone())
        return doubts

    def compare(self) -> list[tuple[Tensor, ScheduleError]]:
        """Up the chain goes a part of the values alone. Returns and raises as ``add_up``."""
        doubts: list[tuple[Tensor, ScheduleError]] = []

        def compared(at: int, held: list[nn.Parameter], values: list[Tensor] | None) -> list[Tensor]:
            marks = _marks(held)
            if values is not None:
                doubts.extend(self._doubts(at, values, marks))
            return marks

        self._up(compared, gradients=0)
        return doubts

    def _doubts(self, at: int, below: list[Tensor], marks: list[Tensor]) -> Iterable[tuple[Tensor, ScheduleError]]:
        """Marks of the copies at a place, beside those of the place before."""
        count = len(self._names)
        norms = zip(below[count : 2 * count], marks[count : 2 * count], strict=True)
        frozen = (below[-1] != marks[-1]).unbind() if len(marks) > 2 * count else [False] * count  # of a step alone
        for name, theirs, mine, value, (other, own), apart in zip(
            self._names, below[:count], marks[:count], map(_mine, self._of(at)), norms, frozen, strict=True
        ):
            yield from _doubt(apart, self._apart(name, at, _FROZEN))
            verdict = differs([theirs], [mine])
            if own.numel():
                verdict = verdict | _far(other, own, value)
            yield from _doubt(verdict, self._apart(name, at, _OTHER_VALUES))

    def _apart(self, name: str, at: int, how: str) -> ScheduleError:
        below, here = self._holders[at - 1][0], self._holders[at][0]
        return ScheduleError(f"tied[{name!r}]: the copies on stages {below} and {here} {how}")

    def _up(
        self,
        step: Callable[[int, list[nn.Parameter], list[Tensor] | None], list[Tensor]],
        gradients: int | None = None,
    ) -> list[Tensor] | None:
        """Args: gradients: how many of the values are sent as what gets gradients; None for one of each name."""
        marked = len(self._names) if gradients is None else gradients
        for rank, lane in self._lanes.items():
            if rank in self._ranks:
                lane.begin(None)
        values: list[Tensor] | None = None
        for at in sorted(self._stages):
            if at and self._ranks[at - 1] != self._ranks[at]:
                values = self._receive(Action(at, Kind.RECV_F, 0), at)
            values = step(at, self._of(at), values if at else None)
            if at + 1 < len(self._ranks) and self._ranks[at + 1] != self._ranks[at]:
                self._send(
                    Action(at, Kind.SEND_F, 0),
                    at,
                    [value.detach().requires_grad_(n < marked) for n, value in enumerate(values)],
                )
        return values

    def _send(self, action: Action, at: int, values: list[Tensor]) -> None:
        key = action.kind, at
        if key not in self._ends:
            self._ends[key] = self._lanes[self._ranks[at]].sender(action)
        try:
            self._ends[key](tuple(values))
        except PeerLost as error:
            raise PeerLost(None, error.peer) from error  # the action is of the chain, and in nobody's list

    def _receive(self, action: Action, at: int) -> list[Tensor]:
        key = action.kind, at
        if key not in self._ends:
            self._ends[key] = self._lanes[self._ranks[at]].receiver(action)
        receipt: Receipt = self._ends[key]
        try:
            receipt.post()
            return [value.detach() for value in receipt.wait()]  # type: ignore[union-attr]
        except PeerLost as error:
            raise PeerLost(None, error.peer) from error
