"""Training state to checkpoint and back: fsdp's records become ShardedTensors, everything else is common data.

    model.state_records --> ShardedTensor --.
    step, samples, config, data, scalars ----+--> sixfold.dist_ckpt.save   (this file)   load --> live tensors

Keys, global shapes and dtypes are the same at every layout: ``model.<canonical name>`` (fp32 main weights),
``ema.model.<canonical name>`` (their average, where a run has one) and
``optimizer.state.<state>.model.<canonical name>``. Scalar optimizer state and group options go into common data by
canonical name, after all ranks have gathered them, because a checkpoint writes common data from one rank. A checkpoint
without optimizer state (of step 0, or weights alone) is loaded as weights with a fresh optimizer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sixfold import dist_ckpt
from sixfold.dist_ckpt import retention
from sixfold.gpt.config.lora import is_adapter
from sixfold.gpt.config.train_config import PLAN
from sixfold.gpt.engine.rank_model import TIED, RankModel, canonical, draw_start_values
from sixfold.gpt.engine.weight_average import AVERAGE
from sixfold.gpt.errors import ConfigError, TrainError
from sixfold.gpt.parallel.agreement import all_or_raise, from_rank_0, gather_objects

if TYPE_CHECKING:
    from sixfold.dist_ckpt import MemoryTier
    from sixfold.gpt.parallel.mesh import RankMesh

# How long a rank waits for what rank 0 has chosen to show up: network file systems cache folders for up to a minute.
SEEN_S = 90.0
SEEN_POLL_S = 0.05
END = "eod"  # key of common data: the id that ends a document, for a resume whose tokenizer has another name
UNTOLD = "untold"  # key of snapshots: lines of metrics.jsonl that wait until the snapshot is whole
AVERAGES = f"{AVERAGE}.model."  # how keys of averages of weights begin
_KEY_PREFIXES = {"param": "model.", AVERAGE: AVERAGES}
ORIGIN = "origin"  # key of common data: what convert.py's import said that [model] does not; checkpoints hand it on


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run has come; ``step`` counts updates done."""

    step: int = 0
    samples: int = 0
    tokens: int = 0


def sharded_state(
    rank: RankModel, *, weights_only: bool = False
) -> dict[str, dist_ckpt.ShardedTensor | dist_ckpt.ShardedObject]:
    """Live shards of this rank by checkpoint key. No communication; the tensors are aliases."""
    state: dict[str, dist_ckpt.ShardedTensor | dist_ckpt.ShardedObject] = {}
    cuts = rank.mesh.cuts
    for record in rank.state_records(weights_only=weights_only):
        name = canonical(record.name)
        tied = int(rank.tied_copy and name == TIED)
        offsets = [(axis, part, parts) for axis, (part, parts) in sorted(cuts.of(name).items())]
        key = _KEY_PREFIXES.get(record.key, f"optimizer.state.{record.key}.model.") + name
        state[key] = dist_ckpt.ShardedTensor.from_rank_offsets_flat(
            key,
            record.tensor,
            record.global_shape,
            *offsets,
            flattened_range=slice(record.start, record.stop),
            replica_id=(cuts.replica(name), tied, record.replica),
        )
    return state | _buffers(rank) | _extra_state(rank)


