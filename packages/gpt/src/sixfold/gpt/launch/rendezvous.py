"""Which rank this process is, and how it joins the others.

    torchrun, srun, a PyTorchJob or spawn.py set variables --> detect --> Rendezvous --> join --> World  (this file)
                                                                                                          `-> loop.py

The one place of the package that reads a launcher's variables and that makes or ends the default process group. A
process without such variables is a world of one, with no group at all. torch is imported when a rank joins, not before.

[Note: which GPU is a rank's] Under torchrun, and for ranks that we start, a rank sees all devices of the machine. It
takes the device of its local rank. srun may bind devices (``--gpus-per-task``, ``--gpu-bind``). A task then sees fewer
devices than its step has on the node, or no more than it asked for. They are its own, and it takes the first.
``--gpu-bind=none`` beside ``--gpus-per-task`` shows all devices to all tasks. A single visible device is always taken.
When ranks meet, they check that no two share a device, and that all have one or none.

[Note: one process of a pod] Kubernetes' PyTorchJob sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, but no
LOCAL_RANK. Then each pod has one process, and its devices are the process's own. torchrun in the container reads other
variables of the job (PET_...) and sets LOCAL_RANK for the ranks that it starts. Then they are ranks of torchrun.
"""

from __future__ import annotations

import datetime
import json
import re
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sixfold.gpt.errors import ConfigError, TrainError

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PYTORCHJOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
MPIRUN = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))  # Open MPI; MPICH and Intel MPI
NODE_HOST = "SIXFOLD_NODE_HOST"  # set by elastic/nodes.py: how other nodes reach this one
OWN = ("SIXFOLD_RANK", "SIXFOLD_RANKS", "SIXFOLD_STORE")  # set by spawn.py in the ranks that it starts

