"""A batch that comes out of a graph of the caller's, such as an embedding in front of the pipeline.

    inputs with a graph --> leaves, cut into microbatches --> step --> the graph's own backward, once (this file)

Autograd frees a graph in its backward, and the parts of one tensor share theirs. So a step runs on parts without
history, and behind it the gradients of all parts go through the caller's graph together. A list of microbatches is
taken as it is: each has a graph of its own, which its own backward goes through. Of targets and keyword arguments
nobody collects the gradients, so there a graph that several microbatches share is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.microbatches.cut_batch import tensors_in

__all__ = ["OuterGraph", "refuse_shared_graph"]


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
        ends = [
            (where, value.grad_fn)
            for where, value in tensors_in(part, f"{name}[{k}]" if given else name)
            if value.grad_fn is not None
        ]
        for where, end in ends:
            if not given or any(end is one for one in seen):
                raise ScheduleError(
                    f"{where} comes out of an autograd graph that several microbatches would go backward through, and "
                    "the first backward frees it; detach it, or give it as an input"
                )
        seen += [end for _, end in ends]


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

    @property
    def there(self) -> bool:
        """Whether there is one."""
        return bool(self._at)

    def leaves(self, microbatches: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The microbatches of ``inputs``, asking for the gradients that the graphs want."""
        made = [
            tuple(value.detach().requires_grad_() if at in self._at else value for at, value in enumerate(values))
            for values in microbatches
        ]
        self._parts = [tuple(values[at] for values in made) for at in self._at]
        return made

    def backward(self) -> None:
        """Through the caller's graphs; what no stage used has a gradient of zeros."""
        gradients = [
            torch.cat([torch.zeros_like(part) if part.grad is None else part.grad for part in parts])
            for parts in self._parts
        ]
        torch.autograd.backward(self._ends, gradients)
