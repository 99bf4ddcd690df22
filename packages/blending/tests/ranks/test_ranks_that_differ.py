"""Ranks that would read other samples: told on all, within the time of one exchange."""

import pytest
from blending_helpers import ListDataset, config, numbered

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError
from sixfold.blending.source import ListSource

ranktest = pytest.importorskip("ranktest", reason="needs tools/ranktest")

DATA = {  # what rank 1 has where rank 0 has 100 documents of 5 tokens
    "fewer documents": numbered([5] * 97),
    "others of the same sum": numbered([4, 6] * 50),
    "other ids": numbered([5] * 100, begin=700),
}
CONFIGS = {
    "random_seed": {"random_seed": 5},
    "sequence_length": {"sequence_length": 4},
    "blend of train": {"blend": (["a", "b"], [2, 1])},
    "document_shuffle": {"document_shuffle": "block"},
}


def build(rank: int, ranks: int):
    """The error of each case, None where there is none: all in one job."""
    import torch.distributed as dist

    def outcome(documents, sizes=(40, 0, 0), on=lambda: True, **fields):
        ListDataset.pairs = {"a": ListSource(documents), "b": ListSource(numbered([7] * 30))}
        made = config(**({"blend": (["a", "b"], [1, 2]), "split": "1"} | fields))
        builder = BlendedMegatronDatasetBuilder(ListDataset, sizes, on, made, group=dist.group.WORLD)
        try:
            builder.build()
        except BlendingError as error:
            return str(error)
        return None

    same = numbered([5] * 100)
    found = {"the same": outcome(same), "sizes": outcome(same, (40 + rank, 0, 0))}
    for order in ("stateless", "megatron", "apportioned"):
        for name, documents in DATA.items():
            found[f"{order}: {name}"] = outcome(documents if rank == 1 else same, order=order)
    for name, fields in CONFIGS.items():
        found[name] = outcome(same, **(fields if rank == 1 else {}))
    found["one that builds nothing"] = outcome(DATA["other ids"] if rank == 1 else same, on=lambda: rank == 0)
    return found


@pytest.mark.slow
def test_ranks_with_other_data_or_another_config_are_told_so_on_all():
    first, second = ranktest.run_ranks(build, 2)
    assert first == second, "one error on all ranks"
    assert first.pop("the same") is None and first.pop("one that builds nothing") is None
    for name, error in first.items():
        assert error is not None, f"{name} was not noticed"
        what = "the data of a" if ":" in name else name
        assert error.startswith(f"{what} differs between ranks: rank 0 has "), (name, error)
