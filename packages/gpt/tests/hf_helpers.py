"""Hugging Face folders as transformers itself writes them, small, with weights large enough to matter."""

from __future__ import annotations

import copy
import ctypes
import functools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sixfold import dist_ckpt
from sixfold.gpt import GPTConfig, GPTModel, load_model
from sixfold.gpt.config.table import keys_of
from sixfold.gpt.config.toml import write_tables
from sixfold.gpt.huggingface.convert import import_model

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
BY_LAYER = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 5e5, **YARN},
        "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"},
    }
}  # fmt: skip
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "_attn_implementation": "eager"}
LOCAL = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e5, **LINEAR},
        "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
    }
}
GEMMA3 = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 12}
LATENTS = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
MSCALES = {"mscale": 1.5, "mscale_all_dim": 0.8}
ROUTED = {
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 12, "n_shared_experts": 2, "num_key_value_heads": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 8}),
    "llama_wide_heads": ("llama", {"head_dim": 12, "rms_norm_eps": 1e-3}),
    "llama_rope_scaling": ("llama", {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied_scaling": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6, **LLAMA3}}),
    "qwen3": ("qwen3", {"head_dim": 12, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [0], "norm_topk_prob": True, **EXPERTS}),
    "qwen2_moe": ("qwen2_moe", {"shared_expert_intermediate_size": 24, "router_aux_loss_coef": 0.01, **EXPERTS}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "mistral_plain": ("mistral", {"sliding_window": None, "rope_parameters": {"rope_theta": 1e6, **LINEAR}}),
    "mixtral": ("mixtral", {"sliding_window": 5, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-3}),
    "olmo3": ("olmo3", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], **BY_LAYER}),
    "gemma2": ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 7, **CAPS}),
    "gemma3_text": ("gemma3_text", {"num_hidden_layers": 3, "head_dim": 12, "sliding_window": 7, **LOCAL, **GEMMA3}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": {"rope_theta": 1e4, **YARN, **MSCALES}, **LATENTS, **ROUTED}),
    "deepseek_v3_plain_queries": ("deepseek_v3", {**LATENTS, **ROUTED, "q_lora_rank": None, "rope_interleave": False}),
    "llama_yarn": ("llama", {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
    "qwen3_tied_scaling": ("qwen3", {"head_dim": 6, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
}

# [model] of runs of one's own, each as an architecture has it, for ``model_helpers.small``.
UNCUT = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": False}
OLMO = {"qk_norm": True, "qk_norm_over": "projection", "norm_position": "post"}
GEMMA = {
    "norm_position": "both", "zero_centered_norm": True, "hidden_act": "gelu_pytorch_tanh", "scale_embeddings": True,
    "sliding_window": 5, "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "olmo2": OLMO,
    "deepseek": {
        "num_query_groups": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "rope_interleave": True, "num_experts": 4, "n_group": 2, "topk_group": 1,
        "scoring_func": "sigmoid", "expert_bias": True, "router_aux_loss": 0.0, "routed_scaling_factor": 1.5,
        "moe_ffn_hidden_size": 12, "shared_ffn_hidden_size": 24, "dense_layers": 1,
    },
    "gemma2": {
        **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": {**GEMMA, "qk_norm": True, "rope_local_base_freq": 500.0, "query_pre_attn_scalar": 12.0},
    "olmo3": {
        **OLMO, "sliding_window": 5, "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
        "rope_local_base_freq": 500.0, "rope_scaling": {k: v for k, v in UNCUT.items() if k != "truncate"},
    },
    "mistral": {"sliding_window": 9, "rope_scaling": UNCUT},
    "mixtral": {"num_experts": 4, "moe_ffn_hidden_size": 20, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama": {"tie_embeddings": False, "head_dim": 12},
    "llama_rope_scaling": {"rope_theta": 500.0, "rope_scaling": CASES["qwen3_tied_scaling"][1]["rope_parameters"]},
    "qwen2": {"qkv_bias": True, "norm_eps": 1e-3, "tie_embeddings": False},
    "qwen3": {"qk_norm": True, "head_dim": 6},
    "qwen3_moe": {"qk_norm": True, "dense_layers": 1, "num_experts": 5, "moe_ffn_hidden_size": 20},
    "qwen2_moe": {
        "qkv_bias": True, "num_experts": 4, "norm_topk_prob": False, "shared_ffn_hidden_size": 24,
        "shared_expert_gate": True,
    },
}  # fmt: skip


def peer(case: str, **sizes: int) -> Any:
    """transformers' model of a case, float32; 100 ids, which is no multiple of 128, if nothing else is said."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = copy.deepcopy(CASES[case])  # transformers writes into what it is given
    shape = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **fields, **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            norm = (0.0 if "gemma" in kind else 1.0) + 0.2 * drawn
            parameter.copy_(drawn * 0.1 if parameter.dim() > 1 else norm)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def write_folder(
    folder: Path, case: str, *, shard: int | str = "5GB", dtype: torch.dtype = torch.float32, **sizes: int
) -> Any:
    """``save_pretrained`` of ``peer(case)``; returns the model."""
    model = peer(case, **sizes).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


@functools.cache
def peer_and_import(case: str) -> tuple[Any, GPTModel]:
    """``peer(case)``, and our model with its weights."""
    with TemporaryDirectory() as folder:
        model = write_folder(Path(folder, "hf"), case)
        import_model(Path(folder, "hf"), Path(folder, "run"))
        return model, load_model(Path(folder, "run"))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a JSON file."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the safetensors files of a folder."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def run_of(folder: Path, model: GPTModel, **config: object) -> Path:
    """A run folder of a model, as a checkpoint of `sixfold train` has it: whole, fp32, with its configuration."""
    text = write_tables(
        {
            "model": {key: getattr(model.config, key) for key in keys_of(GPTConfig)},
            "data": {"blend": ["nowhere"], "seq_length": 64, **config},
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1},
            "optimizer": {"lr": 0.1},
            "run": {"dir": str(folder)},
        }
    )
    common = {"step": 3, "samples": 3, "tokens": 9, "config": text}
    dist_ckpt.save(model.sharded_state_dict() | common, folder / "checkpoints/step-00000003", group=None)
    return folder


def from_folder(folder: Path, **options: Any) -> Any:
    """transformers' model of a folder, with eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


def stepwise_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' model that reads each row but six tokens, and these one by one, with its cache."""
    begin = tokens.shape[1] - 6
    out = model(tokens[:, :begin], use_cache=True)
    found = [out.logits]
    for at in range(begin, tokens.shape[1]):
        out = model(tokens[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    return torch.cat(found, 1)


class Peak:
    """The most anonymous memory (files that are mapped are not counted) beyond what there was, looked at every ms.

    Of what is held, not of what glibc keeps: once a block of a MiB was freed it takes such blocks from its heap, and
    keeps up to thrice as much of what comes and goes there. A block of more than 32 MiB never lies there, so that it
    is an effect of the small parts of a test, and not of the 64 MiB that an export reads at a time.
    """

    def __enter__(self):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: larger blocks are given back when they are freed
        libc.malloc_trim(0)  # what was let go of before must not hide what is taken now
        self.start, self.most, self.over = self.now(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        self.thread.start()
        return self

    def watch(self):
        while not self.over.wait(0.001):
            self.most = max(self.most, self.now() - self.start)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        sys.setswitchinterval(self.interval)

    @staticmethod
    def now():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
