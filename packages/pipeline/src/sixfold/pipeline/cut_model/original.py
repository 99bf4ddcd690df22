"""The model that a stage was cut from: what is set on it later holds in the stage, and what is replaced is refused.

    model, layers of one stage --> the model as it was cut (this file) --> each forward of the stage

What a stage's part shares with the model (layers, hooks, buffers) needs no look. Attributes are looked at, the class,
what calling the model runs, and which parts it has.
The model is not kept alive: a rank that keeps its stages alone has the memory of the others' layers back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.stage.side_effects import OF_ALL_MODULES

__all__ = ["ABSENT", "Origin", "SequentialOrigin", "base_of", "check_compiled", "check_layers"]

Held = dict[str, "weakref.ref[nn.Module]"]
ABSENT: Any = object()  # the value of an attribute that was deleted
_HOLDERS = "it", "its base_model", "its tied output embedding"
_COMPILED = "_compiled_call_impl"
_NOT_LOOKED_AT = OF_ALL_MODULES - {"_is_full_backward_hook"}  # stages share hooks, and must know of which sort they are


class Origin:
    """A model as it was cut; a copy of a stage has none.

    Args:
        head: the model's, where the stage has a copy of it.
    """

    def __init__(
        self, model: Any = None, layers: str = "", mine: range = range(0), head: nn.Module | None = None
    ) -> None:
        self._model: Callable[[], Any] = lambda: None
        self._head: Callable[[], Any] = (lambda: None) if head is None else weakref.ref(head)
        self._followed: list[Followed] = []
        if model is None:
            return
        base = base_of(model)
        self._model = weakref.ref(model)
        self._layers = layers
        if head is not None:
            self._weight, self._trained = weakref.ref(head.weight), head.weight.requires_grad
        holders = self._holders(model)
        self._parts: list[Held] = [_held(holder, layers) for holder in holders]
        self._kinds = [type(holder) for holder in holders]
        self._count = len(base._modules[layers])
        self._own = {str(at): weakref.ref(base._modules[layers][at]) for at in mine}
        self._told = [_attributes(holder) for holder in holders]

    def __deepcopy__(self, _: Any) -> Origin:
        return Origin()

    def __reduce__(self) -> Any:
        return Origin, ()

    def follow(self, part: nn.Module, own: nn.Module) -> None:
        """``own`` is the stage's copy of ``part`` of the model: what is set on that holds in it too."""
        self._followed += [Followed(*pair) for pair in zip(part.modules(), own.modules(), strict=True)]

    def look(self) -> Iterator[tuple[int, str, Any]]:
        """What was set since the last look: 0 for the model, 1 for its base, 2 for its head; name and value.

        Of a head that the stage has a copy of, also whether its tied weight (3) is trained, and its parameters.

        Raises:
            ScheduleError: a part that stages have was replaced or added, a head is tied no more, something was set
                that only a call of the model runs, or layers are left out by chance.
        """
        model = self._model()
        if model is None:
            return
        base: Any = base_of(model)
        check_layers(model, base)
        for each in self._followed:
            each.look()
        holders = self._holders(model)
        for holder, held, kind, where in zip(holders, self._parts, self._kinds, _HOLDERS, strict=False):
            if "forward" in vars(holder) or type(holder) is not kind:
                what = "a forward" if "forward" in vars(holder) else f"the class {type(holder).__name__}"
                raise ScheduleError(
                    f"the model is a {type(model).__name__}, and {what} was set on {where}, which the stages of "
                    "stages_of_causal_lm would not run; remove it (del its forward), and do in loss_fn or in a hook "
                    "of a layer what it adds"
                )
            check_compiled(holder, "stages_of_causal_lm")
            modules = holder._modules
            for name, part in held.items():
                now = modules.get(name)
                if now is not None and now is not part():
                    _refuse(model, name)
            if len(modules) > len(held) and (
                new := next((n for n in _held(holder, self._layers) if n not in held), "")
            ):
                _refuse(model, new)
        if own := next(iter((*model._parameters, *base._parameters)), None):
            _refuse(model, own)
        layers: Any = base._modules.get(self._layers)
        if layers is not None:  # else its memory was given back
            if len(layers) != self._count:
                _refuse(model, self._layers)
            for name, part in self._own.items():
                if layers._modules.get(name) is not part():
                    _refuse(model, f"layer {name}")
        for place, (holder, told) in enumerate(zip(holders, self._told, strict=True)):
            now = _attributes(holder)
            for name in [name for name in {**told, **now} if told.get(name, ABSENT) is not now.get(name, ABSENT)]:
                yield place, name, now.get(name, ABSENT)
            told.clear()
            told.update(now)
        if len(holders) > 2:
            yield from self._look_at_head(model, holders[2])

    def of_head(self) -> dict[str, Any] | None:
        """The parameters that the model's head has now, if the stage has a copy of it."""
        head = self._head()
        return None if head is None else dict(head._parameters)

    def elsewhere(self, part: nn.Module) -> Iterator[nn.Parameter]:
        """Parameters that the model has outside of the stage, whose module is ``part``."""
        model = self._model()
        if model is None:
            return
        base, mine = base_of(model), {id(module) for module in part.modules()} | {id(self._head())}
        units = [*(base._modules.get(self._layers) or ())]
        for holder, held in zip((model, base), self._parts, strict=False):  # what replaced one, ``look`` refuses
            units += [unit for name, unit in holder._modules.items() if name in held and held[name]() is unit]
        for unit in units:
            if unit is not base and id(unit) not in mine:
                yield from unit.parameters()

    def grown(self, _: nn.Module) -> str | None:
        """See SequentialOrigin. Here one group alone is tied, embedding and head: another is none of ``tied``."""
        return None

    def _look_at_head(self, model: Any, head: Any) -> Iterator[tuple[int, str, Any]]:
        weight: Any = getattr(head, "weight", None)
        if weight is None or weight is not self._weight():
            if weight is None or weight is not getattr(model.get_input_embeddings(), "weight", None):
                _refuse(model, "tied output embedding's weight")
            self._weight = weakref.ref(weight)
        if weight.requires_grad != self._trained:
            self._trained = weight.requires_grad
            yield 3, "requires_grad", weight.requires_grad
        yield 2, "_parameters", dict(head._parameters)

    def _holders(self, model: Any) -> list[Any]:
        """Whose attributes stages have copies of."""
        head = self._head()
        return [model, base_of(model)] if head is None else [model, base_of(model), head]


