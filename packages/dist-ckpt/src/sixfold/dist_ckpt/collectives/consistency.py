"""Common data on several ranks: is it the same everywhere? Only the first rank's is written.

    common data --> digests (this file) --> first rank: equal? --> if not, check: an error or a warning that names paths

[Note: what may differ] Where values differ between ranks, saving one of them loses the others. So that is an error, and
``PerRank`` keeps them. So is a value that the first rank does not have. A value that is no tensor or array and that the
first rank has and others do not gives a warning: none is lost. A plain tensor that some ranks have, equal on all of
them, is written by one of those. State of an optimizer is no such tensor where another rank has an optimizer of that
name without it: a number there stands for another parameter. Numbers of numpy count as Python's; order of keys, kinds
of dicts and ``maxlen`` do not count. ``preprocess_common_before_consistancy_check`` may drop any from the check.

[Note: replicas that disagree] Of copies of one shard the first is written. So each rank sends digests of at most
``_MOST_SAMPLES`` of its shards. A digest is of all elements up to ``_WHOLE``, and of ``_SAMPLE`` elements of a larger
shard. Copies that have grown apart differ nearly everywhere. A digest of everything would cost as much as the save.
"""

from __future__ import annotations

import io
import logging
import pickle
import re
import sys
import warnings
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from typing import Any, NamedTuple
from zlib import crc32

import torch

from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.formats.frame import has_form
from sixfold.dist_ckpt.formats.integrity import crc32_at
from sixfold.dist_ckpt.state import plain_types, tree
from sixfold.dist_ckpt.state.placeholders import Placeholder, placeholder
from sixfold.dist_ckpt.state.records import ShardedTensor, ShardId, is_main_replica
from sixfold.dist_ckpt.state.tensor_memory import PLAIN_TENSORS, has_values, is_freed

_MOST_SHOWN, _MOST_INNER = 20, 4
_DEPTH = 4  # within a value: what refers to itself has no end
_IN_OPTIMIZER = re.compile(r"(^|\.)(state\[\d+\]\.|param_groups\b|parameter_names\[)")
_BY_NUMBER, _GROUPS = re.compile(r"(.*\.|)state\[\d+\]\."), re.compile(r"(.*\.|)param_groups\[\d+\]\.")
_OF_OPTIMIZER = (
    "State of an optimizer, as each stage of a pipeline has its own: describe it by the records of its weights, by "
    "optim_state_to_sharding_state of sixfold.dist_ckpt.optimizers. "
)
_FULL = (
    "Rank 0 has this dict and others an empty one, as torch's full_state_dict=True with cpu_offload=True gives it. "
    "Leave those options out: each rank then saves its shards. "
)
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_MOST_SAMPLES, _WHOLE, _SAMPLE = 64, 1 << 14, 1 << 10  # shards; elements
_log = logging.getLogger("sixfold.dist_ckpt")


class Digest(NamedTuple):
    """Equal for equal leaves, whichever process made them.

    ``is_data`` if tensors or arrays are in it, ``is_tensor`` if it is a tensor of the checkpoint.
    """

    value: int
    is_data: bool = False
    is_tensor: bool = False


class Place(NamedTuple):
    """A path as it is shown, and in a form that no other has: ``{"a.b": 1}`` and ``{"a": {"b": 1}}`` read alike."""

    text: str
    exact: str


class Owners(NamedTuple):
    """Which rank writes a plain tensor, by ``Place.exact``, and which of them only some ranks have.

    ``not_on_first``: placeholders of those that the first rank has not, in dicts and lists as they stood, by rank.
    """

    by_path: dict[str, int]
    of_some: frozenset[str]
    not_on_first: tuple[Any, ...] = ()


