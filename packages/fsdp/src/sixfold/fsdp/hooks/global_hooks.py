"""What happens elsewhere in the process: modules that get new parameters, optimizers that step.

    torch's global hooks, once a process --> Watched --> OutsideCalls (this file) --> engine/engine.py

A model's hooks on its modules hold the engine, so a module wrapped by ``fully_shard`` keeps what it needs. These hold
it weakly.

[Note: hooks that stay] A model that is collected must not take its hooks out of torch's tables. The garbage collector
runs at any moment, also while torch walks such a table. Making another model, or a step of another optimizer, would
then end in "OrderedDict mutated during iteration". So what is looked up are weak sets of our own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.hooks.state_dict_hooks import LOAD
from sixfold.fsdp.parameter_access.guard import guard_of, written_in_place

BETWEEN = "set it between calls, on all ranks alike"


class OutsideCalls:
    """What happens elsewhere in the process: parameters that appear after wrapping would be on no other rank."""

    def __init__(self, root: nn.Module, engine: Engine, sharded: Collection[torch.optim.Optimizer]) -> None:
        self._sharded = sharded
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet(root.modules())
        self._engine = weakref.ref(engine)
        self._steps: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # of optimizers that were made apart

    def _engine_of(self, module: nn.Module) -> Engine | None:
        return self._engine() if module in self._modules else None

    def parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """``module.name = parameter``."""
        engine = self._engine_of(module)
        if engine is None or parameter is None or module._parameters.get(name) is parameter:
            return
        if self._comes_back(engine, module, name, parameter):
            return
        raise FsdpError(
            f"{type(module).__name__}.{name} is set to another Parameter of shape {tuple(parameter.shape)} after "
            f"wrapping; a wrapped model keeps its Parameter objects. {LOAD.capitalize()}"
        )

    def _comes_back(self, engine: Engine, module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
        """A parametrisation took it away for a while, as peft's do in a forward. Torch sets it to itself meanwhile."""
        for place, own, one in engine.registered:
            if place is module._parameters and own == name and one is parameter:
                if engine.gathering.versions is not None:
                    engine.gathering.versions.accept(engine.records[parameter])
                return True
        return False

    def module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """``module.name = child``: fine for a child without parameters of its own."""
        engine = self._engine_of(module)
        if engine is None or child is None:
            return
        for inside, parameter in child.named_parameters():
            if parameter not in engine.records:
                raise FsdpError(
                    f"{type(module).__name__}.{name} brings the parameter {inside} of shape {tuple(parameter.shape)} "
                    "after wrapping, and no rank would reduce its gradient; add modules before wrapping"
                )
        for part in child.modules():
            self._modules.add(part)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()`` of any optimizer."""
        engine = self._engine()
        if engine is None:
            return
        refuse_unsharded(engine, optimizer, self._sharded)
        if optimizer in engine.optimizers:
            return
        ids = engine.main_parameters.ids
        over_mains = any(id(one) in ids for group in optimizer.param_groups for one in group["params"])
        engine.end_raised_step()
        # Made apart: inside SAM, or another wrapper.
        if over_mains and not engine.stepping and engine.faults.failed is None:
            refuse_changed_parameters(engine)
            engine.before_step(widen=True)
            self._steps.add(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It ended."""
        engine = self._engine()
        if engine is not None and optimizer in self._steps:
            self._steps.discard(optimizer)
            engine.after_step()


class Watched:
    """Tells a model what happens, until this handle is removed: by a finalizer, at whatever moment."""

    def __init__(self, watcher: OutsideCalls) -> None:
        self._watcher: OutsideCalls | None = watcher
        _watchers().add(watcher)

    def remove(self) -> None:
        """No more."""
        self._watcher = None


@cache
def _watchers() -> weakref.WeakSet[OutsideCalls]:
    found: weakref.WeakSet[OutsideCalls] = weakref.WeakSet()

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


def install(engine: Engine, root: nn.Module, sharded: Collection[torch.optim.Optimizer]) -> list[Any]:
    """What is watched for one model, as handles."""
    return [Watched(OutsideCalls(root, engine, sharded))]


def refuse_changed_parameters(engine: Engine) -> None:
    """Once per step: every parameter is the one that was wrapped, and nothing wrote to it beneath its guard.

    Raises:
        FsdpError: a parameter was replaced or, inside a call of its unit, written to in place, given another ``.data``,
            frozen or unfrozen.
    """
    versions = engine.gathering.versions
    written = None if versions is None else versions.look()
    with torch._C.DisableTorchFunctionSubclass():  # a plain attribute costs 80 ns, a guarded one a microsecond
        for place, name, parameter in engine.registered:
            guard = guard_of(parameter)  # torch.utils.swap_tensors takes it away
            if place.get(name) is not parameter or guard is None:
                record = engine.records[parameter]
                raise FsdpError(
                    f"{record.name} is no longer the Parameter that was wrapped; change the module before wrapping",
                    unit=record.flat_buffer.unit,
                )
            if parameter is written:
                raise written_in_place(guard, engine.units[0].module)
            if parameter.data_ptr() != guard.record.compute.data_ptr():
                raise guard.error("its .data was assigned in a call of its unit", f"gathers do not reach that. {LOAD}")
            if parameter.requires_grad != guard.record.wanted:
                raise guard.error(f"requires_grad was set to {parameter.requires_grad} in a call of its unit", BETWEEN)


def refuse_unsharded(
    engine: Engine, optimizer: torch.optim.Optimizer, sharded: Collection[torch.optim.Optimizer]
) -> None:
    """Before every optimizer's step: one that holds the module's own parameters would train nothing.

    (Megatron-FSDP steps such an optimizer in silence.)
    """
    if engine.faults.failed is not None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            record = engine.records.get(parameter)
            if record is None:
                continue
            if optimizer in sharded:
                raise FsdpError(
                    f"{type(optimizer).__name__} holds {record.name} itself, given by add_param_group after "
                    "fully_shard_optimizer; give its main parameter: "
                    f"optimizer.add_param_group({{'params': [dict(model.main_parameters())[{record.name!r}]]}})"
                )
            raise FsdpError(
                f"{type(optimizer).__name__} holds {record.name} itself, which has no gradient; "
                "use fully_shard_optimizer(optimizer, model) before the first step"
            )
