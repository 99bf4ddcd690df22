"""Digests of weights: CPU time of 100 million fp32 parameters, beside a plain read of the same memory.

    python -m pytest packages/gpt/benchmarks/bench_digest.py --benchmark-only

One thread, CPU seconds (``time.process_time``): other processes take wall time and no time of this one. The floor is
torch's sum of the same bytes as int64, which reads each byte once.
"""

import time

import pytest
import torch

from sixfold.gpt.observe.tensor_digest import DigestSums

ELEMENTS = 100_000_000
GPT2 = [(50257, 768), *[(768, 768)] * 48, *[(768, 2048)] * 24, *[(2048, 768)] * 12, *[(768,)] * 25]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cpu(benchmark):
    benchmark._timer = time.process_time
    return benchmark


def test_read(cpu):
    words = torch.randn(ELEMENTS).view(torch.int64)
    cpu.extra_info.update(elements=ELEMENTS)
    cpu.pedantic(words.sum, rounds=9, warmup_rounds=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_tensor(cpu, dtype):
    tensor, sums = torch.randn(ELEMENTS).to(dtype), DigestSums(torch.device("cpu"))
    cpu.extra_info.update(elements=ELEMENTS)
    cpu.pedantic(sums.of, (tensor, 0), rounds=9, warmup_rounds=1)


def test_the_tensors_of_a_model(cpu):
    tensors, sums = [torch.randn(shape) for shape in GPT2], DigestSums(torch.device("cpu"))
    cpu.extra_info.update(elements=sum(tensor.numel() for tensor in tensors), tensors=len(tensors))
    cpu.pedantic(lambda: [sums.of(tensor, 0) for tensor in tensors], rounds=9, warmup_rounds=1)
