"""Ranks that build together count a share of the windows each, and read the same rows."""

import numpy as np
import pytest

from sixfold.blending import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig
from sixfold.blending.samples import packed_rows

ranktest = pytest.importorskip("ranktest", reason="needs tools/ranktest")
indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")


@pytest.fixture
def prefixes(tmp_path):
    rng = np.random.default_rng(0)
    for name in "ab":
        with indexed_data.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16) as builder:
            for length in rng.integers(1, 40, 100):
                builder.add_document(np.arange(length) + 1)
    return [str(tmp_path / name) for name in "ab"]


def build(rank, ranks, prefixes, folder, absent=None):
    """(tokens, how many windows this rank counted)."""
    import torch.distributed as dist

    packed_rows.WINDOW_AT_LEAST = 16
    counted, rows = [], packed_rows.Windows.rows

    def watched(self, windows):
        counted.extend(windows)
        return rows(self, windows)

    packed_rows.Windows.rows = watched
    config = GPTDatasetConfig(
        random_seed=5,
        sequence_length=8,
        packing="best_fit",
        blend=(prefixes, [1, 2]),
        split="1",
        path_to_cache=folder,
    )
    group = dist.group.WORLD if dist.is_initialized() else None
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [100, 0, 0], lambda: rank != absent, config, group=group)
    train = builder.build()[0]
    return None if train is None else train.get_batch(range(100))["tokens"].tolist(), len(counted)


@pytest.mark.slow
def test_each_rank_counts_a_share_and_all_read_the_same(prefixes, tmp_path):
    first, second, third = ranktest.run_ranks(build, 3, prefixes, None)
    assert first[0] == second[0] == third[0]
    assert sorted(counted for _, counted in (first, second, third)) == [4, 4, 6]  # 7 windows in each of two datasets
    folder = str(tmp_path / "cache")
    alone = ranktest.run_ranks(build, 2, prefixes, folder, 1)
    assert alone == [(first[0], 14), (None, 0)]
    assert ranktest.run_ranks(build, 2, prefixes, folder) == [(first[0], 0), (first[0], 0)]
