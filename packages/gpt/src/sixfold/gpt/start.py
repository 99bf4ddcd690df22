"""What a run starts from: one configuration on all ranks, one checkpoint chosen for all, or fresh weights.

    config, mesh --> same_config, starting_point --> folder or None   (this file) --> build.py, loop.py

Nothing here is decided by a rank for itself: what a rank reads (its configuration, a folder of a shared file system)
may differ from what its neighbours read, and a run of differing ranks trains without a word on something nobody asked.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from pathlib import Path

from sixfold.dist_ckpt import retention
from sixfold.gpt import checkpoint
from sixfold.gpt.agree import gather, together
from sixfold.gpt.checks import resume_changes
from sixfold.gpt.config import TrainConfig
from sixfold.gpt.data import preflight
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.load import saved_config
from sixfold.gpt.mesh import RankMesh


def same_config(config: TrainConfig, mesh: RankMesh) -> None:
    """All ranks were given one configuration.

    Raises:
        ConfigError: on all ranks: the first key that differs, both values and the ranks.
    """
    text = config.to_toml()
    digests = gather(mesh.control, mesh.size, hashlib.sha256(text.encode()).hexdigest())
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    texts = gather(mesh.control, mesh.size, text)
    first, other = (asdict(TrainConfig.from_text(one)) for one in (texts[0], texts[odd]))
    table, key = next((t, k) for t in first for k in first[t] if first[t][k] != other[t][k])
    raise ConfigError(
        f"{table}.{key} is {first[table][key]!r} on rank 0 and {other[table][key]!r} on rank {odd}; all ranks of a run "
        f"read one configuration"
    )


def starting_point(config: TrainConfig, mesh: RankMesh) -> Path | None:
    """The checkpoint of ``run.dir`` to continue from, None for a fresh start; alike on all ranks. Writes config.toml.

    Raises:
        ConfigError: what the configuration asks cannot be done with what lies in ``run.dir``; on all ranks.
    """
    together(mesh.control, mesh.size, lambda: preflight(config))

    def choose() -> Path | None:
        newest = _newest(config)
        if newest is not None:
            resume_changes(saved_config(newest), config, step=step_of(newest))
        _write_config(config)
        return newest

    return checkpoint.chosen(mesh, choose, config.run.timeout_seconds)


def initial_weights(config: TrainConfig, mesh: RankMesh) -> Path | None:
    """The checkpoint that ``checkpoint.init_from`` means, None if it is empty; the same on all ranks."""
    if not config.checkpoint.init_from:
        return None
    return checkpoint.chosen(mesh, lambda: checkpoint.find(config.checkpoint.init_from), config.run.timeout_seconds)


def step_of(checkpoint_folder: Path | None) -> int:
    """The step of a folder that ``retention.step_path`` named; 0 without one."""
    return 0 if checkpoint_folder is None else int(checkpoint_folder.name.rpartition("-")[2])


def _newest(config: TrainConfig) -> Path | None:
    root = Path(config.run.dir) / "checkpoints"
    newest = retention.latest(root) if root.is_dir() else None
    if config.checkpoint.resume == "must" and newest is None:
        raise ConfigError(f'checkpoint.resume is "must" and {root} holds no whole checkpoint; "auto" starts anew')
    if config.checkpoint.resume == "never" and newest is not None:
        raise ConfigError(f'checkpoint.resume is "never" and {newest} is there; choose another run.dir')
    return newest


def _write_config(config: TrainConfig) -> None:
    """run.dir/config.toml, whole or not at all."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".config.toml.{os.getpid()}"
    draft.write_text(config.to_toml(), encoding="utf-8")
    draft.replace(folder / "config.toml")
