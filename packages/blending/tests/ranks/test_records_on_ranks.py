"""Ranks tell each other of the files they built: what one built the others map, without reading it."""

import numpy as np
import pytest

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset, GPTDatasetConfig
from sixfold.blending.cache import indices

ranktest = pytest.importorskip("ranktest", reason="needs tools/ranktest")
indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")


class Tokenizer:
    eod = 0
    unique_identifiers = {"class": "Toy"}  # noqa: RUF012


@pytest.fixture
def prefixes(tmp_path):
    rng = np.random.default_rng(0)
    for name in "abcd":
        with indexed_data.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16) as builder:
            for length in rng.integers(1, 40, 30):
                builder.add_document([7] * int(length))
    return [str(tmp_path / name) for name in "abcd"]


def build(rank, ranks, prefixes, folder, absent=None, group=True, lost=None):
    """(indices, names of the functions that built or read an index here)."""
    import torch.distributed as dist

    calls = []

    def watch(name):
        function = getattr(indices, name)

        def watched(*arguments):
            calls.append(name)
            if rank == lost:
                raise MemoryError("no room for the index")
            return function(*arguments)

        setattr(indices, name, watched)

    watch("build_indices")
    watch("indices_fit")
    made = GPTDatasetConfig(
        random_seed=5, sequence_length=8, tokenizer=Tokenizer(), order="apportioned", split="1",
        blend=(prefixes, [1, 2, 3, 4]), path_to_cache=folder, num_dataset_builder_threads=2,
    )  # fmt: skip
    world = dist.group.WORLD if group else None
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [100, 0, 0], lambda: rank != absent, made, group=world)
    try:
        train = builder.build()[0]
    except BlendingError as error:
        return str(error), calls
    if train is None:
        return None, calls
    return [getattr(dataset, name).tolist() for dataset in train.datasets for name in indices.INDICES], calls


@pytest.mark.parametrize("absent", [None, 0])
@pytest.mark.slow
def test_each_index_is_built_by_one_rank_and_read_in_full_by_none(absent, prefixes, tmp_path):
    found = ranktest.run_ranks(build, 3, prefixes, str(tmp_path / "cache"), absent)
    assert sorted(name for _, calls in found for name in calls) == ["build_indices"] * 4
    kept = [arrays for rank, (arrays, _) in enumerate(found) if rank != absent]
    assert kept.count(kept[0]) == len(kept) == (3 if absent is None else 2)
    assert len(list((tmp_path / "cache").glob("*.json"))) == 1
    again = build(0, 1, prefixes, str(tmp_path / "cache"), group=False)
    assert again == (kept[0], []), "the file that the first rank wrote tells of the shares of all"


def test_an_error_at_one_share_is_raised_on_all_and_leaves_a_cache_that_is_whole(prefixes, tmp_path):
    found = ranktest.run_ranks(build, 2, prefixes, str(tmp_path / "cache"), None, True, 1)
    for error, _ in found:
        assert error.startswith("rank 1: no room for the index (while the train part of ")
    alone = build(0, 1, prefixes, str(tmp_path / "other"), group=False)[0]
    assert build(0, 1, prefixes, str(tmp_path / "cache"), group=False)[0] == alone
