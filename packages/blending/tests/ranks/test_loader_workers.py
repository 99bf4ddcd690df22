"""Workers of a DataLoader that are not forked: they get the dataset pickled, and open its files themselves."""

import pytest
from blending_helpers import blend, numbered

torch = pytest.importorskip("torch", reason="needs torch, the extra 'distributed'")


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_started_anew_give_the_same_batches(context):
    from sixfold.blending.torch import PositionSampler

    data = blend({"a": numbered([50, 7]), "b": numbered([33])}, [1, 2], create_cu_seqlens=True)
    data.get_batch(range(3))  # its handles are not pickled
    loader = torch.utils.data.DataLoader(
        data, sampler=PositionSampler(5, 4), batch_size=None, num_workers=1, multiprocessing_context=context, timeout=60
    )
    batches = iter(loader)
    for step in range(3):
        expected = data.get_batch(range(5 + 4 * step, 9 + 4 * step))
        assert {name: array.tolist() for name, array in next(batches).items()} == {
            name: array.tolist() for name, array in expected.items()
        }
