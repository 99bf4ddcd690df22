"""What `nox -s gpu` runs, in the order of what it tells most. Nothing is done here.

    GROUPS (this file) --> gpu_run.py runs each --> gpu_page.py: the page of results

[Note: shares] A group ends by the sum of the shares up to its own. So what one leaves over the next ones have, and the
whole ends in time whatever hangs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checks.commands import pytest_on
from checks.places import ROOT

TOTAL_S = 480  # of the whole, installing apart
RESERVE_S = 20  # for asking the device, ending what hangs, and writing
LEAST_S = 10  # torch alone takes half of it to load: with less a group is not begun
TEST_S = 100  # of one test


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Test files in one pytest, or one benchmark with ``--out``.

    Attributes:
        tells: what is known when it has passed.
        share_s: of the clock, see [Note: shares].
        places: test files, or one script; relative to ROOT.
        arguments: of the script.
    """

    name: str
    tells: str
    share_s: int
    places: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    @property
    def benchmark(self) -> bool:
        """A script that measures; else tests."""
        return "/benchmarks/" in self.places[0]

    def command(self, python: str, out: Path, of_pytest: Sequence[str] = ()) -> list[str]:
        """Writes to ``out`` what it finds, line by line or case by case: what ends it early loses no more than one."""
        if self.benchmark:
            return [python, str(ROOT / self.places[0]), *self.arguments, "--out", str(out)]
        tests = [*pytest_on(*(ROOT / place for place in self.places)), "-m", "gpu", "-o", f"timeout={TEST_S}"]
        return [python, *tests, "-p", "checks.gpu_records", "--records", str(out), *of_pytest]

    def by_hand(self) -> str:
        """The same for who runs it alone."""
        words = [*self.places, *self.arguments] if self.benchmark else ["-m", "pytest", *self.places, "-m", "gpu"]
        return " ".join(["python", *words])


def _tests(package: str, *names: str) -> tuple[str, ...]:
    return tuple(f"packages/{package}/tests/gpu/test_{name}.py" for name in names)


GROUPS = (
    Group(
        name="kernels",
        tells="packed documents, experts, compiled layers and float8 products agree with their definitions",
        share_s=120,  # compilers take half of it, so what they compile comes last
        places=(
            *_tests("gpt", "model", "context_parallel", "moe_gpu"),
            *_tests("fsdp", "fp8_cuda"),
            *_tests("gpt", "kernels_gpu"),
        ),
    ),
    Group(
        name="training",
        tells="the train loop has the losses of a plain loop on the CPU",
        share_s=50,
        places=_tests("gpt", "train_gpu"),
    ),
    Group(
        name="fsdp",
        tells="bits of plain training, streams, memory, NCCL with one rank",
        share_s=60,
        places=_tests("fsdp", "cuda", "optim_cuda", "reduce_cuda", "budget_cuda", "order_cuda", "nccl_alone"),
    ),
    Group(
        name="pipeline",
        tells="bits of the plain loop, streams, graphs, messages",
        share_s=60,
        places=_tests(
            "pipeline", "one_process", "actions_on_a_device", "streams_on_a_device", "overlap_on_a_device",
            "graphs_on_a_device", "one_device", "edges_on_devices",
        ),
    ),
    Group(
        name="checkpoints and data",
        tells="device tensors come back bit for bit, batches arrive whole",
        share_s=30,
        places=(*_tests("dist-ckpt", "cuda", "background_cuda", "parallel"), *_tests("blending", "pinned")),
    ),
    Group(
        name="planned memory",
        tells="a step holds as much as `sixfold plan` says",
        share_s=30,
        places=_tests("gpt", "plan_gpu"),
    ),
    Group(
        name="updates",
        tells="whole updates of a Llama of 1.1 B parameters beside a plain loop",
        share_s=80,
        places=("packages/gpt/benchmarks/one_gpu.py",),
        arguments=("--seconds", "20"),
    ),
    Group(
        name="saves",
        tells="a save, a background save and a load beside torch DCP",
        share_s=30,
        places=("packages/dist-ckpt/benchmarks/one_gpu.py",),
        arguments=("--gib", "2", "--rounds", "1"),
    ),
)  # fmt: skip


def ends_of(groups: Sequence[Group] = GROUPS) -> list[int]:
    """By which second each group ends. [Note: shares]"""
    return [sum(one.share_s for one in groups[: place + 1]) for place in range(len(groups))]


def listing(groups: Sequence[Group] = GROUPS) -> str:
    """What would run, in which order and by when."""
    lines = [
        f"{end:4d} s  {group.name}: {group.tells}\n        {group.by_hand()}"
        for group, end in zip(groups, ends_of(groups), strict=True)
    ]
    return "\n".join(["ends by", *lines])
