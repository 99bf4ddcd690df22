"""The weight gradients that I leaves to W.

    F, I through the store --> what the gradients are made of (this file) --> W: one backward into the parameters

``nn.Linear`` and ``nn.Embedding`` (exact types) run as autograd Functions while their stage's store is open: they save
their input as autograd would, give the input's gradient in I, and leave (parameter, input, output's gradient) here.
Nobody walks autograd's graph. While the store is closed no module is touched. ``layers.py`` has the Functions.

[Note: one sum per microbatch] Autograd adds all gradients of a parameter within a backward before it accumulates them.
W does the same, in the order in which I came by them. A gradient may reach the parameter in I by another way, such as
a tied head's ``F.linear(x, embedding.weight)``. It is caught at the parameter and put in line. From the next F on that
parameter is not deferred: autograd adds up what autograd sees.

[Note: a ring through autograd] An entry holds an input, this its graph, a node in there the list of entries. Python
does not see through autograd's nodes, so a list that is given up is emptied: a failed step would keep its activations.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from gc import get_referents as _held_by
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.split_backward.deferred import Cast, Entry, MicrobatchEntries, Operator, add_up, as_it_is, summed
from sixfold.pipeline.split_backward.layers import MAKES_ITS_OWN, Layer, deferrable
from sixfold.pipeline.split_backward.nested_backward import NOBODY, Asked, joins, task
from sixfold.pipeline.stage.stage import Stage
from sixfold.pipeline.torch_private import hide, show

__all__ = ["WeightGradientStore"]

_FLUSH_BYTES = 32 * 2**20  # gradients that W holds before it accumulates them; a call of the engine costs 10 us
_graph_is_made, _make_graph = torch.is_grad_enabled, torch._C._set_grad_enabled
_engine: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
_backward = _engine  # W's
_STRIDED = torch.strided


def elements_of(entries: list[Entry]) -> int:
    """Elements of the trained parameters that they give gradients to, each counted once. No parameter is kept.

    Not of those that I made a gradient of, though it waited in line.
    """
    found: dict[int, int] = {}
    for make, wanted, _, _ in sorted(entries, key=lambda entry: entry[0] is as_it_is):
        for target in wanted:
            parameter = target.parameter if isinstance(target, Cast) else target
            if parameter is not None and parameter.requires_grad:
                found[id(parameter)] = 0 if make is as_it_is else parameter.numel()
    return sum(found.values())


class WeightGradientStore:
    """Weight gradients of one stage between I and W.

    Args:
        stage: its module's layers are looked for here, and again where a step finds other layers or parameters;
            ``data_parallel.accumulate`` is given what W makes where it has one, else the gradients reach ``.grad``
            through autograd, hooks and all.
    Attributes:
        waited: elements of the parameters whose gradients the first W was left; None before it.
        looks: how often the module's layers were looked for.
        slot: what is open now, None while closed.
        alone: nobody else looks after the stage's gradients.
        task: autograd's number of the I that runs, once it reached a layer.
        thread: who runs the step.
        entry: the code that enters autograd for I.
        inner: the last pass inside of another, and what it was asked for.
        leaf: stands for the parameters of deferred layers where nothing else wants a gradient.
    """

    def __init__(self, stage: Stage) -> None:
        self.slot: MicrobatchEntries | None = None
        self.index = stage.index
        self._accumulate: Callable[[Tensor, Tensor], object] | None = getattr(stage.data_parallel, "accumulate", None)
        self.alone = stage.data_parallel is None
        self.leaf = torch.empty(0, device=stage.device, requires_grad=True)
        self._slots: dict[int, MicrobatchEntries] = {}
        self._edges: dict[int, tuple[Tensor, GradientEdge]] = {}  # by id of the parameter, which is held
        self._watches: dict[int, tuple[Any, Any, Any]] = {}  # by id of a node of autograd's: it, its hook, whose it is
        self._operators: dict[tuple[int, ...], tuple[Operator, Any]] = {}  # by ids of parameters, which are held
        self._seen: dict[int, int] = {}  # where the gradients of the others lie
        self._forwards: list[tuple[dict[str, Any], Callable[..., Any]]] | None = None  # looked at once in a step
        self.task, self.thread = NOBODY, 0
        self.inner: tuple[int, Asked] = NOBODY, None
        self.entry = WeightGradientStore.backward.__code__
        self._simple: dict[int, Any] = {}  # by id of a parameter that is held: its node, False where it is not simple
        self.looks = 0
        self._module = nn.Module() if stage.module is None else stage.module
        self._look(_things_of(self._module))

    def _look(self, things: list[int]) -> None:
        """The module's layers and parameters, as they are now."""
        module = self._module
        self._things = things
        self.looks += 1
        self._large = sum(p.nbytes for p in module.parameters()) > _FLUSH_BYTES
        self._own = {id(p) for p in module.parameters()}  # not older weights
        self._layers = deferrable(module, self)
        self._others = [] if self._accumulate else _others(module, self._layers)
        self._refused: frozenset[tuple[int, str]] = frozenset()  # (layer, parameter) that others use too
        self.waited: int | None = None

    def forward(self, k: int, call: Callable[..., Any], inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """F: ``call``, in which the stage's layers leave their weight gradients under ``k``."""
        slot = self._slots.get(k)
        if slot is None:
            slot = self._slots[k] = MicrobatchEntries(self._refused)
        forwards = self._forwards
        if forwards is None:
            self.thread = get_ident()
            if (things := _things_of(self._module)) != self._things:
                self.drop()
                self._look(things)
                slot = self._slots[k] = MicrobatchEntries(self._refused)
            forwards = self._forwards = [found for layer in self._layers if (found := layer.replacement()) is not None]
        try:
            for attributes, forward in forwards:
                if "forward" not in attributes:  # of the instance, which comes before its class's
                    attributes["forward"] = forward
            self.slot = slot
            show(self)
            return call(*inputs, **kwargs)
        finally:
            self.close()
            if self._others and slot.entries:
                self._part(slot.entries)

    def close(self) -> None:
        """No layer leaves anything from here on, and each has its class's forward again.

        [Note: left in place] Ctrl-C may cut this short. So ``drop`` does it again, and a layer that still has a store's
        forward gets rid of it in the next step of any runner. With a closed slot that forward is its class's.
        """
        self.slot = None
        hide()
        for attributes, forward in self._forwards or ():
            if attributes.get("forward") is forward:
                del attributes["forward"]

    def backward(self, k: int, roots: tuple[Any, ...], gradients: tuple[Tensor, ...], again: bool = True) -> None:
        """I: the backward of what was made under ``k``; weight gradients wait there.

        No layer is put in its place where no part of the forward runs again. What is shown to a thread is handed to
        each node of its backward, at 1 us a node.

        Args:
            again: layers are put in their places if need be.
        """
        slot = self._slots.get(k)
        if again and (slot is None or slot.again):
            self.forward(k, self.backward, (k, roots, gradients, False), {})
            return
        try:
            self.slot = slot
            _engine(roots, gradients, False, False, (), True, True)  # as stage_run.run_backward
        finally:
            self.task = NOBODY
            self.slot = None
            if self._others and slot is not None and slot.entries:
                self._part(slot.entries)

    def backward_weight(self, k: int) -> None:
        """W: make the gradients that slot ``k`` was left, and accumulate them."""
        slot = self._slots.pop(k, None)
        if self.waited is None:
            self.waited = elements_of([] if slot is None else slot.entries)
        if slot is None:
            return
        if slot.watched:
            self._judge(slot)
        entries = slot.entries
        if not entries:
            return
        grads = _graph_is_made()
        _make_graph(False)  # torch.no_grad() is four times as long
        try:
            if self._large or slot.passes:
                self._weigh_in_parts(entries, {} if self._accumulate else slot.passes)
            else:
                self._weigh_at_once(entries, bool(slot.casts))
        finally:
            _make_graph(grads)
            entries.clear()  # [Note: a ring through autograd]

    def _weigh_at_once(self, entries: list[Entry], cast: bool) -> None:
        """Into ``.grad``, as autograd's own node does; through autograd where anybody would see the difference.

        [Note: no engine] A root of the engine takes 5 to 8 us, an addition 1. Who looks on has a hook, of the parameter
        or of its node, which holds their dicts. A first gradient is nobody else's, and lies as the parameter does. Of a
        parameter used as it is and as it was ``cast`` the engine adds both before it accumulates them.
        """
        targets: list[Any] = []
        gradients: list[Any] = []
        fresh = self.alone and not cast
        for make, wanted, saved, arrived in entries:
            if make not in MAKES_ITS_OWN:
                fresh = False
            targets += wanted
            gradients += make(saved, arrived, wanted)
        if not fresh:
            entries.clear()
            self._deliver(*summed(targets, gradients))
            return
        if len(entries) > 1 and len(set(map(id, targets))) < len(targets):
            targets, gradients = summed(targets, gradients)
        entries.clear()
        others: list[tuple[Any, Tensor]] = []
        there: list[Tensor] = []
        arriving: list[Tensor] = []
        simple, few = self._simple, len(targets) < 3
        for target, gradient in zip(targets, gradients, strict=True):
            if target is None:
                continue
            node = simple.get(id(target))
            if node is None:
                node = self._node_if_simple(target)
            if (
                node is False
                or target._backward_hooks
                or target._post_accumulate_grad_hooks
                or ((held := _held_by(node)) and any(held))
                or gradient.dtype is not target.dtype
            ):
                others.append((target, gradient))
                continue
            before = target.grad
            if before is None:
                target.grad = gradient
            elif type(before) is not Tensor or before.layout is not _STRIDED or before.requires_grad:
                others.append((target, gradient))
            elif few:
                before.add_(gradient)
            else:
                there.append(before)
                arriving.append(gradient)
        if there:
            add_up(there, arriving)
        if others:
            self._deliver(*map(list, zip(*others, strict=True)))

    def _weigh_in_parts(self, entries: list[Entry], passes: Mapping[int, int]) -> None:
        """Each input is free once its gradient was made, and each gradient soon after its last part was.

        Args:
            passes: by place of an entry, which pass made it; I's are not there. [Note: a pass inside of a pass]
        """
        last = len(entries) - 1
        wanted_of = ((passes.get(at), entry[1]) for at, entry in enumerate(entries))
        awaited = Counter((of, id(target)) for of, wanted in wanted_of for target in wanted if target is not None)
        sums: dict[tuple[int | None, int], Tensor] = {}
        targets: list[Any] = []
        gradients: list[Tensor] = []
        pending = 0
        entries.reverse()
        while entries:
            of = passes.get(last - len(entries) + 1)
            make, wanted, saved, arrived = entries.pop()
            for target, gradient in zip(wanted, make(saved, arrived, wanted), strict=True):
                if target is None:
                    continue
                key = of, id(target)
                awaited[key] -= 1
                if key in sums:
                    before = sums.pop(key)
                    gradient = before if gradient is None else before + gradient
                if gradient is None:
                    continue
                if awaited[key]:
                    sums[key] = gradient
                    continue
                if passes and any(target is one for one in targets):  # autograd would add the two first
                    self._deliver(targets, gradients)
                    targets, gradients, pending = [], [], 0
                targets.append(target)
                gradients.append(gradient)
                pending += gradient.nbytes
                if pending >= _FLUSH_BYTES:
                    self._deliver(targets, gradients)
                    targets, gradients, pending = [], [], 0
            del saved, arrived, gradient
        self._deliver(targets, gradients)

    def drop(self) -> None:
        """Forget every slot, and let go of every parameter; what is known of the layers stays."""
        self.close()  # [Note: left in place]
        for slot in self._slots.values():
            slot.entries.clear()  # [Note: a ring through autograd]
        self._slots.clear()
        self._edges.clear()
        self._operators.clear()
        self._seen.clear()
        self._simple.clear()
        self._forwards = None
        for layer in self._layers:
            layer.known = None
        for _, handle, _ in self._watches.values():
            handle.remove()
        self._watches.clear()

    def takes(self, targets: tuple[Tensor | None, ...]) -> bool:
        """Gradients that ``defer_weight_grad`` has for ``targets`` wait in the open slot."""
        key = tuple(map(id, targets))
        known = self._operators.get(key)
        if known is None:
            known = (Operator(tuple(map(str, range(len(targets))))), targets)
            if all(target is None or self.owns(target) for target in targets):
                self._operators[key] = known
        operator = known[0]
        assert self.slot is not None, "only an open store is asked"
        if not operator.waits(self.slot, targets):
            return False
        if operator.watched:
            self.watch(self.slot, operator, targets)
        return True

    def moved(self, *parameters: Tensor | None) -> None:
        """They are others, or were given other data: what is known of them holds no longer."""
        for parameter in parameters:
            self._simple.pop(id(parameter), None)
            self._edges.pop(id(parameter), None)

    def owns(self, parameter: Any) -> bool:
        """It is a parameter of the stage's module, and no other version of it."""
        return id(parameter) in self._own

    def watch(self, slot: MicrobatchEntries, layer: Operator, targets: tuple[Any, ...]) -> None:
        """Until ``layer`` went through one I: catch what reaches ``targets`` by another way than through it."""
        layer.watched = True
        slot.watched += ((layer, targets),)
        for target in targets:
            if type(target) is Cast:  # it may be used without its cast too
                self._watch_node(target.node, target)
                self._watch_node(self._edge(target.parameter).node, target.parameter)
            elif target is not None and target.is_leaf and not target._backward_hooks:
                self._watch_node(self._edge(target).node, target)

    def caught(self, target: Any, gradient: Tensor | None) -> bool:
        """A gradient reached ``target`` not through its layer; whether it is put in line here."""
        slot = self.slot
        if slot is None:  # a W, or a B of the same stage
            return False
        if gradient is not None:
            if task() != self.task and not joins(self, slot.entries, ()):
                slot.passes[len(slot.entries)] = task()  # it was asked for this one by name
            slot.entries.append((as_it_is, (target,), None, gradient))
            slot.caught |= {id(target.parameter if type(target) is Cast else target)}
        return True

    def _watch_node(self, node: Any, target: Any) -> None:
        if id(node) not in self._watches:
            self._watches[id(node)] = (node, node.register_prehook(_catch(weakref.ref(self), target)), target)

    def _judge(self, slot: MicrobatchEntries) -> None:
        """The layers that were watched in this microbatch are clear, or never deferred again."""
        for layer, targets in slot.watched:
            layer.watched = False
            for name, target in zip(layer.names, targets, strict=True):
                parameter = target.parameter if type(target) is Cast else target
                if parameter is not None and id(parameter) in slot.caught:
                    self._refused |= {(id(layer), name)}
                    if self.owns(parameter) and self._accumulate is None:
                        self._others.append(parameter)
        cleared = {id(t) for _, targets in slot.watched for t in targets if t is not None}
        cleared |= {id(t.parameter) for _, targets in slot.watched for t in targets if type(t) is Cast}
        for key, (_, handle, target) in list(self._watches.items()):
            parameter = target.parameter if type(target) is Cast else target
            if id(target) in cleared and id(parameter) not in slot.caught:
                handle.remove()
                del self._watches[key]

    def _part(self, entries: list[Entry]) -> None:
        """Let no ``.grad`` lie where an entry does.

        [Note: stolen gradients] Autograd takes the first gradient of a parameter for its ``.grad``, and adds to it in
        place later. It looks whether somebody else holds that tensor, but not whether somebody holds a view of it,
        which here would be changed before its W.
        """
        held: set[int] | None = None
        for parameter in self._others:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            at = gradient.data_ptr()
            if self._seen.get(id(parameter)) == at:
                continue
            if held is None:
                held = {entry[3].untyped_storage().data_ptr() for entry in entries}
            if gradient.untyped_storage().data_ptr() in held:
                parameter.grad = gradient.clone()
                at = parameter.grad.data_ptr()
            self._seen[id(parameter)] = at

    def _edge(self, parameter: Tensor) -> GradientEdge:
        found = self._edges.get(id(parameter))
        if found is not None:
            return found[1]
        edge = get_gradient_edge(parameter)
        if self.owns(parameter):  # weights of another version are not kept
            self._edges[id(parameter)] = (parameter, edge)
        return edge

    def _node_if_simple(self, target: Any) -> Any:
        """Autograd's node of a parameter of the stage's module, strided and dense, whose gradient has its type; False:
        it is no such parameter.
        """
        if type(target) is Cast or not self.owns(target):
            return False
        node = self._edge(target).node  # the edge holds the parameter, so that its id is its own
        simple = (
            type(target) in (nn.Parameter, Tensor)
            and target.is_leaf
            and target.layout is torch.strided
            and target.is_contiguous()
            and getattr(target, "grad_dtype", target.dtype) is target.dtype
        )
        self._simple[id(target)] = node if simple else False
        return self._simple[id(target)]

    def _deliver(self, targets: list[Any], gradients: list[Tensor]) -> None:
        edges: list[GradientEdge] = []
        arriving: list[Tensor] = []
        for target, gradient in zip(targets, gradients, strict=True):
            parameter = target
            if type(target) is Cast:
                parameter = target.parameter
                if self._accumulate is None or not self.owns(parameter):
                    edges.append(GradientEdge(target.node, 0))
                    arriving.append(gradient)
                    continue
                gradient = gradient.to(parameter.dtype)
            if self._accumulate is not None and self.owns(parameter):
                self._accumulate(parameter, gradient)
            else:
                found = self._edges.get(id(parameter))
                edges.append(self._edge(parameter) if found is None else found[1])
                arriving.append(gradient)
        if edges:
            _backward(tuple(edges), tuple(arriving), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def refuse_create_graph(self) -> None:
        """Raise where the gradient of a gradient is asked for."""
        raise ScheduleError(
            f"stage {self.index}: a backward with create_graph runs while weight gradients wait for W, and would miss "
            "them; run a program whose backwards are B"
        )


def _catch(store: weakref.ref[WeightGradientStore], target: Any) -> Callable[[Any], Any]:
    """Hook of the node that would accumulate ``target``. Only autograd holds it: it must not hold the store."""

    def hook(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
        alive = store()
        return (None,) if alive is not None and alive.caught(target, gradients[0]) else None

    return hook


def _things_of(module: nn.Module) -> list[int]:
    """Its parts and parameters; those that are looked after are held, so that no other takes their place in memory."""
    return [*map(id, module.modules()), *map(id, module.parameters())]


def _others(module: nn.Module, layers: list[Layer]) -> list[Tensor]:
    """Those that get their gradient in I."""
    deferred = {id(p) for layer in layers if not layer.never for p in layer.module.parameters()}
    return [p for p in module.parameters() if id(p) not in deferred]
