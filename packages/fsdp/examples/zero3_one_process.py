"""Train a small model with sharded parameters (one process here; all ranks under torchrun) and show its bytes."""

import torch
from torch import nn

from sixfold.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

torch.manual_seed(0)
net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1))
model = FullyShardedDataParallel(
    net,
    process_group="world",  # all ranks under torchrun, after init_process_group
    strategy="optim_grads_params",
    fsdp_unit_modules=[nn.Sequential],
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
)
optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)
x = torch.randn(256, 64)
y = x[:, :8].sum(1, keepdim=True)
for step in range(30):
    loss = (model(x).float() - y).square().mean()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.4f}")
print("units", model.units)
print("bytes", {kind: count for kind, count in model.report()["bytes"].items() if count})
