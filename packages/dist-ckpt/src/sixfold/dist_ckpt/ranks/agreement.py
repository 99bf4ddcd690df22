"""Common data on several ranks: is it the same everywhere? Only the first rank's is written.

    common data --> digests (this file) --> first rank: equal? --> if not, check: an error or a warning that names paths

[Note: what may differ] Tensors and numpy arrays, wherever they stand in a leaf, are data (also in an object of a user's
class): where they differ between ranks, saving one of them loses the others, so that is an error. Numbers, texts and
everything else are warned of: host names and clocks differ in most jobs.
``preprocess_common_before_consistancy_check`` may drop either from the check.
"""

from __future__ import annotations

import io
import logging
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.files.crc import crc32
from sixfold.dist_ckpt.files.frame import tensor_bytes
from sixfold.dist_ckpt.ranks.exchange import Exchange
from sixfold.dist_ckpt.state import plain, tree

_MOST_SHOWN = 20
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
_log = logging.getLogger("sixfold.dist_ckpt")


class Digest(NamedTuple):
    """Equal for equal leaves, whichever process made them; ``is_data`` if tensors or arrays are in it."""

    value: int
    is_data: bool = False


def digests(common: dict[Any, Any], preprocess: Callable[..., Any] | None) -> dict[str, Digest]:
    """The digest of each leaf, by its path."""
    compared = preprocess(common) if preprocess else common
    return {tree.path_text(path): digest_of(leaf) for path, leaf in tree.leaves(compared)}


def summary(found: dict[str, Digest]) -> int:
    """One number for all of them."""
    return crc32(repr(sorted((path, value) for path, (value, _) in found.items())).encode("utf-8", "surrogatepass"))


def digest_of(leaf: Any) -> Digest:
    """The digest of a leaf, by what it holds and not by how it lies in memory."""
    if type(leaf) in _ATOMS:  # most leaves: pickled alone, they give equal bytes for equal values
        return Digest(crc32(pickle.dumps(leaf, 4)))
    if isinstance(leaf, torch.Tensor):
        return Digest(_of_tensor(leaf), True)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.ndarray) and not leaf.dtype.hasobject:
        return Digest(crc32(leaf.tobytes(), crc32(f"{leaf.dtype.str}{leaf.shape}".encode())), True)
    parts = plain.parts_of(leaf)
    if not parts:
        return _of_object(leaf)
    found = [digest_of(part) for _, part in parts]
    if isinstance(leaf, set | frozenset):
        found.sort()  # the order of a set of texts is another in each process
    elif not isinstance(leaf, tuple | list | deque):
        found += [digest_of(name) for name, _ in parts]
    text = f"{type(leaf).__qualname__}{[digest.value for digest in found]}"
    return Digest(crc32(text.encode()), any(digest.is_data for digest in found))


def _of_tensor(tensor: torch.Tensor) -> int:
    dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not dense or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        buffer = io.BytesIO()
        torch.save(tensor.detach(), buffer)
        return crc32(buffer.getvalue())
    kind = crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.is_meta:
        return kind
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return crc32(tensor_bytes(values), kind)


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


def check(exchange: Exchange, found: dict[str, Digest]) -> None:
    """Say what differs, when the summaries of all ranks have shown that something does. Collective.

    A warning on the first rank, and a line on the logger ``sixfold.dist_ckpt`` of each other rank that differs from it.

    Raises:
        ShardingError: tensors or arrays differ; see [Note: what may differ]. On every rank.
    """
    _, (differing, first) = exchange.together(lambda: (None, found), _differing)
    if not differing:
        return
    if exchange.rank == 0:
        shown = ", ".join(differing[:_MOST_SHOWN]) + (", ..." if len(differing) > _MOST_SHOWN else "")
        warnings.warn(f"common data differs between ranks at {shown}; the first rank's was saved", stacklevel=5)
    elif found != first:
        _log.warning(
            "Rank %d common state dict differs from rank 0 common state dict. Keys only on rank 0: %s, "
            "Keys only on %d: %s, Mismatched keys: %s",
            exchange.rank,
            sorted(first.keys() - found.keys()),
            exchange.rank,
            sorted(found.keys() - first.keys()),
            sorted(path for path in first.keys() & found.keys() if first[path] != found[path]),
        )


def _differing(by_rank: list[dict[str, Digest]]) -> tuple[list[str], dict[str, Digest]]:
    """Paths whose leaves are not the same on all ranks, and the first rank's digests."""
    paths = {path for found in by_rank for path in found}
    differing = sorted(path for path in paths if len({found.get(path) for found in by_rank}) > 1)
    data = [path for path in differing if any(found[path].is_data for found in by_rank if path in found)]
    if data:
        lines = [f"{path}: {_who(path, by_rank)}" for path in data[:_MOST_SHOWN]]
        lines += [f"and {len(data) - _MOST_SHOWN} more"] * (len(data) > _MOST_SHOWN)
        raise ShardingError(
            "tensors or arrays in common data differ between ranks, and common data is saved once:\n  "
            + "\n  ".join(lines)
            + "\nDescribe them by ShardedTensor (or DTensor), give each rank its own by ShardedObject, drop them by "
            "LocalNonpersistentObject, or drop them from the check by preprocess_common_before_consistancy_check; "
            "then the first rank's are saved"
        )
    return differing, by_rank[0]


def _who(path: str, by_rank: list[dict[str, Digest]]) -> str:
    """``ranks [0, 1], [2] hold different values; ranks [3] hold none``."""
    ranks: dict[Digest | None, list[int]] = {}
    for rank, found in enumerate(by_rank):
        ranks.setdefault(found.get(path), []).append(rank)
    without = ranks.pop(None, [])
    text = f"ranks {', '.join(map(_ranks, ranks.values()))} hold {'different values' if len(ranks) > 1 else 'it'}"
    return text + (f", ranks {_ranks(without)} do not have it" if without else "")


def _ranks(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"[{', '.join(map(str, ranks[:8]))}, ...]"
