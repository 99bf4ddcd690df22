"""What stands in common data where a tensor stood that is stored in the frames, under its path as name.

    tensor of common data --> placeholder (this file) --> common.pt: a tensor on the meta device, without values

No meta tensor is saved otherwise, so that each that is read is one of these.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from sixfold.dist_ckpt.state import tree


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Is pickled as ``like``: on the meta device, of the dtype, shape and kind of the tensor, or the tensor itself."""

    like: torch.Tensor


def in_common(common: Any) -> tuple[str, ...]:
    """Names of the tensors whose values placeholders of common data hold."""
    found = [(path, leaf) for path, leaf in tree.leaves(common) if isinstance(leaf, Placeholder)]
    return tuple(tree.key_text(path) for path, leaf in found if not leaf.like.is_meta)


def placeholder(tensor: torch.Tensor) -> Placeholder:
    """What stands for a tensor; one object for all that are alike, which is pickled once."""
    return _like(tuple(tensor.shape), tensor.dtype, isinstance(tensor, torch.nn.Parameter), tensor.requires_grad)


@lru_cache(maxsize=1024)
def _like(shape: tuple[int, ...], dtype: torch.dtype, is_parameter: bool, requires_grad: bool) -> Placeholder:
    like = torch.empty(shape, dtype=dtype, device="meta")
    return Placeholder(torch.nn.Parameter(like, requires_grad) if is_parameter else like.requires_grad_(requires_grad))


def with_kind(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The values as a Parameter if ``like`` is one, and known to autograd as it is."""
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(values, like.requires_grad)
    return values.requires_grad_(like.requires_grad)


def is_placeholder(leaf: object) -> bool:
    """Whether a leaf of common data, as it was read, stands for a tensor."""
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def with_placeholders(common: dict[Any, Any], names: Collection[str]) -> dict[Any, Any]:
    """Common data as it was read, with placeholders in place of the tensors that have these names."""

    def change(path: tree.KeyPath, leaf: Any) -> Any:
        is_one = isinstance(leaf, torch.Tensor) and tree.key_text(path) in names
        return placeholder(leaf).like if is_one else leaf

    return tree.mapped(common, change, same=tree.BRANCHES)  # type: ignore[no-any-return]


def without_placeholders(common: dict[Any, Any], kept: Collection[tree.KeyPath] = ()) -> dict[Any, Any]:
    """Common data as it was read without placeholders, but for those that are ``kept``.

    A list that loses some of its elements becomes {position: value}.
    """

    def change(path: tree.KeyPath, leaf: Any) -> Any:
        return tree.GONE if is_placeholder(leaf) and path not in kept else leaf

    found = tree.mapped(common, change, same=tree.BRANCHES)
    return {} if found is tree.GONE else found
