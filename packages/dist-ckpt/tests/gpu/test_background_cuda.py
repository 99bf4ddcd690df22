"""Background saves of CUDA tensors: through pinned shared memory, without a CUDA context in the worker."""

import subprocess

import pytest
import torch
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt.background import saver as background
from sixfold.dist_ckpt.background.arena import Pinned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda.is_available() is false"),
]


def test_values_are_those_at_the_call_and_the_worker_has_no_context(tmp_path):
    with background.AsyncSaver(group=None) as saver:
        for value in (1.0, 2.0):
            weights = torch.full((4096, 1024), value, device="cuda")
            bias = torch.full((7,), value)
            handle = saver.save({"w": one("w", weights.t()), "b": one("b", bias)}, tmp_path / "c")
            weights.fill_(-1)
            bias.fill_(-1)
            assert isinstance(saver._arena._pinned, Pinned)
            handle.wait(120)
            loaded = dist_ckpt.load_plain_tensors(tmp_path / "c")
            assert loaded["w"].unique().tolist() == [value]
            assert loaded["b"].unique().tolist() == [value]
        listed = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True
        )
        assert str(handle.worker_pid) not in listed.stdout.split()
        with open(f"/proc/{handle.worker_pid}/maps") as maps:
            assert "/dev/nvidia" not in maps.read()


def test_copies_follow_the_trainers_stream(tmp_path):
    """The kernels that make the values are still queued when the call begins."""
    with background.AsyncSaver(group=None) as saver:
        weights = torch.zeros(2048, 2048, device="cuda")
        factor = torch.eye(2048, device="cuda")
        for _ in range(200):
            weights = weights @ factor + 1
        saver.save({"w": one("w", weights)}, tmp_path / "c").wait(120)
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].unique().tolist() == [200.0]
