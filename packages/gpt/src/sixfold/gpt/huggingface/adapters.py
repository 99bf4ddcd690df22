"""Adapters of a run: added to the weights of an export, or a folder as peft writes it.

    checkpoint of a run with [lora] --> Adapters.add (this file) --> convert.py: rows of merged weights
                                    `-> export_adapters (this file) --> adapter_config.json, adapter_model.safetensors

peft opens the folder on top of the base that the run began from. No model is held in memory, only adapters.
"""

from __future__ import annotations

import json
from pathlib import Path

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
from sixfold.gpt.config.lora import ENDS, LoraConfig, is_adapter
from sixfold.gpt.config.rules import refuse_path
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.files.atomic_folder import new_folder, refuse_taken
from sixfold.gpt.huggingface import config as hf_config
from sixfold.gpt.huggingface.tensor_names import hf_name

_THEIRS = dict(zip(ENDS, ("lora_A", "lora_B"), strict=True))


class Adapters:
    """All adapters of a checkpoint, float32, by canonical name; none where ``lora`` has none.

    Args:
        prefix: of ``weights_prefix``: of the weights, or of their average.
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
        """``rows`` of the canonical matrix ``name`` from ``first_row`` on, with what its adapter adds to them."""
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
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError("Hugging Face folders need the library safetensors: pip install 'sixfold-gpt[hf]'") from error
    target = Path(out_dir)
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
    named, modules = {}, set()
    for name, tensor in Adapters(folder, lora, prefix).tensors.items():
        module, _, end = name.rpartition(".")
        theirs = hf_name(f"{module}.weight", kind.tensors).removesuffix(".weight")
        modules.add(theirs.rpartition(".")[2])
        named[f"base_model.model.{theirs}.{_THEIRS['.' + end]}.weight"] = tensor.contiguous()
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    written = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": lora.rank,
        "lora_alpha": alpha, "target_modules": sorted(modules), "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    with new_folder(target, "a peft folder") as draft:
        (draft / "adapter_config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        save_file(named, str(draft / "adapter_model.safetensors"), metadata={"format": "pt"})
    return target
