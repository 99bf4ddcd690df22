"""Adapters of a run on their way out: added to exported weights, or written as a folder of peft.

    checkpoint of a run with [lora] --> Adapters.add (this file) --> convert.py: rows of merged weights
                                    `-> export_adapters (this file) --> adapter_config.json, adapter_model.safetensors

peft opens the folder on top of the base that the run began from. No model is held in memory, only adapters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sixfold import dist_ckpt
from sixfold.gpt.checkpoints.trained_model import (
    check_tensors,
    saved_common,
    saved_lora,
    saved_model,
    weights_prefix,
)
from sixfold.gpt.checkpoints.training_state import ORIGIN, find
from sixfold.gpt.config.lora import ADAPTER_ENDS, LoraConfig, is_adapter
from sixfold.gpt.config.rules import refuse_path
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.files.atomic_folder import new_folder, refuse_taken
from sixfold.gpt.huggingface import config as hf_config
from sixfold.gpt.huggingface.architecture import Architecture
from sixfold.gpt.huggingface.safetensors_extra import safetensors_library
from sixfold.gpt.huggingface.tensor_names import hf_name

_PEFT_ENDS = dict(zip(ADAPTER_ENDS, (".lora_A.weight", ".lora_B.weight"), strict=True))


class Adapters:
    """All adapters of a checkpoint, float32, by canonical name; none if ``lora`` has none.

    Args:
        prefix: from ``weights_prefix``: of the weights, or of their average.
    """

    def __init__(self, folder: Path, lora: LoraConfig, prefix: str = "model.") -> None:
        self._scale = lora.scale if lora.rank else 0.0
        stored = dist_ckpt.load_tensors_metadata(folder) if lora.rank else {}
        wanted = {key: one for key, one in stored.items() if key.startswith(prefix) and is_adapter(key)}
        shards = {
            key: dist_ckpt.ShardedTensor(
                key, None, one.dtype, one.global_shape, one.global_shape, (0,) * len(one.global_shape), None
            )
            for key, one in wanted.items()
        }
        loaded = dist_ckpt.load(dict(shards), folder, group=None, validate_access_integrity=False) if shards else {}
        self.tensors: dict[str, torch.Tensor] = {k.removeprefix(prefix): loaded[k].float() for k in wanted}

    def add(self, name: str, first_row: int, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` of the matrix ``name`` plus the same rows of scale * B A, rounded once to the dtype of ``rows``.

        Args:
            name: canonical; a tensor without an adapter stays as it is.
            first_row: of ``rows`` in the whole matrix.
        """
        module = name.removesuffix(".weight")
        b = self.tensors.get(f"{module}.lora_b")
        if b is None or not name.endswith(".weight"):
            return rows
        change = (b[first_row : first_row + len(rows)] @ self.tensors[f"{module}.lora_a"]) * self._scale
        return (rows.float() + change).to(rows.dtype)


def export_adapters(path: str | Path, out_dir: str | Path, *, step: int | None = None, ema: bool = False) -> Path:
    """Write the adapters of a run as a peft folder: adapter_config.json and adapter_model.safetensors.

    Args:
        path, step, ema: as of ``export_model``.
    Returns:
        ``out_dir``; ``peft.PeftModel.from_pretrained(base, out_dir)`` opens it.
    Raises:
        ConfigError: as of ``export_model``; or the run has no adapters.
    """
    refuse_path("OUT_DIR", str(out_dir))
    library, target = safetensors_library(), Path(out_dir)
    refuse_taken(target, "a peft folder")
    folder = find(path, step)
    config, lora = saved_model(folder), saved_lora(folder)
    if not lora.rank:
        raise ConfigError(
            f"{folder} has no adapters: its lora.rank is 0. Leave --lora out, and the whole model is written"
        )
    prefix = weights_prefix(folder, ema=ema)
    check_tensors(folder, config, prefix, lora)
    kind = hf_config.architecture_of(config, str(saved_common(folder).get(ORIGIN, {}).get("model_type", "")))
    tensors = {_peft_name(name, kind): one.contiguous() for name, one in Adapters(folder, lora, prefix).tensors.items()}
    with new_folder(target, "a peft folder") as draft:
        text = json.dumps(_peft_config(lora, tensors), indent=2)
        (draft / "adapter_config.json").write_text(f"{text}\n", encoding="utf-8")
        library.torch.save_file(tensors, str(draft / "adapter_model.safetensors"), metadata={"format": "pt"})
    return target


def _peft_name(name: str, kind: Architecture) -> str:
    """layers.0.attention.q.lora_a -> base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight."""
    module, dot, end = name.rpartition(".")
    theirs = hf_name(f"{module}.weight", kind.tensors).removesuffix(".weight")
    return f"base_model.model.{theirs}{_PEFT_ENDS[dot + end]}"


def _peft_config(lora: LoraConfig, peft_names: Mapping[str, object]) -> dict[str, Any]:
    """adapter_config.json; its target modules are the linears of ``peft_names``, such as q_proj."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in peft_names}), "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
