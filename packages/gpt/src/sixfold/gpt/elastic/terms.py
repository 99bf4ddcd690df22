"""Who leads the nodes of a run: files that are made once, in the run's folder, which all nodes share.

    nodes.py --> Terms.take (this file) --> RUN/.sixfold-nodes/term-3: node 1 leads    (exclusive: one of all makes it)
    leader.py, metrics.py, loop.py --> Term.check (this file) --> DeposedError: there is a newer one

A term is a time in which one node leads. The next one begins when a node that has no leader makes the next file. So no
two nodes lead in one term, whoever can reach whom. Whoever led before finds the newer file before it forms a
generation, and its ranks find it before they write a line or a checkpoint.

[Note: what a term cannot fence] A rank looks, and then writes. Stopped between the two and woken in a later term, it
still writes: one line, or one commit of a checkpoint of a step that the others do again with the same bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from sixfold.gpt.errors import ConfigError, TrainError

FOLDER = ".sixfold-nodes"  # in run.dir; a name that no file of a user has
_TERM = re.compile(r"term-(\d{1,9})")


class DeposedError(TrainError):
    """Another node leads the run by now; whoever led before, and its ranks, write nothing more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One of the files: its number, the node that leads, and the exit status with which the run has ended in it."""

    folder: str
    number: int
    node: int
    ended: int | None = None
    why: str = ""

    def check(self) -> None:
        """Raises DeposedError if there is a newer one, or this one is gone."""
        newest = max(_numbers(Path(self.folder)), default=0)
        if newest != self.number:
            raise DeposedError(
                f"this is of term {self.number}, in which node {self.node} led the run, and term {newest} has begun: "
                "what is of the older one has ended and writes nothing more. A node of it that lives joins anew"
            )


@dataclass(frozen=True, slots=True)
class Terms:
    """The files of a run."""

    folder: Path

    def newest(self) -> Term | None:
        """The newest term; None before the first."""
        for number in sorted(_numbers(self.folder), reverse=True):
            try:
                found = json.loads((self.folder / f"term-{number}").read_text())
            except FileNotFoundError:  # a newer one was made meanwhile
                continue
            return Term(folder=str(self.folder), number=number, **found)
        return None

    def take(self, number: int, node: int) -> Term | None:
        """Lead from now on, in term ``number``; None if another node was first."""
        place = self.folder / f"term-{number}"
        draft = self._draft(json.dumps({"node": node}))
        try:
            os.link(draft, place)  # whole or not at all, by one node alone
        except FileExistsError:
            return None
        finally:
            draft.unlink()
        numbers = _numbers(self.folder)
        if max(numbers) > number:  # the file was there once, and made way for newer ones
            place.unlink(missing_ok=True)
            return None
        for old in numbers:
            if old < number - 1:
                (self.folder / f"term-{old}").unlink(missing_ok=True)
        return Term(folder=str(self.folder), number=number, node=node)

    def end(self, term: Term, status: int, why: str) -> None:
        """The run has ended with ``status``: a node that was cut off begins nothing anew."""
        with contextlib.suppress(DeposedError):
            term.check()
            draft = self._draft(json.dumps({"node": term.node, "ended": status, "why": why}))
            draft.replace(self.folder / f"term-{term.number}")

    def key(self) -> bytes:
        """The secret of the run's nodes, made by the first of them. Only its owner may read it.

        Raises:
            ConfigError: others may.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        place = self.folder / "key"
        if not place.exists():
            draft = self._draft(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(draft, place)
            draft.unlink()
        status = place.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"{place} is the secret of the run's nodes, and others than you may read it (mode "
                f"{status.st_mode & 0o777:o}, owner {status.st_uid}); remove it, and start all nodes again"
            )
        return bytes.fromhex(place.read_text())

    def _draft(self, text: str) -> Path:
        draft = self.folder / f".draft-{secrets.token_hex(8)}"
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        return draft


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [int(match[1]) for name in names if (match := _TERM.fullmatch(name))]