Found = dict[Place, Digest]
Inner = dict[Place, dict[str, int]]  # of values that hold others: digests by name, to tell what differs
Samples = dict[tuple[ShardId, tuple[int, ...]], int]  # by shard and local shape


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is a plain tensor whose values can lie in a frame."""
    is_dense = type(leaf) in PLAIN_TENSORS and has_values(leaf)
    return is_dense and has_form(leaf.dtype)


def digests(compared: Any, with_tensors: bool) -> Found:
    """The digest of each leaf of common data, by its path. ``with_tensors``: plain ones are tensors of the save."""
    return {
        Place(tree.path_text(path), repr(path)): digest_of(leaf)._replace(is_tensor=True)
        if with_tensors and is_tensor(leaf)
        else digest_of(leaf)
        for path, leaf in tree.leaves(compared)
    }


def summary(compared: Any) -> int:
    """One number for all of them; of a tensor that a placeholder stands for its dtype and shape alone."""
    leaves = ((path, leaf.like if type(leaf) is Placeholder else leaf) for path, leaf in tree.leaves(compared))
    found = sorted((repr(path), digest_of(leaf).value) for path, leaf in leaves)
    return crc32(repr(found).encode("utf-8", "surrogatepass"))


def digest_of(leaf: Any) -> Digest:
    """The digest of a leaf, by what it holds and not by how it lies in memory."""
    if type(leaf) in _ATOMS:  # most leaves: pickled alone, they give equal bytes for equal values
        return Digest(crc32(pickle.dumps(leaf, 4)))
    if isinstance(leaf, torch.Tensor):
        return Digest(_of_tensor(leaf), True)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.generic) and type(item := leaf.item()) in _ATOMS:
        return digest_of(item)  # numpy's numbers and texts mean what Python's do
    if numpy is not None and isinstance(leaf, numpy.ndarray) and not leaf.dtype.hasobject:
        return Digest(crc32(leaf.tobytes(), crc32(f"{leaf.dtype.str}{leaf.shape}".encode())), True)
    parts = plain_types.parts_of(leaf)
    if not parts:
        return _of_object(leaf)
    found = [digest_of(part) for _, part in parts]
    values: list[Any] = [digest.value for digest in found]
    if not isinstance(leaf, tuple | list | deque | set | frozenset):
        values = [(digest_of(name).value, value) for (name, _), value in zip(parts, values, strict=True)]
    if not isinstance(leaf, tuple | list | deque):
        values.sort()  # see [Note: what may differ]; the order of a set of texts is another in each process
    kind = dict if isinstance(leaf, dict) else type(leaf)
    return Digest(crc32(f"{kind.__qualname__}{values}".encode()), any(digest.is_data for digest in found))


def _of_tensor(tensor: torch.Tensor) -> int:
    dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not dense or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        buffer = io.BytesIO()
        torch.save(tensor.detach(), buffer)
        return crc32(buffer.getvalue())
    return crc_of(tensor, crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode()))


def crc_of(tensor: torch.Tensor, crc: int = 0) -> int:
    """The CRC-32 of the values of a dense tensor in row-major order, behind bytes whose CRC-32 is ``crc``."""
    if tensor.is_meta or is_freed(tensor):  # the first rank's dump refuses it
        return crc
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    nbytes = values.numel() * values.element_size()
    return crc32_at(values.data_ptr(), nbytes, crc) if nbytes else crc


class _Pickler(pickle.Pickler):
    """Sees whether tensors or arrays are in what it pickles: an object of a user's class may hold some."""

    has_data = False

    def persistent_id(self, obj: Any) -> None:
        numpy = sys.modules.get("numpy")
        self.has_data |= isinstance(obj, torch.Tensor) or (numpy is not None and isinstance(obj, numpy.ndarray))


def _of_object(leaf: Any) -> Digest:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=4)
    pickler.fast = True  # without a memo equal values give equal bytes, whatever they share
    try:
        pickler.dump(leaf)
    except Exception:  # the first rank's dump reports what cannot be pickled, with its path
        return Digest(0)
    return Digest(crc32(buffer.getvalue()), pickler.has_data)


