"""Digests of a run's weights after a step: the same at every layout that has the same bits.

    state records --> stretches of whole tensors --> DigestSums --> one sum over all ranks --> digests (this file)

A digest is of main weights: what the optimizer updates and a checkpoint holds. Each rank takes the sums of its own
shards at their places in the whole tensor. Of weights that several ranks have (replicas, the tied embedding's second
copy), one rank's count. Columns of a matrix, as tensor parallelism cuts them, get zeros for the columns of the other
ranks, a few rows at a time; zeros add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from sixfold.fsdp import StateRecord
from sixfold.gpt.engine.rank_model import TIED, RankModel, canonical
from sixfold.gpt.observe.straggler import communicates
from sixfold.gpt.observe.tensor_digest import LANES, DigestSums, run_digest, tensor_digest
from sixfold.gpt.parallel.agreement import gather_objects
from sixfold.gpt.parallel.lost_ranks import group_collective
from sixfold.gpt.parallel.weight_sharding import Stretch, stretches, whole_shape

_PADDED = 1 << 20  # elements of rows with zeros, at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """Digests after a step: of all weights together, and of each tensor, by its name in checkpoints."""

    whole: str
    tensors: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    dtype: str
    shape: tuple[int, ...]


class WeightDigests:
    """Takes digests of one rank's model; every rank of the run has one."""

    def __init__(self, rank: RankModel) -> None:
        self._rank = rank
        self._sums: dict[torch.device, DigestSums] = {}
        self._stretches: dict[tuple[str, int, int], list[Stretch]] = {}
        self._kinds: dict[str, _Kind] | None = None  # of the tensors of all ranks, by name, in the order of names

    def take(self) -> Digests | None:
        """The digests of the weights as they are; on rank 0, None on the others. Collective over all ranks."""
        rank, mesh = self._rank, self._rank.mesh
        records = [record for record in rank.state_records(weights_only=True) if record.key == "param"]
        kinds = self._known(records)
        places = {name: place for place, name in enumerate(kinds)}
        # Sums of each lane, and how many elements they are of.
        total = torch.zeros((len(kinds), LANES + 1), dtype=torch.int64)
        mine = [record for record in records if self._counts(record)]
        if mine:
            at = [places[canonical(record.name)] for record in mine]
            sums = torch.stack([self._sums_of(record).to(rank.device) for record in mine]).cpu()
            total[:, :LANES].index_add_(0, torch.tensor(at), sums)
            total[:, LANES].index_add_(0, torch.tensor(at), torch.tensor([record.tensor.numel() for record in mine]))
        _add_all_ranks(rank, total)
        if mesh.rank != 0:
            return None
        found = {}
        for (name, kind), (*sums_of_name, count) in zip(kinds.items(), total.tolist(), strict=True):
            size = torch.Size(kind.shape).numel()
            assert count == size, f"{name}: {count} of {size} elements are in the digest"
            found[name] = tensor_digest(name, kind.dtype, kind.shape, sums_of_name)
        return Digests(whole=run_digest(list(found.values())), tensors=found)

    def _known(self, records: list[StateRecord]) -> dict[str, _Kind]:
        """All tensors of the run; ranks tell each other once."""
        if self._kinds is None:
            cuts, mine = self._rank.mesh.cuts, {}
            for record in records:
                name = canonical(record.name)
                shape = whole_shape(cuts.of(name), record.global_shape)
                mine[name] = _Kind(dtype=str(record.tensor.dtype).removeprefix("torch."), shape=shape)
            everyone = gather_objects(self._rank.mesh.control, self._rank.mesh.size, mine)
            self._kinds = dict(sorted({name: kind for part in everyone for name, kind in part.items()}.items()))
        return self._kinds

    def _counts(self, record: StateRecord) -> bool:
        """Whether this rank's copy of these elements is in the digest: the one that a checkpoint would have."""
        name = canonical(record.name)
        tied = self._rank.tied_copy and name == TIED
        return record.replica == 0 and not tied and self._rank.mesh.cuts.replica(name) == 0

    def _sums_of(self, record: StateRecord) -> torch.Tensor:
        name = canonical(record.name)
        key = name, record.start, record.stop
        if key not in self._stretches:
            cut = self._rank.mesh.cuts.of(name)
            self._stretches[key] = stretches(cut, record.global_shape, record.start, record.stop)
        device = record.tensor.device
        if device not in self._sums:
            self._sums[device] = DigestSums(device)
        sums = self._sums[device]
        flat = record.tensor.detach().reshape(-1)
        parts = [_sums_of_stretch(sums, flat, one, record.start) for one in self._stretches[key]]
        return torch.stack(parts).sum(0) if parts else torch.zeros(LANES, dtype=torch.int64, device=flat.device)


@communicates
def _add_all_ranks(rank: RankModel, total: torch.Tensor) -> None:
    if rank.mesh.control is not None:
        with group_collective(rank.mesh.control, "sum of the digests of the weights"):
            dist.all_reduce(total, group=rank.mesh.control)


def _sums_of_stretch(sums: DigestSums, flat: torch.Tensor, stretch: Stretch, start: int) -> torch.Tensor:
    """Of the elements of ``flat``, which begins at element ``start`` of the part."""
    at, length = stretch.at - start, stretch.length
    if stretch.count == 1:
        return sums.of(flat[at : at + length], stretch.whole_at)
    rows = max(1, min(stretch.count, _PADDED // stretch.stride))
    padded = torch.zeros((rows, stretch.stride), dtype=flat.dtype, device=flat.device)
    total = torch.zeros(LANES, dtype=torch.int64, device=flat.device)
    for row in range(0, stretch.count, rows):
        here = min(rows, stretch.count - row)
        first = at + row * length
        padded[:here, :length] = flat[first : first + here * length].view(here, length)
        together = padded.view(-1)[: (here - 1) * stretch.stride + length]
        total += sums.of(together, stretch.whole_at + row * stretch.stride)
    return total
