"""What a worker does of a snapshot: frames and record into the tmpfs, copies to other domains, frames to the disk.

    arena --> SnapshotJob.write --> frames --> SnapshotJob.commit (this file) --> record, copies
    frames of a whole generation --> DrainJob.write (this file) --> an ordinary checkpoint

They are jobs of a background save. A ``SnapshotJob`` is that of a rank alone: no rank waits for another's worker. A
``DrainJob`` is one of all ranks, which ends with one commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from sixfold.dist_ckpt.background.arena import MappedArena, ProgressCounter
from sixfold.dist_ckpt.background.lost_ranks import Job
from sixfold.dist_ckpt.errors import CheckpointError, CorruptError
from sixfold.dist_ckpt.formats.integrity import BLOCK_BYTES, crc32
from sixfold.dist_ckpt.memory_tier.domain_folder import DomainFolder, DomainStore, record_name
from sixfold.dist_ckpt.memory_tier.generations import Generation
from sixfold.dist_ckpt.memory_tier.peers import Address, File, Peer
from sixfold.dist_ckpt.memory_tier.record import Record, crc_of
from sixfold.dist_ckpt.save_load import writer
from sixfold.dist_ckpt.storage.frame_file import PartFile
from sixfold.dist_ckpt.storage.store import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotJob(Job):
    """One rank's part of a generation. As a ``Job`` it is that of one rank: nothing is told to other workers.

    Attributes:
        own_rank, own_ranks: of the group. place, count: of this rank in its domain, and its ranks.
        goes: generations whose memory is free from now on. receivers: who takes a copy. io_s: see peers.py.
    """

    outlives_trainer: ClassVar[bool] = True  # its step is then not lost, and nobody waits for it

    own_rank: int
    own_ranks: int
    place: int
    count: int
    goes: tuple[Generation, ...]
    receivers: tuple[Address, ...]
    token: bytes
    io_s: float

    @property
    def file_rank(self) -> int:
        return self.own_rank

    @property
    def store(self) -> DomainStore:
        """Of its content."""
        store = self.content.store
        assert isinstance(store, DomainStore), f"{store} is a domain's"
        return store

    def write(self, arena: MappedArena, counter: ProgressCounter) -> writer.Written:
        for generation in self.goes:  # here, since pages take long to be freed; each worker of the domain frees a part
            self.store.run_folder.remove(generation, self.place, self.count)
            counter.add(0)
        return Job.write(self, arena, counter)

    def commit(self, shares: list[writer.Written], counter: ProgressCounter) -> tuple[bytes, list[CheckpointError]]:
        """Put the record, send the copies. Returns the CRC-32s of ``Written``, and why copies are not there."""
        (written,), store, save, content = shares, self.store, self.ticket.save, self.content
        is_first = self.own_rank == 0
        record = Record(
            store.generation(save),
            self.own_rank,
            self.own_ranks,
            written,
            content.common_bytes if is_first else b"",
            content.in_common if is_first else (),
            tuple(content.crcs) if is_first else (),
        )
        data = store.write_record(save, record)
        counter.add(0)
        files = [File(name, file.size, crc_of(file)) for name, file in written.files.items()]
        files.append(File(record_name(self.own_rank), len(data), crc32(data)))
        failed = list[CheckpointError]()
        for address in self.receivers:
            try:
                with Peer(address, self.token, self.io_s) as peer:
                    peer.put(record.generation, store.folder(save), files, counter.add)
            except CheckpointError as error:
                failed.append(error)
            counter.add(0)
        return written.crcs, failed


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainJob(Job):
    """One rank's share of a checkpoint whose frames lie in a generation of its domain already."""

    folder: DomainFolder
    generation: Generation

    def write(self, arena: MappedArena, counter: ProgressCounter) -> writer.Written:
        """Copy the files.

        Raises:
            CorruptError: they are not what was written there.
        """
        record = self.folder.record(self.generation, self.rank)
        own, expected = self.folder.path(self.generation), record.written.files
        parts = [
            Part(name=name, fill=partial(_copy, own / name), nbytes=file.size, threads=2, moved=counter.add)
            for name, file in expected.items()
        ]
        found = writer.write_parts(self.content.store, self.ticket.save, parts)
        for part, digest in zip(parts, found, strict=True):
            if digest != expected[part.name]:
                raise CorruptError(f"{own / part.name} is damaged: it does not match its own digest")
        return record.written


def _copy(path: Path, file: PartFile) -> None:
    with path.open("rb", buffering=0) as source:
        while piece := source.read(BLOCK_BYTES):
            file.append(piece)
