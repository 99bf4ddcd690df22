"""The model that a stage was cut from: what is set on it later holds in the stage, and what is replaced is refused.

    model, layers of one stage --> the model as it was cut (this file) --> each forward of the stage

The model is not kept alive: a rank that keeps its stages alone has the memory of the others' layers back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.stage.side_effects import OF_ALL_MODULES

__all__ = ["Origin", "base_of", "check_layers"]

Held = dict[str, "weakref.ref[nn.Module]"]


class Origin:
    """A model as it was cut; a copy of a stage has none."""

    def __init__(self, model: Any = None, layers: str = "", mine: range = range(0)) -> None:
        self._model: Callable[[], Any] = lambda: None
        if model is None:
            return
        base = base_of(model)
        self._model = weakref.ref(model)
        self._layers = layers
        self._parts: tuple[Held, Held] = _held(model, layers), _held(base, layers)
        self._count = len(base._modules[layers])
        self._own = {str(at): weakref.ref(base._modules[layers][at]) for at in mine}
        self._told = _attributes(model), _attributes(base)

    def __deepcopy__(self, _: Any) -> Origin:
        return Origin()

    def __reduce__(self) -> Any:
        return Origin, ()

    def look(self) -> Iterator[tuple[int, str, Any]]:
        """What was set since the last look: 0 for the model and 1 for its base, name and value.

        Raises:
            ScheduleError: a part that stages have was replaced, or layers are left out by chance.
        """
        model = self._model()
        if model is None:
            return
        base: Any = base_of(model)
        check_layers(model, base)
        for holder, held in zip((model, base), self._parts, strict=True):
            if "forward" in vars(holder):
                raise ScheduleError(
                    f"the model is a {type(model).__name__}, and a forward was set on it after stages_of_causal_lm, "
                    "which its stages would not run; remove it (del model.forward), and do in loss_fn or in a hook of "
                    "a layer what it adds"
                )
            modules = holder._modules
            for name, part in held.items():
                now = modules.get(name)
                if now is not None and now is not part():
                    _refuse(model, name)
        layers: Any = base._modules.get(self._layers)
        if layers is not None:  # else its memory was given back
            if len(layers) != self._count:
                _refuse(model, self._layers)
            for name, part in self._own.items():
                if layers._modules.get(name) is not part():
                    _refuse(model, f"layer {name}")
        for place, (holder, told) in enumerate(zip((model, base), self._told, strict=True)):
            now = vars(holder)
            for name in [name for name, value in told.items() if now.get(name) is not value]:
                told[name] = now.get(name)
                yield place, name, told[name]


def base_of(model: Any) -> Any:
    """The part that has embedding and layers: ``base_model``, or ``model`` where that is the whole (Llama 4)."""
    base: Any = getattr(model, "base_model", None)
    return getattr(model, "model", base) if base is model else base


def check_layers(model: Any, base: Any) -> None:
    """Each layer runs in each forward. Raises ScheduleError."""
    if (chance := getattr(base, "layerdrop", 0.0)) and chance > 0:
        raise ScheduleError(
            f"the model is a {type(model).__name__} with layerdrop={chance}: training drops layers at random, also the "
            "first or last of a stage; set base_model.layerdrop = 0.0"
        )


def _held(module: nn.Module, layers: str) -> Held:
    return {n: weakref.ref(part) for n, part in module._modules.items() if part is not None and n != layers}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_ALL_MODULES}


def _refuse(model: Any, name: str) -> None:
    raise ScheduleError(
        f"the model is a {type(model).__name__}, whose {name} was replaced after stages_of_causal_lm (a resize, a "
        "head, an adapter); its stages still hold the old one; cut the model again, and make a new optimizer and runner"
    )
