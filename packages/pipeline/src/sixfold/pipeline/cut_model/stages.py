"""From a model of one piece to stages: an nn.Sequential, or a causal language model of Hugging Face's form.

    model, number of stages --> Stages that share its parameters (this file) --> PipelineRunner

Nothing of transformers is imported: what is asked of a model are ``base_model``, ``get_input_embeddings``,
``get_output_embeddings`` and its one list of layers. Each stage runs the model's own forward on some of the layers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.pipeline.cut_model.comparison import prove
from sixfold.pipeline.cut_model.original import ABSENT, Origin, SequentialOrigin, base_of, check_compiled, check_layers
from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.plan.partition import partition
from sixfold.pipeline.stage.side_effects import differs, part_of
from sixfold.pipeline.stage.stage import Stage, check_made

__all__ = ["stages_of_causal_lm", "stages_of_sequential"]


def stages_of_sequential(model: nn.Sequential, stages: int) -> list[Stage]:
    """``model`` cut between its layers, so that the largest part has few parameters. Stages share its parameters.

    The stages of a rank are ``[made[i] for i in program.stages_of(rank)]``. A parameter that several stages hold is
    tied (``Stage(tied=)``).

    A layer hands on only what it returns. If it leaves a value in an attribute for a later layer, that layer may read
    the value of another microbatch. Return such a value, in a tuple.

    Raises:
        ScheduleError: it is no nn.Sequential, or has a forward, a ``__call__`` or hooks of its own. A layer has no
            shapes yet (a lazy one). Or it has fewer layers than stages.
    """
    if not isinstance(model, nn.Sequential):
        raise ScheduleError(f"the model is a {type(model).__name__}; stages_of_sequential cuts an nn.Sequential")
    kind = type(model)
    own = "a forward" if "forward" in vars(model) or kind.forward is not nn.Sequential.forward else ""
    own = own or ("a __call__" if kind.__call__ is not nn.Sequential.__call__ else "")
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    own = own or ("hooks" if any(hooks) else "")
    check_compiled(model, "stages_of_sequential")
    if own:
        raise ScheduleError(
            f"the model is a {type(model).__name__} that has {own} of its own, which no stage would run; "
            "stages_of_sequential cuts between layers: put it in an nn.Sequential as a layer"
        )
    check_made(model, "the model")
    layers: Any = list(model._modules.items())  # named_children leaves out what stands there again
    sizes = _cut(layers, [layer for _, layer in layers], stages)
    parts, begin = [], 0
    stage_of = [at for at, size in enumerate(sizes) for _ in range(size)]
    places = {name: at for (name, _), at in zip(layers, stage_of, strict=True)}
    for size in sizes:
        part = _Layers(first=begin == 0, last=begin + size == len(layers))
        for name, layer in layers[begin : begin + size]:
            part.add_module(name, layer)  # under its own name, so that state dicts fit
        part._origin = SequentialOrigin(model, part._modules, places)
        parts.append(part)
        begin += size
    _watch_buffers(parts)
    return [
        Stage(part, index, tied=shared) for index, (part, shared) in enumerate(zip(parts, _shared(parts), strict=True))
    ]


class _Layers(nn.Sequential):
    """Some layers of an nn.Sequential. What they hand on is one value, and reaches the next stage as it was.

    Messages hold tensors side by side: a tuple or a list is sent as its parts, and a number behind them says which.
    """

    def __init__(self, *layers: Any, first: bool = True, last: bool = True) -> None:
        super().__init__(*layers)  # as nn.Sequential's own slices make it
        self._first, self._last = first, last
        self._origin = SequentialOrigin()
        self._watched: list[tuple[str, nn.Module, str]] = []  # buffers that another stage has too, not yet looked at

    def forward(self, *parts: Any) -> Any:
        self._origin.look()
        if self._watched and (now := [each for each in self._watched if each[1].training]):
            with _unchanged(now):
                made = self._run(*parts)
            self._watched = [each for each in self._watched if each not in now]
            return made
        return self._run(*parts)

    def _run(self, *parts: Any) -> Any:
        value: Any = parts[0] if len(parts) == 1 else parts
        if len(parts) > 1 and not self._first:
            value = list(parts[:-1]) if parts[-1] else parts[:-1]
        made: Any = super().forward(value)  # type: ignore[no-untyped-call]
        if self._last or not isinstance(made, tuple | list):
            return made
        return *made, int(isinstance(made, list))


def _watch_buffers(parts: Sequence[_Layers]) -> None:
    """[Note: shared buffers] Layers of several stages may have tables, and no statistics.

    Each rank would have statistics of its own, and in one process the schedule would say in which order they move.
    Which buffers a forward changes is seen in its first run in training mode.
    """
    holders = Counter(id(buffer) for part in parts for buffer in part.buffers())
    for part in parts:
        part._watched = [
            (f"{path}.{name}", module, name)
            for path, module in part.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and holders[id(buffer)] > 1
        ]


@contextmanager
def _unchanged(watched: Iterable[tuple[str, nn.Module, str]]) -> Iterator[None]:
    """Raises ScheduleError: a forward changes one of the buffers. [Note: shared buffers]"""
    found = [(path, module._buffers, name, module._buffers.get(name)) for path, module, name in watched]
    before = [part_of(buffer) for *_, buffer in found]
    yield
    for (path, buffers, name, buffer), was in zip(found, before, strict=True):
        if buffers.get(name) is not buffer or differs(was, part_of(buffer)):
            raise ScheduleError(
                f"the forward changes {path}, a buffer of a layer that several stages have, and each rank would go on "
                "with values of its own; give each stage a layer of its own, or call eval() on this one"
            )


def _shared(parts: Sequence[nn.Module]) -> list[dict[str, nn.Parameter]]:
    """Of each part the parameters that another part has too, by a name of all of them.

    In one process they are one object; on several ranks each has its own, which would get a part of the gradient.
    """
    holders: dict[nn.Parameter, dict[int, str]] = {}
    for at, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                holders.setdefault(parameter, {})[at] = f"{name} of stage {at}"
    found: list[dict[str, nn.Parameter]] = [{} for _ in parts]
    for parameter, names in holders.items():
        for at in names if len(names) > 1 else ():
            found[at][next(iter(names.values()))] = parameter
    return found


def stages_of_causal_lm(model: Any, stages: int, *, check: bool = True) -> list[Stage]:
    """A causal language model of Hugging Face's form (Llama, Qwen, Gemma, GPT-2, ...) as stages.

    The first stage takes token ids. The last gives logits, with the model's soft cap or scale. ``kwargs`` of a step
    reach every stage (``attention_mask``, ``position_ids``). Stages share the model's parameters. Only a tied output
    embedding becomes a copy, tied between the first stage and the last. The stages of a rank are
    ``[made[i] for i in program.stages_of(rank)]``. Attributes and configuration that are set later hold in them too.

    Args:
        check: run the model and its stages once on 16 tokens, in eval mode without gradients, and compare the logits.
            It is left out for parameters on meta or sharded ones (DTensor, FSDP, ZeRO-3), for flex attention, and for
            flash attention on CPUs. If the model fails on token ids and a mask, it is cut with a warning.
    Raises:
        ScheduleError: the model has another form, fewer layers than stages, random layer drop or a loss of its routers
            (``output_router_logits``). No stage, or several, would hold a parameter. A ``forward`` or a forward
            pre-hook was set on it. Or its stages give other logits.
    """
    if callable(getattr(model, "get_base_model", None)):
        raise ScheduleError(
            f"the model is a {type(model).__name__}, which wraps the model with the layers; give its get_base_model(), "
            "which holds LoRA adapters too (prompts that peft adds before the input are left out)"
        )
    if "_orig_mod" in getattr(model, "_modules", ()):
        raise ScheduleError(
            "the model is compiled, and the graph of all its layers fits no stage; cut the model itself, "
            "stages_of_causal_lm(model._orig_mod, ...), then compile each stage's layers"
        )
    base: Any = base_of(model)
    lists = [(n, m) for n, m in base.named_children() if isinstance(m, nn.ModuleList)] if base is not None else []
    asked = all(callable(getattr(model, name, None)) for name in ("get_input_embeddings", "get_output_embeddings"))
    if not asked or base is model or len(lists) != 1 or model.get_output_embeddings() is None:
        raise ScheduleError(
            f"the model is a {type(model).__name__}; stages_of_causal_lm takes a Hugging Face causal language model, "
            "whose base_model has one ModuleList: write stages of this model as modules of your own"
        )
    (name, layers), head = lists[0], model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    _check_form(model, base, name, embedding, head)
    _check_routers(model, {})
    _check_hooks(model)
    check_layers(model, base)
    for part in (model, base):
        check_compiled(part, "stages_of_causal_lm")
    tied = head.weight is embedding.weight
    sizes = _cut(list(layers), list(layers), stages)
    parts: list[_Part] = []
    ranges: list[range] = []
    begin = 0
    for index, size in enumerate(sizes):
        first, last = index == 0, index == stages - 1
        mine = range(begin, begin + size)
        part = _part(base, name, mine, embedding, first, last)
        own = _copied(head, head.weight) if last and tied and stages > 1 else head
        parts.append(_Part(part, own if last else None, first, name, model, mine))
        ranges.append(mine)
        begin += size
    if check:
        prove(model, list(layers), parts, ranges)
    ties: list[dict[str, nn.Parameter]] = _shared(parts)
    if tied and stages > 1:
        ties[0]["embedding"], ties[-1]["embedding"] = embedding.weight, own.weight
    return [Stage(part, index, tied=ends) for index, (part, ends) in enumerate(zip(parts, ties, strict=True))]


def _copied(module: Any, weight: nn.Parameter) -> Any:
    """``module`` with a copy of its ``weight``; all that it has besides, hooks of later too, is the model's."""
    made = copy.copy(module)
    made._parameters = {n: copy.deepcopy(p) if p is weight else p for n, p in module._parameters.items()}
    made._modules = {
        n: _copied(part, weight) if part is not None and any(p is weight for p in part.parameters()) else part
        for n, part in module._modules.items()
    }
    return made


