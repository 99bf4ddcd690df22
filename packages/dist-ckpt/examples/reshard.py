"""Save a weight as four flattened shards, load it as two column shards."""

import tempfile
from itertools import pairwise
from pathlib import Path

import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor

whole = torch.arange(24.0).view(4, 6)
flat = whole.reshape(-1)
cuts = [0, 5, 11, 20, 24]
with tempfile.TemporaryDirectory() as folder:
    shards = [
        ShardedTensor.from_rank_offsets_flat("w", flat[a:b].clone(), (4, 6), flattened_range=slice(a, b))
        for a, b in pairwise(cuts)
    ]
    dist_ckpt.save({"w": shards, "step": 7}, Path(folder) / "step-00000007")
    columns = [ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3), (1, i, 2)) for i in range(2)]
    loaded = dist_ckpt.load({"w": columns}, Path(folder) / "step-00000007")
    print(*shards, "->", *columns, "| equal:", torch.equal(torch.cat(loaded["w"], dim=1), whole), loaded["step"])
