"""What can be wrong with a pair, and the one exception that says so.

Problem (this file) --> raised by reader.py, writer.py; listed by verifying.py
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule. ``str(problem)`` is the line that errors, reports and the command print."""

    rule: str  # what always holds, in words: "the document index starts at 0"
    where: str  # the file, sequence or document that breaks it
    value: str  # what was found there
    expected: str  # what the rule asks for

    def __str__(self) -> str:
        return f"{self.where}: found {self.value}, expected {self.expected} ({self.rule})"


class IndexedDataError(ValueError):
    """Data, a file or a call that breaks a rule; the message names the thing, its value, the rule and the remedy.

    ``problem`` holds the same as a record where a file of a pair is at fault, else None.
    """

    problem: Problem | None = None

    @classmethod
    def broken(cls, problem: Problem, remedy: str = "") -> IndexedDataError:
        """The exception for one broken rule of a pair."""
        error = cls(f"{problem}{'. ' + remedy if remedy else ''}")
        error.problem = problem
        return error
