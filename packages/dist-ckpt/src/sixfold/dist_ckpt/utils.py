"""Sharded state dicts by kinds of leaves and by prefixes of keys.

    sharded state dict --> this file --> parts of it, or the same with other keys

Names and meanings are megatron-core's (``dist_checkpointing/utils.py``), for code that is written for it. Functions
whose name says so change records in place. No files, no ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

from sixfold.dist_ckpt.dict_utils import DictError, extract_matching_values, nested_values
from sixfold.dist_ckpt.state.factory import ShardedTensorFactory
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedBase, ShardedTensor

Parts = tuple[Any, Any]
_Stack = tuple[tuple[str, ...], logging.Logger]
_stack: ContextVar[_Stack] = ContextVar("stack", default=((), logging.getLogger(__name__)))


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """``zip`` of equally long iterables; DictError that names the lengths if they are not."""
    lists = [list(arg) for arg in args]
    if len({len(found) for found in lists}) > 1:
        raise DictError(f"iterables of unequal lengths {[len(found) for found in lists]} are zipped; all are as long")
    return zip(*lists, strict=True)


def _by_kind(state: dict[Any, Any], *kinds: type) -> Parts:
    return extract_matching_values(state, lambda value: isinstance(value, kinds))


def extract_sharded_tensors(sharded_state_dict: dict[Any, Any]) -> Parts:
    """ShardedTensors, and everything else, each in the structure of the state dict."""
    return _by_kind(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: dict[Any, Any]) -> Parts:
    """ShardedTensors and factories, and everything else."""
    return _by_kind(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: dict[Any, Any]) -> Parts:
    """ShardedTensors, factories and LocalNonpersistentObjects, and everything else."""
    return _by_kind(sharded_state_dict, ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)


def extract_sharded_base(sharded_state_dict: dict[Any, Any]) -> Parts:
    """Records of all kinds, and everything else."""
    return _by_kind(sharded_state_dict, ShardedBase)


def extract_nonpersistent(sharded_state_dict: dict[Any, Any]) -> Parts:
    """LocalNonpersistentObjects, and everything else."""
    return _by_kind(sharded_state_dict, LocalNonpersistentObject)


def _rename(state: dict[Any, Any], new_key: Callable[[str], str]) -> None:
    """Give each record its new key, in place; nothing is changed if one of them raises."""
    records = [value for value in nested_values(state) if isinstance(value, ShardedBase)]
    # One record may stand at several places.
    for record, key in [(record, new_key(record.key)) for record in {id(r): r for r in records}.values()]:
        record.key = key


def add_prefix_for_sharding(sharded_state_dict: dict[Any, Any], prefix: str) -> None:
    """Put ``prefix`` before the key of every record, in place."""
    _rename(sharded_state_dict, lambda key: prefix + key)


def replace_prefix_for_sharding(sharded_state_dict: dict[Any, Any], old_prefix: str, new_prefix: str) -> None:
    """Replace ``old_prefix`` of every key, in place.

    Raises:
        DictError: a key does not begin with it; then nothing is changed.
    """

    def renamed(key: str) -> str:
        if not key.startswith(old_prefix):
            raise DictError(f"{key} does not begin with the prefix {old_prefix!r} that shall be replaced")
        return new_prefix + key[len(old_prefix) :]

    _rename(sharded_state_dict, renamed)


def apply_prefix_mapping(sharded_state_dict: dict[Any, Any], prefix_map: Mapping[str, str]) -> None:
    """Replace in each key the first prefix of the map that it begins with, in place; other keys stay."""

    def renamed(key: str) -> str:
        old = next((prefix for prefix in prefix_map if key.startswith(prefix)), None)
        return key if old is None else prefix_map[old] + key[len(old) :]

    _rename(sharded_state_dict, renamed)


def force_all_tensors_to_non_fp8(sharded_state_dict: dict[Any, Any]) -> None:
    """Replace TransformerEngine's quantised tensors in records by what they stand for, in place."""
    for value in nested_values(sharded_state_dict):
        data: Any = getattr(value, "data", None)
        if type(data).__module__.startswith("transformer_engine") and hasattr(data, "dequantize"):
            value.data = data.dequantize()


def _clean_metadata_for_serialization(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """``content_metadata`` without the process group in it, which cannot be saved; trainers import it by this name."""
    return None if metadata is None else {name: part for name, part in metadata.items() if name != "dp_cp_group"}


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Within the block, messages of ``debug_time`` and ``debug_msg`` go to this logger, under one more name."""
    names, logger = _stack.get()
    token = _stack.set(((*names, name) if name else names, current_logger or logger))
    try:
        yield ".".join(_stack.get()[0]), current_logger or logger
    finally:
        _stack.reset(token)


@contextmanager
def debug_time(
    name: str, logger: logging.Logger | None = None, threshold: float = float("-inf"), level: int | None = None
) -> Iterator[None]:
    """Log how long the block took, in seconds, if that is at least ``threshold``; then at level WARNING, else DEBUG."""
    with logger_stack(name, logger) as (path, found):
        start = monotonic()
        try:
            yield
        finally:
            seconds = monotonic() - start
            usual = logging.DEBUG if threshold == float("-inf") else logging.WARNING
            if seconds >= threshold:
                found.log(usual if level is None else level, f"{path} took {seconds:.4f}s")


def debug_msg(msg: str) -> None:
    """Log a message under the names of the blocks that it is in."""
    with logger_stack() as (path, found):
        found.debug(f"{path} {msg}")
