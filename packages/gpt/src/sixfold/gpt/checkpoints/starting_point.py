"""What a run starts from: one configuration on all ranks, one checkpoint chosen for all, or fresh weights.

    config, mesh --> same_config, starting_point --> StartingPoint (this file) --> rank_model.py, loop.py

[Note: a damaged newest checkpoint] A save is committed by one rename, so a step's folder that does not open was
damaged later. A run goes on from the newest one that opens, and says so. Damage that only a load's checksums show is
found when all ranks read (`older_start`). Once an older one is loaded, the damaged folder gets another name. In its old
place retention would count it among those to keep, and could remove the good one. Without a good one the run ends.

No rank decides alone here. A rank's configuration, or its view of a shared folder, may differ from that of the others.
Such a run would train on something that nobody asked for, without an error.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, MismatchError, retention
from sixfold.dist_ckpt.tools import verify
from sixfold.gpt.checkpoints import training_state
from sixfold.gpt.checkpoints.trained_model import (
    IMPORTED,
    check_adapters,
    model_differences,
    saved_common,
    saved_config,
)
from sixfold.gpt.checkpoints.training_state import END
from sixfold.gpt.config.resume_rules import resume_changes
from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.data.own_data import Datasets
from sixfold.gpt.data.token_stream import end_of_documents, preflight
from sixfold.gpt.errors import ConfigError, FinalError
from sixfold.gpt.files.run_dir import check_run_dir
from sixfold.gpt.parallel.agreement import all_or_raise, gather_objects
from sixfold.gpt.parallel.mesh import RankMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    """Where a run begins.

    Attributes:
        newest: the checkpoint to continue from; None is a fresh start.
        damaged: on rank 0: newer folders of steps, and what is wrong with each.
    """

    newest: Path | None
    damaged: dict[Path, str] = field(default_factory=dict)


def same_config(config: TrainConfig, mesh: RankMesh) -> None:
    """All ranks were given one configuration.

    Raises:
        ConfigError: on all ranks: the first key that differs, both values and the ranks.
    """
    text = config.to_toml()
    digests = gather_objects(mesh.control, mesh.size, hashlib.sha256(text.encode()).hexdigest())
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    texts = gather_objects(mesh.control, mesh.size, text)
    first, other = (asdict(TrainConfig.from_text(one)) for one in (texts[0], texts[odd]))
    table, key = next((t, k) for t in first for k in first[t] if first[t][k] != other[t][k])
    raise ConfigError(
        f"{table}.{key} is {first[table][key]!r} on rank 0 and {other[table][key]!r} on rank {odd}; all ranks of a run "
        f"read one configuration"
    )


def starting_point(
    config: TrainConfig, mesh: RankMesh, datasets: Datasets | None = None, *, joins: bool = False
) -> StartingPoint:
    """What of ``run.dir`` to continue from; the same on all ranks. Writes nothing.

    Args:
        joins: a run that is at work there is not refused: it is an older generation of this one.
    Raises:
        ConfigError: what the configuration asks cannot be done with what lies in ``run.dir``; on all ranks.
        TrainError: every checkpoint there is damaged; on all ranks.
    """
    all_or_raise(mesh.control, mesh.size, lambda: preflight(config, datasets))
    all_or_raise(
        mesh.control, mesh.size, lambda: check_run_dir(config.run.dir, joins=joins) if mesh.rank == 0 else None
    )
    return _start(config, mesh, {})


def settled(config: TrainConfig, newest: Path | None) -> TrainConfig:
    """``config`` with what its checkpoint settles: data.deal = "auto" is how the run has dealt its samples so far.

    Args:
        newest: as of `StartingPoint`.
    """
    if config.data.deal != "auto":
        return config
    past = None if newest is None or IMPORTED in saved_common(newest) else saved_config(newest)
    return replace(config, data=replace(config.data, deal=(past or config).data.dealt_as))


def older_start(config: TrainConfig, mesh: RankMesh, start: StartingPoint, error: CorruptError) -> StartingPoint:
    """What to continue from when the checkpoint of ``start`` could not be loaded: an older one. As `starting_point`.

    Raises:
        CorruptError: ``error``, if it is not of a file of that checkpoint.
    """
    assert start.newest is not None, f"nothing was loaded that could be damaged: {error}"
    if start.newest.name not in str(error):  # it blames no file of the folder: the ranks saw different ones
        raise error
    return _start(config, mesh, start.damaged | {start.newest: str(error)})


def set_aside(start: StartingPoint) -> list[tuple[int, Path, str]]:
    """Rename what is damaged, so that nothing takes it for a checkpoint. On rank 0, when an older one is loaded.

    Returns:
        Step, new place and damage of each, the newest first.
    """
    moved = []
    for folder, why in start.damaged.items():
        aside = folder.with_name(f"damaged-{folder.name}-{secrets.token_hex(4)}")
        folder.rename(aside)
        moved.append((step_of(folder), aside, why))
    return moved


def initial_weights(config: TrainConfig, mesh: RankMesh) -> Path | None:
    """The checkpoint that ``checkpoint.init_from`` means, None if it is empty; the same on all ranks.

    What its [model] has otherwise is told on stderr: other shapes do not load, and another rope_theta may be meant.
    """
    if not config.checkpoint.init_from:
        return None

    def choose() -> Path:
        folder = training_state.find(config.checkpoint.init_from)
        check_adapters(folder, config.lora)
        for differ in model_differences(folder, config.model):
            print(f"sixfold: checkpoint.init_from is of another {differ}", file=sys.stderr, flush=True)
        return folder

    return training_state.chosen(mesh, choose, config.run.timeout_seconds)


def data_state(start: StartingPoint) -> dict[str, Any] | None:
    """The state of the data in the checkpoint; None for a fresh start and for an imported model."""
    common = {} if start.newest is None else saved_common(start.newest)
    state: dict[str, Any] | None = None if IMPORTED in common else common.get("data")
    return state


def step_of(checkpoint_folder: Path | None) -> int:
    """The step of a folder that ``retention.step_path`` named; 0 without one."""
    return 0 if checkpoint_folder is None else int(checkpoint_folder.name.rpartition("-")[2])


def _start(config: TrainConfig, mesh: RankMesh, damaged: Mapping[Path, str]) -> StartingPoint:
    known = dict(damaged)

    def choose() -> Path | None:
        newest = _newest(config, known)
        if newest is not None:
            _check_past(newest, config)
        return newest

    newest = training_state.chosen(mesh, choose, config.run.timeout_seconds)
    return StartingPoint(newest=newest, damaged=known)


def _check_past(newest: Path, config: TrainConfig) -> None:
    """Refuse a configuration with which the past of ``newest`` would have been another; an import has a model alone."""
    common = saved_common(newest)
    if IMPORTED not in common:
        same_end = config.data.eod_mask_loss and common.get(END) == end_of_documents(config)
        resume_changes(saved_config(newest), config, step=step_of(newest), same_end=same_end)
    elif differ := model_differences(newest, config.model):
        raise ConfigError(
            f"{newest} was imported with another {', '.join(differ)}; copy the [model] of its config.toml"
        )


def _newest(config: TrainConfig, damaged: dict[Path, str]) -> Path | None:
    """The newest checkpoint that opens; newer ones that do not are added to ``damaged``."""
    root = Path(config.run.dir) / "checkpoints"
    newest = None
    for folder in _steps(root):
        if folder not in damaged and (why := _damage(folder)):
            damaged[folder] = why
        if folder not in damaged:
            newest = folder
            break
    resume = config.checkpoint.resume
    if resume == "never" and (newest or damaged):
        raise ConfigError(
            f'checkpoint.resume is "never" and {newest or next(iter(damaged))} is there; choose another run.dir'
        )
    if newest is None and damaged:
        folder, why = next(iter(damaged.items()))
        raise FinalError(
            f"{root} holds no whole checkpoint; the newest is damaged: {why}. Restore one, or move {folder.name} away "
            f"to start anew"
        )
    if resume == "must" and newest is None:
        raise ConfigError(f'checkpoint.resume is "must" and {root} holds no whole checkpoint; "auto" starts anew')
    return newest


def _steps(root: Path) -> list[Path]:
    """Folders of steps, the newest first, whole or not."""
    if not root.is_dir():
        return []
    found = {folder for folder in root.iterdir() if re.fullmatch(r"step-\d{8,}", folder.name)}
    with suppress(CorruptError):  # all are damaged: those are here
        if (newest := retention.latest(root)) is not None:
            found.add(newest)  # a replacement that was cut short is opened by this name, and there is no such folder
    return sorted(found, key=step_of, reverse=True)


def _damage(folder: Path) -> str:
    """What is wrong with a checkpoint as far as names, sizes and its small files tell; nothing if it is empty."""
    try:
        if not dist_ckpt.check_is_distributed_checkpoint(folder):
            problem = next(iter(verify(folder, quick=True)["problems"]), {"file": folder, "detail": "it does not open"})
            return f"{folder}: {problem['file']}: {problem['detail']}"
        dist_ckpt.load_common_state_dict(folder)
        dist_ckpt.load_tensors_metadata(folder)
    except (CorruptError, MismatchError) as error:  # a system that does not let us see is no damage
        return str(error)
    return ""
