"""The loader of docs/guide/blending-loading.md for accelerate, as accelerate itself prepares it in each process."""

import numpy as np
import pytest
from blending_helpers import blend, numbered

torch = pytest.importorskip("torch", reason="needs torch, the extra 'distributed'")
loaders = pytest.importorskip("accelerate.data_loader", reason="needs accelerate, a peer that only tests use")


@pytest.mark.parametrize("processes", [1, 3])
def test_accelerate_gives_each_process_its_batches_of_a_batch_sampler_from_its_begin_on(processes):
    """As the guide says it: ``batch_sampler=``, with rank and ranks left out. 72 samples fill 18 batches."""
    from sixfold.blending.torch import PositionSampler

    stream = blend({"a": numbered([50] * 9), "b": numbered([33] * 9)}, [1, 2], size=74)
    seen = []
    for rank in range(processes):
        loader = torch.utils.data.DataLoader(stream, batch_sampler=PositionSampler(2, 4, end=74))
        prepared = loaders.prepare_data_loader(loader, num_processes=processes, process_index=rank, put_on_device=False)
        seen.append([batch["tokens"].numpy() for batch in prepared])
    assert [len(batches) for batches in seen] == [18 // processes] * processes
    rows = np.concatenate([batch for step in zip(*seen, strict=True) for batch in step])
    assert np.array_equal(rows, stream.get_batch(range(2, 74))["tokens"])
