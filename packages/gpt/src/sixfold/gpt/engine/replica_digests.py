"""Digests of the shards that several ranks hold, compared: of weights and of optimizer state.

    state records --> shards with their holders --> DigestSums --> one small gather --> Comparison (this file)
                                              digests of each shard, if some differ --> replica_verdict.py

Ranks hold copies of a shard without sharding (all of dp x cp), in hybrid meshes (the replicas), of weights that tensor
parallelism leaves whole, of experts, and of the tied embedding on two stages. A rank tells one digest for all of its
shards that the same ranks hold: a few numbers, whatever the model. Only where those differ does it tell one for each.

Numbers beside a parameter, such as an optimizer's count of steps, are the same on all ranks that have any part of it.
They are compared everywhere, and do not count as copies of a shard.

[Note: who holds what] Ranks tell each other once, as hashes of 64 bits. A rank whose shards have changed since, as by
the optimizer's first step, says so in the row that it sends, and all tell each other again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from sixfold.fsdp import StateRecord
from sixfold.gpt.engine.rank_model import RankModel, canonical
from sixfold.gpt.engine.replica_verdict import Verdict, judge
from sixfold.gpt.observe.straggler import communicates
from sixfold.gpt.observe.tensor_digest import DigestSums
from sixfold.gpt.parallel.agreement import gather_objects
from sixfold.gpt.parallel.lost_ranks import group_collective

_BUNDLE = 1 << 18  # elements
_WORDS = 3  # of a set of holders in a row: its hash, and 128 bits of its shards


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Elements ``[start, stop)`` of the part of a tensor that a cut leaves; the same on all ranks that have a copy.

    Attributes:
        name: of the parameter, canonical.
        key: "param", or the optimizer's name of a state.
        cut: dimension, which part, of how many; by tensor and expert parallelism.
    """

    name: str
    key: str
    cut: tuple[tuple[int, int, int], ...]
    shape: tuple[int, ...]
    start: int
    stop: int

    def __str__(self) -> str:
        return self.name if self.key == "param" else f"{self.key} of {self.name}"

    @property
    def hash(self) -> int:
        """64 bits, the same in every process."""
        return _hash(repr((self.name, self.key, self.cut, self.shape, self.start, self.stop)))

    @property
    def is_number(self) -> bool:
        """Of an optimizer's state, one for the whole parameter."""
        return not self.shape and self.key != "param"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What was compared, and what came of it.

    Attributes:
        copies: some shard of the run lies on more than one rank.
        shards: of this rank, that lie on others too.
    """

    verdict: Verdict[Shard]
    copies: bool
    shards: int


@dataclass(kw_only=True, slots=True)
class _Holders:
    """What this rank holds, and which of it lies on other ranks too."""

    shards: tuple[Shard, ...]
    shared: dict[tuple[int, ...], list[Shard]] = field(default_factory=dict)  # by the ranks that hold a copy
    width: int = 0  # the most such sets of any rank
    copies: bool = False  # on any rank, of more than numbers

    @property
    def count(self) -> int:
        """Of shards with a copy."""
        return sum(not shard.is_number for some in self.shared.values() for shard in some)


class ReplicaDigests:
    """Compares what one rank's model shares with other ranks; every rank of the run has one."""

    def __init__(self, rank: RankModel) -> None:
        self._rank = rank
        self._sums: dict[torch.device, DigestSums] = {}
        self._holders = _Holders(shards=())

    def compare(self) -> Comparison:
        """All copies as they are now; the same verdict on every rank. Collective over all ranks."""
        records = self._records()
        changed = tuple(records) != self._holders.shards
        table = self._gather_rows({} if changed else records, changed=changed)
        if any(row[0] for row in table):
            self._holders = self._tell(tuple(records))
            table = self._gather_rows(records, changed=False)
        differ = _sets_that_differ(table)
        verdict = self._judged(records, differ) if differ else judge({})
        return Comparison(verdict=verdict, copies=self._holders.copies, shards=self._holders.count)

    def _records(self) -> dict[Shard, torch.Tensor]:
        """What this rank holds."""
        found = {self._shard(record): record.tensor for record in self._rank.state_records()}
        states = self._rank.optimizer.state
        for name, parameter in self._rank.model.main_parameters():
            if self._rank.is_second_table(name):
                continue
            for key, value in sorted(states.get(parameter, {}).items()):
                if torch.is_tensor(value) and value.dim():
                    continue
                shard = Shard(name=canonical(name), key=key, cut=self._cut(name), shape=(), start=0, stop=1)
                found[shard] = torch.as_tensor(value, dtype=torch.float64).reshape(1)
        return found

    def _cut(self, name: str) -> tuple[tuple[int, int, int], ...]:
        cuts = self._rank.mesh.cuts.of(canonical(name))
        return tuple((at, part, parts) for at, (part, parts) in sorted(cuts.items()))

    def _shard(self, record: StateRecord) -> Shard:
        name, cut, shape = canonical(record.name), self._cut(record.name), tuple(record.global_shape)
        return Shard(name=name, key=record.key, cut=cut, shape=shape, start=record.start, stop=record.stop)

    def _tell(self, shards: tuple[Shard, ...]) -> _Holders:
        """See [Note: who holds what]. Collective over all ranks."""
        mesh = self._rank.mesh
        mine = {shard.hash: shard for shard in shards}
        assert len(mine) == len(shards), f"two of {len(shards)} shards have one hash"
        ranks_of: dict[int, list[int]] = {number: [] for number in mine}
        for rank, theirs in enumerate(gather_objects(mesh.control, mesh.size, list(mine))):
            for number in theirs:
                if number in ranks_of:
                    ranks_of[number].append(rank)
        found = _Holders(shards=shards)
        for number in sorted(mine):  # the same order on all who have them
            if len(ranks_of[number]) > 1:
                found.shared.setdefault(tuple(ranks_of[number]), []).append(mine[number])
        told = gather_objects(mesh.control, mesh.size, (len(found.shared), found.count))
        found.width, found.copies = max(width for width, _ in told), any(count for _, count in told)
        return found

    def _sums_of(self, tensors: list[torch.Tensor]) -> list[list[int]]:
        """Of each tensor; the host waits for its device once."""
        sums = []
        for one in tensors:
            if one.device not in self._sums:
                self._sums[one.device] = DigestSums(one.device)
            sums.append(self._sums[one.device].of(one, 0).to(self._rank.device))
        found: list[list[int]] = torch.stack(sums).tolist() if sums else []
        return found

    def _gather_rows(self, records: dict[Shard, torch.Tensor], *, changed: bool) -> list[list[int]]:
        """Of every rank: whether its shards have changed, and one digest for each set of ranks that it shares with."""
        row = torch.zeros(1 + _WORDS * self._holders.width, dtype=torch.int64)
        row[0] = int(changed)
        sets = self._holders.shared if records else {}
        parts = {ranks: _bundles([records[shard] for shard in shards]) for ranks, shards in sets.items()}
        sums = iter(self._sums_of([part for some in parts.values() for part in some]))
        for place, (ranks, some) in enumerate(parts.items()):
            said = repr([next(sums) for _ in some])
            words = [_hash(repr(ranks)), *(_hash(f"{lane}{said}") for lane in range(_WORDS - 1))]
            row[1 + _WORDS * place :][:_WORDS] = torch.tensor(words)
        return _gathered(self._rank, row)

    def _judged(self, records: dict[Shard, torch.Tensor], differ: set[int]) -> Verdict[Shard]:
        """Of each shard of the sets that ``differ``. Collective over all ranks."""
        mesh, shared = self._rank.mesh, self._holders.shared
        mine = [shard for ranks, shards in shared.items() if _hash(repr(ranks)) in differ for shard in shards]
        told = dict(zip(mine, map(tuple, self._sums_of([records[shard] for shard in mine])), strict=True))
        by_shard: dict[Shard, dict[int, tuple[int, ...]]] = {}
        for rank, theirs in enumerate(gather_objects(mesh.control, mesh.size, told)):
            for shard, digest in theirs.items():
                by_shard.setdefault(shard, {})[rank] = digest
        return judge(by_shard)