def inner(compared: Any) -> Inner:
    """The digests of what lies within leaves: fields of namespaces and of objects, parts of tuples."""
    found = (
        (path, dict(_within(leaf, "", _DEPTH))) for path, leaf in tree.leaves(compared) if type(leaf) not in _ATOMS
    )
    return {Place(tree.path_text(path), repr(path)): names for path, names in found if names}


def _within(leaf: Any, name: str, depth: int) -> Iterator[tuple[str, int]]:
    parts = plain_types.parts_of(leaf) if not isinstance(leaf, set | frozenset) else []
    is_object = not parts and hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | type)
    is_field = is_object or not isinstance(leaf, dict | list | tuple | deque)
    for part, value in (vars(leaf).items() if is_object else parts) if depth else ():
        text = f"{name}.{part}" if is_field else f"{name}[{part!r}]"
        below = list(_within(value, text, depth - 1))
        yield from below or [(text, digest_of(value).value)]


def shapes(compared: Any) -> Any:
    """Placeholders of the plain tensors of common data, where they stand."""
    return tree.mapped(
        compared, lambda _, leaf: placeholder(leaf) if is_tensor(leaf) else tree.GONE, same=tree.BRANCHES
    )


def check(exchange: Exchange, compared: Any, with_tensors: bool) -> Owners | None:
    """Say what differs, when the summaries of all ranks have shown that something does. Collective.

    Returns who writes plain tensors, if not all ranks have the same; else None.

    A warning on the first rank, and a line on the logger ``sixfold.dist_ckpt`` of each other rank that differs from it.

    Raises:
        ShardingError: values differ; see [Note: what may differ]. On every rank.
    """
    found = digests(compared, with_tensors)
    mine = found, inner(compared), shapes(compared) if with_tensors else tree.GONE
    _, (differing, first, owners) = exchange.all_reduce(lambda: (None, mine), _differing)
    if not differing:
        return owners
    if exchange.rank == 0:
        shown = ", ".join(place.text for place in differing[:_MOST_SHOWN]) + (
            ", ..." if len(differing) > _MOST_SHOWN else ""
        )
        warnings.warn(f"common data differs between ranks at {shown}; the first rank's was saved", stacklevel=5)
    elif found != first:
        _log.warning(
            "Rank %d common state dict differs from rank 0 common state dict. Keys only on rank 0: %s, "
            "Keys only on %d: %s, Mismatched keys: %s",
            exchange.rank,
            sorted(place.text for place in first.keys() - found.keys()),
            exchange.rank,
            sorted(place.text for place in found.keys() - first.keys()),
            sorted(place.text for place in first.keys() & found.keys() if first[place] != found[place]),
        )
    return owners


def _differing(reports: list[tuple[Found, Inner, Any]]) -> tuple[list[Place], Found, Owners | None]:
    """Paths whose leaves are not the same on all ranks, the first rank's digests, and who writes plain tensors."""
    by_rank, inner_by_rank = [found for found, _, _ in reports], [within for _, within, _ in reports]
    paths = {path for found in by_rank for path in found}
    differing = sorted(path for path in paths if len({found.get(path) for found in by_rank}) > 1)
    of_some = {path for path in differing if _is_of_some([found.get(path) for found in by_rank])}
    of_some -= _of_unlike_optimizers(of_some, by_rank)
    differing = [path for path in differing if path not in of_some]
    lost = [path for path in differing if _is_lost([found.get(path) for found in by_rank])]
    if lost:
        raise _lost(
            [f"{path.text}: {_who(path, by_rank)}{_where(path, inner_by_rank)}" for path in lost],
            is_full=any(_is_full_state_dict(path, by_rank) for path in lost),
        )
    return differing, by_rank[0], _owners(by_rank, of_some, [own for *_, own in reports]) if of_some else None


def _is_full_state_dict(place: Place, by_rank: list[Found]) -> bool:
    """Whether the first rank has values below what is an empty dict on all others."""
    inside = place.exact.removesuffix(")").removesuffix(",") + ", "
    is_empty = all(found.get(place) == digest_of({}) for found in by_rank[1:])
    return is_empty and any(other.exact.startswith(inside) for other in by_rank[0])


