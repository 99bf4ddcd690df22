"""What a schedule says of itself, and how it is found by name.

    @schedule(...) in a schedule's file --> Schedule (this file) --> command, gallery, plan, gpt, tests

Torch-free. The decorator writes on the function and nowhere else; ``catalogue.py`` reads the files of its
folder. So a schedule is one file, and no list has to be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType, ModuleType
from typing import TypeVar

from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.program.program import Program

__all__ = ["Placement", "Schedule", "called", "collected", "schedule", "unknown"]

Placement = Callable[[int, int], tuple[int, ...]]  # ranks, stages of a rank -> rank of each stage
_Make = TypeVar("_Make", bound=Callable[..., Program])
_MARK = "registered_schedule"
_SIZES = ("ranks", "microbatches")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A schedule and what others need to know of it.

    Attributes:
        name: of the function, by which it is found.
        make: the function.
        arguments: what it takes beside ranks and microbatches, such as ``("chunks", "group")``.
        placement: rank of each stage, from ranks and stages of a rank.
        chunks: stages of a rank; None where the argument ``chunks`` or ``waves`` says how many.
        flushed: whether the program's weights are flushed, so that a step begins and ends empty.
        split: whether backwards are I and W (all or some), else B.
        search: makes the same program with the same arguments and ``go_on``, or gives None once ``go_on()`` says no. Of
            schedules that are the best of several list schedules; others take no time to speak of.
        aliases: names elsewhere (torch, torchtitan) and, of each, in what theirs differs; "" for nothing.
    """

    name: str
    make: Callable[..., Program]
    arguments: tuple[str, ...]
    placement: Placement
    chunks: int | None
    flushed: bool
    split: bool
    search: Callable[..., Program | None] | None
    aliases: Mapping[str, str]

    def arguments_for(self, chunks: int) -> dict[str, int] | None:
        """Arguments that put ``chunks`` stages on each rank; None if the schedule cannot."""
        if self.chunks is not None:
            return {} if chunks == self.chunks else None
        if "chunks" in self.arguments:
            return {"chunks": chunks}
        return {"waves": chunks // 2} if chunks and chunks % 2 == 0 else None

    def with_chunks(self, ranks: int, microbatches: int, chunks: int, **more: object) -> Program:
        """The program of ``chunks`` stages per rank.

        Raises:
            ScheduleError: the schedule has another number of them, or as ``make``.
        """
        arguments = self.arguments_for(whole("chunks", chunks, least=1))
        if arguments is None:
            rule = f"{self.chunks} on each rank" if self.chunks else "an even number on each rank (two make a wave)"
            raise ScheduleError(f"{self.name} has {rule}; chunks is {chunks}")
        return self.make(ranks, microbatches, **arguments, **more)


def schedule(
    *,
    placement: Placement,
    chunks: int | None = 1,
    flushed: bool = True,
    split: bool = False,
    search: Callable[..., Program | None] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Callable[[_Make], _Make]:
    """Register the decorated function, which takes ranks, microbatches and what else its signature names.

    Args: as the attributes of ``Schedule``.
    """

    def mark(make: _Make) -> _Make:
        first, second, *more = signature(make).parameters
        assert (first, second) == _SIZES, f"{make.__name__} takes {first}, {second}; a schedule takes {_SIZES} first"
        entry = Schedule(
            name=make.__name__,
            make=make,
            arguments=tuple(more),
            placement=placement,
            chunks=chunks,
            flushed=flushed,
            split=split,
            search=search,
            aliases=MappingProxyType(dict(aliases or {})),
        )
        setattr(make, _MARK, entry)
        return make

    return mark


def collected(modules: Iterable[ModuleType]) -> tuple[Schedule, ...]:
    """The schedules of ``modules``, by name; one that a file only imports is not its own."""
    own = {}
    for module in modules:
        for value in vars(module).values():
            entry = getattr(value, _MARK, None)
            if isinstance(entry, Schedule) and entry.make.__module__ == module.__name__:
                own[entry.name] = entry
    entries = tuple(own[name] for name in sorted(own))
    spelled: dict[str, str] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            other = spelled.setdefault(_plain(name), entry.name)
            assert other == entry.name, f"{entry.name} and {other} are both called {name}"
    return entries


def called(name: str, entries: Iterable[Schedule]) -> Schedule | None:
    """The one of ``entries`` of that name or alias; capitals count as small letters, ``-`` as ``_``."""
    plain = _plain(name)
    every = (entry for entry in entries if any(_plain(known) == plain for known in (entry.name, *entry.aliases)))
    return next(every, None)


def unknown(name: str, entries: Sequence[Schedule]) -> ScheduleError:
    """The error that lists what there is."""
    known = ", ".join(entry.name for entry in entries)
    aliases = ", ".join(alias for entry in entries for alias in entry.aliases)
    return ScheduleError(f"there is no schedule {name!r}; there are {known}, also called {aliases}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