def _bundles(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Small ones behind each other: sums of a tensor take 0.1 ms, however small it is."""
    bundles: list[list[torch.Tensor]] = []
    for one in tensors:
        last = bundles[-1] if bundles else []
        fits = sum(part.numel() for part in last) + one.numel() <= _BUNDLE
        if last and fits and (last[0].dtype, last[0].device) == (one.dtype, one.device):
            last.append(one)
        else:
            bundles.append([one])
    return [torch.cat(bundle) if len(bundle) > 1 else bundle[0] for bundle in bundles]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _sets_that_differ(table: list[list[int]]) -> set[int]:
    """Hashes of the sets of holders that do not all tell the same."""
    told: dict[int, set[tuple[int, ...]]] = {}
    for row in table:
        for at in range(1, len(row), _WORDS):
            told.setdefault(row[at], set()).add(tuple(row[at + 1 : at + _WORDS]))
    return {holders for holders, digests in told.items() if len(digests) > 1}


@communicates
def _gathered(rank: RankModel, row: torch.Tensor) -> list[list[int]]:
    control = rank.mesh.control
    if control is None:
        return [row.tolist()]
    table = [torch.empty_like(row) for _ in range(rank.mesh.size)]
    with group_collective(control, "digests of copies"):
        dist.all_gather(table, row, group=control)
    return [one.tolist() for one in table]