def _lost(lines: list[str], *, is_full: bool = False) -> ShardingError:
    more = [f"and {len(lines) - _MOST_SHOWN} more"] * (len(lines) > _MOST_SHOWN)
    return ShardingError(
        "values in common data differ between ranks, and common data is saved once:\n  "
        + "\n  ".join([*lines[:_MOST_SHOWN], *more])
        + ("\n" + _FULL if is_full else "\n" + _OF_OPTIMIZER if any(map(_IN_OPTIMIZER.search, lines)) else "\n")
        + "Describe tensors by ShardedTensor (or DTensor). Broadcast buffers of DDP, as of BatchNorm, from "
        "rank 0 before the save. PerRank(value) keeps a value for each rank, under one "
        "key of the state dict. Drop them by LocalNonpersistentObject, or drop them from the check by "
        "preprocess_common_before_consistancy_check; then the first rank's are saved"
    )


def check_crcs(names: Iterable[str], by_rank: Sequence[bytes]) -> None:
    """ShardingError if ranks hold different values under a name.

    Args:
        by_rank: CRC-32s of each rank, four bytes for a name.
    """
    if len({*by_rank}) > 1:
        found = zip(names, *(array("I", crcs) for crcs in by_rank), strict=True)
        values = {name: [Digest(crc) for crc in crcs] for name, *crcs in found if len({*crcs}) > 1}
        by_place = [{Place(name, name): own[rank] for name, own in values.items()} for rank in range(len(by_rank))]
        raise _lost([f"{place.text}: {_who(place, by_place)}" for place in by_place[0]])


def _owners(by_rank: list[Found], of_some: set[Place], shapes_by_rank: Sequence[Any]) -> Owners:
    """Each plain tensor to the rank that has it and got fewest."""
    lacking = {path.exact for path in of_some - by_rank[0].keys()}
    kept = [
        tree.mapped(own, lambda path, leaf: leaf if repr(path) in lacking else tree.GONE, same=tree.BRANCHES)
        for own in shapes_by_rank
    ]
    holders = defaultdict[Place, list[int]](list)
    for rank, found in enumerate(by_rank):
        for path, digest in found.items():
            if digest.is_tensor:
                holders[path].append(rank)
    counts, by_path = Counter[int](), dict[str, int]()
    for path in sorted(holders):
        by_path[path.exact] = owner = min(holders[path], key=lambda rank: (counts[rank], rank))
        counts[owner] += 1
    return Owners(by_path, frozenset(path.exact for path in of_some), tuple(kept) if lacking else ())


def _of_unlike_optimizers(of_some: set[Place], by_rank: list[Found]) -> set[Place]:
    """State under numbers of parameters, which not all optimizers of this name have."""
    names = {path: found[1] for path in of_some if (found := _BY_NUMBER.match(path.text))}
    with_groups = [{found[1] for path in own if (found := _GROUPS.match(path.text))} for own in by_rank if names]
    return {
        path
        for path, name in names.items()
        if any(name in there and path not in own for there, own in zip(with_groups, by_rank, strict=True))
    }


def _is_of_some(by_rank: list[Digest | None]) -> bool:
    """Whether this is a plain tensor of some ranks, equal on all of them."""
    there = {digest for digest in by_rank if digest is not None}
    return None in by_rank and len(there) == 1 and next(iter(there)).is_tensor


def _is_lost(by_rank: list[Digest | None]) -> bool:
    """Whether saving the first rank's value loses those of others. See [Note: what may differ]."""
    there = [digest for digest in by_rank if digest is not None]
    if by_rank[0] is None or len(set(there)) > 1:
        return True
    return there[0].is_data and len(there) < len(by_rank)