# A rank that leaves first closes what others still read; the host of the store waits this long for all to be done.
LEAVE_S = 10.0
CONNECT_POLL_S = 0.1
SERVED_S = 10.0  # for a store that is served already; nobody listens there when its generation is over


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the ranks of a job meet.

    Attributes:
        launcher: "torchrun", "srun", "pytorchjob" or "sixfold".
        url: ``tcp://host:port``, ``env://`` (torchrun's agent may host the store) or ``file:///path``.
        gpus_on_node: what srun says this machine has for the job step; 0 where nobody says.
        gpus_per_task: what srun was asked to give each task; 0 where it was not.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    url: str
    gpus_on_node: int = 0
    gpus_per_task: int = 0

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

    srun is known by SLURM_STEP_NUM_TASKS *and* SLURM_PROCID: a batch script alone has SLURM_PROCID=0. A step of one
    task (a shell on a node) is no launcher.

    Raises:
        ConfigError: a variable that is not a number, a rank outside the world, or one of several processes that nobody
            told how to meet (mpirun, a part of a launcher's variables): alone, each would train its own run in run.dir.
    """
    if all(name in environ for name in OWN):
        rank, size = _number(environ, "SIXFOLD_RANK"), _number(environ, "SIXFOLD_RANKS")
        return _checked("sixfold", rank, size, rank, f"file://{environ['SIXFOLD_STORE']}")
    if all(name in environ for name in TORCHRUN):
        rank, size, local = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return _checked("torchrun", rank, size, local, "env://")
    tasks = _optional(environ, "SLURM_STEP_NUM_TASKS", 1) if all(name in environ for name in SRUN) else 1
    _refuse_mpirun(environ, tasks)
    if tasks > 1:
        rank, local = _number(environ, "SLURM_PROCID"), _optional(environ, "SLURM_LOCALID", 0)
        found = _checked("srun", rank, tasks, local, _slurm_url(environ))
        on_node = _optional(environ, "SLURM_GPUS_ON_NODE", 0)
        return replace(found, gpus_on_node=on_node, gpus_per_task=_gpus_per_task(environ))
    if "RANK" in environ and _optional(environ, "WORLD_SIZE", 1) > 1:
        return _pytorchjob(environ)
    return None


def node_host(environ: Mapping[str, str]) -> str | None:
    """How ranks of other nodes reach this one; None where all ranks are here, or another launcher has started them."""
    return environ.get(NODE_HOST)


def _pytorchjob(environ: Mapping[str, str]) -> Rendezvous:
    """See [Note: one process of a pod]."""
    told = f"RANK is {environ['RANK']} and WORLD_SIZE {environ['WORLD_SIZE']}"
    missing = [name for name in PYTORCHJOB if name not in environ]
    if missing:
        raise ConfigError(
            f"{told}, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start the ranks by "
            f"torchrun or a PyTorchJob, which set {', '.join(PYTORCHJOB)}, or unset RANK and WORLD_SIZE for a run of "
            f"its own"
        )
    processes = environ.get("PET_NPROC_PER_NODE", "1")
    if processes not in ("", "1"):
        raise ConfigError(
            f"{told}, and PET_NPROC_PER_NODE is {processes}, which torchrun reads: let the container run "
            f"`torchrun -m sixfold.gpt train ...`, or set nprocPerNode of the PyTorchJob to 1"
        )
    url = f"tcp://{environ['MASTER_ADDR']}:{_number(environ, 'MASTER_PORT')}"
    return _checked("pytorchjob", _number(environ, "RANK"), _number(environ, "WORLD_SIZE"), 0, url)


def _refuse_mpirun(environ: Mapping[str, str], tasks: int) -> None:
    for size_name, rank_name in MPIRUN:
        size = _optional(environ, size_name, 1)
        # srun --mpi sets them too, to its own numbers; mpirun inside a job starts its daemons by srun, others'.
        by_srun = size == tasks and environ.get(rank_name) == environ.get("SLURM_PROCID")
        if size > 1 and not by_srun:
            raise ConfigError(
                f"mpirun started {size} processes ({size_name}); it tells them no place to meet: start the ranks by "
                f"torchrun, srun or `sixfold train --ranks {size}`"
            )


def _checked(launcher: str, rank: int, size: int, local_rank: int, url: str) -> Rendezvous:
    if not 0 <= rank < size:
        raise ConfigError(f"{launcher} says that this is rank {rank} of {size}; ranks are 0 to {size - 1}")
    return Rendezvous(launcher=launcher, rank=rank, size=size, local_rank=local_rank, url=url)


def _optional(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    return _number(environ, name) if name in environ else otherwise


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise ConfigError(f"{name} is {environ[name]!r}; its launcher sets it to a whole number") from error


def _gpus_per_task(environ: Mapping[str, str]) -> int:
    """SLURM_GPUS_PER_TASK looks like ``2`` or ``volta:3,kepler:1``; 0 where it is not set."""
    parts = environ.get("SLURM_GPUS_PER_TASK", "0").split(",")
    return sum(_number({"SLURM_GPUS_PER_TASK": part.rpartition(":")[2]}, "SLURM_GPUS_PER_TASK") for part in parts)


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
        # Steps of one job run side by side on one host; the factor keeps them apart from the jobs numbered next.
        job, step = _optional(environ, "SLURM_JOB_ID", 0), _optional(environ, "SLURM_STEP_ID", 0)
        port = 20000 + (job + 1009 * step) % 20000
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


def device_index(rendezvous: Rendezvous | None, visible: int) -> int:
    """Which of ``visible`` GPUs is this rank's; see [Note: which GPU is a rank's].

    Raises:
        ConfigError: more ranks on this machine than GPUs.
    """
    if rendezvous is None:
        return 0
    local_rank = rendezvous.local_rank
    if rendezvous.launcher == "srun":
        alone = visible == 1 and not rendezvous.gpus_on_node
        if alone or visible < rendezvous.gpus_on_node or visible <= rendezvous.gpus_per_task:
            return 0
    elif rendezvous.launcher == "torchrun" and visible == 1:
        return 0
    elif rendezvous.launcher == "pytorchjob" and visible > 1:
        raise ConfigError(
            f"rank {rendezvous.rank} is the only process of its pod (LOCAL_RANK is not set) and sees {visible} GPUs; "
            f"let the container run `torchrun --nproc-per-node={visible} -m sixfold.gpt train ...`, or give it one GPU"
        )
    if local_rank >= visible:
        raise ConfigError(
            f"local rank {local_rank} needs a GPU of its own; this machine shows {visible}. Start at most {visible} "
            f'ranks on it, or set run.device = "cpu"'
        )
    return local_rank


Place = tuple[str, str, str]  # of a rank: host, kind of device, the GPU's identifier


def check_places(places: Sequence[Place]) -> None:
    """Ranks compute on one kind of device, and no two on one GPU.

    Raises:
        ConfigError: naming two ranks that do not go together.
    """
    ranks: dict[Place, int] = {}
    for rank, place in enumerate(places):
        host, kind, gpu = place
        if kind != places[0][1]:
            raise ConfigError(
                f"rank 0 computes on {places[0][1]} and rank {rank} on {kind} of {host}; set run.device, and give "
                f"every rank a GPU or none"
            )
        if gpu and ranks.setdefault(place, rank) != rank:
            raise ConfigError(
                f"ranks {ranks[place]} and {rank} are both on GPU {gpu} of {host}; start as many ranks on a machine as "
                f"it has GPUs, or let srun bind them (--gpus-per-task=1)"
            )


def pick_device(wanted: str, rendezvous: Rendezvous | None = None) -> torch.device:
    """The device of a rank: ``auto`` takes a GPU where there are any.

    Raises:
        ConfigError: ``cuda`` without a usable GPU, or more ranks on this machine than GPUs.
    """
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('run.device is "cuda" and torch sees no GPU here; use "cpu", or a torch built for this GPU')
    return torch.device("cuda", device_index(rendezvous, torch.cuda.device_count()))


def make_deterministic(environ: MutableMapping[str, str]) -> None:
    """Have torch compute the same bits each time, or refuse. Before CUDA is first used: cuBLAS reads its variable then.

    A CUBLAS_WORKSPACE_CONFIG of the user's own stays.
    """
    import torch

    environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def join(rendezvous: Rendezvous | None, device: str = "auto", timeout_s: float = 600.0) -> World:
    """Meet the other ranks and make the default process group; a world of one makes none.

    gloo on a CPU, ``cpu:gloo,cuda:nccl`` on GPUs with the device set first. Collective over all ranks.

    Args:
        rendezvous: from ``detect``; None is a world of one.
        device: "auto", "cpu" or "cuda".
        timeout_s: longest wait for the others, here and in every later collective.
    Raises:
        ConfigError: the device, or devices that do not go together (on all ranks). TrainError: the others did not come
            in time.
    """
    import torch

    rank, size, local_rank = (rendezvous.rank, rendezvous.size, rendezvous.local_rank) if rendezvous else (0, 1, 0)
    chosen = pick_device(device, rendezvous)
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
        _agree_on_places(store, rendezvous, device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=PrefixStore("default", store),
            rank=rendezvous.rank,
            world_size=rendezvous.size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    except TrainError:
        raise
    except (dist.DistError, RuntimeError) as error:
        raise TrainError(_not_met(rendezvous, timeout_s, str(error))) from error
    return store


def _not_met(rendezvous: Rendezvous, timeout_s: float, error: str) -> str:
    first = error.splitlines()[0].rstrip(".")
    if "EADDRINUSE" in error:
        return f"{rendezvous}: the port is in use on this machine; set MASTER_PORT to a free one on all ranks"
    return (
        f"{rendezvous} did not meet the others within {timeout_s:g} s: {first}. Are all {rendezvous.size} ranks "
        f"started, and can they reach that address?"
    )


def _await_host(rendezvous: Rendezvous, host: str, port: int, timeout_s: float) -> None:
    """Return when rank 0 listens. torch's own client prints pages about each attempt that fails.

    Raises:
        TrainError: the name is not known, or nobody listens there in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1)).close()
            return
        except socket.gaierror as error:
            why = f"the host name {host} is not known here ({error.strerror})"
        except OSError as error:
            why = f"nobody listens there ({error.strerror or error})"
        if time.monotonic() > deadline:
            raise TrainError(_not_met(rendezvous, timeout_s, why))
        time.sleep(CONNECT_POLL_S)


