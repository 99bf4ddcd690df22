"""Workers of a DataLoader that are not forked: they get the dataset pickled, and open its files themselves."""

import pytest
from blending_helpers import blend, numbered

torch = pytest.importorskip("torch", reason="needs torch, the extra 'distributed'")


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.slow
def test_workers_that_are_started_anew_give_the_same_batches(context):
    from sixfold.blending.torch import PositionSampler

    data = blend({"a": numbered([50, 7]), "b": numbered([33])}, [1, 2], create_cu_seqlens=True)
    data.get_batch(range(3))  # its handles are not pickled
    # To the sampler's end: a worker that is stopped while it packs batches ahead may abort in torch's own threads
    # ("terminate called without an active exception"), which its loader then reports from __del__.
    sampler = PositionSampler(5, 4, end=17)
    loader = torch.utils.data.DataLoader(
        data, sampler=sampler, batch_size=None, num_workers=1, multiprocessing_context=context, timeout=300
    )
    batches = [{name: array.tolist() for name, array in batch.items()} for batch in loader]
    expected = [data.get_batch(range(begin, begin + 4)) for begin in (5, 9, 13)]
    assert batches == [{name: array.tolist() for name, array in batch.items()} for batch in expected]