def _check_form(model: Any, base: Any, name: str, embedding: nn.Module, head: nn.Module) -> None:
    """What the stages run is the model's, and each parameter has one stage."""
    parts = list(model._modules.values())
    wrong = ""
    if "forward" in vars(model) or "forward" in vars(base):
        wrong = "has a forward that was set on the object, and stages would not run it"
    elif base not in parts or head not in parts:
        wrong = "does not hold its base_model and output embedding itself"
    elif model._parameters or any(_trained(part) for part in parts if part not in (base, head)):
        wrong = "has parameters besides its base_model and output embedding"
    elif getattr(base, "layers_are_rescaled", False):
        wrong = "has layers rescaled for evaluation (call train() and run one forward to undo it)"
    elif base._parameters:
        wrong = f"has parameters of its base_model's own: {', '.join(base._parameters)}"
    seen = False
    for other, module in base._modules.items():
        seen |= other == name
        plain = module is None or module is embedding or other == name or not _trained(module)
        if not wrong and not plain and not isinstance(module, nn.Embedding) and not _is_norm(module):
            where = "after" if seen else "before"
            wrong = f"has a {type(module).__name__} {where} its layers, and no stage would hold it"
    if wrong:
        raise ScheduleError(
            f"the model is a {type(model).__name__}, which {wrong}; stages_of_causal_lm cuts embedding, layers, "
            "norm and head: write stages of this model as modules of your own"
        )


