"""Start a real torchrun, with a deadline.

    test_torchrun.py --> run_torchrun (this file) --> python -m torch.distributed.run --> ranks

Also used by jobs of benchmarks. On a machine with enough GPUs the ranks take them and NCCL; elsewhere they
are CPU processes over loopback. No host name is resolved: a laptop on a train has none that works.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Union

import torch

if TYPE_CHECKING:
    from warm_helpers import Program

AGENT_EXIT_S = 5.0
OUTPUT = "torchrun.out"
Started = Union[subprocess.Popen[bytes], "Program"]


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """How many ranks a job gets, and on what."""

    ranks: int
    device: str  # "cuda" or "cpu"


def world_for(least_ranks: int) -> World:
    """All GPUs where a multiple of ``least_ranks`` of them can be had, else ``least_ranks`` CPU processes.

    NCCL refuses two ranks on one device, so fewer GPUs than ranks means none.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= least_ranks:
        return World(ranks=gpus // least_ranks * least_ranks, device="cuda")
    return World(ranks=least_ranks, device="cpu")


def run_torchrun(
    world: World,
    arguments: list[str],
    *,
    folder: Path,
    timeout_s: float = 400.0,
    check: bool = True,
    warm: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``torchrun ... <arguments>`` in ``folder`` and wait.

    Args:
        world: ranks and device; with "cpu" the job sees no GPU.
        arguments: a script with its arguments, or ``-m`` and a module with its.
        timeout_s: deadline, after which every process of the job is killed.
        check: raise when the job fails.
        warm: see ``start_torchrun``.
    Returns:
        Exit status and output (stdout and stderr of all ranks together, in ``stdout``).
    Raises:
        AssertionError: the job failed or passed its deadline; holds the output.
    """
    process = start_torchrun(world, arguments, folder=folder, warm=warm)
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end_with_descendants(process)
    text = (folder / OUTPUT).read_text(errors="replace")
    command = f"torchrun --nproc-per-node={world.ranks} {' '.join(arguments)}"
    assert status is not None, f"`{command}` did not end within {timeout_s:g} s; its output:\n{text}"
    assert status == 0 or not check, f"`{command}` ended with status {status}; its output:\n{text}"
    return subprocess.CompletedProcess(command, status, stdout=text)


def start_torchrun(world: World, arguments: list[str], *, folder: Path, warm: bool = False) -> Started:
    """The torchrun process; its output and the ranks' goes to a file in ``folder``.

    ``warm``: it and its ranks are forked from a process that has torch loaded (see warm_helpers.py); CPU only.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if world.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # --local-addr: torchrun would otherwise tell the ranks to meet at this machine's host name.
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={world.ranks}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *arguments]
    if warm:
        from warm_helpers import start_warm  # not where a benchmark runs a job

        (folder / OUTPUT).write_text("")
        return start_warm(command[1:], folder=folder, environment=environment, output=folder / OUTPUT)
    with (folder / OUTPUT).open("w") as file:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)


def end_with_descendants(process: Started) -> None:
    """Ask torchrun to end, then kill it and all it started; it puts its ranks into sessions of their own."""
    if process.poll() is not None:
        return
    family = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(AGENT_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, from /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def ended(pid: int, within_s: float = 5.0) -> bool:
    """Whether a process is gone or only waits to be reaped."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False
