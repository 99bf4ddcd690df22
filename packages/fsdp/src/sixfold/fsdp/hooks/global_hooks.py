"""The hooks that torch keeps for the whole process: one of each kind, made at the first wrap, never taken away.

    state_dict_hooks.py, optimizers/sharded_optimizer.py --> Watched (this file) --> torch's global hooks, once a process

[Note: hooks that stay] A model that is collected must not take its hooks out of torch's tables. The garbage collector
runs at any moment, also while torch walks such a table, and what the user does then (another model is made, another
optimizer steps) would end in "OrderedDict mutated during iteration". So what is looked up are weak sets of our own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Watcher(Protocol):
    """What one model wants to know of the whole process."""

    def parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """``module.name = parameter``, before it is done."""

    def module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """``module.name = child``, before it is done."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()``, before it is done."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()``, when it is done."""


class Watched:
    """Tells a watcher what happens, until this handle is removed: by a finalizer, at whatever moment."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher: Watcher | None = watcher
        _watchers().add(watcher)

    def remove(self) -> None:
        """No more."""
        self._watcher = None


@cache
def _watchers() -> weakref.WeakSet[Watcher]:
    found: weakref.WeakSet[Watcher] = weakref.WeakSet()

    def all_of(name: str) -> Callable[..., None]:
        def tell(*args: Any) -> None:
            for one in list(found):
                getattr(one, name)(*args)

        return tell

    register_module_parameter_registration_hook(all_of("parameter"))
    register_module_module_registration_hook(all_of("module"))
    told = all_of("step")
    ended = all_of("stepped")
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: told(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: ended(optimizer))
    return found
