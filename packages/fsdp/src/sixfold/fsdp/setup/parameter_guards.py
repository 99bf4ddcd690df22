"""Who may read a wrapped model's parameters between calls: one guard per unit, drawn once start values are in.

    build.py --> guard_parameters (this file) --> parameter_access/guard.py; engine/engine.py reveals and hides

[Note: classes say who may read] is parameter_access/guard.py's; here is what it asks of a running model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import Tensor, nn

from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.buffers.weights import whole_main
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.parameter_access.guard import Guard, UnitGuard
from sixfold.fsdp.parameter_access.saved_weights import EscapedViews, Versions
from sixfold.fsdp.torch_private import in_backward


def guard_parameters(engine: Engine, *, as_sharded: bool) -> None:
    """From now on parameters are read in calls of their units; ``as_sharded``: also where all weights are here."""
    for unit in engine.units:
        for flat_buffer in unit.flat_buffers:
            flat_buffer.weights.show_bytes_only(lambda: engine.state_dict_asked == "values")
    engine.guards = [
        UnitGuard(
            [
                Guard(
                    record,
                    _reads(engine, unit, as_sharded=as_sharded),
                    _owes_gradient(engine),
                    engine.forget,
                    _saved(engine),
                )
                for record in unit.records
            ],
            EscapedViews(unit, engine.saved_views),
            as_sharded=as_sharded,
            strides=any(map(_strides, {type(part) for module in unit.modules for part in module.modules()})),
        )
        for unit in engine.units
    ]
    engine.gathering.versions = Versions(engine.units)
    engine.registered = [
        (part._parameters, name, parameter)
        for part in engine.units[0].module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]


def _reads(engine: Engine, unit: Unit, *, as_sharded: bool) -> Callable[[], bool]:
    """Whether values of ``unit`` may be read now by code that is not of the unit's own call."""
    always = not as_sharded and all(one.weights.whole_here for one in unit.flat_buffers)

    def readable() -> bool:
        if always:
            return True
        if engine.state_dict_asked == "names" or not engine.gathering.ready(unit):
            return False
        if in_backward() != -1:
            return True  # they stay for the nodes that follow its gather
        # Between calls never: whether they are here then depends on what ran before. In shared memory they stay for
        # the unit's own call.
        return engine.calls_run and (not unit.shares or unit in engine.running)

    return readable


def _saved(engine: Engine) -> Callable[[ParamRecord], Tensor | None]:
    return lambda record: whole_main(record) if engine.state_dict_asked == "values" else None


def _owes_gradient(engine: Engine) -> Callable[[ParamRecord], bool]:
    def owes(record: ParamRecord) -> bool:
        if record.flat_buffer.gradients.filled(record) or engine.reduction.pipeline.flying(record.flat_buffer.unit):
            return True
        if record.main is not None:
            return record.main.grad is not None
        return any(one.main is not None and one.main.grad is not None for one in record.flat_buffer.records)

    return owes


def _strides(kind: type[nn.Module]) -> bool:
    """Code of this class, or a function that this calls by name, names ``as_strided``. [Note: offsets in a storage]"""
    for cls in kind.__mro__:
        if cls.__module__.startswith("torch.nn."):
            return False
        for method in vars(cls).values():
            if any("as_strided" in names for names in _names(method)):
                return True
            called = {name for names in _names(method) for name in names}
            known = getattr(method, "__globals__", {})
            if any("as_strided" in names for name in called if name in known for names in _names(known[name])):
                return True
    return False


def _names(function: Any) -> Iterator[tuple[str, ...]]:
    """Names in the code of ``function`` and of those inside it."""
    codes = [getattr(function, "__code__", None)]
    for code in codes:
        if isinstance(code, CodeType):
            yield code.co_names
            codes += [one for one in code.co_consts if isinstance(one, CodeType)]
