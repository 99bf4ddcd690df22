"""Bits that turn over in a rank's memory at a named step, and what training jobs say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import run, world_of

from sixfold.gpt import TrainConfig
from sixfold.gpt.engine.rank_model import canonical
from sixfold.gpt.errors import ReplicasDifferError
from sixfold.gpt.training.loop import train_in


@dataclass(frozen=True)
class Flip:
    """A bit of the first element that a rank has of a tensor, when it has done a step; of "step", the count of steps.

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
        if self.key == "step":
            states = run.rank.optimizer.state
            names = dict(run.rank.model.main_parameters())
            value = next(states[p]["step"] for name, p in names.items() if canonical(name) == self.name)
            value.add_(1)
            return
        record = next(
            record for record in run.rank.state_records()
            if record.key == self.key and self.name in (None, canonical(record.name))
        )  # fmt: skip
        record.tensor.view(torch.int32)[0] ^= 1 << self.bit


def undisturbed_runs(
    folders: pytest.TempPathFactory, keys: tuple[str, ...], layouts: Mapping[str, tuple[Any, ...]]
) -> Callable[[str], TrainConfig]:
    """Of a layout: the run that nothing happens to and that compares nothing, trained once.

    Args:
        layouts: ranks and overrides by name.
    """

    @cache
    def of(layout: str) -> TrainConfig:
        ranks, *overrides = layouts[layout]
        config = tiny_config(folders.mktemp(layout), *keys, *overrides)
        run(config, ranks)
        return config

    return of


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
