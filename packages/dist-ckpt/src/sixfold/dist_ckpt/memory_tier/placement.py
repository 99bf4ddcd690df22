"""Placement: which domain holds a copy of which rank's part, and how much memory that takes.

    what all ranks tell of themselves --> check_places (this file)
    domains of all ranks, turn --> holders (this file) --> jobs.py sends copies there
    bytes of all ranks --> bytes_per_domain (this file) --> stated before a run

Pure. A *turn* is the number of a snapshot within an attempt.

[Note: copies move on] A copy of a part goes to another domain than its own. Which one changes with each snapshot, and
differs between ranks of one domain. So a domain does not hold the parts of its neighbour alone: two neighbours that are
lost together (one power supply, one switch) lose the parts of one snapshot, and often not those of the one before. And
after a loss many domains send what is missing, not one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sixfold.dist_ckpt.errors import CheckpointError, MismatchError

_GENERATIONS = 2
_PAGE_BYTES, _GRAIN_BYTES = 4096, 2**21  # of an arena: its counter, and what it grows by


class Place(NamedTuple):
    """What a rank tells the others once."""

    domain: str
    host: str
    folder: tuple[str, int, int]  # boot, device, inode: of one folder
    path: str
    options: dict[str, object]


def check_places(places: Sequence[Place]) -> None:
    """MismatchError if ranks contradict each other."""
    for rank, place in enumerate(places):
        for name, value in places[0].options.items():
            if place.options[name] != value:
                raise MismatchError(
                    f"{name} is {value!r} on rank 0 and {place.options[name]!r} on rank {rank}; all ranks of a memory "
                    "tier are given the same"
                )
        for other, before in enumerate(places[:rank]):
            same = place.folder == before.folder
            if same and place.domain != before.domain:
                raise MismatchError(
                    f"{place.path} is the folder of domain {before.domain} (rank {other}) and of domain {place.domain} "
                    f"(rank {rank}): both would be lost together. Domains have folders of their own"
                )
            if not same and place.domain == before.domain:
                raise MismatchError(
                    f"ranks {other} and {rank} are of domain {place.domain}, and have different folders ({before.path} "
                    f"on {before.host}, {place.path} on {place.host}). Give domain= another name, or all one folder"
                )


def domains_of(domain_of_R: Sequence[str]) -> list[str]:
    """The domains, in the order of their first ranks; ``domain_of_R``: that of each rank."""
    return [*dict.fromkeys(domain_of_R)]


def holders(domain_of_R: Sequence[str], rank: int, turn: int, replicas: int) -> tuple[str, ...]:
    """The domains that get a copy of the part of ``rank``: as many of ``replicas`` as there are other domains.

    With D domains, the copies of a part go to those ``1 + (turn + place + n) % (D - 1)`` behind its own, where
    ``place`` is that of the rank in its domain, and n counts the copies. See [Note: copies move on].
    """
    domains = domains_of(domain_of_R)
    own, place = domains.index(domain_of_R[rank]), list(domain_of_R[:rank]).count(domain_of_R[rank])
    return tuple(domains[at] for at in _holders(len(domains), own, place, turn, replicas))


def _holders(domains: int, own: int, place: int, turn: int, replicas: int) -> list[int]:
    others = domains - 1
    return [(own + 1 + (turn + place + n) % others) % domains for n in range(min(replicas, others))]


def receivers(domain_of_R: Sequence[str], rank: int, turn: int, replicas: int) -> tuple[int, ...]:
    """The ranks that take the copies of ``holders``: in each domain the one at this rank's place, round and round."""
    place = list(domain_of_R[:rank]).count(domain_of_R[rank])
    found = list[int]()
    for name in holders(domain_of_R, rank, turn, replicas):
        ranks = [other for other, domain in enumerate(domain_of_R) if domain == name]
        found.append(ranks[place % len(ranks)])
    return tuple(found)


def bytes_per_domain(
    share_bytes_R: Sequence[int], domain_of_R: Sequence[str], replicas: int = 1, *, drains: bool = False
) -> dict[str, int]:
    """The memory that a tier needs on each domain at most, besides the tensors themselves.

    That is, of its own ranks' shares: the arenas that they are copied into, and two generations, or three with
    ``drains``, of which one waits for the disk. And the copies of other domains' shares in them. (While copies fail,
    the newest generation that has all of them stays besides.)

    Args:
        share_bytes_R: what each rank writes, in bytes; divide the size of a state by the ranks if they share it evenly.
        domain_of_R: the domain of each rank, such as its host's name.
    Raises:
        CheckpointError: the lists differ in length.
    """
    if len(share_bytes_R) != len(domain_of_R):
        raise CheckpointError(
            f"share_bytes_R has {len(share_bytes_R)} ranks, domain_of_R {len(domain_of_R)}; give both for each rank"
        )
    domains, count = domains_of(domain_of_R), _GENERATIONS + drains
    turns = max(1, len(domains) - 1)
    held = [[0] * turns for _ in domains]
    arenas, places = [0] * len(domains), [0] * len(domains)
    index = {name: at for at, name in enumerate(domains)}
    for nbytes, own in zip(share_bytes_R, map(index.__getitem__, domain_of_R), strict=True):
        for turn in range(turns):
            for at in (own, *_holders(len(domains), own, places[own], turn, replicas)):
                held[at][turn] += nbytes
        places[own] += 1
        arenas[own] += -(-(nbytes + _PAGE_BYTES) // _GRAIN_BYTES) * _GRAIN_BYTES
    most = [max(sum(by_turn[(turn + n) % turns] for n in range(count)) for turn in range(turns)) for by_turn in held]
    return {name: most[at] + arenas[at] for name, at in index.items()}
