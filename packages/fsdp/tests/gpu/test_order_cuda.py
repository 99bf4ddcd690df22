"""Order on streams as a profiler's trace has it, and allocations as the allocator counts them: NCCL with one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, fully_shard_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
WIDTH, BLOCKS = 1024, 4  # 4 MiB each: of the allocator's large pool


@pytest.fixture
def nccl() -> Iterator[dist.ProcessGroup]:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    dist.destroy_process_group()


class Block(nn.Module):
    """One matrix, used under a range of its name."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.at = nn.Linear(WIDTH, WIDTH), at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with record_function(f"forward {self.at}"):
            return torch.relu(self.layer(x))


def stepper(group: Any, device: str = "cuda") -> tuple[Callable[[], None], Any]:
    """A training step: of the wrapped net, or with ``group`` None of the plain one."""
    net = nn.Sequential(*(Block(at) for at in range(BLOCKS))).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    model: Any = net
    if group is not None:
        model = FullyShardedDataParallel(
            net, process_group=group, fsdp_unit_modules=[Block], buffers=BufferConfig(always_communicate=True)
        )
        fully_shard_optimizer(optimizer, model)
    x = torch.randn(256, WIDTH, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def under_ranges(model: FullyShardedDataParallel) -> None:
    """Each gather and reduction is launched under a range of its unit's name."""

    def named(word: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(unit: Any, *args: Any) -> Any:
            with record_function(f"{word} {unit}"):
                return call(unit, *args)

        return run

    gathers, reductions = model._engine.gathering.pipeline, model._engine.reduction.pipeline
    gathers.gather = named("gather", gathers.gather)
    reductions.put = named("reduce", reductions.put)


class Work(NamedTuple):
    """One kernel or copy of the device, in microseconds."""

    launched: float
    start: float
    end: float
    stream: int


class Trace:
    """What the device did, by the ranges of the host that it was launched in."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        launches = {
            e["args"]["correlation"]: (e["ts"], e["tid"])
            for e in events
            if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
        }
        done = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        self.works = [
            (Work(launches[at][0], e["ts"], e["ts"] + e["dur"], e["args"]["stream"]), launches[at][1])
            for e in done
            if (at := e["args"]["correlation"]) in launches
        ]
        self._ranges = [e for e in events if e.get("cat") == "user_annotation"]

    def of(self, name: str) -> list[list[Work]]:
        """Of each range of that name, in order, what was launched in it."""
        ranges = sorted((e for e in self._ranges if e["name"] == name), key=lambda e: e["ts"])
        return [
            [work for work, tid in self.works if tid == e["tid"] and e["ts"] <= work.launched <= e["ts"] + e["dur"]]
            for e in ranges
        ]


def test_a_unit_is_gathered_before_its_layers_and_reduced_behind_them_on_streams_of_their_own(nccl, tmp_path: Path):
    step, model = stepper(nccl)
    under_ranges(model)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = Trace(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    computes = [trace.of(f"forward {at}")[0] for at in range(BLOCKS)]
    (stream,) = {work.stream for works in computes for work in works}
    gathered, reduced = set(), set()
    for at, layers in enumerate(computes):
        gathers = [works for works in trace.of(f"gather {at}") if works]
        if gathers and gathers[0][0].launched < layers[0].launched:  # else it stayed from the step before
            assert max(work.end for work in gathers[0]) <= min(work.start for work in layers), f"unit {at}"
        (reductions,) = [works for works in trace.of(f"reduce {at}") if works]
        before = [w.end for w, _ in trace.works if w.stream == stream and w.launched < reductions[0].launched]
        assert min(work.start for work in reductions) >= max(before), f"unit {at}"
        gathered |= {work.stream for works in gathers for work in works}
        reduced |= {work.stream for work in reductions}
        assert reductions[-1].stream != stream, f"unit {at}"  # copies into the buffer go before it, where gradients are
    assert gathered and stream not in gathered
    assert not gathered & (reduced - {stream})


def large_allocations(step: Callable[[], None]) -> int:
    """Blocks of the large pool that a steady step asks the allocator for."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.large_pool.allocated"]
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["allocation.large_pool.allocated"] - before)


def test_a_steady_step_asks_the_allocator_for_no_more_large_blocks_than_the_plain_one(nccl):
    assert large_allocations(stepper(nccl)[0]) <= large_allocations(stepper(None)[0])
