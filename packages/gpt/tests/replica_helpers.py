"""Bits that turn over in a rank's memory at a named step, and what training jobs say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from run_helpers import world_of

from sixfold.gpt import TrainConfig
from sixfold.gpt.engine.rank_model import canonical
from sixfold.gpt.errors import ReplicasDifferError
from sixfold.gpt.training.loop import train_in


@dataclass(frozen=True)
class Flip:
    """A bit of the first element that a rank has of a tensor, when it has done a step.

    Attributes:
        name: None is any tensor of which it has elements.
        generation: in which it happens; 0: in each.
        bit: 0 is the last, which the next update may round away.
    """

    rank: int
    step: int
    name: str | None = "layers.1.ffn.up.weight"
    key: str = "param"
    generation: int = 1
    bit: int = 0

    def put(self) -> None:
        """Patch this process, as `kept_alive_helpers.Fault` does."""
        from sixfold.gpt.training.loop import Run

        real, put = Run.step, getattr(Run.step, "put", frozenset())
        if self in put:  # in an earlier generation of this process
            return

        def step(run: Any, stop: bool) -> Any:
            outcome = real(run, stop)
            happens = run.kept is None or self.generation in (0, run.kept.generation.number)
            if happens and run.progress.step == self.step:
                self._strike(run)
            return outcome

        step.put = put | {self}  # type: ignore[attr-defined]
        Run.step = step  # type: ignore[method-assign]

    def _strike(self, run: Any) -> None:
        record = next(
            record for record in run.rank.state_records()
            if record.key == self.key and self.name in (None, canonical(record.name))
        )  # fmt: skip
        record.tensor.view(torch.int32)[0] ^= 1 << self.bit


def train_with_flips(rank: int, ranks: int, text: str, flips: tuple[Flip, ...]) -> dict[str, Any] | None:
    """One rank of a training job; what its error says, None where it ends well."""
    for flip in flips:
        if flip.rank == rank:
            flip.put()
    try:
        train_in(TrainConfig.from_text(text), world_of(rank, ranks))
    except ReplicasDifferError as error:
        return {
            "kind": type(error), "ranks": error.ranks, "tensor": error.tensor, "step": error.step, "text": str(error),
        }  # fmt: skip
    return None
