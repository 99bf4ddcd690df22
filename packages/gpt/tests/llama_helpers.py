"""The reference slides' model, Llama-3-70B, and their device: for plans."""

from __future__ import annotations

from sixfold.gpt.machine.devices import device_named
from sixfold.gpt.plan.plan import PlannedConfig

H100 = device_named("h100")
LLAMA_70B = """
[model]
num_layers = 80
hidden_size = 8192
num_attention_heads = 64
num_query_groups = 8
ffn_hidden_size = 28672
vocab_size = 128256
rope_theta = 500000.0
tie_embeddings = false
[data]
blend = ["corpus"]
seq_length = 8192
document_mask = false
[train]
steps = 100
global_batch_size = 128
micro_batch_size = 1
[fsdp]
reduce_buffers = 1
[optimizer]
lr = 1e-4
[run]
dir = "runs/llama"
device = "cuda"
"""


def llama(*overrides: str) -> PlannedConfig:
    return PlannedConfig.from_text(LLAMA_70B, overrides)
