"""Every schedule of this folder, and how one is found by its name.

    schedules/*.py --> entries (this file) --> schedules/__init__ --> command, gallery, plan, gpt

    ranks, microbatches --> Program (a schedule's file) --> passes.lower --> runner

On each stage the F's, the input gradients and the ends of weight gradients each come in ascending microbatch order.
Sums then have the bits of the plain loop. A new schedule is one more file here, whose function has ``@schedule``, and
its picture in the tests; it is found here by name. ``__init__.pyi`` repeats the names for type checkers
(``tests/golden/make_drawings.py`` writes it).
"""

from importlib import import_module
from pkgutil import iter_modules

from sixfold.pipeline.schedules.registry import Schedule, called, collected, unknown

__all__ = ["by_name", "find", "registered"]

_FOLDER = import_module(__name__.rpartition(".")[0])
_ENTRIES = collected(import_module(f"{_FOLDER.__name__}.{module.name}") for module in iter_modules(_FOLDER.__path__))


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
