"""Which rank this process is, and how it joins the others.

    torchrun, srun or processes.py set variables --> detect --> Rendezvous --> join --> World   (this file) --> loop.py

The one place of the package that reads a launcher's variables and that makes or ends the default process group. A
process without such variables is a world of one, with no group at all. torch is imported when a rank joins, not before.
"""

from __future__ import annotations

import datetime
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sixfold.gpt.errors import ConfigError, TrainError

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
OWN = ("SIXFOLD_RANK", "SIXFOLD_RANKS", "SIXFOLD_STORE")  # set by processes.py in the ranks that it starts

# A rank that leaves first closes what others still read; the host of the store waits this long for all to be done.
LEAVE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the ranks of a job meet.

    Attributes:
        launcher: "torchrun", "srun" or "sixfold".
        url: ``tcp://host:port``, ``env://`` (torchrun's agent may host the store) or ``file:///path``.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    url: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.launcher}, {self.url})"


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among all ranks of the job.

    Attributes:
        store: the job's key-value store; None in a world of one.
        device: what this rank computes on; already the current one if it is a GPU.
    """

    rank: int
    size: int
    local_rank: int
    store: Store | None
    device: torch.device


def detect(environ: Mapping[str, str]) -> Rendezvous | None:
    """Read the launcher's variables; None where there is no launcher.

    srun is known by SLURM_STEP_NUM_TASKS *and* SLURM_PROCID: a batch script alone has SLURM_PROCID=0.

    Raises:
        ConfigError: a variable that is not a number, or a rank outside the world.
    """
    if all(name in environ for name in OWN):
        rank, size = _number(environ, "SIXFOLD_RANK"), _number(environ, "SIXFOLD_RANKS")
        return _checked("sixfold", rank, size, rank, f"file://{environ['SIXFOLD_STORE']}")
    if all(name in environ for name in TORCHRUN):
        rank, size, local = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return _checked("torchrun", rank, size, local, "env://")
    if all(name in environ for name in SRUN):
        rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
        local = _number(environ, "SLURM_LOCALID") if "SLURM_LOCALID" in environ else 0
        return _checked("srun", rank, size, local, _slurm_url(environ))
    return None


def _checked(launcher: str, rank: int, size: int, local_rank: int, url: str) -> Rendezvous:
    if not 0 <= rank < size:
        raise ConfigError(f"{launcher} says that this is rank {rank} of {size}; ranks are 0 to {size - 1}")
    return Rendezvous(launcher=launcher, rank=rank, size=size, local_rank=local_rank, url=url)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise ConfigError(f"{name} is {environ[name]!r}; its launcher sets it to a whole number") from error


def _slurm_url(environ: Mapping[str, str]) -> str:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    hosts = expand_hosts(nodes)
    if not hosts:
        raise ConfigError(
            "srun set SLURM_PROCID, but no SLURM_STEP_NODELIST or SLURM_JOB_NODELIST; their first host is the master"
        )
    if "MASTER_PORT" in environ:
        port = _number(environ, "MASTER_PORT")
    else:
        port = 20000 + (_number(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0) % 20000
    return f"tcp://{hosts[0]}:{port}"


def expand_hosts(nodes: str) -> list[str]:
    """Host names of a Slurm node list: ``gpu[01-03,7],login`` -> gpu01 gpu02 gpu03 gpu7 login.

    Raises:
        ConfigError: brackets that do not close or a range that is none.
    """
    hosts: list[str] = []
    # Commas inside brackets separate numbers, outside they separate hosts.
    for part in re.split(r",(?![^\[]*\])", nodes.strip()):
        if part:
            hosts += _expand_part(part, nodes)
    return hosts


def _expand_part(part: str, nodes: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, close, tail = rest.partition("]")
    tails = _expand_part(tail, nodes) if tail else [""]
    names = []
    for piece in ranges.split(","):
        low, _, high = piece.partition("-")
        if not close or not low.isdigit() or not (high or low).isdigit() or int(high or low) < int(low):
            raise ConfigError(f"node list {nodes!r}: {piece!r} is no number or range; lists look like gpu[01-03,07]")
        names += [f"{head}{n:0{len(low)}d}" for n in range(int(low), int(high or low) + 1)]
    return [name + tail for name in names for tail in tails]


def pick_device(wanted: str, local_rank: int = 0) -> torch.device:
    """The device of a rank: ``auto`` takes a GPU where there are any.

    Raises:
        ConfigError: ``cuda`` without a usable GPU, or more ranks on this machine than GPUs.
    """
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('run.device is "cuda" and torch sees no GPU here; use "cpu", or a torch built for this GPU')
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"run.device is {wanted!r} and local rank {local_rank} needs a GPU of its own; this machine shows {count}. "
            f'Start at most {count} ranks on it, or set run.device = "cpu"'
        )
    return torch.device("cuda", local_rank)


def join(rendezvous: Rendezvous | None, device: str = "auto", timeout_s: float = 600.0) -> World:
    """Meet the other ranks and make the default process group; a world of one makes none.

    gloo on a CPU, ``cpu:gloo,cuda:nccl`` on GPUs with the device set first. Collective over all ranks.

    Args:
        rendezvous: from ``detect``; None is a world of one.
        device: "auto", "cpu" or "cuda".
        timeout_s: longest wait for the others, here and in every later collective.
    Raises:
        ConfigError: the device. TrainError: the others did not come in time.
    """
    import torch

    rank, size, local_rank = (rendezvous.rank, rendezvous.size, rendezvous.local_rank) if rendezvous else (0, 1, 0)
    chosen = pick_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    elif rendezvous is not None:
        torch.set_num_threads(1)  # ranks share the cores; a process of its own keeps what its user set
    if rendezvous is None or size == 1:
        return World(rank=rank, size=size, local_rank=local_rank, store=None, device=chosen)
    store = _make_group(rendezvous, chosen, timeout_s)
    return World(rank=rank, size=size, local_rank=local_rank, store=store, device=chosen)


def _make_group(rendezvous: Rendezvous, device: torch.device, timeout_s: float) -> Store:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    timeout = datetime.timedelta(seconds=timeout_s)
    on_gpu = device.type == "cuda"
    try:
        store = _store(rendezvous, timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=PrefixStore("default", store),
            rank=rendezvous.rank,
            world_size=rendezvous.size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    except (dist.DistError, RuntimeError) as error:
        raise TrainError(
            f"{rendezvous} did not meet the others within {timeout_s:g} s: {error}. Are all {rendezvous.size} ranks "
            f"started, and can they reach that address?"
        ) from error
    return store


def _store(rendezvous: Rendezvous, timeout: datetime.timedelta) -> Store:
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous as meet

    if rendezvous.launcher == "sixfold":
        store: Store = FileStore(rendezvous.url.removeprefix("file://"), rendezvous.size)
    elif rendezvous.launcher == "torchrun":
        store = next(iter(meet("env://", rendezvous.rank, rendezvous.size, timeout=timeout)))[0]
    else:
        host, _, port = rendezvous.url.removeprefix("tcp://").rpartition(":")
        store = TCPStore(host, int(port), rendezvous.size, is_master=rendezvous.rank == 0, timeout=timeout)
    store.set_timeout(timeout)
    return store


def leave(world: World) -> None:
    """End the process group that ``join`` made. Rank 0 goes last, because the store may live in its process."""
    # [Note: a failed rank keeps its connections] In the finally of a failed run nothing is closed: peers would see
    # closed connections and report those instead of what happened first. The process ends soon, and they with it.
    if world.store is None or sys.exception() is not None:
        return
    import torch.distributed as dist

    try:
        world.store.add("sixfold/leaving", 1)
        deadline = time.monotonic() + LEAVE_S
        while world.rank == 0 and world.store.add("sixfold/leaving", 0) < world.size and time.monotonic() < deadline:
            time.sleep(0.005)
    except RuntimeError:  # the store went with its host: nobody waits for us there
        pass
    if dist.is_initialized():
        dist.destroy_process_group()
