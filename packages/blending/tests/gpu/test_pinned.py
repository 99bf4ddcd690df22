"""Pinned memory: a loader that pins, and batches read straight into pinned arrays and copied while the host goes on."""

import numpy as np
import pytest
from blending_helpers import blend, numbered

from sixfold.blending import Prefetcher

torch = pytest.importorskip("torch", reason="needs torch, the extra 'distributed'")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def data():
    return blend({"a": numbered([50, 7]), "b": numbered([33])}, [1, 2], create_document_ids=True)


def test_a_loader_pins_whole_batches(data):
    from sixfold.blending.torch import PositionSampler

    loader = torch.utils.data.DataLoader(
        data, sampler=PositionSampler(0, 4, end=12), batch_size=None, num_workers=2, pin_memory=True
    )
    for step, batch in zip(range(3), loader, strict=True):
        assert batch["tokens"].is_pinned()
        expected = data.get_batch(range(4 * step, 4 * step + 4))
        assert np.array_equal(batch["tokens"].cuda(non_blocking=True).cpu().numpy(), expected["tokens"])


def test_batches_read_into_pinned_arrays_arrive_whole(data):
    pinned = []

    def make_out():
        tensors = {name: torch.from_numpy(array).pin_memory() for name, array in data.get_batch(range(4)).items()}
        pinned.append(tensors)
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    positions = [range(step * 4, step * 4 + 4) for step in range(50)]
    arrived = []
    with Prefetcher(data, positions, make_out=make_out) as batches:
        for batch in batches:
            tokens = torch.from_numpy(batch["tokens"])
            assert any(tokens.data_ptr() == tensors["tokens"].data_ptr() for tensors in pinned)
            arrived.append(tokens.cuda(non_blocking=True))
            torch.cuda.synchronize()  # before the next batch is taken, its arrays are filled anew
    for some, tokens in zip(positions, arrived, strict=True):
        assert np.array_equal(tokens.cpu().numpy(), data.get_batch(some)["tokens"])
