"""A program: one list of actions per rank, with its text and CSV forms.

    schedules/*, text, CSV <--> Program (this file) --> passes, verify, simulate, draw, runner

Torch-free. Nothing here says whether a program is right; that is ``verify``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.program.action import MESSAGES, PER_STAGE, Action, Kind

__all__ = ["Program", "Weights", "program_given"]

_LINE = re.compile(r"\s*([0-9]{1,15})\s*:(.*)")
_WEIGHTS = re.compile(r"\s*weights\s*:(.*)")


class Weights(StrEnum):
    """Which version of a stage's weights a microbatch reads, where a program has STEPs; the value is its text.

    Batch t is the microbatches between STEP t - 1 and STEP t of a stage. A program begins with W(0), and STEP t makes
    W(t + 1).
    """

    FLUSHED = "flushed"  # batch t reads W(t): its forwards come after STEP t - 1, and one version is enough
    PIPEDREAM = "pipedream"  # a microbatch reads what its stage had at its forward, until its backward (1806.03377)
    TWO_BW = "2bw"  # batch t reads W(max(t - 1, 0)) on all ranks: two versions (2006.09503)


@dataclass(frozen=True)
class Program:
    """What every rank does in one step.

    Attributes:
        ranks: the actions of each rank, in the order in which it runs them.
        microbatches: m, per flush of the pipeline.
        placement: rank of each stage.
        name: for reports; it is no part of the program's identity, and text and CSV do not hold it.
        weights: which version of its weights a microbatch reads where the program has STEPs.
    """

    ranks: tuple[tuple[Action, ...], ...]
    microbatches: int
    placement: tuple[int, ...]
    name: str = field(default="", compare=False)
    weights: Weights = Weights.FLUSHED

    def __post_init__(self) -> None:
        # Lists and numpy's integers are taken, and become what a program can be compared, hashed and sent by.
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        object.__setattr__(self, "microbatches", whole("microbatches", self.microbatches, least=1))
        numbers = (whole(f"rank of stage {stage}", rank) for stage, rank in enumerate(self.placement))
        object.__setattr__(self, "placement", tuple(numbers))
        object.__setattr__(self, "weights", _weights(self.weights))
        if not self.ranks or not self.placement:
            raise ScheduleError(
                f"the program has {len(self.ranks)} ranks and {len(self.placement)} stages; both are >= 1"
            )
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < len(self.ranks):
                raise ScheduleError(f"stage {stage} is placed on rank {rank}; the program has {len(self.ranks)} ranks")

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.placement)

    @property
    def lowered(self) -> bool:
        """Whether the messages are in the lists; one without need of any is lowered once it reduces gradients."""
        kinds = {action.kind for actions in self.ranks for action in actions}
        local = all(a == b for a, b in pairwise(self.placement))
        return bool(kinds & MESSAGES) or (local and Kind.REDUCE_GRAD in kinds)

    def entries(self) -> Iterator[tuple[int, int, Action]]:
        """Every (rank, position, action), rank after rank."""
        for rank, actions in enumerate(self.ranks):
            for position, action in enumerate(actions):
                yield rank, position, action

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages on ``rank``, ascending."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def __str__(self) -> str:
        lines = [f"{rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.ranks)]
        first = [] if self.weights is Weights.FLUSHED else [f"weights: {self.weights}"]
        return "".join(line.rstrip() + "\n" for line in (*first, *lines))

    @classmethod
    def parse(cls, text: str, microbatches: int | None = None) -> Program:
        """Read lines ``rank: action action ...``, and ``weights: 2bw`` or ``weights: pipedream`` where there is one.

        Blank lines and ``#`` comments are skipped.

        Args:
            text: one line per rank, any order, no rank left out.
            microbatches: m; None takes 1 + the largest index found.
        Raises:
            ScheduleError: names the cell, its rank and its column, or the rank that is missing or doubled.
        """
        rows: dict[int, tuple[Action, ...]] = {}
        weights: Weights | None = None
        for line in text.splitlines():
            line = line.partition("#")[0]
            if not line.strip():
                continue
            if (said := _WEIGHTS.fullmatch(line)) is not None:
                if weights is not None:
                    raise ScheduleError("weights are given twice; a program has one line for them")
                weights = _weights(said[1].strip())
                continue
            if (found := _LINE.fullmatch(line)) is None:
                raise ScheduleError(f"line {line.strip()!r} is not 'rank: action action ...'")
            rank = int(found[1])
            if rank in rows:
                raise ScheduleError(f"rank {rank} has two lines; each rank has one", rank=rank)
            rows[rank] = _cells(found[2].split(), rank)
        for rank in range(len(rows)):
            if rank not in rows:
                raise ScheduleError(f"rank {rank} has no line; ranks are 0..{max(rows)}", rank=rank)
        program = cls._from_rows([rows[rank] for rank in range(len(rows))], microbatches)
        return program if weights is None else replace(program, weights=weights)

    @classmethod
    def from_csv(cls, text: str) -> Program:
        r"""Read PyTorch's form: row r is rank r, cells joined by ``,``, rows ended by ``\r\n`` or ``\n``.

        Cells may stand in quotation marks, and a row without cells is a rank without stages, as for torch's reader.
        An empty cell is an idle slot that torch writes for alignment; it is dropped. The program's weights are
        flushed: this form has no place for another word.
        """
        rows = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
        cells = [_cells((_unquoted(cell) for cell in row.split(",")), rank) for rank, row in enumerate(rows)]
        return cls._from_rows(cells, None)

    def to_csv(self) -> str:
        """PyTorch's form of this program: "compute_only" of one with compute actions alone, else "compute_comms".

        Raises:
            ScheduleError: the program holds RECOMPUTE or STEP, or its weights are not flushed: torch has no word for
                these. It has UNSHARD or REDUCE_GRAD but no messages, which is neither form. Or it has messages but not
                exactly one REDUCE_GRAD per stage, where torch divides by m.
        """
        reduced = [0] * self.stages
        sharded = None
        for rank, position, action in self.entries():
            if action.kind in (Kind.RECOMPUTE, Kind.STEP):
                raise _not_exported(rank, position, action, f"CSV has no {action.kind}; passes.strip removes it")
            if action.kind in PER_STAGE:
                sharded = sharded or (rank, position, action)
                reduced[action.stage] += action.kind is Kind.REDUCE_GRAD
        if self.weights is not Weights.FLUSHED:
            raise ScheduleError(
                f"weights are {self.weights}; PyTorch's CSV has no place for that; passes.strip makes one flush of it"
            )
        if self.lowered and set(reduced) != {1}:
            stage = next(stage for stage, count in enumerate(reduced) if count != 1)
            raise ScheduleError(
                f"stage {stage} has {reduced[stage]} REDUCE_GRADs; PyTorch divides gradients by m there and nowhere "
                "else, so a lowered CSV has one per stage (passes.reduce_grad adds it)",
                rank=self.placement[stage],
            )
        if sharded is not None and not self.lowered:
            rule = (
                "PyTorch's CSV with compute actions alone has none of these; its other form needs messages, "
                "which passes.lower adds"
            )
            raise _not_exported(*sharded, rule)
        return "".join(",".join(map(str, actions)) + "\r\n" for actions in self.ranks)

    @classmethod
    def _from_rows(cls, rows: list[tuple[Action, ...]], microbatches: int | None) -> Program:
        placement: dict[int, int] = {}
        largest = -1
        for rank, actions in enumerate(rows):
            for action in (part for entry in actions for part in entry.each()):
                placement.setdefault(action.stage, rank)  # a stage on two ranks is for verify to refuse
                if action.microbatch is not None and action.kind is not Kind.STEP:
                    largest = max(largest, action.microbatch)
        if largest < 0:
            raise ScheduleError("the program has no action with a microbatch; it needs at least one")
        for stage in range(max(placement) + 1):
            if stage not in placement:
                raise ScheduleError(f"stage {stage} has no action; stages are 0..{max(placement)}")
        m = largest + 1 if microbatches is None else microbatches
        return cls(tuple(rows), m, tuple(placement[stage] for stage in range(len(placement))))


def _weights(value: str) -> Weights:
    try:
        return Weights(value)
    except ValueError:
        raise ScheduleError(f"weights is {value!r}; it is 'flushed', 'pipedream' or '2bw'") from None


def _not_exported(rank: int, position: int, action: Action, rule: str) -> ScheduleError:
    return ScheduleError(f"rank {rank} [{position}] {action}: {rule}", rank=rank, position=position, action=action)


def _unquoted(cell: str) -> str:
    """A cell as a table program may quote it; none holds a comma or a quotation mark of its own."""
    cell = cell.strip()
    return cell[1:-1].strip() if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell


def _cells(cells: Iterable[str], rank: int) -> tuple[Action, ...]:
    """Parse one rank's cells, dropping empty ones; an error says which column of which rank."""
    actions = []
    for column, cell in enumerate(cells):
        if cell:
            try:
                actions.append(Action.parse(cell))
            except ScheduleError as error:
                raise ScheduleError(f"rank {rank}, column {column}: {error}", rank=rank, position=column) from None
    return tuple(actions)


def program_given(value: object) -> None:
    """``value`` is a Program, and not a schedule's name or function.

    Raises:
        ScheduleError: it is none; the text says how to make one.
    """
    if isinstance(value, Program):
        return
    if isinstance(value, str):
        raise ScheduleError(
            f"program is {value!r}; it is a Program: program_of({value!r}, ranks, microbatches) makes one of a name"
        )
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise ScheduleError(f"program is the function {name}; call it: {name}(ranks, microbatches)")
    raise ScheduleError(
        f"program is a {type(value).__name__}; it is a Program, such as one_f_one_b(ranks, microbatches)"
    )
