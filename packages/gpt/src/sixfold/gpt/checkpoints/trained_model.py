"""A trained model in one process, whatever layout wrote it.

run folder or checkpoint --> training_state.find --> dist_ckpt.load (group=None) --> GPTModel   (this file)
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sixfold import dist_ckpt
from sixfold.gpt.checkpoints.training_state import AVERAGES, ORIGIN, find
from sixfold.gpt.config.lora import LoraConfig
from sixfold.gpt.config.resume_rules import forget_idle_keys
from sixfold.gpt.config.table import build
from sixfold.gpt.config.toml import read_tables
from sixfold.gpt.config.train_config import TABLES, GPTConfig, TrainConfig
from sixfold.gpt.data.tokenizer import ByteTokenizer, FileTokenizer, NoTokenizer, Tokenizer, tokenizer_for, tokenizer_of
from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from sixfold.gpt.model.decoder import GPTModel


IMPORTED = "imported"  # key of the common data of a checkpoint that convert.py made: no run, a model alone

NO_ADAPTERS = LoraConfig()

TABLES_OF_IDS = ("embedding.weight", "head.weight")  # have vocabulary padding


def canonical_shapes(config: GPTConfig, lora: LoraConfig = NO_ADAPTERS) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape without vocabulary padding, for all tensors of the model and its adapters."""
    shapes = {name: tuple(p.shape) for name, p in _empty_model(config, lora).named_parameters()}
    return {n: (config.vocab_size, *shape[1:]) if n in TABLES_OF_IDS else shape for n, shape in shapes.items()}


def weights_prefix(folder: Path, *, ema: bool) -> str:
    """How the keys of a checkpoint's weights begin; with ``ema``, those of the average of its weights.

    Raises:
        ConfigError: the checkpoint has no average.
    """
    if not ema:
        return "model."
    if not any(key.startswith(AVERAGES) for key in dist_ckpt.load_sharded_metadata(folder)):
        raise ConfigError(
            f"{folder} has no average of weights: optimizer.ema_decay was 0. Its weights themselves are there without "
            f"--ema (ema=False)"
        )
    return AVERAGES


def _empty_model(config: GPTConfig, lora: LoraConfig) -> GPTModel:
    """The model and its adapters on the device meta: names and shapes without values."""
    from sixfold.gpt.model.decoder import GPTModel
    from sixfold.gpt.model.lora import add_adapters

    model = GPTModel(config, device="meta")
    add_adapters(model, lora)
    return model


def check_tensors(folder: Path, config: GPTConfig, prefix: str = "model.", lora: LoraConfig = NO_ADAPTERS) -> None:
    """Refuse a checkpoint whose tensors are not exactly those of the model; vocabulary rows may be padded.

    Args:
        prefix: from ``weights_prefix``.
    Raises:
        ConfigError: lists all tensors that are missing, of another shape or not the model's.
    """
    stored = {key: one for key, one in dist_ckpt.load_sharded_metadata(folder).items() if key.startswith(prefix)}
    problems = []
    for name, shape in canonical_shapes(config, lora).items():
        key = f"{prefix}{name}"
        if (one := stored.pop(key, None)) is None:
            problems.append(f"no {key}")
            continue
        found = tuple(one.global_shape)
        padded = name in TABLES_OF_IDS and bool(found) and found[0] >= shape[0]
        if (found[1:] if padded else found) != (shape[1:] if padded else shape):
            problems.append(f"{key} is of shape {list(found)} and [model] says {list(shape)}")
    problems += [f"{key}, which is no part of the model" for key in sorted(stored)]
    if problems:
        raise ConfigError(
            f"{folder} is no GPTModel of its [model]: {'; '.join(problems)}; a model_provider's own decoder is loaded "
            f"by its own code (sixfold.dist_ckpt.load) and has no Hugging Face form"
        )


def saved_common(folder: Path) -> dict[str, Any]:
    """The common data of a checkpoint.

    Raises:
        ConfigError: it carries no config (it was written neither by sixfold train nor by sixfold import).
    """
    common = dist_ckpt.load_common_state_dict(folder)
    if "config" not in common:
        raise ConfigError(f"{folder} holds no config; only checkpoints of `sixfold train` can be loaded as a model")
    return common


def saved_model(folder: Path) -> GPTConfig:
    """The [model] that a checkpoint carries.

    Raises:
        ConfigError: as ``saved_common``.
    """
    common = saved_common(folder)
    if IMPORTED not in common:
        return saved_config(folder).model
    values = read_tables(common["config"], (), TABLES, str(folder))
    model: GPTConfig = build(GPTConfig, values["model"], "model")
    return model


def saved_lora(folder: Path) -> LoraConfig:
    """The [lora] of the run that wrote a checkpoint; without adapters for an imported model."""
    common = dist_ckpt.load_common_state_dict(folder)
    return NO_ADAPTERS if IMPORTED in common or "config" not in common else saved_config(folder).lora