def _is_norm(module: nn.Module) -> bool:
    """All that has parameters in it is a norm: also within a wrapper, such as peft's of ``modules_to_save``."""
    return all("norm" in type(part).__name__.lower() for part in module.modules() if part._parameters)


def _check_routers(model: Any, kwargs: Mapping[str, Any]) -> None:
    """No loss of all layers' routers is asked for: each stage sees its own layers' alone."""
    wanted = kwargs.get("output_router_logits")
    if getattr(getattr(model, "config", None), "output_router_logits", False) if wanted is None else wanted:
        raise ScheduleError(
            f"the model is a {type(model).__name__} with output_router_logits, whose loss needs the routers of all "
            "layers, and no stage has all; set it to False, and add each layer's balance by add_loss in a forward hook"
        )


def _check_hooks(model: Any) -> None:
    if model._forward_pre_hooks:
        raise ScheduleError(
            f"the model is a {type(model).__name__} with a forward pre-hook, which only the last stage would run; "
            "remove it, and give the arguments that it makes as inputs and kwargs of the step"
        )


def _trained(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


class _Part(nn.Module):
    """Some layers of a model, with its own forward.

    [Note: from layer to layer] What the model does in front of its layers (a scale, a norm) was done in the first
    stage, and what it does behind them is done in the last. So the input of a later stage goes to its first layer as
    it is, and what its last layer returns leaves as it is.

    Args:
        base: the model without the other layers.
        head: of the last stage.
        first: takes ids.
        layers: name of the layers in ``base``.
        model: whose forward the last stage runs, around ``base`` and ``head``.
        mine: the layers' places in the model.
    """

    def __init__(
        self, base: nn.Module, head: nn.Module | None, first: bool, layers: str, model: Any, mine: range
    ) -> None:
        super().__init__()
        self.base, self.head, self.first = base, head, first
        self._layers = layers
        self._ends: dict[str, str] = {}  # names that base and head have in the model
        self._whole: list[nn.Module] = []  # no part of this module: it has the same parameters
        self._config: Any = getattr(base_of(model), "config", None)
        self._mine, self._count = mine, len(getattr(base_of(model), layers))
        whole_head = model.get_output_embeddings()
        self._origin = Origin(model, layers, mine, None if head is None or head is whole_head else whole_head)
        for name, part in base_of(model)._modules.items():
            own = base._modules[name]
            if name != layers and own is not None and own is not part and type(own) is type(part):
                self._origin.follow(part, own)
        self._follow()
        if head is not None:
            whole = copy.copy(model)
            whole._modules = dict(model._modules)
            other = {id(base_of(model)): "base", id(model.get_output_embeddings()): "head"}
            self._ends = {name: other[id(part)] for name, part in model._modules.items() if id(part) in other}
            self._whole = [whole]

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        for place, attribute, value in self._origin.look():
            self._set(place, attribute, value)
        if self._config is not None and vars(self._config) != self._told:
            self._follow()
        run: Any = self.base
        _check_routers(run, kwargs)
        for run in self._whole:
            _check_routers(run, kwargs)
            _check_hooks(run)
            run._modules.update({name: getattr(self, mine) for name, mine in self._ends.items()})
        held: Any = getattr(self.base, self._layers)._modules  # of a list that is this stage's own
        layers = dict(held)
        names = list(layers)
        # The model's train() and eval() reach the layers, and not what is this stage's own.
        self.base.training = run.training = any(layer.training for layer in layers.values())
        enter = leave = _Border(layers[names[0]], None if self.first else x)
        if len(names) > 1:
            leave = _Border(layers[names[-1]], None)
        # The layers get x; what the model does to its embeddings, in place perhaps (CTRL), is the first stage's.
        given = {"input_ids": x} if self.first else {"inputs_embeds": x.detach().clone()}
        held[names[0]], held[names[-1]] = enter, leave
        try:
            made = run(**given, **kwargs | {"use_cache": False, "return_dict": True})
        finally:
            held.update(layers)
        found: Tensor = leave.output if self.head is None else made.logits
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Also those that the model's tied head was given since the last forward, such as a bias."""
        if (given := self._origin.of_head()) is not None:
            self._set(2, "_parameters", given)
        return super().named_parameters(*args, **kwargs)

    def _set(self, place: int, name: str, value: Any) -> None:
        """An attribute of the model (0), its base (1), its head (2) or the head's tied weight (3) is another now."""
        head: Any = self.head
        if place == 3:
            head.weight.requires_grad_(value)
            return
        if place == 1 and name == "config" and value is not ABSENT:
            self._config = value
            self._follow()
            return
        attributes = {name: value}
        if place == 1:
            _cut_lists(attributes, self._count, self._mine)
        if name == "_parameters":  # a bias or an adapter is the model's, the tied weight this stage's own
            value.update({n: p for n, p in head._parameters.items() if n == "weight"})
        for holder in (*self._whole,) if place == 0 else (self.base,) if place == 1 else (head,):
            if value is ABSENT:
                vars(holder).pop(name, None)
            else:
                vars(holder).update(attributes)

    def _follow(self) -> None:
        """``base`` has what the model's configuration says now: another attention may be set after the cut."""
        if self._config is not None:
            self._told = dict(vars(self._config))
            self.base.config = _config(self._config, self._count, self._mine)


class _Border(nn.Module):
    """The first or last layer of a stage while its forward runs. [Note: from layer to layer]

    Args:
        x: what the layer takes; None leaves it to the model.
    """

    output: Any

    def __init__(self, layer: nn.Module, x: Tensor | None) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, x=x, output=None)  # no parts of this module
        # The model's forward may ask for the dtype of its first parameter, which may be the layer's.
        self.__dict__.update({name: vars(layer)[name] for name in ("_parameters", "_buffers", "_modules")})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer, x = self.__dict__["layer"], self.__dict__["x"]
        if x is not None and args:
            args = (x, *args[1:])
        elif x is not None:
            kwargs["hidden_states"] = x
        made = layer(*args, **kwargs)
        several = isinstance(made, tuple | list)
        if several and any(isinstance(part, Tensor) and part.shape == made[0].shape for part in made[1:]):
            raise ScheduleError(
                f"a {type(layer).__name__} returns several hidden states; stages_of_causal_lm takes layers that return "
                "one: write the stages as modules of your own"
            )
        self.__dict__["output"] = made[0] if several else made
        return made