def _with_extra_state(rank: RankModel) -> dict[str, nn.Module]:
    """Modules that have state besides tensors (``get_extra_state``, as TransformerEngine's), by checkpoint key."""
    return {
        f"model.{canonical(f'{name}._extra_state')}": module
        for name, module in rank.model.module.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _extra_state(rank: RankModel) -> dict[str, dist_ckpt.ShardedObject]:
    """Extra state of a model_provider's modules (GPTModel has none): that of data rank 0 is saved."""
    return {
        key: dist_ckpt.ShardedObject(key, module.get_extra_state(), (1,), (0,), (0, 0, rank.mesh.data_rank))
        for key, module in _with_extra_state(rank).items()
    }


def _buffers(rank: RankModel) -> dict[str, dist_ckpt.ShardedTensor]:
    """Persistent buffers of a model_provider's modules (GPTModel has none): those of data rank 0 are saved."""
    kept = rank.model.module.state_dict(keep_vars=True)  # for its names: no weight is read
    state = {}
    for name, buffer in rank.model.module.named_buffers():
        if name in kept:
            key = f"model.{canonical(name)}"
            alias = buffer.detach().view(1) if buffer.dim() == 0 else buffer.detach()
            state[key] = dist_ckpt.ShardedTensor.from_rank_offsets(key, alias, replica_id=(0, 0, rank.mesh.data_rank))
    return state


def _optimizer_common(rank: RankModel) -> dict[str, dict[str, dict[str, Any]]]:
    """Scalar state and group options of every parameter of the run, by canonical name; the same on every rank."""
    options = {
        id(p): {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"}
        for group in rank.optimizer.param_groups
        for p in group["params"]
    }
    mine: dict[str, dict[str, dict[str, Any]]] = {"scalars": {}, "options": {}}
    states = rank.optimizer.state
    for name, parameter in rank.model.main_parameters():
        if rank.is_second_table(name):
            continue
        state = states.get(parameter, {})
        mine["scalars"][canonical(name)] = {
            key: float(value) for key, value in state.items() if not torch.is_tensor(value) or value.dim() == 0
        }
        mine["options"][canonical(name)] = options.get(id(parameter), {})
    everyone = gather_objects(rank.mesh.control, rank.mesh.size, mine)
    return {part: {name: d for rank_part in everyone for name, d in sorted(rank_part[part].items())} for part in mine}


def save(
    rank: RankModel,
    folder: Path,
    progress: Progress,
    data_state: Mapping[str, Any],
    versions: Mapping[str, str],
    *,
    background: bool,
    since: Path | None = None,
) -> tuple[float, dist_ckpt.AsyncSave | None]:
    """Write the whole training state to ``folder``, complete or not at all. Collective over all ranks.

    Args:
        since: an older checkpoint; of its files those are linked whose tensors have not changed.
        background: return when the values are copied; a worker process of each rank writes them.
    Returns:
        Seconds for which training was blocked, and the handle of a background save.
    """
    start = time.monotonic()
    state = whole_state(rank, progress, data_state, versions)
    timeout = rank.config.run.timeout_seconds
    if background:
        handle = dist_ckpt.async_save(state, folder, since=since, group=rank.mesh.control, timeout_s=timeout)
        return time.monotonic() - start, handle
    dist_ckpt.save(state, folder, since=since, group=rank.mesh.control, timeout_s=timeout)
    return time.monotonic() - start, None


def whole_state(
    rank: RankModel, progress: Progress, data_state: Mapping[str, Any], versions: Mapping[str, str]
) -> dict[str, Any]:
    """All that a run goes on from, with live tensors. Collective over all ranks."""
    state: dict[str, Any] = dict(sharded_state(rank))
    state |= {
        "step": progress.step,
        "samples": progress.samples,
        "tokens": progress.tokens,
        "config": rank.config.to_toml(),
        "data": dict(data_state),
        "versions": dict(versions),
        "optimizer": _optimizer_common(rank),
    }
    if rank.stored_plan is not None:
        state["plan"] = rank.stored_plan
    if rank.eod is not None:
        state[END] = rank.eod
    if rank.origin is not None:
        state[ORIGIN] = rank.origin
    return state


def _set_scalars(rank: RankModel, scalars: Mapping[str, Mapping[str, float]]) -> None:
    states = rank.optimizer.state
    for name, parameter in rank.model.main_parameters():
        state = states.get(parameter, {})
        for key, value in scalars.get(canonical(name), {}).items():
            old = state.get(key)
            if torch.is_tensor(old):
                old.fill_(value)
            elif old is not None:
                state[key] = type(old)(value)


def _set_extra_state(rank: RankModel, loaded: Mapping[str, Any]) -> None:
    for key, module in _with_extra_state(rank).items():
        module.set_extra_state(loaded[key])


def load(rank: RankModel, folder: Path) -> tuple[Progress, dict[str, Any]]:
    """Fill model and optimizer from a checkpoint of any layout. Collective over all ranks.

    Returns:
        How far it had come, and its common data.
    """
    saved = dist_ckpt.load_tensors_metadata(folder)
    has_state = any(key.startswith("optimizer.state.") for key in saved)
    if has_state:
        rank.materialize_state()
    else:
        rank.optimizer.clear_state()  # of a damaged checkpoint that was loaded in part
    if rank.average is not None:
        if any(key.startswith(AVERAGES) for key in saved):
            rank.average.make_room()
        else:
            rank.average.forget()  # it begins with the weights, when all is loaded
    if older := any(key.startswith("optimizer.state.older.") for key in saved):
        older = rank.expect_older()
    state = _draw_new_adapters(rank, sharded_state(rank, weights_only=not has_state), saved)
    common = dist_ckpt.load(state, folder, group=rank.mesh.control, timeout_s=rank.config.run.timeout_seconds)
    if has_state:
        _set_scalars(rank, common["optimizer"]["scalars"])
    progress = _take(rank, common)
    if older:
        rank.go_on_behind(common["step"])
    return progress, common


def _draw_new_adapters(rank: RankModel, state: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the adapters that a checkpoint of a base does not have; what of ``state`` is to be loaded."""
    if not rank.config.lora.rank or any(map(is_adapter, saved)):
        return dict(state)
    draw_start_values(rank.model, rank.config, rank.mesh.cuts, is_adapter)
    return {key: value for key, value in state.items() if not is_adapter(key)}


def untold(rank: RankModel, lines: list[dict[str, Any]]) -> dict[str, dist_ckpt.ShardedObject]:
    """Lines of rank 0 as a part of a snapshot, or of none to load them."""
    return {UNTOLD: dist_ckpt.ShardedObject(UNTOLD, lines, (1,), (0,), replica_id=rank.mesh.rank)}


def load_snapshot(rank: RankModel, tier: MemoryTier) -> tuple[Progress, dict[str, Any]] | None:
    """As `load`, of the newest snapshot in memory; None if there is none. Collective over all ranks.

    Raises:
        CorruptError: there were snapshots, and none is whole.
    """
    rank.materialize_state()
    if rank.average is not None:
        rank.average.make_room()
    restored = tier.restore(sharded_state(rank) | untold(rank, []))
    if restored is None:
        return None
    _set_scalars(rank, restored.state["optimizer"]["scalars"])
    return _take(rank, restored.state), restored.state


def _take(rank: RankModel, common: dict[str, Any]) -> Progress:
    """What is not a tensor of a checkpoint, and what follows from tensors that were loaded in place."""
    rank.origin = common.get(ORIGIN)
    _set_extra_state(rank, common)
    rank.copy_table()
    rank.model.refresh()
    if rank.config.parallel.schedule == PLAN:
        rank.stored_plan = common.get("plan")
    return Progress(step=common["step"], samples=common["samples"], tokens=common["tokens"])


def load_weights(rank: RankModel, folder: Path) -> None:
    """Fill the model alone; optimizer state stays fresh. Collective over all ranks."""
    saved = dist_ckpt.load_tensors_metadata(folder)
    state = _draw_new_adapters(rank, sharded_state(rank, weights_only=True), saved)
    loaded = dist_ckpt.load(state, folder, group=rank.mesh.control, timeout_s=rank.config.run.timeout_seconds)
    _set_extra_state(rank, loaded)
    rank.origin = loaded.get(ORIGIN)
    rank.copy_table()
    rank.model.refresh()


def chosen(mesh: RankMesh, choose: Callable[[], Path | None], timeout_s: float) -> Path | None:
    """The checkpoint that rank 0 chooses, on every rank, once every rank sees it.

    Ranks that looked for themselves could see different folders of a shared file system, and train different weights.

    Raises:
        ConfigError: rank 0's own, on all ranks. TrainError: a rank does not see the folder, within ``SEEN_S`` or half
            of ``timeout_s``; on all ranks.
    """
    folder = from_rank_0(mesh.control, mesh.rank, mesh.size, choose)
    if folder is not None and mesh.size > 1:
        limit = min(SEEN_S, timeout_s / 2)
        all_or_raise(mesh.control, mesh.size, lambda: _await_sight(mesh.rank, folder, limit))
    return folder


def _await_sight(rank: int, folder: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not dist_ckpt.check_is_distributed_checkpoint(folder):
        if time.monotonic() > deadline:
            raise TrainError(
                f"rank {rank} does not see {folder}, which rank 0 chose, within {limit_s:g} s. All ranks of a run need "
                f"run.dir on one file system"
            )
        time.sleep(SEEN_POLL_S)


def refuse_hugging_face(path: Path) -> None:
    """Refuse a folder that transformers wrote: its tensors have other names, and dist_ckpt would open it.

    Raises:
        ConfigError: with the command that makes a run folder of it.
    """
    try:
        found = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    if (path / "checkpoints").exists():  # a run, beside whose files somebody has laid it
        return
    if isinstance(found, dict) and ("architectures" in found or "model_type" in found):
        raise ConfigError(
            f"{path} is a Hugging Face folder, no run and no checkpoint; `sixfold import {path} RUN_DIR` makes a run "
            f"folder of it, whose name goes here"
        )


def find(path: str | Path, step: int | None = None) -> Path:
    """The checkpoint that ``path`` means: a checkpoint folder itself, or a run folder (newest whole one, or ``step``).

    Raises:
        ConfigError: neither.
    """
    path = Path(path)
    refuse_hugging_face(path)
    if step is None and dist_ckpt.check_is_distributed_checkpoint(path):
        return path
    root = path / "checkpoints"
    if step is not None:
        folder = retention.step_path(root, step)
        if dist_ckpt.check_is_distributed_checkpoint(folder):
            return folder
        known = [number for number, _ in retention.checkpoints(root)] if root.is_dir() else []
        raise ConfigError(f"{path} has no whole checkpoint of step {step}; it has steps {known}")
    newest = retention.latest(root) if root.is_dir() else None
    if newest is None:
        raise ConfigError(
            f"{path} is neither a checkpoint nor a run folder with one: it holds no metadata.json and "
            f"no whole checkpoints/step-*; name a folder that a run wrote"
        )
    return newest
