"""Ranks share the building of indices: each is built once, and every rank loads what one process would have built."""

import re

import pytest
from blending_helpers import ListDataset, config, numbered, sequences_of

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError
from sixfold.blending.builder.rank_shares import shares
from sixfold.blending.cache import indices
from sixfold.blending.source import ListSource

ranktest = pytest.importorskip("ranktest", reason="needs tools/ranktest")

FIELDS = {"blend": (["a", "b", "c"], [1, 2, 3]), "split": "80,20"}
ARRAYS = ("document_index", "sample_index", "shuffle_index")


def build_here(order, folder, group=None, built_here=True):
    ListDataset.pairs = {
        "a": ListSource(numbered([30] * 19)),
        "b": ListSource(numbered([20] * 55)),
        "c": ListSource(sequences_of([7] * 90)),
    }
    made = config(**FIELDS, order=order, path_to_cache=folder)
    return BlendedMegatronDatasetBuilder(ListDataset, [400, 20, 0], lambda: built_here, made, group=group).build()


def arrays_of(parts):
    return [
        [data.dataset_index.tolist(), data.dataset_sample_index.tolist()]
        + [getattr(dataset, name).tolist() for dataset in data.datasets for name in ARRAYS]
        for data in parts
        if data is not None
    ]


def count_builds():
    """A list that grows with every index built in this process."""
    built = []

    def counted(name):
        function = getattr(indices, name)

        def counting(*arguments):
            built.append(name)
            return function(*arguments)

        setattr(indices, name, counting)

    counted("build_indices")
    counted("build_blend")
    return built


def build(rank: int, ranks: int, order: str, folder: str, absent: int | None):
    import torch.distributed as dist

    built = count_builds()
    parts = build_here(order, folder, dist.group.WORLD, rank != absent)
    return arrays_of(parts), built


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
@pytest.mark.slow
def test_two_ranks_build_each_index_once_and_load_what_one_process_builds(order, tmp_path):
    expected = arrays_of(build_here(order, str(tmp_path / "alone")))
    (first, built), (second, built_too) = ranktest.run_ranks(build, 2, order, str(tmp_path / "shared"), None)
    assert first == second == expected
    assert sorted(built + built_too).count("build_indices") == 6, "three datasets in two parts"
    assert min(built.count("build_indices"), built_too.count("build_indices")) >= 2
    assert (built + built_too).count("build_blend") == (2 if order == "megatron" else 0)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir() if path.suffix != ".json"}
        for folder in ("alone", "shared")
    ]
    assert files[0] == files[1]


def test_a_rank_that_is_not_built_on_builds_nothing(tmp_path):
    (arrays, built), (nothing, untouched) = ranktest.run_ranks(build, 2, "megatron", str(tmp_path), 1)
    assert len(arrays) == 2
    assert built.count("build_indices") == 6
    assert (nothing, untouched) == ([], [])


def build_with_a_failure(rank: int, ranks: int, folder: str):
    import torch.distributed as dist

    if rank == 1:

        def failing(*_):
            raise MemoryError("no room for the index")

        indices.build_indices = failing
    try:
        build_here("megatron", folder, dist.group.WORLD)
    except BlendingError as error:
        return str(error)
    return None


def test_a_rank_that_fails_at_its_share_fails_all(tmp_path):
    first, second = ranktest.run_ranks(build_with_a_failure, 2, str(tmp_path))
    assert first == second
    assert re.fullmatch(r"rank 1: no room for the index \(while the (train|valid) part of [abc] was made\)", first)


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_shares_hold_every_task_once_and_are_even(ranks):
    costs = [1000 // (number + 1) for number in range(60)]
    taken = shares(costs, ranks)
    assert sorted(number for share in taken for number in share) == list(range(60))
    loads = [sum(costs[number] for number in share) for share in taken]
    assert max(loads) <= max(costs[0], 4 / 3 * sum(costs) / ranks)
