"""The curves of a run on W&B (Weights & Biases).

    curves.py --> WandbSink (this file) --> wandb: its service, or RUN/wandb where WANDB_MODE is offline

A run has one id, which its folder keeps. So a start that resumes the run continues the same curves.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError

ID = "run-id.txt"  # in RUN/wandb


def check_wandb(project: str) -> None:
    """Refuse ``log.wandb`` where wandb is not installed.

    Raises:
        ConfigError: with what to install.
    """
    if project and find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb is {project!r} and wandb is not installed: pip install 'sixfold-gpt[wandb]', or set "
            "log.wandb = ''"
        )


class WandbSink:
    """Hands values to wandb. Its x axis is ``step``.

    W&B's history takes nothing back, so a step that is done again has two points.

    Args:
        folder: RUN/wandb.
        project: its name, or ``team/name``.
        config: of the run, shown beside its curves.
    """

    def __init__(self, folder: Path, *, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        entity, _, name = project.rpartition("/")
        self._run: Any = wandb.init(
            project=name,
            entity=entity or None,
            id=_id_of(folder),
            resume="allow",
            dir=str(folder.parent),  # wandb makes its folder, ``wandb``, in it
            name=folder.absolute().parent.name,
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),  # the terminal is the run's
        )
        self._run.define_metric("*", step_metric="step")
        place = self._run.url or f"offline; `wandb sync {Path(self._run.dir).parent}` uploads it"
        print(f"sixfold: W&B: {place}", file=sys.stderr, flush=True)

    def take_back(self, step: int) -> None:
        """See CurveSink. W&B cannot: both points stay."""

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """See CurveSink."""
        self._run.log({"step": step, **values})

    def flush(self) -> None:
        """See CurveSink. Nothing to do: wandb's own process has what ``add`` gave it."""

    def close(self, failed: bool) -> None:
        """See CurveSink."""
        self._run.finish(exit_code=int(failed))


def _id_of(folder: Path) -> str:
    """The id of the run on W&B, drawn at its first start."""
    path = folder / ID
    if not path.exists():
        path.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
