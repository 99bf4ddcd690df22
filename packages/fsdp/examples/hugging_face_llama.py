"""Train a Llama of transformers with sharded parameters, generate from it and save it as ``from_pretrained`` reads it.

One process here; all ranks under ``torchrun --nproc-per-node 2 hugging_face_llama.py FOLDER``. The model is made from a
config, so nothing is downloaded; ``LlamaForCausalLM.from_pretrained(...)`` in its place works the same.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from sixfold.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

folder = sys.argv[1] if len(sys.argv) > 1 else "llama"
if "RANK" in os.environ:  # set by torchrun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank() if dist.is_initialized() else 0

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
net = LlamaForCausalLM(config).train()
# A class name is enough: the layers of other models are BertLayer, Qwen2DecoderLayer, MistralDecoderLayer and so on.
model = FullyShardedDataParallel(
    net, fsdp_unit_modules=["LlamaDecoderLayer"], mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
)
optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)

text = torch.arange(16).repeat(4, 2) + torch.randint(0, 32, (4, 1))  # counting: what it learns
for step in range(30):
    loss = model(input_ids=text, labels=text).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9 and rank == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")

net.eval()
with torch.no_grad():  # the same number of tokens on every rank: each token gathers
    told = model.entry(net, method="generate")(text[:1, :8], max_new_tokens=8, do_sample=False, pad_token_id=0)
if rank == 0:
    print("generated", told[0, 8:].tolist(), "for", text[0, 8:16].tolist())

weights = model.full_state_dict()  # on every rank; main weights, float32
if rank == 0:
    net.save_pretrained(folder, state_dict=dict(weights))  # a copy: it takes out what it wrote
    again = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)  # its config says bfloat16
    same = all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())
    print(f"saved in {folder}, and read again it is the same: {same}")
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