class Followed:
    """A part of the model, and the copy of it whose state a stage's forwards may change."""

    def __init__(self, part: nn.Module, own: nn.Module) -> None:
        self._part, self._own = weakref.ref(part), own
        self._told = _attributes(part), dict(part._buffers)

    def look(self) -> None:
        """What was set on the part since the last look is set on the copy."""
        part, own = self._part(), self._own
        if part is None:
            return
        told = self._told
        self._told = _attributes(part), dict(part._buffers)
        for before, now, mine in zip(told, self._told, (vars(own), own._buffers), strict=True):
            for name in {**before, **now}:
                if name not in now:
                    mine.pop(name, None)
                elif before.get(name, ABSENT) is not (value := now[name]):
                    mine[name] = value.clone() if mine is own._buffers and value is not None else value


class SequentialOrigin:
    """An nn.Sequential as it was cut; a copy of a stage has none.

    Args:
        mine: the names of the stage's layers.
        places: of each layer by name, the stage.
    """

    def __init__(
        self, model: nn.Sequential | None = None, mine: Iterable[str] = (), places: Mapping[str, int] | None = None
    ) -> None:
        self._model: Callable[[], Any] = (lambda: None) if model is None else weakref.ref(model)
        layers: dict[str, Any] = {} if model is None else model._modules
        self._own = {name: weakref.ref(layers[name]) for name in mine}
        self._count = 0 if model is None else len(model)
        self._kind: type = type(model)
        self._places = dict(places or {})
        own = ((f"{name}.{path}", one) for name in mine for path, one in layers[name].named_parameters())
        self._shared = self._stages_with(own)

    def __deepcopy__(self, _: Any) -> SequentialOrigin:
        return SequentialOrigin()

    def __reduce__(self) -> Any:
        return SequentialOrigin, ()

    def look(self) -> None:
        """Raises ScheduleError: the model has other layers than it had, or does more than run them."""
        model: Any = self._model()
        if model is None:
            return
        kind: Any = type(model)
        if "forward" in vars(model) or kind is not self._kind or _hooked(model):
            raise ScheduleError(
                f"the model is a {type(model).__name__}, and a forward, a hook or a class was set on it after "
                "stages_of_sequential, which its stages would not run; remove it, and put it on a layer"
            )
        check_compiled(model, "stages_of_sequential")
        modules = model._modules
        if len(modules) != self._count or any(modules.get(name) is not one() for name, one in self._own.items()):
            raise ScheduleError(
                f"the model is a {type(model).__name__}, whose layers were replaced, added or deleted after "
                "stages_of_sequential, and its stages still hold the old ones; cut the model again, and make a new "
                "optimizer and runner"
            )

    def grown(self, part: nn.Module) -> str | None:
        """A parameter of the stage, whose module is ``part``, that has come to further stages since the cut."""
        now = self._stages_with(part.named_parameters())
        return next((path for path, stages in now.items() if stages - self._shared.get(path, stages)), None)

    def _stages_with(self, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, set[int]]:
        """By path, the other stages that a parameter is of, too; without those of this stage alone."""
        stages: dict[int, set[int]] = {}
        for name, layer in self._others():
            for parameter in layer.parameters():
                stages.setdefault(id(parameter), set()).add(self._places.get(name, -1))
        return {path: stages[id(one)] for path, one in named if id(one) in stages}

    def elsewhere(self, part: nn.Module) -> Iterator[nn.Parameter]:
        """See Origin."""
        for _, layer in self._others():
            yield from layer.parameters()

    def _others(self) -> Iterator[tuple[str, nn.Module]]:
        model = self._model()
        for name, layer in model._modules.items() if model is not None else ():
            if name not in self._own and layer is not None:
                yield name, layer


def check_compiled(model: Any, cut: str) -> None:
    """Nothing was compiled that no stage calls. Raises ScheduleError."""
    if vars(model).get(_COMPILED) is not None:
        raise ScheduleError(
            f"the model is a {type(model).__name__} with a compile() of its own, and the graph of all its layers fits "
            f"no stage of {cut}; compile the layers, or each stage's module, and set model._compiled_call_impl = None"
        )


def _hooked(model: nn.Module) -> bool:
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    return any(hooks)


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
    return {name: value for name, value in vars(module).items() if name not in _NOT_LOOKED_AT}


def _refuse(model: Any, name: str) -> None:
    raise ScheduleError(
        f"the model is a {type(model).__name__}, whose {name} was replaced or added after stages_of_causal_lm (a "
        "resize, a head, an adapter); its stages hold what there was; cut the model again, and make a new optimizer "
        "and runner"
    )
