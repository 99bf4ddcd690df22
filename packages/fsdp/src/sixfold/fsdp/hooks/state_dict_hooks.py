"""The wrapped module used by itself: right where it can be, refused at the call where it cannot.

    module(x), module.state_dict(), new parameters, copies --> install (this file) --> engine/engine.py

forward_backward.py knows forwards and backwards; this file knows the rest of what people do with a module. Its hooks
hold the engine, so a module wrapped by ``fully_shard`` keeps what it needs; hooks that torch keeps for all modules do
not.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffers.flat_buffer import ParamRecord
from sixfold.fsdp.engine.call_state import CallContext
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.hooks.forward_backward import Hook, cast_floating, own_parameters, watch_outputs
from sixfold.fsdp.hooks.global_hooks import Watched
from sixfold.fsdp.parameter_access.guard import guard_of, written_in_place

STATE = (
    "use the wrapper's full_state_dict() (collective) or state_records() (live aliases, no communication); "
    "save_pretrained takes it: net.save_pretrained(folder, state_dict=model.full_state_dict()). "
    "sixfold.fsdp.torch_state has DTensors for torch's tools"
)
BETWEEN = "set it between calls, on all ranks alike"
LOAD = "use the wrapper's load_full_state_dict(), or copy into its state_records() and call its refresh()"


class RootCall(Hook):
    """``module(x)`` does what ``model(x)`` does."""

    def __init__(self, engine: Engine, cast_to: torch.dtype | None) -> None:
        super().__init__(engine)
        self._cast_to = cast_to
        self._contexts: list[CallContext | None] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A root call, unless one runs already."""
        self._contexts.append(None)  # taken back by ``after``, which comes also when begin_call raises
        if self.engine.in_call or self.engine.faults.failed is not None:
            self.engine.faults.check()
            return None
        self._contexts[:] = [self.engine.begin_call(None, by_hook=True)]  # interrupted calls took nothing back
        if self._cast_to is None:
            return None
        return cast_floating(args, self._cast_to), cast_floating(kwargs, self._cast_to)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The call ended, also by an exception."""
        context = self._contexts.pop()
        if context is None:
            return None
        try:
            own = None if output is None else own_parameters(self.engine, output)
        finally:
            self.engine.end_call()
        if own is not None:
            self.engine.guards[0].refuse_written()
        if torch.is_grad_enabled():
            watch_outputs(self.engine, self.engine.units[0], own, context)
        return None if own is output else own


class StateDict(Hook):
    """``module.state_dict()`` of the wrapped module or a part of it: whole in one process, else refused.

    With ``keep_vars=True`` it holds the Parameter objects themselves, which ask whoever reads them: names, and buffers.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._keeps = False

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Raise where half a dict could be taken for a whole one."""
        engine = self.engine
        self._keeps = keep_vars
        if keep_vars or engine.state_dict_asked == "names":
            return
        if engine.ranks.size > 1:
            raise FsdpError(
                f"state_dict() of {type(module).__name__} inside a FullyShardedDataParallel of {engine.ranks.size} "
                f"ranks would hold whatever lies in gathered memory; {STATE}"
            )
        engine.state_dict_asked = "values"

    def after(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Main weights take the place of gathered ones."""
        if self._keeps or self.engine.state_dict_asked == "names":
            return
        self.engine.state_dict_asked = ""
        for name, parameter in module._parameters.items():
            record = self.engine.records.get(parameter) if parameter is not None else None
            if record is not None and prefix + name in state_dict:
                state_dict[prefix + name] = whole_main(record)


def whole_main(record: ParamRecord) -> Tensor:
    """In one process: a copy of the main weight in the parameter's shape."""
    if record.main is None:  # no elements
        return torch.zeros(record.spec.shape, dtype=record.buffer.weights.main_dtype, device=record.buffer.device)
    return record.main.detach().clone().view(record.spec.shape)


class LoadStateDict(Hook):
    """``module.load_state_dict()`` would fill gathered copies and be lost."""

    def before(self, module: nn.Module, *_: Any) -> None:
        """Raise before the first value is copied."""
        raise FsdpError(
            f"load_state_dict() of {type(module).__name__} inside a FullyShardedDataParallel would be undone by the "
            f"next gather; {LOAD}"
        )


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


def install(
    engine: Engine, root: nn.Module, cast_to: torch.dtype | None, sharded: Collection[torch.optim.Optimizer]
) -> tuple[list[Any], list[Any]]:
    """Hooks on the modules, and what is watched in the whole process; both as handles."""
    call, saving, loading = RootCall(engine, cast_to), StateDict(engine), LoadStateDict(engine)

    def saved(*args: Any) -> None:  # torch marks the function that it gets, and a method takes no mark
        saving.after(*args)

    own = [
        root.register_forward_pre_hook(call.before, with_kwargs=True, prepend=True),
        root.register_forward_hook(call.after, with_kwargs=True, always_call=True),
    ]
    for module in root.modules():
        own.append(module.register_state_dict_pre_hook(saving.before))  # type: ignore[no-untyped-call]
        own.append(module.register_state_dict_post_hook(saved))  # type: ignore[no-untyped-call]
        own.append(module.register_load_state_dict_pre_hook(loading.before))  # type: ignore[no-untyped-call]
    return own, [Watched(OutsideCalls(root, engine, sharded))]


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
                    unit=record.buffer.unit,
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
