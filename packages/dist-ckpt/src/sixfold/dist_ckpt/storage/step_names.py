"""Names of the folders of a run's steps, and of what a save or a prune puts beside them.

    naming, step --> StepNames (this file) --> name of a folder
    name of a folder --> StepNames (this file) --> step, and what it is of it

Text alone: no file is looked at. A name is read by trying: a number in it is its step if that step's name is the same.
So a name is never taken for a step that would be saved under another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.storage.local import ENDS

Naming = str | Callable[[int], str]
NAMING = "step-{step:08d}"

# ``.old-`` marks a folder whose replacement was cut short: opening the step falls back to it. ``.gone-`` is what a
# prune has moved aside, ``.tmp-`` and ``.job-`` are a save that goes on, or has died. A name whose end is none that a
# save or a prune gives is the user's own.
_BESIDE = re.compile(
    rf"\.(?P<of>.+)\.(?P<kind>old|gone|tmp|job)-(?P<save>(?:(?<=gone-)[0-9a-f]{{8}}|{ENDS}))", re.DOTALL
)
_NUMBER = re.compile(r"[0-9]+")
_TRIED = (0, 123_456_789_012)  # of a naming that cannot work one of these steps is not read back


class Read(NamedTuple):
    """What a name says: the step; None for its checkpoint, else what stands beside that; of which save."""

    step: int
    kind: str | None
    save: str


class StepNames:
    """The names that one run gives.

    Args:
        naming: a text with ``{step}`` in it, such as ``"iter_{step:07d}"``, or a function of the step.
    Raises:
        CheckpointError: it makes names from which the step cannot be read.
    """

    def __init__(self, naming: Naming = NAMING) -> None:
        self.naming = naming
        if not (isinstance(naming, str) or callable(naming)):
            raise CheckpointError(f"name is {naming!r}; {_RULE}")
        for step in _TRIED if isinstance(naming, str) else ():  # a function may know only the steps of its run
            self.of(step)

    def of(self, step: int) -> str:
        """The name of a step's folder."""
        try:
            name = self._made(step)
        except Exception as error:  # whatever a function of the user or a wrong field raises
            raise CheckpointError(
                f"name is {self.naming!r}, which raises {type(error).__name__}: {error} for step {step}; {_RULE}"
            ) from error
        is_folder = isinstance(name, str) and name[:1] not in ("", ".") and not {"/", "\0"} & set(name)
        if not is_folder or self.read(name) != (step, None, ""):
            raise CheckpointError(
                f"name is {self.naming!r}, which makes {name!r} of step {step}: that is no name of a folder, or the "
                f"step cannot be read from it; {_RULE}"
            )
        return name

    def read(self, name: str) -> Read | None:
        """What a name stands for; None if it is none of these."""
        beside = _BESIDE.fullmatch(name)
        of, kind, save = (name, None, "") if beside is None else beside.group("of", "kind", "save")
        for step in self._numbers(of):
            exact = self._tried(step)
            if of == exact or (exact is not None and kind == "gone" and of == _hidden(exact)):
                return Read(step, kind, save)
        return None

    def nearly(self, name: str) -> int | None:
        """The step that a name stands for with other zeros before its numbers than it is saved with."""
        for step in self._numbers(name):
            exact = self._tried(step)
            if exact is not None and exact != name and _without_zeros(exact) == _without_zeros(name):
                return step
        return None

    def aside(self, step: int, end: str) -> str:
        """The name for a step that is moved aside to be deleted.

        Trainers that take what holds ``step-7`` and ``.metadata`` for a step must not find it.
        """
        return f".{_hidden(self.of(step))}.gone-{end}"

    def _made(self, step: int) -> str:
        return self.naming.format(step=step) if isinstance(self.naming, str) else self.naming(step)

    def _tried(self, step: int) -> str | None:
        try:
            return self._made(step)
        except Exception:  # of a function that knows the steps of its run alone
            return None

    def _numbers(self, name: str) -> list[int]:
        return [int(number) for number in _NUMBER.findall(name)]


_RULE = "it is a text with {step} in it, such as 'checkpoint-{step}' or 'iter_{step:07d}', or a function of the step"


def _hidden(name: str) -> str:
    return re.sub("-(?=[0-9])", ".", name)


def _without_zeros(name: str) -> str:
    return _NUMBER.sub(lambda number: str(int(number[0])), name)