def check_adapters(folder: Path, lora: LoraConfig) -> None:
    """Refuse a checkpoint to begin from whose adapters the run does not have.

    Raises:
        ConfigError: the checkpoint has adapters, and ``lora`` says others or none.
    """
    saved = saved_lora(folder)
    if saved.rank and saved != lora:
        pairs = [f"lora.{key} (was {then!r}, is {getattr(lora, key)!r})" for key, then in asdict(saved).items()
                 if getattr(lora, key) != then]  # fmt: skip
        raise ConfigError(
            f"checkpoint.init_from has adapters of another {', '.join(pairs)}; put back what was, or add them to the "
            f"weights: `sixfold export {folder} MERGED`, then `sixfold import MERGED RUN_DIR`"
        )


def saved_config(folder: Path) -> TrainConfig:
    """The resolved config that a checkpoint carries.

    Raises:
        ConfigError: as ``saved_common``; or it is of an import, which knows its [model] alone.
    """
    common = saved_common(folder)
    if IMPORTED in common:
        raise ConfigError(
            f"{folder} was imported and has a [model] and its weights alone; name it in checkpoint.init_from of a run"
        )
    values = read_tables(common["config"], (), TABLES, str(folder))
    forget_idle_keys(values)
    return TrainConfig(**{name: build(table, values[name], name) for name, table in TABLES.items()})


def model_differences(folder: Path, model: GPTConfig) -> list[str]:
    """What a checkpoint's [model] has otherwise than ``model``, a phrase for each key; none if it does not tell."""
    if "config" not in dist_ckpt.load_common_state_dict(folder):
        return []
    then, now = asdict(saved_model(folder)), asdict(model)
    # How the first weights were drawn is nothing that loaded ones have.
    return [
        f"model.{key} (was {then[key]!r}, is {now[key]!r})"
        for key in then
        if then[key] != now[key] and key != "init_std"
    ]


def longest_row(folder: Path) -> int:
    """Tokens in a row of what a checkpoint's model has been trained on, before its import too."""
    common = saved_common(folder)
    if IMPORTED in common:
        return int(common[IMPORTED]["max_position_embeddings"])
    before = common.get(ORIGIN, {}).get("max_position_embeddings", 0)
    return max(saved_config(folder).data.seq_length, int(before))


def saved_tokenizer(folder: Path, name: str = "", eod_token: str = "") -> Tokenizer:
    """The tokenizer of a checkpoint's run, or that of an import: tokenizer.json in the run folder.

    Where neither the run nor its data names one, a model of 257 ids is one of bytes; else it is a `NoTokenizer`. It
    begins a text as what it was trained on begins: an import's with its template's BOS, a run's as its data does.

    Args:
        name, eod_token: in the place of what the run was trained with.
    Raises:
        ConfigError: it is not there, or its library is not installed.
    """
    if IMPORTED in saved_common(folder):
        brought = tokenizer_for(name or str(folder.parent.parent / "tokenizer.json"), eod_token)
        if isinstance(brought, FileTokenizer):
            brought.template = True
        return brought
    config = saved_config(folder)
    data = config.data
    found = tokenizer_of(data.blend, name or data.tokenizer, eod_token or data.eod_token)
    if isinstance(found, NoTokenizer) and config.model.vocab_size == ByteTokenizer.vocab_size:
        return ByteTokenizer()
    if isinstance(found, FileTokenizer):
        found.template = _begins_with(found.lead, data.blend)
    return found


def _begins_with(lead: list[int], prefixes: Iterable[str]) -> bool:
    """Whether the documents of a run begin with ``lead``: the first one of the first pair that is there."""
    from sixfold.indexed_data import IndexedDataError, IndexedDataset

    for prefix in prefixes if lead else ():
        with suppress(IndexedDataError), IndexedDataset(prefix) as pair:
            if len(pair):
                return bool(pair[0][: len(lead)].tolist() == lead)
    return False


def load_model(
    path: str | Path,
    *,
    step: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    ema: bool = False,
) -> GPTModel:
    """Load the whole model from a run folder or one checkpoint folder.

    Args:
        step: the checkpoint of that step; None takes the newest whole one.
        ema: the average of its weights (``optimizer.ema_decay``) in their place.
    Returns:
        The model in evaluation mode, weights in ``dtype``; adapters stay beside them.
    Raises:
        ConfigError: there is no checkpoint, or its tensors are not those of its [model], or it has no average.
        CheckpointError: the checkpoint is damaged.
    """
    folder = find(path, step)
    config, lora = saved_model(folder), saved_lora(folder)
    prefix = weights_prefix(folder, ema=ema)
    check_tensors(folder, config, prefix, lora)
    model = _empty_model(config, lora).to_empty(device="cpu")
    dist_ckpt.load(model.sharded_state_dict(prefix), folder, group=None)
    return model.to(device=device, dtype=dtype).eval()
