"""How many bytes of tensors are alive, and were at most.

tests of streamed state and of start values --> peak_bytes (this file)
tests of what a report states --> storages (this file)
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages() -> dict[int, int]:
    """Place and bytes of all storages of tensors that are alive, but for those that were loaded with the tests.

    Fake tensors, which the compiler keeps of tests before, have none.
    """
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        found = [one.untyped_storage() for one in tensors if not isinstance(one, FakeTensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


class _Alive(TorchDispatchMode):
    """Storages that operators returned for the first time here, for as long as anybody holds them.

    Not what a back end makes for itself: gloo gathers into memory of its own and lets go of it when its threads come
    to it. Storages that were there before are known by their place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, StorageWeakRef] = {}
        self.sizes: dict[int, int] = {}
        self.peak = 0
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        came = {one.untyped_storage().data_ptr() for one in inputs}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                storage = one.untyped_storage()
                if storage.data_ptr() not in came:
                    self.given[storage.data_ptr()] = StorageWeakRef(storage)
                    self.sizes[storage.data_ptr()] = storage.nbytes()
        self.given = {place: ref for place, ref in self.given.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.sizes[place] for place in self.given))
        return result


def peak_bytes(action: Callable[[], Any]) -> int:
    """Most bytes alive at a time that operators in ``action`` made."""
    with _Alive() as alive:
        action()
    assert alive.operators, "no operator ran"
    return alive.peak
