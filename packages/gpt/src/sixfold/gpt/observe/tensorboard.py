"""TensorBoard of a run, on request.

    metrics.jsonl --> TensorBoardWriter (this file) --> RUN/tensorboard

It reads metrics.jsonl and nothing else, as the progress line and the plots do.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.metrics import MetricsTail

# The fields of a step line that have a curve of their own.
CURVES = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "batch_size",
    "seconds",
    "data_seconds",
    "tokens_per_second",
    "wall_tokens_per_second",
    "mfu",
    "memory_bytes",
)


def check_tensorboard(wanted: bool) -> None:
    """Refuse ``log.tensorboard`` where TensorBoard is not installed.

    Raises:
        ConfigError: with what to install.
    """
    if wanted and find_spec("tensorboard") is None:
        raise ConfigError(
            "log.tensorboard is true and tensorboard is not installed: pip install 'sixfold-gpt[tensorboard]', "
            "or set log.tensorboard = false"
        )


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The curves' next values that a line of metrics.jsonl holds, by TensorBoard's names; none is null."""
    found: dict[str, float | None] = {}
    if record["kind"] == "step":
        found |= {f"train/{name}": record.get(name) for name in CURVES}
        found |= {f"loss by dataset/{name}": loss for name, loss in record.get("loss_by_dataset", {}).items()}
    elif record["kind"] == "eval":
        name = record.get("name")
        found[f"loss by validation set/{name}" if name else "valid/loss"] = record["loss"]
    elif record["kind"] == "timeline":
        found |= {"pipeline/bubble": record["bubble"], "pipeline/bubble on paper": record["bubble_on_paper"]}
    elif record["kind"] == "save":
        found |= {"save/seconds": record["seconds"], "save/blocked_seconds": record["blocked_seconds"]}
    return {name: float(value) for name, value in found.items() if value is not None}


class TensorBoardWriter:
    """Writes what is appended to a run's metrics.jsonl from now on into RUN/tensorboard.

    Args:
        step: updates done; what an earlier start wrote of later ones is hidden, as they are done again.
    """

    def __init__(self, run_dir: str | Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._tail = MetricsTail(Path(run_dir) / "metrics.jsonl")
        self._writer: Any = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=step + 1)

    def poll(self) -> None:
        """Take over the lines that are new."""
        for record in self._tail.read():
            for name, value in scalars(record).items():
                self._writer.add_scalar(name, value, record["step"], walltime=record["time"])

    def close(self) -> None:
        """Write what is left."""
        self.poll()
        self._writer.close()
