"""Schedules: pure functions from sizes to a compute-only program, one per file; a new file here is found by its name.

From outside: registry.
"""

from sixfold.pipeline.schedules.catalogue import Schedule, by_name, find, registered  # noqa: F401 - for users

__all__ = [entry.name for entry in registered()]  # __init__.pyi repeats them for type checkers
globals().update({entry.name: entry.make for entry in registered()})