def _agree_on_places(store: Store, rendezvous: Rendezvous, device: torch.device) -> None:
    """Rank 0 looks at the places of all ranks and tells all what is wrong with them, if anything is."""
    import torch

    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    place: Place = (socket.gethostname(), device.type, gpu)
    store.set(f"sixfold/place/{rendezvous.rank}", json.dumps(place))
    if rendezvous.rank == 0:
        places = [tuple(json.loads(store.get(f"sixfold/place/{rank}"))) for rank in range(rendezvous.size)]
        try:
            check_places(places)
            problem = ""
        except ConfigError as error:
            problem = str(error)
        store.set("sixfold/places", problem)
    if problem := store.get("sixfold/places").decode():
        _last_of_all(store, "sixfold/places-read", rendezvous.rank, rendezvous.size)
        raise ConfigError(problem)


def _last_of_all(store: Store, key: str, rank: int, size: int) -> None:
    """Say that this rank is done; rank 0 waits for the others, because the store may live in its process."""
    store.add(key, 1)
    deadline = time.monotonic() + LEAVE_S
    while rank == 0 and store.add(key, 0) < size and time.monotonic() < deadline:
        time.sleep(0.005)


def _store(rendezvous: Rendezvous, timeout: datetime.timedelta) -> Store:
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous as meet

    if rendezvous.url.startswith("file://"):
        store: Store = FileStore(rendezvous.url.removeprefix("file://"), rendezvous.size)
    elif rendezvous.launcher == "torchrun":
        store = next(iter(meet("env://", rendezvous.rank, rendezvous.size, timeout=timeout)))[0]
    else:
        host, _, port = rendezvous.url.removeprefix("tcp://").rpartition(":")
        host, own = host.strip("[]"), rendezvous.launcher == "sixfold"  # the leader of the nodes serves it, from before
        if own or rendezvous.rank != 0:
            _await_host(rendezvous, host, int(port), SERVED_S if own else timeout.total_seconds())
        is_master = rendezvous.rank == 0 and not own
        store = TCPStore(host, int(port), rendezvous.size, is_master=is_master, timeout=timeout)
    store.set_timeout(timeout)
    return store


def leave(world: World) -> None:
    """End the process group that ``join`` made. Rank 0 goes last."""
    # [Note: a failed rank keeps its connections] In the finally of a failed run nothing is closed: peers would see
    # closed connections and report those instead of what happened first. The process ends soon, and they with it.
    if world.store is None or sys.exception() is not None:
        return
    import torch.distributed as dist

    try:
        _last_of_all(world.store, "sixfold/leaving", world.rank, world.size)
    except RuntimeError:  # the store went with its host: nobody waits for us there
        pass
    if dist.is_initialized():
        dist.destroy_process_group()
