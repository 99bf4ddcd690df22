"""``scale="token"``: gradients of sums, divided once by the number of tokens.

    counts of the last stage --> total of a batch on every rank (this file) --> gradients / total

The total is known once the last stage has run all forwards of a batch, which is before
any stage is done with its backwards; it is sent at that moment, on the control channel.
A stage under ``fully_shard``, or in a DistributedDataParallel, gets the mean of gradients over ranks with batches of
their own: its divisor is the mean of their totals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from struct import pack, unpack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Action
from sixfold.pipeline.stage.compute import StageRun
from sixfold.pipeline.stage.distributed_data_parallel import Replicas
from sixfold.pipeline.stage.fully_shard import check_reduced, mean_over, mesh_of_shards
from sixfold.pipeline.stage.loss import LossTail

if TYPE_CHECKING:
    from sixfold.pipeline.transport.protocol import Control

__all__ = ["SetAside", "TokenCount", "leaves_below", "leaves_in"]


class SetAside:
    """Gradients that are there when a step begins: kept apart, and added to those of the step at its end."""

    def __init__(self) -> None:
        self._before: dict[Tensor, Tensor | None] = {}

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """A new step: there are no gradients of these."""
        self._before = {}
        for tensor in tensors:
            self.take(tensor)

    def take(self, tensor: Tensor) -> bool:
        """One more, of which no backward of this step has run yet; whether it is new."""
        if tensor in self._before:
            return False
        self._before[tensor] = tensor.grad
        if tensor.grad is not None:
            tensor.grad = None
        return True

    def add(self, tensor: Tensor) -> None:
        """The gradient of the step is final, and used before the step ends."""
        if (before := self._before.get(tensor)) is not None:
            tensor.grad = before if tensor.grad is None else before.add_(tensor.grad)
            self._before[tensor] = None

    def commit(self) -> None:
        """The step went through."""
        for tensor in self._before:
            self.add(tensor)
        self._before = {}

    def restore(self) -> None:
        """The step failed: gradients are what they were before it."""
        for tensor, gradient in self._before.items():
            tensor.grad = gradient
        self._before = {}


def leaves_below(nodes: Iterable[Any]) -> list[Tensor]:
    """The leaves whose gradients a backward from ``nodes`` of autograd's makes."""
    found: list[Tensor] = []
    seen: dict[int, Any] = {}  # held, so that no other takes its number
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        stack += [edge[0] for edge in node.next_functions]
    return found


def leaves_in(given: Any) -> list[Tensor]:
    """The leaves that get a gradient through tensors in ``given``, containers of them too."""
    stack, nodes, found = [given], [], []
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            if value.requires_grad and value.grad_fn is not None:
                nodes.append(value.grad_fn)
            elif value.requires_grad:
                found.append(value)
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, tuple | list):
            stack += value
    return found + leaves_below(nodes)


