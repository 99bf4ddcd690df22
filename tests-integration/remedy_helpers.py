"""Following the remedy of an error, as docs/errors has it.

    docs/errors --> entry_says, follow (this file) --> test_remedies.py, test_remedies_of_*.py

A case is a generator that yields twice: the call that raises, and the call that follows the remedy, whose result is
true if it did what it promised. A case is named by the heading of its entry.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import site_errors
from repository_helpers import ROOT

Case = Iterator[Callable[[], Any]]


@functools.cache
def texts_of(package: str) -> dict[str, list[str]]:
    """Heading -> texts of each entry of a package that is about messages."""
    found: dict[str, list[str]] = {}
    for entry in site_errors.notes(package, ROOT).messages:
        found.setdefault(entry.of, []).extend(entry.texts)
    return found


def entry_says(package: str, heading: str, said: str) -> bool:
    """Whether the entry of that heading is about the message ``said``."""
    patterns = (re.sub(r"\\\{.*?\\\}", ".*", re.escape(words)) for words in texts_of(package)[heading])
    return any(re.search(pattern, said, re.DOTALL) for pattern in patterns)


def follow(package: str, heading: str, case: Case) -> None:
    """Run both calls of a case.

    Raises:
        AssertionError: the first call raises what another entry is about, or the remedy does not give what it promises.
    """
    with pytest.raises((ValueError, RuntimeError)) as raised:
        next(case)()
    assert entry_says(package, heading, str(raised.value)), str(raised.value)
    assert next(case)()


def said_by(call: Callable[[], Any]) -> str:
    """The text of the error that a call raises."""
    with pytest.raises((ValueError, RuntimeError)) as raised:
        call()
    return str(raised.value)


def called(wrong: Callable[[], Any], right: Callable[[], Any]) -> Case:
    """A case of two calls; the second gives a value that is true."""
    yield wrong
    yield right
