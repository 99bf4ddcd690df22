"""A batch that comes out of a graph of the caller's, such as an embedding in front of the pipeline.

    inputs with a graph --> leaves, cut into microbatches --> step --> the graph's own backward, once (this file)

Autograd frees a graph in its backward, and the parts of one tensor share theirs. So a step runs on parts without
history, and behind it the gradients of all parts go through the caller's graph together. So do those of a list of
microbatches whose graphs meet. If each has a graph of its own, its own backward goes through it. Of targets and keyword
arguments nobody collects the gradients, so there a graph that several microbatches share is refused. What is seen too
late is told by ``freed_graph``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.microbatches.cut_batch import tensors_in

__all__ = ["OuterGraph", "freed_graph", "refuse_shared_graph"]

_FREED = ("backward through the graph a second time", "a tensor that was already unpacked once")  # torch's words
Ends = list[tuple[str, Any]]  # tensors with a history: name, autograd's node


def refuse_shared_graph(name: str, batch: Any, m: int, form: type | tuple[type, ...] = list) -> None:
    """Targets or keyword arguments: the backward of one microbatch would free what that of another needs.

    Args:
        form: of a batch that is given as microbatches.
    Raises:
        ScheduleError: a tensor of ``batch`` comes out of a graph of the caller's, and m microbatches use it.
    """
    seen: list[Any] = []  # autograd's nodes of earlier microbatches
    given = isinstance(batch, form)
    for k, part in enumerate(batch if given else (batch,) if m > 1 else ()):
        ends = _ends_of(part, f"{name}[{k}]" if given else name)
        for where, end in ends:
            if not given or any(end is one for one in seen):
                raise ScheduleError(
                    f"{where} comes out of an autograd graph that several microbatches would go backward through, and "
                    "the first backward frees it; detach it, or give it as an input"
                )
        seen += [end for _, end in ends]


def freed_graph(error: BaseException, stage: int | None, arguments: Mapping[str, Any]) -> ScheduleError | None:
    """What ``error`` means, if a backward found its graph freed by an earlier one; else None.

    Args:
        stage: whose backward it was; None: the one through the graph of the inputs.
        arguments: of the call, by name.
    """
    if not isinstance(error, RuntimeError) or not any(words in str(error) for words in _FREED):
        return None
    given = [_ends_of(value, name) for name, value in arguments.items()]
    ends = [end for of_one in given for end in of_one]
    if meeting := _meeting([end] for end in ends):
        what = (
            f"{meeting[0]} and {meeting[1]} come out of one autograd graph of yours; detach them, or give them as "
            "inputs"
        )
    elif ends:
        what = (
            f"{ends[0][0]} comes out of an autograd graph of yours, and several stages may use it; detach it, or give "
            "it as an input"
        )
    else:
        what = (
            f"{'the caller' if stage is None else f'stage {stage} or loss_fn'} keeps a tensor with its graph from one "
            "microbatch to the next (a cache, a hidden state); detach it there"
        )
    found = ScheduleError(f"an earlier backward has freed the graph that this one goes through: {what}")
    found.__cause__ = error
    return found


def _ends_of(value: Any, name: str) -> Ends:
    return [(where, part.grad_fn) for where, part in tensors_in(value, name) if part.grad_fn is not None]


def _meeting(groups: Iterable[Ends]) -> tuple[str, str] | None:
    """The names of two tensors of different groups whose graphs meet in front of their leaves."""
    owners: dict[Any, tuple[int, str]] = {}  # of nodes
    for group, ends in enumerate(groups):
        for name, end in ends:
            stack = [end]
            while stack:
                node = stack.pop()
                if node in owners:
                    owner, other = owners[node]
                    if owner != group:
                        return other, name
                    continue
                owners[node] = group, name
                further = (behind for behind, _ in node.next_functions)
                stack += [n for n in further if n is not None and not hasattr(n, "variable")]
    return None


class OuterGraph:
    """The graphs that end in one batch.

    Args:
        inputs: as ``step`` takes them.
    Attributes:
        inputs: as they are to be cut; ``parts`` are then told by ``cut``.
    """

    def __init__(self, inputs: Any) -> None:
        several = isinstance(inputs, tuple)
        given = inputs if several else (inputs,)
        self._at = [at for at, value in enumerate(given) if isinstance(value, Tensor) and value.grad_fn is not None]
        self._ends = [given[at] for at in self._at]
        self._parts: list[tuple[Tensor, ...]] = []
        plain = [value.detach() if at in self._at else value for at, value in enumerate(given)]
        self.inputs = (tuple(plain) if several else plain[0]) if self._at else inputs
        self._listed = isinstance(inputs, list) and _meeting(_ends_of(part, "") for part in inputs) is not None

    @property
    def there(self) -> bool:
        """Whether there is one."""
        return bool(self._at) or self._listed

    def leaves(self, microbatches: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The microbatches of ``inputs``, asking for the gradients that the graphs want."""
        if self._listed:
            return [tuple(self._leaf(value) for value in values) for values in microbatches]
        made = [
            tuple(value.detach().requires_grad_() if at in self._at else value for at, value in enumerate(values))
            for values in microbatches
        ]
        self._parts = [tuple(values[at] for values in made) for at in self._at]
        return made

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return value
        leaf = value.detach().requires_grad_()
        self._ends.append(value)
        self._parts.append((leaf,))
        return leaf

    def backward(self) -> None:
        """Through the caller's graphs; what no stage used has a gradient of zeros."""
        gradients = [
            [torch.zeros_like(part) if part.grad is None else part.grad for part in parts] for parts in self._parts
        ]
        torch.autograd.backward(self._ends, [torch.cat(one) if len(one) > 1 else one[0] for one in gradients])
