"""Saves with ``since`` seen from outside: inodes, links, and what torch's own index says of the files.

    folders --> new_bytes, shared, used_shares (this file) --> tests

Nothing here shares code with the package.
"""

from collections import defaultdict
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank: the layer is frozen, the adapter trains."""

    def __init__(self, width, rank):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def lora(layers=3, width=128, rank=4, seed=0):
    """A model of such layers and the optimizer of its adapters."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(Adapted(width, rank) for _ in range(layers)))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model, optimizer):
    width = model[0].base.in_features
    model(torch.randn(8, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def data_files(folder):
    return {path.name: path for path in folder.iterdir() if path.suffix == ".distcp"}


def new_bytes(folder, *older):
    """Bytes of data files that no older folder has."""
    known = {path.stat().st_ino for place in older for path in data_files(place).values()}
    return sum(path.stat().st_size for path in data_files(folder).values() if path.stat().st_ino not in known)


def shared(folder, older):
    """Names of the data files that are one file in both folders."""
    mine, theirs = data_files(folder), data_files(older)
    return sorted(name for name in mine.keys() & theirs.keys() if mine[name].samefile(theirs[name]))


def used_shares(folder):
    """The part of each data file that torch's index names; no two frames overlap."""
    frames = defaultdict(list)
    for info in FileSystemReader(folder).read_metadata().storage_data.values():
        frames[info.relative_path].append((info.offset, info.offset + info.length))
    for spans in frames.values():
        spans.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
    return {
        name: sum(stop - start for start, stop in frames[name]) / path.stat().st_size
        for name, path in data_files(folder).items()
    }
