"""Host time per action in one process: what ``profile=True`` adds, and what two streams of a CUDA device add.

    python host_time.py [rounds]        (20 rounds: 20 s on a CPU)

``thread_time`` of the thread that runs the schedule, per F, B, I or W; in each round every contender runs four steps in
turn. On a CUDA device the host only enqueues: it is synchronised before and behind the steps and not inside, so what is
told is the time that a device would have to outlast. "plain" is the same forwards, losses and backwards without a
runner, stage by stage in a loop, as ``interpreter.py`` has it. Where no CUDA device is, that part is left out and said.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, Program, Stage, dualpipe_v, one_f_one_b, zb_v
from sixfold.pipeline.program.action import COMPUTE

WIDTH, ROWS, M, STEPS = 64, 4, 32, 4
PROGRAMS = (one_f_one_b(2, M), zb_v(2, M), dualpipe_v(2, M))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference."""
    return ((output - target) ** 2).mean()


def modules(stages: int, device: str) -> list[nn.Module]:
    """Tiny stages."""
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device) for _ in range(stages)]


def batch(device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    return torch.randn(M * ROWS, WIDTH, device=device), torch.randn(M * ROWS, WIDTH, device=device)


def plain(program: Program, device: str) -> Callable[[], object]:
    """Leaves between stages, as a pipeline has them."""
    net, (x, y) = modules(program.stages, device), batch(device)

    def step() -> None:
        for a, b in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
            hidden, pairs = a, []
            for module in net:
                leaf = hidden.detach()
                if pairs:
                    leaf.requires_grad_()
                hidden = module(leaf)
                pairs.append((leaf, hidden))
            (loss(hidden, b) / M).backward()
            for (_, output), (leaf, _) in zip(pairs[-2::-1], pairs[:0:-1], strict=True):
                output.backward(leaf.grad)

    return step


def ours(program: Program, device: str, **options: object) -> Callable[[], object]:
    """The runner."""
    stages = [Stage(module, index) for index, module in enumerate(modules(program.stages, device))]
    runner = PipelineRunner(program, stages, loss_fn=loss, **options)
    x, y = batch(device)
    return lambda: runner.step(x, y)


def measure(program: Program, device: str, rounds: int) -> None:
    """Print microseconds per action of each contender."""
    calls = {
        "plain": plain(program, device),
        "runner": ours(program, device),
        "profile": ours(program, device, profile=True),
    }
    if device == "cuda" and program.name == "dualpipe_v":
        calls["streams"] = ours(program, device, overlap="streams")
    synchronize: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    actions = sum(len(a.parts) or 1 for _, _, a in program.entries() if a.kind in COMPUTE)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in calls.items():
            run()
            synchronize()
            begin = time.thread_time()
            for _ in range(STEPS):
                run()
            times[name].append((time.thread_time() - begin) / STEPS / actions * 1e6)
            synchronize()
    for word, of in (("median", statistics.median), ("least", min)):
        figures = ", ".join(f"{name} {of(taken):.2f}" for name, taken in times.items())
        added = of([a - b for a, b in zip(times["profile"], times["runner"], strict=True)])
        tail = f"; profile adds {added:.2f} (median of turns)" if word == "median" else ""
        print(f"{device} {program.name:12s} {word:6s} us per action: {figures}{tail}", flush=True)


def main() -> None:
    """Both devices, or the one that is here."""
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for device in ("cpu", "cuda"):
        if device == "cuda" and not torch.cuda.is_available():
            print("cuda: no CUDA device on this machine; host time with streams is not measured")
            continue
        for program in PROGRAMS:
            measure(program, device, rounds)


if __name__ == "__main__":
    main()
