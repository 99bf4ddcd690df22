"""The square sum of 100 million gradients: with one number for any cut, and the default's, in turns on one thread.

Peers: torch's own norm, and both other ways to add exactly that were tried: grids of each chunk's own, which need no
maximum over ranks first but three grids instead of two; and ``math.fsum``, on a hundredth of the elements.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sixfold.fsdp import FullyShardedDataParallel, MixedPrecision
from sixfold.fsdp.optimizers import exact_squares

NUMEL, TURNS = 100_000_000, 5


class Weights(nn.Module):
    """Ten tensors; nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(NUMEL // 10) for _ in range(10))


def model_of(grad_sum: str, gradient: Tensor) -> FullyShardedDataParallel:
    model = FullyShardedDataParallel(
        Weights(), process_group=None, mixed_precision=MixedPrecision(grad_sum=grad_sum), root_units=False
    )
    for (_, main), part in zip(model.main_parameters(), gradient.chunk(10), strict=True):
        main.grad = part
    return model


def on_three_grids(gradient: Tensor) -> None:
    """The arithmetic of grids at fixed exponents: the chunk's largest is looked up on the way, so memory is read once.

    The grids are not those of a real sum; the operations are as many.
    """
    numel = exact_squares.CHUNK_NUMEL["cpu"]
    y, h = torch.empty(2, numel, dtype=torch.float64)
    sums = torch.empty(3, dtype=torch.int64)
    for part in gradient.split(numel):
        y, h = y[: part.numel()], h[: part.numel()]
        torch.aminmax(part)
        y.copy_(part).square_()
        torch.add(y, 1.0, out=h)
        torch.sum(h.view(torch.int64), 0, out=sums[0])
        h.sub_(1.0)
        y.sub_(h)
        torch.add(y, 1.0, out=h)
        torch.sum(h.view(torch.int64), 0, out=sums[1])
        h.sub_(1.0)
        h.sub_(y)
        torch.sum(h.view(torch.int64), 0, out=sums[2])


def test_square_sum_of_100_million_elements(benchmark: object) -> None:
    torch.set_num_threads(1)
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)) * 1e-3
    tree, default = model_of("tree", gradient), model_of("backend", gradient)
    few = gradient[: NUMEL // 100]
    ways: dict[str, Callable[[], object]] = {
        "backend": default.grad_square_sum,
        "tree": tree.grad_square_sum,
        "three grids": lambda: on_three_grids(gradient),
        "torch, float32": lambda: torch.linalg.vector_norm(gradient),
        "math.fsum": lambda: math.fsum(x * x for x in few.tolist()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            began = time.process_time()
            way()
            if turn:
                seconds[name].append((time.process_time() - began) * (100 if name == "math.fsum" else 1))
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"{name}: {median:.3f} s of CPU, {median / NUMEL * 1e9:.2f} ns/element")
    benchmark(lambda: tree.grad_square_sum())  # type: ignore[operator]  # pytest-benchmark has no types