class TokenCount:
    """The totals of a step's batches, and the division by them.

    What is divided is looked for in each step: the stages' parameters, and what else the backward reaches. Each
    microbatch's graph shows these: parameters of the loss, of keyword arguments, inputs, tensors of modules that are
    not registered. A parameter that several stages of this process share is divided with the last of them. Gradients
    that are there when a step begins are set aside, so that they are not divided again, and added to those of the
    step.

    Args:
        runs: the stages of this process, by index.
        tail: the end of the last stage, where this process has it.
        batch: microbatches per STEP.
        control: between ranks; None where all are in this process.
        source: rank of the last stage.
        steps: whether optimizers step inside of a step.
    """

    def __init__(
        self,
        runs: Mapping[int, StageRun],
        tail: LossTail | None,
        batch: int,
        control: Control | None,
        rank: int,
        ranks: int,
        source: int,
        *,
        steps: bool,
    ) -> None:
        self._runs, self._tail, self._batch = runs, tail, batch
        self._control, self._source, self._steps = control, source, steps
        self._others = [peer for peer in range(ranks) if peer != rank] if control is not None else []
        self._stages: list[int] = []  # in the order in which they reduce last
        self._parameters: dict[int, list[Tensor]] = {}
        self._found: dict[int, list[Tensor]] = {}  # besides parameters, by the stage that they are divided with
        self._divided: dict[Tensor, Tensor] = {}  # gradients of those
        self._before = SetAside()
        self._totals: dict[int, float] = {}
        self._meshes: dict[int, Any] = {}  # of stages under fully_shard
        self._means: dict[tuple[int, Any], float] = {}  # by batch, and mesh or group of replicas

    def order(self, stages: Iterable[int]) -> None:
        """The order in which stages reduce, which says which of them is the last to hold a parameter."""
        self._stages = list(dict.fromkeys(stages))

    def begin(self, given: Iterable[Any]) -> None:
        """A new step: no total is known, and there are no gradients.

        Args:
            given: inputs and keyword arguments, in which tensors may ask for a gradient.
        """
        self._totals.clear()
        self._means.clear()
        self._meshes = {stage: mesh_of_shards(self._runs[stage].stage) for stage in self._stages}
        for stage in self._stages:
            check_reduced(self._runs[stage].stage)
            if (handle := self._replicas(stage)) is not None:
                handle.check_synced("scale='token' divides each step by the tokens of all replicas")
        self._divided.clear()
        taken: set[int] = set()
        for stage in reversed(self._stages):
            mine = list(self._runs[stage].stage.parameters())
            self._parameters[stage] = [p for p in mine if id(p) not in taken]
            taken.update(map(id, mine))
        self._before.begin(p for mine in self._parameters.values() for p in mine)
        self._found = {stage: [] for stage in self._stages}
        if self._stages:
            self._take(self._stages[-1], leaves_in(given))

    def look(self, run: StageRun, k: int) -> None:
        """The stage has the graph of slot ``k``."""
        self._take(run.index, leaves_below(run.graph(k)))

    def clear(self, *, failed: bool) -> None:
        """The step is over: where it failed, gradients are what they were before."""
        if failed:
            self._before.restore()
        else:
            for tensor, gradient in self._divided.items():
                tensor.grad = gradient
            self._before.commit()
        self._found, self._divided = {}, {}

    def _take(self, stage: int, leaves: Iterable[Tensor]) -> None:
        self._found[stage] += [leaf for leaf in leaves if self._before.take(leaf)]

    def tell(self, batch: int, action: Action) -> None:
        """Behind the last forward of a batch on the last stage, ``action``: its total to all ranks."""
        assert self._tail is not None, "only the last stage counts"
        counts = self._tail.counts
        first = batch * self._batch
        total = float(sum(counts[k % len(counts)] for k in range(first, first + self._batch)))
        if not (math.isfinite(total) and total > 0):
            raise ScheduleError(
                f"the counts of loss_fn sum to {total}; scale='token' divides by a sum that is finite and > 0"
            )
        self._totals[batch] = total
        for peer in self._others:
            assert self._control is not None, "others are behind a control channel"
            self._control.send(pack("<d", total), peer, action)

    def divide(self, stage: int, batch: int, action: Action) -> None:
        """REDUCE_GRAD of ``stage``: divide its gradients in place."""
        if (total := self._totals.get(batch)) is None:
            total = self._totals[batch] = self._receive(action)
        total = self._mean(stage, batch, total)
        for parameter in self._parameters[stage]:
            if parameter.grad is not None:
                parameter.grad.div_(total)
            if self._steps:
                self._before.add(parameter)
        for tensor in self._found[stage]:
            if (gradient := tensor.grad) is not None:  # of this batch, where a step has several
                gradient.div_(total)
                sum_before = self._divided.get(tensor)
                self._divided[tensor] = gradient if sum_before is None else sum_before.add_(gradient)
                tensor.grad = None

    def _replicas(self, stage: int) -> Replicas | None:
        handle = self._runs[stage].stage.data_parallel
        return handle if isinstance(handle, Replicas) else None

    def _mean(self, stage: int, batch: int, total: float) -> float:
        """Of the totals of all ranks over which the gradients of ``stage`` are averaged."""
        mesh, handle = self._meshes[stage], self._replicas(stage)
        ranks = mesh if handle is None else handle.group
        if ranks is None:
            return total
        if (batch, ranks) not in self._means:
            self._means[batch, ranks] = mean_over(mesh, total) if handle is None else handle.mean(total)
        return self._means[batch, ranks]

    def _receive(self, action: Action) -> float:
        assert self._control is not None, "in one process the total is known"
        return float(unpack("<d", self._control.receive(self._source, action))[0])
