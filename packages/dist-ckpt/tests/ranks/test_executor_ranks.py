"""The executor between ranks: what a repeated save sends, and how often a byte is read."""

import re
from pathlib import Path

import pytest
import torch

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor
from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy

TENSORS = 300


def repeated_saves(rank, ranks, folder):
    """Bytes that this rank sent in each save: the same records thrice, one rank's changed, then the same again."""
    sent, plain, strategy = [], Exchange._send, TorchDistSaveShardedStrategy()

    def send(exchange, peer, texts, **options):
        sent[-1] += sum(map(len, texts))
        return plain(exchange, peer, texts, **options)

    Exchange._send = send
    for turn, extra in enumerate((0, 0, 0, 1, 1)):
        state = {
            f"t{i}": ShardedTensor.from_rank_offsets(f"t{i}", torch.full((2, 3), float(turn)), (0, rank, ranks))
            for i in range(TENSORS)
        }
        if extra and rank == 1:
            state["extra"] = ShardedTensor.from_rank_offsets("extra", torch.full((4,), 7.0))
        sent.append(0)
        dist_ckpt.save(state, folder / str(turn), strategy)
    return sent


@pytest.mark.slow
def test_a_repeated_save_sends_no_plan_and_a_change_on_one_rank_is_seen(tmp_path):
    first, second, third, changed, last = run_ranks(repeated_saves, 2, tmp_path)[1]
    assert first > 50 * TENSORS
    places = 16 * TENSORS  # where each frame came to lie
    samples = 40 * 64  # digests of some shards, by which replicas that disagree are found
    bound = 2_000 + places + samples
    assert second < bound and third < bound and last < bound
    assert changed > 50 * TENSORS
    for turn in range(5):
        plain = dist_ckpt.load_plain_tensors(tmp_path / str(turn))
        assert plain["t7"].tolist() == [[float(turn)] * 3] * 4
        assert ("extra" in plain) == (turn > 2)


def rows(rank, ranks):
    whole = torch.arange(1024.0 * 1024).view(1024, 1024)
    return {
        f"t{i}": ShardedTensor.from_rank_offsets(f"t{i}", (whole + i).chunk(ranks)[rank], (0, rank, ranks))
        for i in range(4)
    }


def save_rows(rank, ranks, folder):
    dist_ckpt.save(rows(rank, ranks), folder)


def load_and_count(rank, ranks, folder, axis):
    """Bytes that this rank asked the system for during a load, and bytes that came from the disk."""

    def counters():
        text = Path("/proc/self/io").read_text()
        return [int(re.search(rf"{name}: (\d+)", text)[1]) for name in ("rchar", "read_bytes")]

    asked = {
        f"t{i}": ShardedTensor.from_rank_offsets(
            f"t{i}", torch.zeros(1024, 1024).chunk(ranks, axis)[rank].clone(), (axis, rank, ranks)
        )
        for i in range(4)
    }
    dist_ckpt.load(asked, folder)  # imports what it needs
    before = counters()
    loaded = dist_ckpt.load(asked, folder)
    after = counters()
    whole = torch.arange(1024.0 * 1024).view(1024, 1024)
    assert all(torch.equal(loaded[f"t{i}"], (whole + i).chunk(ranks, axis)[rank]) for i in range(4))
    return [b - a for a, b in zip(before, after, strict=True)]


@pytest.mark.slow
def test_each_byte_is_read_once_by_all_ranks_together(tmp_path):
    run_ranks(save_rows, 2, tmp_path / "c")
    size = sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
    for axis in (0, 1):
        counts = run_ranks(load_and_count, 4, tmp_path / "c", axis)
        assert max(map(sum, zip(*counts, strict=True))) < 1.05 * size
