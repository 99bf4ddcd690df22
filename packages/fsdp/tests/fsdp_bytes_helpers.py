"""Bytes that operators write in a step: what is copied, and what is written at all.

    a step --> Written (this file) --> tests and benchmarks

Every tensor that an operator makes or changes counts with its bytes; views count nothing, and neither does what a
collective writes: that is traffic, counted elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sixfold.fsdp import FullyShardedDataParallel

Step = tuple[Callable[[], Any], Callable[[], Any]]
_COPIES = ("copy", "clone", "cat", "split_with_sizes_copy", "chunk_cat", "to_copy", "stack")


class Written(TorchDispatchMode):
    """Bytes written inside, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if not name.startswith("c10d"):
            self.by_operator[name] += _bytes_written(func, args, kwargs or {}, result)
        return result

    @property
    def total(self) -> int:
        """Of all operators."""
        return sum(self.by_operator.values())

    @property
    def copied(self) -> int:
        """Of operators that only move elements."""
        return sum(n for name, n in self.by_operator.items() if any(one in name.split(".")[1] for one in _COPIES))


def _bytes_written(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    if "all_gather_copy_in" in str(func):  # FSDP2's: returns what it filled, and the whole buffer that is gathered into
        return int(result[0].nbytes)
    changed: list[Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if at >= len(args) else args[at]
            changed += [one for one in torch.utils._pytree.tree_leaves(value) if isinstance(one, Tensor)]
    made: list[Tensor] = []
    results = result if isinstance(result, (tuple, list)) else [result]
    for one, returned in zip(results, func._schema.returns, strict=False):
        if returned.alias_info is None and "empty" not in str(func):
            made += [leaf for leaf in torch.utils._pytree.tree_leaves(one) if isinstance(leaf, Tensor)]
    return sum(one.nbytes for one in (*changed, *made))


def written(step: Callable[[], Any]) -> Written:
    """What ``step`` writes."""
    with Written() as found:
        step()
    return found


def forward_backward(
    kind: str, group: Any, net: nn.Module, units: list[nn.Module], batch: Tensor, **options: Any
) -> Step:
    """Forward and backward of ``net`` plain, in FSDP2 or in ours; the second of the pair drops the gradients."""
    if kind == "fsdp2":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        for unit in (*units, net):
            fully_shard(unit, mesh=mesh)
    elif kind == "sixfold":
        model = FullyShardedDataParallel(net, process_group=group, fsdp_unit_modules=units, initial="trust", **options)
        return lambda: model(batch).float().sum().backward(), model.zero_grad
    return lambda: net(batch).float().sum().backward(), net.zero_grad
