"""Hosts: which ranks of a load share a mirror of the store, and who of them fetches which block.

store --> open_host_view (this file) --> a folder: the store's own, or one mirror per host
blocks that ranks touch --> HostView.shares (this file) --> blocks that each rank fetches and hashes
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sixfold.dist_ckpt.checkpoint.opening import Checkpoint, open_checkpoint
from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.formats.integrity import Span, spans_of
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.plans.plan import assign
from sixfold.dist_ckpt.storage.store import PartlyLocal, Store

if TYPE_CHECKING:
    from sixfold.dist_ckpt.mirror.leases import Host
    from sixfold.dist_ckpt.mirror.mirror import Mirror

#: Blocks that ranks fetch and hash, of those ranks that one must know.
Shares = Mapping[int, Sequence[Span]]


@dataclass(frozen=True, slots=True)
class HostView:
    """A store as this rank's host sees it.

    Attributes:
        store: the checkpoint's place.
        folder: holds, or gets, its files.
        mirror: fills the folder; None if the folder is the store itself.
        hosts: the ranks that see one folder, of each folder; they read and fetch for each other.
        rank: of this process.
    """

    store: Store
    folder: Path
    mirror: Mirror | None
    hosts: tuple[tuple[int, ...], ...]
    rank: int

    def errors_named(self) -> AbstractContextManager[None]:
        """Errors inside name the store; see ``Mirror.errors_named``."""
        return nullcontext() if self.mirror is None else self.mirror.errors_named()

    def opened(self, verify: str) -> Checkpoint:
        """The checkpoint, whose bytes may arrive while it is read."""
        checkpoint = open_checkpoint(self.folder, verify=verify)
        if self.mirror is not None:
            checkpoint.arrives, checkpoint.takes = self.mirror.arrives, self.mirror.take
        return checkpoint

    def touched(self, checkpoint: Checkpoint, frames: set[ByteRange], ranks: int) -> list[Span]:
        """Of all the blocks that hold what this rank reads, those that must be fetched or hashed by somebody.

        For ``verify="full"`` all blocks are hashed: where each host fetches for itself, one of them takes those that
        nobody reads.
        """
        integrity, verify = checkpoint.integrity, checkpoint.verify
        if self.mirror is None and (integrity is None or verify == "off"):
            return []
        if integrity is None or verify != "full":
            return spans_of(frames, checkpoint.block_bytes)
        if self.mirror is None:
            return integrity.all_spans()
        whole = [ByteRange(name, 0, file.size) for name, file in sorted(integrity.files.items())]
        return spans_of([*frames, *whole[self.rank :: ranks]], checkpoint.block_bytes)

    def shares(self, touched: Sequence[Sequence[Span]]) -> list[list[Span]]:
        """The blocks that ranks touch, by rank, each given to one of those on a host that touch it."""
        shares: list[list[Span]] = [[] for _ in touched]
        for ranks in self.hosts:
            found = assign([touched[rank] for rank in ranks], marks_alone=self.mirror is not None)
            for rank, share in zip(ranks, found, strict=True):
                shares[rank] = share
        return shares

    def parts(self, shares: Sequence[Sequence[Span]]) -> list[Shares]:
        """Of the shares of all ranks those that each rank must know: its own and, where one fetches for another, its
        host's."""
        if self.mirror is None:
            return [{rank: share} for rank, share in enumerate(shares)]
        by_host = {rank: {mate: shares[mate] for mate in ranks} for ranks in self.hosts for rank in ranks}
        return [by_host[rank] for rank in range(len(shares))]

    def room(self) -> tuple[str, int] | None:
        """Where a mirror lies, and the bytes that are free there."""
        return None if self.mirror is None else self.mirror.room()

    def check_room(
        self, shares: Sequence[Sequence[Span]], rooms: Sequence[tuple[str, int] | None], nbytes: int
    ) -> None:
        """StorageError if what a host will fetch, in blocks of ``nbytes``, has no room there."""
        for ranks in self.hosts:
            room = rooms[ranks[0]]
            if room is not None and self.mirror is not None:
                needed = sum(self.mirror.nbytes_of(shares[rank], nbytes) for rank in ranks)
                self.mirror.check_room(needed, *room)

    def start(self, shares: Shares, nbytes: int) -> None:
        """Begin to fetch this rank's share, in blocks of ``nbytes``, if the store is not there already."""
        if self.mirror is not None:
            self.mirror.start(shares, nbytes)

    def giving_up(self) -> AbstractContextManager[None]:
        """After an error inside fetch no more; others of the host that wait for this rank's blocks hear why."""
        return nullcontext() if self.mirror is None else self.mirror.giving_up()

    def check_unchanged(self) -> None:
        """StorageError if another save has taken the place, in a store that is no local folder."""
        if self.mirror is not None:
            self.mirror.check_unchanged()


@contextmanager
def open_host_view(store: Store, exchange: Exchange) -> Iterator[HostView]:
    """The store as a local folder while the context lasts. Collective, unless it is one."""
    everyone = tuple(range(exchange.ranks))
    if store.local_folder is not None:
        yield HostView(store, store.local_folder, None, (everyone,), exchange.rank)
        return

    from sixfold.dist_ckpt.mirror.leases import this_host
    from sixfold.dist_ckpt.mirror.mirror import Mirror

    def here() -> tuple[None, Host | str]:
        if exchange.ranks > 1 and not store.is_shared:
            raise CheckpointError(f"{store.name} is seen by one process alone; load it with group=None")
        return None, store.host if isinstance(store, PartlyLocal) else this_host()

    def by_host(found: list[Host | str]) -> tuple[str, tuple[tuple[int, ...], ...]]:
        hosts = tuple(tuple(rank for rank in everyone if found[rank] == host) for host in dict.fromkeys(found))
        return secrets.token_hex(8), hosts

    _, (token, hosts) = exchange.all_reduce(here, by_host)
    mates = next(ranks for ranks in hosts if exchange.rank in ranks)
    mirror = Mirror(store, token, exchange.rank, exchange.timeout_s)
    is_first = exchange.rank == mates[0]
    try:
        exchange.run_on_all(mirror.create if is_first else lambda: None)
        exchange.run_on_all(lambda: None if is_first else mirror.attach())
        yield HostView(store, mirror.folder, mirror, hosts, exchange.rank)
    finally:
        mirror.close()