class _Zeros(nn.Module):
    """In the place of embeddings that the first stage has added."""

    def forward(self, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros((), device=positions.device)


def _part(base: nn.Module, name: str, mine: range, embedding: nn.Module, first: bool, last: bool) -> nn.Module:
    """``base`` with these layers alone; what only the first or last stage does is done there alone."""
    part = copy.copy(base)
    part._modules = dict(base._modules)
    layers: Any = base._modules[name]
    seen = False
    for other, module in base._modules.items():
        if other == name:
            part._modules[other] = nn.ModuleList(layers[i] for i in mine)
            seen = True
        elif module is embedding:
            part._modules[other] = module if first else _Zeros()  # also asked for token types (GPT-2)
        elif isinstance(module, nn.Embedding):  # learned positions
            part._modules[other] = module if first else _Zeros()
        elif isinstance(module, nn.Dropout) and not seen:  # of the embedding
            part._modules[other] = module if first else nn.Identity()
        elif module is not None and not _trained(module) and any(True for _ in module.buffers()):
            part._modules[other] = _with_own_buffers(module)
        elif _trained(module):  # a norm of the embedding, or the last one
            part._modules[other] = module if (last if seen else first) else nn.Identity()
    _cut_lists(vars(part), len(layers), mine)
    return part


def _with_own_buffers(module: nn.Module) -> nn.Module:
    """``module``, which has no parameters, with buffers and attributes of the stage's own.

    [Note: rotary embeddings] Dynamic ones move their frequencies to the longest row that they have seen. With one for
    all stages of a process, a later microbatch moves what the second half of an earlier one reads.
    """
    own = copy.copy(module)
    own._buffers = {n: None if buffer is None else buffer.clone() for n, buffer in module._buffers.items()}
    own._modules = {n: None if part is None else _with_own_buffers(part) for n, part in module._modules.items()}
    return own


def _config(whole: Any, count: int, mine: range) -> Any:
    """The configuration of ``count`` layers, for some of them."""
    config = copy.copy(whole)
    _cut_lists(vars(config), count, mine)
    # Lists by property would count from the first layer again, up to the number that is set below.
    properties = {n for kind in type(whole).__mro__ for n, value in vars(kind).items() if isinstance(value, property)}
    lists = {name: getattr(whole, name, None) for name in sorted(properties) if "layer" in name}
    lists = {name: value for name, value in lists.items() if type(value) in (list, tuple)}
    before = dict(lists)
    _cut_lists(lists, count, mine)
    lists = {name: value for name, value in lists.items() if value is not before[name]}
    if lists:
        config.__class__ = type(type(whole).__name__, (type(whole),), lists)
    if hasattr(config, "rescale_every"):  # RWKV's evaluation halves weights by a layer's place, against fp16's bound
        config.rescale_every = 0
    config.num_hidden_layers = whole.num_hidden_layers * len(mine) // count  # LongCat's layers count as two each
    return config


def _cut_lists(attributes: dict[str, Any], count: int, mine: range) -> None:
    """Lists of an entry per layer, such as ``layer_types``, which the forward reads by place among its layers."""
    for name, value in attributes.items():
        if type(value) in (list, tuple) and len(value) == count and not name.startswith("_"):
            attributes[name] = value[mine.start : mine.stop]


def _cut(layers: Sequence[Any], modules: Sequence[nn.Module], stages: int) -> Sequence[int]:
    stages = whole("stages", stages, least=1)
    if stages > len(layers):
        raise ScheduleError(f"the model has {len(layers)} layers for {stages} stages; each has one at least")
    return partition([1.0 + sum(p.numel() for p in module.parameters()) for module in modules], stages)
