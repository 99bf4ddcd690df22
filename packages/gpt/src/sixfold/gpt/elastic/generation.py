"""What leader, nodes and members say to each other, about one generation of ranks.

    leader.py --> Begin, Fork, Kill, ... --> processes.py --> Generation, Over --> member.py
    leader.py <-- Said, Died, Silent     <-- processes.py <-- Done, Failed, Ready <--'          (words: this file)

A generation is a meeting of ranks: its number, who is which rank, where they meet. Every word carries the number, so a
word of an older generation is known as one. A member is a process; it is a rank of some generations and a spare in
others, and keeps its number for life.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sixfold.gpt.elastic.terms import Term
from sixfold.gpt.launch.spawn import Failure

STUCK = 76  # exit status of a member that waits in vain, though its generation is over


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A rank that a generation lost, and how."""

    rank: int
    member: int
    failure: Failure

    @property
    def why(self) -> str:
        """One line."""
        line = self.failure.text.splitlines()[-1]
        return line if line.startswith("rank ") else f"rank {self.rank}: {line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """To a member: be this rank, among so many, who meet at ``store``.

    Attributes:
        number: from 1. place: of this process on its machine, the number of its device.
        store: URL of the store, ``file://`` or ``tcp://``; the leader makes it unusable when the generation is over.
        lost: what ended the generation before; empty for the first one.
        lost_at: when that was seen, on the clock ``time.monotonic`` of this machine.
        stop: the run was asked to stop meanwhile.
        nodes: by rank. present: all that were there. wanted: ranks that the run is to have, if there are processes.
        term: of the leader that formed it; None where there is one node.
    """

    number: int
    rank: int
    place: int
    size: int
    store: str
    lost: tuple[Lost, ...] = ()
    lost_at: float = 0.0
    stop: bool = False
    nodes: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    wanted: int = 0
    term: Term | None = None

    @property
    def node(self) -> int:
        """Of this rank."""
        return self.nodes[self.rank] if self.nodes else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """To a member: the generation has ended; drop what belongs to it and say `Ready`."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """From a rank: the run is done, with this exit status."""

    generation: int
    status: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """From a rank: an error.

    Attributes:
        blames_peer: the error says that another rank failed, is gone or late.
        accused: ranks whose bits are not those of the majority, and what to say of each; all ranks tell the same.
    """

    generation: int
    failure: Failure
    blames_peer: bool
    accused: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """From a rank: nothing is left of the generation, this process can be a rank of the next one."""

    generation: int


class Leave:
    """To a member: the run has ended, and so may the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """To a node: its member is a rank of this generation from now on."""

    member: int
    generation: Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """From a node: a word of its member."""

    member: int
    word: Done | Failed | Ready


@dataclass(frozen=True, kw_only=True, slots=True)
class Died:
    """From a node: the process of its member has ended; ``silent``: a signal has stopped it, and it is as good as."""

    member: int
    failure: Failure
    silent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A member that a node has, as it tells a new leader.

    Attributes:
        generation: the newest that it was a rank of. busy: it has not dropped that one.
    """

    member: int
    generation: Generation | None
    busy: bool


Event = Said | Died
