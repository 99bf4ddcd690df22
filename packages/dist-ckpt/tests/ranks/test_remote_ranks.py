"""Several ranks save to and load from a store without rename: each puts its own file, the first one commits."""

import pytest
import torch

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, ShardedTensor
from sixfold.dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

fsspec = pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")
WHOLE = torch.arange(4_000_000.0).view(2000, 2000)


def shared_store():
    """A store that all ranks of this machine share: local files behind a protocol that is not ``file``."""
    from fsspec.implementations.local import LocalFileSystem

    class Shared(LocalFileSystem):
        protocol = "shared"

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.removeprefix("shared://"))

        def put_file(self, local, path, **options):
            self.makedirs(path.rpartition("/")[0], exist_ok=True)
            super().put_file(local, path, **options)

    fsspec.register_implementation("shared", Shared, clobber=True)


def state(rank, ranks, axis, fill):
    part = WHOLE.chunk(ranks, axis)[rank].contiguous()
    tied = torch.arange(5.0)
    return {
        "w": ShardedTensor.from_rank_offsets("w", part if fill else part * 0, (axis, rank, ranks)),
        "tied": ShardedTensor.from_rank_offsets("tied", tied if fill else tied * 0, replica_id=rank),
        "step": 3,
    }


def save(rank, ranks, url):
    shared_store()
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    for _ in range(2):  # the second replaces the first
        dist_ckpt.save(state(rank, ranks, 0, True), url, strategy)


def load(rank, ranks, url, parallel):
    shared_store()
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()) if parallel else None
    loaded = dist_ckpt.load(state(rank, ranks, 1, False), url, strategy)
    assert torch.equal(loaded["w"], WHOLE.chunk(ranks, 1)[rank])
    assert loaded["tied"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    return loaded["step"]


def load_damage(rank, ranks, url):
    shared_store()
    with pytest.raises(CorruptError, match="shared://"):
        dist_ckpt.load(state(rank, ranks, 1, False), url, timeout_s=20.0)
    return True


@pytest.mark.slow
def test_ranks_save_to_a_store_and_others_load_another_cut(tmp_path):
    url = f"shared://{tmp_path}/c"
    run_ranks(save, 2, url)
    files = sorted((tmp_path / "c").rglob("*.distcp"))
    assert len(files) == 2
    for parallel in (False, True):
        assert run_ranks(load, 2, url, parallel) == [3, 3]
    data = bytearray(files[1].read_bytes())
    data[len(data) // 2] ^= 1
    files[1].write_bytes(bytes(data))
    assert run_ranks(load_damage, 2, url) == [True, True]
