"""Generations: which snapshots are whole, which one a load takes, and which ones stay.

    listings of all domains --> whole_ones (this file) --> Choice --> restoring.py
    what was saved lately --> kept (this file) --> domain_folder.py removes the others

Pure: no files, no ranks, no clock. A *domain* is a set of ranks that fail together, such as those of a host. A
*generation* is one snapshot of all ranks. A *part* is what one rank wrote of it. A *copy* is a part as one domain
holds it.

[Note: attempts] A run that goes back trains its steps again. A host that was away may come back with later steps of
the time before. So each start or restore has a number, the attempt, and a generation of a later attempt is newer,
whatever its step is. It is larger than all that are seen, and at least the time in milliseconds: what knows of the last
one may be lost. The save id keeps two saves of one step apart: parts of two generations are never taken together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

_NAME = re.compile(r"attempt-(\d{6,})-step-(\d{8,})-([0-9a-f]{16})")


class Generation(NamedTuple):
    """One snapshot of all ranks; the larger one is the newer one. See [Note: attempts]."""

    attempt: int
    step: int
    save_id: str

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"attempt-{self.attempt:06d}-step-{self.step:08d}-{self.save_id}"

    @classmethod
    def of_name(cls, name: str) -> Generation | None:
        """Of the name of a folder; None for a name that is of none."""
        match = _NAME.fullmatch(name)
        found = match and cls(int(match.group(1)), int(match.group(2)), match.group(3))
        return found if found and found.name == name else None


class Part(NamedTuple):
    """A copy of one rank's part, as a domain finds it.

    Attributes:
        ranks: of the job that saved it. problem: why it cannot be used; "" if all its files are there at full size.
    """

    ranks: int
    problem: str = ""


class Held(NamedTuple):
    """What a domain has of a generation.

    Attributes:
        parts: by the rank that wrote it. is_settled: all ranks have agreed that the generation was whole.
    """

    parts: Mapping[int, Part]
    is_settled: bool = False


#: What the domains have, by domain.
Listings = Mapping[str, Mapping[Generation, Held]]
#: A copy: generation, rank, domain.
Copy = tuple[Generation, int, str]


class Choice(NamedTuple):
    """A generation that can be loaded, and the domains that hold each rank's part."""

    generation: Generation
    holders: tuple[tuple[str, ...], ...]  # by rank

    def copies(self) -> set[Copy]:
        """All that are good."""
        return {(self.generation, rank, name) for rank, names in enumerate(self.holders) for name in names}

    def sources(self, domain: str) -> dict[int, str]:
        """For each rank, the domain whose copy the ranks of ``domain`` read: their own if it has one.

        Other domains take turns, so that one which holds much is not asked for all of it.
        """
        return {
            rank: domain if domain in holders else holders[rank % len(holders)]
            for rank, holders in enumerate(self.holders)
        }


class Skipped(NamedTuple):
    """A generation that cannot be loaded, and why."""

    generation: Generation
    reason: str
    was_whole: bool  # once: all ranks had agreed on that

    def __str__(self) -> str:
        return f"step {self.generation.step}: {self.reason}"


def whole_ones(listings: Listings, banned: Collection[Copy] = ()) -> tuple[list[Choice], list[Skipped]]:
    """The generations of which each rank's part is in some domain, the newest first, and the others.

    Args:
        banned: copies that are known to be damaged.
    """
    choices, skipped = list[Choice](), list[Skipped]()
    for generation in sorted({found for listing in listings.values() for found in listing}, reverse=True):
        held = {name: listing[generation] for name, listing in sorted(listings.items()) if generation in listing}
        copies = [(rank, name, part) for name, found in held.items() for rank, part in found.parts.items()]
        counts = {part.ranks for _, _, part in copies if part.ranks}
        ranks = max(counts, default=0)
        good = [
            tuple(n for r, n, part in copies if r == rank and not part.problem and (generation, rank, n) not in banned)
            for rank in range(ranks)
        ]
        reason = _reason(generation, ranks, counts, good, copies, banned)
        if reason:
            skipped.append(Skipped(generation, reason, any(found.is_settled for found in held.values())))
        else:
            choices.append(Choice(generation, tuple(good)))
    return choices, skipped


def _reason(
    generation: Generation,
    ranks: int,
    counts: Collection[int],
    good: Sequence[Sequence[str]],
    copies: Iterable[tuple[int, str, Part]],
    banned: Collection[Copy],
) -> str:
    """Why a generation is not whole; "" if it is."""
    if not ranks:
        return "no domain has a part of it"
    if len(counts) > 1:
        return f"its parts are of jobs of {' and of '.join(map(str, sorted(counts)))} ranks"
    lost = [rank for rank, holders in enumerate(good) if not holders]
    if not lost:
        return ""
    own = [(name, part) for rank, name, part in copies if rank == lost[0]]
    found = [
        f"its copy in domain {name} {part.problem or 'is damaged'}"
        for name, part in own
        if part.problem or (generation, lost[0], name) in banned
    ]
    which = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost[:8]))}"
    return f"no domain here has the part of {which} of {ranks}" + (f" ({'; '.join(found[:3])})" if found else "")


class Saved(NamedTuple):
    """A generation that all ranks have agreed is whole; ``is_replicated``: each part has all its copies."""

    generation: Generation
    is_replicated: bool


def kept(saved: Sequence[Saved]) -> list[Saved]:
    """Those that stay while the next one is written, oldest first: the newest, and the newest that has all its copies.

    In the usual case that is one.
    """
    newest = sorted(saved)[-1:]
    return sorted({*newest, *[one for one in sorted(saved) if one.is_replicated][-1:]})
