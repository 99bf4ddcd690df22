"""A whole generation as a store: what this domain has is linked, what it lacks is asked for from others.

    records of all ranks --> index (this file) --> small files
    small files, copies --> GenerationStore (this file) --> a load like any other

The index of a generation is made when it is loaded, by the first rank, of the records that travelled with the frames.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError, StorageError
from sixfold.dist_ckpt.formats.integrity import Content, FileDigest, digest_of, pieces_of
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.memory_tier.generations import Generation
from sixfold.dist_ckpt.memory_tier.peers import Address, Peer
from sixfold.dist_ckpt.memory_tier.record import Record
from sixfold.dist_ckpt.plans.shard_table import Encoded
from sixfold.dist_ckpt.save_load import saving
from sixfold.dist_ckpt.save_load.writer import RankContent
from sixfold.dist_ckpt.storage import store as stores
from sixfold.dist_ckpt.storage.memory import MemoryStore
from sixfold.dist_ckpt.storage.range_reads import in_flight
from sixfold.dist_ckpt.storage.store import POINTER


class Index(NamedTuple):
    """Of a generation: its small files by name, and of each file of frames its size and the rank that wrote it."""

    small: Mapping[str, bytes]
    frames: Mapping[str, tuple[int, int]]


class _SmallFiles(MemoryStore):
    """A store that keeps what a commit writes, and has the parts already."""

    def prepare(self, save: stores.Save, parts: Mapping[str, FileDigest]) -> None:
        pass

    def write(self, save: stores.Save, name: str, data: Content) -> FileDigest:
        self.files[name] = b"".join(pieces_of(data))
        return digest_of(self.files[name])

    def commit(
        self,
        save: stores.Save,
        pointer: bytes,
        for_torch: Content | None = None,
        files: Mapping[str, FileDigest] | None = None,
    ) -> None:
        self.files[POINTER] = pointer


def index_of(records: Sequence[Record]) -> Index:
    """What the first rank of the save would have committed.

    Args:
        records: of all ranks, in their order.
    Raises:
        ShardingError: ranks held different values under one name.
    """
    first = records[0]
    store = _SmallFiles(f"the snapshot of step {first.generation.step}")
    content = RankContent(
        store,
        records=[],
        writes=(),
        objects=[],
        common={},
        common_bytes=first.common_bytes,
        nbytes=0,
        table=Encoded(b"", 0, b""),
        metadata="compact",
        in_common=first.in_common,
        crcs=dict.fromkeys(first.crc_names),
    )
    save = stores.Save(save_id=first.generation.save_id, target=store.name)
    saving.commit([record.written for record in records], content, saving.Ticket(save))
    frames = {name: (nbytes, record.rank) for record in records for name, nbytes in record.file_bytes.items()}
    return Index(store.files, frames)


class GenerationStore(stores.PartlyLocal):
    """A generation, as the ranks of one domain load it. Close it behind the load.

    Args:
        folder: of the generation in this domain. mirrors: the tier's folder there.
        sources: for each rank of the save, the domain whose copy is read. addresses: a rank that serves each domain.
    """

    def __init__(
        self,
        generation: Generation,
        index: Index,
        domain: str,
        mirrors: Path,
        sources: Mapping[int, str],
        addresses: Mapping[str, Address],
        token: bytes,
        io_s: float,
    ) -> None:
        self.host, self.mirrors, self._generation, self._index = domain, mirrors, generation, index
        self._sources, self._addresses, self._token, self._io_s = sources, addresses, token, io_s
        folder = mirrors / generation.name
        self.local_files = {name: folder / name for name, (_, rank) in index.frames.items() if sources[rank] == domain}
        self._idle, self._lock = defaultdict[str, list[Peer]](list), Lock()  # connections, by domain
        self.fetched_bytes = 0

    @property
    def name(self) -> str:
        return f"snapshot of step {self._generation.step}"

    def list_files(self) -> dict[str, int]:
        small = {name: len(data) for name, data in self._index.small.items()}
        return small | {name: nbytes for name, (nbytes, _) in self._index.frames.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if name in self._index.small:
            return self._index.small[name][start:stop]
        if name not in self._index.frames:
            raise FileNotFoundError(name)
        nbytes, rank = self._index.frames[name]
        return self._fetched(self._sources[rank], name, start, (nbytes if stop is None else stop) - start)

    def read_ranges(self, ranges: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, bytes]]:
        return in_flight(lambda part: self.read(part.file, part.offset, part.offset + part.length), ranges)

    def delete(self, name: str) -> None:
        raise FileNotFoundError(name)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for peers in self._idle.values():
                while peers:
                    peers.pop().close()

    def _fetched(self, domain: str, name: str, at: int, nbytes: int) -> bytes:
        """Bytes from another domain. If it gives none, that copy is at fault; the group tells who is dead."""
        with self._lock:
            peer = self._idle[domain].pop() if self._idle[domain] else None
        try:
            peer = peer or Peer(self._addresses[domain], self._token, self._io_s)
            data = peer.get(self._generation, name, at, nbytes)
        except CheckpointError as error:
            if peer is not None:
                peer.close()
            if isinstance(error, LostPeerError):
                raise StorageError(str(error)) from error
            raise
        with self._lock:
            self._idle[domain].append(peer)
            self.fetched_bytes += nbytes
        return data