def samples(records: Sequence[ShardedTensor], rank: int) -> Samples:
    """Digests of samples of this rank's shards. See [Note: replicas that disagree].

    Raises:
        ShardingError: two records of this rank name one shard and hold different values.
    """
    chosen = [r for r in records if r.data is not None and has_values(r.data) and r.data.numel()]
    if len(chosen) > _MOST_SAMPLES:  # the same on all ranks, as far as they have the same keys, and what stands twice
        counts = Counter(record.shard_id for record in chosen)
        twice = [record for record in chosen if counts[record.shard_id] > 1] if len(counts) < len(chosen) else []
        few = nsmallest(_MOST_SAMPLES, chosen, key=lambda record: crc32(record.key.encode("utf-8", "surrogatepass")))
        chosen = few + twice
    found: Samples = {}
    main = set[ShardId]()
    for record in chosen:
        assert record.data is not None, f"{record} was chosen for its data"
        value, is_main = digest_of_sample(record.data), is_main_replica(record.replica_id)
        shard = record.shard_id
        both = is_main and shard in main  # which is wrong whatever they hold: plans/shard_table.py tells it
        main |= {shard} if is_main else set()
        if found.setdefault((shard, record.local_shape), value) != value and not both:
            raise ShardingError(
                f"{record}: two records of rank {rank} name this shard and hold different values; one would be lost. "
                "Give one of them another key"
            )
    return found


def digest_of_sample(data: torch.Tensor) -> int:
    """Of a tensor, or of a part of its elements. See [Note: replicas that disagree]."""
    return _of_tensor(_sample(data.detach()))


def _sample(data: torch.Tensor) -> torch.Tensor:
    """Elements from all over a tensor, on whatever device; no copy of the whole, also if it is strided."""
    if data.numel() <= _WHOLE:
        return data
    most = max(2, int(_SAMPLE ** (1 / data.dim())))
    return data[tuple(slice(None, None, -(-length // most)) for length in data.shape)]


def replica_problems(by_rank: Sequence[Samples]) -> list[str]:
    """One line for each shard of which ranks hold different values."""
    return [
        f"{key} from {offset}: ranks {ranks} hold different values of one shard, and one of them is saved. "
        "Broadcast it from the first of them, or pass validate_access_integrity=False to save that one"
        for (key, offset, _), ranks in holders_that_differ(by_rank)
    ]


def holders_that_differ(by_rank: Sequence[Samples]) -> list[tuple[ShardId, str]]:
    """The shards of which ranks hold different values, and those ranks, as ``[0, 1], [2]``."""
    holders: dict[tuple[ShardId, tuple[int, ...]], dict[int, list[int]]] = {}
    for rank, found in enumerate(by_rank):
        for shard, value in found.items():
            holders.setdefault(shard, {}).setdefault(value, []).append(rank)
    return [
        (shard, ", ".join(map(_ranks, values.values()))) for (shard, _), values in holders.items() if len(values) > 1
    ]


def _who(path: Place, by_rank: list[Found]) -> str:
    """``ranks [0, 1], [2] hold different values; ranks [3] hold none``."""
    ranks: dict[Digest | None, list[int]] = {}
    for rank, found in enumerate(by_rank):
        ranks.setdefault(found.get(path), []).append(rank)
    without = ranks.pop(None, [])
    text = f"ranks {', '.join(map(_ranks, ranks.values()))} hold {'different values' if len(ranks) > 1 else 'it'}"
    return text + (f", ranks {_ranks(without)} do not have it" if without else "")


def _where(path: Place, by_rank: list[Inner]) -> str:
    """`` (in .local_rank)``: what differs within a value that several ranks have."""
    there = [within[path] for within in by_rank if path in within]
    names = dict.fromkeys(name for within in there for name in within)
    differing = [name for name in names if len({within.get(name) for within in there}) > 1]
    more = ", ..." if len(differing) > _MOST_INNER else ""
    return f" (in {', '.join(differing[:_MOST_INNER])}{more})" if differing else ""


def _ranks(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"[{', '.join(map(str, ranks[:8]))}, ...]"
