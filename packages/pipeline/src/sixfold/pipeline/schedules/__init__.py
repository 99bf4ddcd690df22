"""Schedules: pure functions from sizes to a compute-only program, one per file.

    ranks, microbatches --> Program (these files) --> passes.lower --> run

On each stage the F's, the input gradients and the ends of weight gradients each
come in ascending microbatch order, so that sums have the bits of the plain loop.
A new schedule is one more file here, whose function has ``@schedule``, and its picture in the tests; it is found here
by name. ``__init__.pyi`` repeats the names for type checkers (``tests/golden/make_drawings.py`` writes it).
"""

from importlib import import_module
from pkgutil import iter_modules

from sixfold.pipeline.schedules.registry import Schedule, called, collected, unknown

_ENTRIES = collected(import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
__all__ = [entry.name for entry in _ENTRIES]
globals().update({entry.name: entry.make for entry in _ENTRIES})


def registered() -> tuple[Schedule, ...]:
    """Every schedule of this package, by name."""
    return _ENTRIES


def find(name: str) -> Schedule | None:
    """The schedule that is called ``name`` here, in torch or in torchtitan ("1F1B", "ZBVZeroBubble"), if there is one.

    Capitals count as small letters and ``-`` as ``_``.
    """
    return called(name, _ENTRIES)


def by_name(name: str) -> Schedule:
    """As ``find``.

    Raises:
        ScheduleError: there is none; it lists those there are.
    """
    if (schedule := find(name)) is None:
        raise unknown(name, _ENTRIES)
    return schedule
