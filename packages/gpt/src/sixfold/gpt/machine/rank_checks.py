"""What several ranks find out together: do they hear each other, do they see one folder, and how fast are they?

    Options --> examine_rank (this file), on every rank --> Report on rank 0 --> doctor.py

[Note: roll calls] Before each check every rank signs in the job's store and waits for the others' signs, with a
deadline. Missing ranks are named, and no rank enters a collective in which it would wait for them. If a rank is lost
inside a collective, the group's deadline finds it; that deadline is the same. Then rank 0 reports what it has, and
signs that it does so. A rank that does not find this sign raises, so a lost rank 0 is reported too.
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sixfold.gpt.errors import ConfigError, TrainError
from sixfold.gpt.launch.rendezvous import World, detect, join, leave
from sixfold.gpt.machine.local_checks import FAIL, OK, WARN, Finding, Options, Report, local_checks
from sixfold.gpt.parallel.agreement import gather_objects, world_collective

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_S = 0.01
_TOLD_S = 5.0  # after the first error: time for rank 0's own deadline
_SIZES = {"cpu": (2**12, 2**16, 2**20, 2**23), "cuda": (2**14, 2**20, 2**24, 2**27)}  # bytes of a rank's part
_LARGEST = {"cpu": 2**28, "cuda": 2**32}  # bytes of all ranks' parts
_MATMUL = {"cpu": 512, "cuda": 8192}
_SUMMED = {"cpu": 2**22, "cuda": 2**27}  # elements: more than a core's cache holds
_MEASURE_S = 0.15  # of one size, and of one product
_CLOCK_ROUNDS = 5
_CLOCK_WARN_S = 0.1
_SLOW = 0.8  # of the middle rank's rate
_NAMES = ("b200", "h200", "h100", "a100")


@dataclass(kw_only=True)
class Job:
    """The ranks at work: what rank 0 knows so far.

    Attributes:
        control: CPU group of all ranks.
    """

    world: World
    options: Options
    control: dist.ProcessGroup | None
    hosts: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    calls: int = 0

    @property
    def several(self) -> bool:
        """There is someone to speak to."""
        return self.world.size > 1

    def say(self, level: str, what: str, value: str, remedy: str = "") -> None:
        """A finding, which rank 0 keeps for all."""
        if self.world.rank == 0:
            self.findings.append(Finding(level, what, value, remedy))

    def all(self, mine: Any) -> list[Any]:
        """``mine`` of every rank."""
        self.meet("exchange")
        return gather_objects(self.control, self.world.size, mine)

    def meet(self, what: str) -> None:
        """[Note: roll calls]"""
        self.calls += 1
        if self.world.store is not None:
            roll_call(
                self.world.store, f"{self.calls}/{what}", self.world.rank, self.world.size, self.options.timeout_s
            )


def roll_call(store: Store, what: str, rank: int, ranks: int, timeout_s: float) -> None:
    """Return when every rank has called with ``what``.

    Raises:
        TrainError: naming the ranks that have not within ``timeout_s``.
    """
    ends = time.monotonic() + timeout_s
    store.set(f"doctor/{what}/{rank}", "here")
    # Everybody polls one number, not the signs of all: a thousand ranks would ask a million times.
    store.add(f"doctor/{what}", 1)
    while store.add(f"doctor/{what}", 0) < ranks:
        if time.monotonic() > ends:
            missing = [other for other in range(ranks) if not store.check([f"doctor/{what}/{other}"])]
            some = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise TrainError(f"rank {some} did not answer within {timeout_s:g} s (at {what.partition('/')[2]})")
        time.sleep(_POLL_S)


def examine_rank(options: Options, *, local: bool = False) -> Report | None:
    """Examine this rank among all; rank 0 has the report of all, the others None.

    Args:
        local: look at limits and folders of every machine too (where no launcher's process does).
    """
    rendezvous = detect(os.environ)
    speaks = rendezvous is None or rendezvous.rank == 0
    try:
        world = join(rendezvous, options.device, options.timeout_s)
    except (ConfigError, TrainError) as error:
        if not speaks:
            return None
        found = local_checks(options.folder) if local else []
        remedy = "look whether every rank was started and can reach rank 0's address"
        return Report(findings=[*found, Finding(FAIL, "ranks meet", str(error), remedy)], machine=None)
    return examine(world, options, local=local)


def examine(world: World, options: Options, *, local: bool = False) -> Report | None:
    """As ``examine_rank``, of a job whose ranks have met."""
    control = None
    if world.size > 1:
        control = dist.group.WORLD if world.device.type == "cpu" else dist.new_group(backend="gloo")
    job = Job(world=world, options=options, control=control)
    checks: list[Callable[[Job], None]] = [_places, _clocks, _folder, _products, _collectives]
    if local:
        checks.insert(0, _machines)
    for check in checks:
        try:
            check(job)
        except (TrainError, RuntimeError, OSError) as error:
            if world.rank != 0:
                _await_report(world, error)
                return None
            text = str(error).strip().splitlines()[0]
            job.say(FAIL, f"ranks ({check.__name__.strip('_')})", text, "look at that rank's machine and its network")
            _tell(world)
            return Report(findings=job.findings, machine=None)
    leave(world)
    if world.rank != 0:
        return None
    return Report(findings=job.findings, machine=job.machine or None)


def _tell(world: World) -> None:
    """Rank 0 has a report."""
    if world.store is not None:
        world.store.set("doctor/told", "")


def _await_report(world: World, error: Exception) -> None:
    """Raise ``error`` where rank 0 does not tell in time what it knows."""
    ends = time.monotonic() + _TOLD_S
    while time.monotonic() < ends:
        try:
            if world.store is None or world.store.check(["doctor/told"]):
                return
        except RuntimeError:  # rank 0 has ended, and the store with it
            return
        time.sleep(_POLL_S)
    raise error


def _machines(job: Job) -> None:
    """Limits and folders of each machine, once; only what is wrong of the others."""
    found = job.all([(one.level, one.what, one.value, one.remedy) for one in local_checks(job.options.folder)])
    hosts = job.all(socket.gethostname())
    seen: set[tuple[str, str]] = set()
    for host, rows in zip(hosts, found, strict=True):
        for level, what, value, remedy in rows:
            if (host, what) not in seen and (host == hosts[0] or level != OK):
                job.say(level, what if host == hosts[0] else f"{what} on {host}", value, remedy)
            seen.add((host, what))


def _places(job: Job) -> None:
    """Where ranks are, on what, with which torch and back ends."""
    device = job.world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _memory()
    rows = job.all((socket.gethostname(), name, memory, torch.__version__))
    job.hosts = [host for host, *_ in rows]
    per_host = max(job.hosts.count(host) for host in job.hosts)
    devices = _counted([row[1] for row in rows])
    job.say(OK, "ranks", f"{len(rows)} on {len(set(job.hosts))} machines, {per_host} on one; {devices}")
    versions = {row[3] for row in rows}
    if len(versions) > 1:
        job.say(FAIL, "torch", f"ranks have {', '.join(sorted(versions))}", "install one version on all machines")
    if device.type == "cuda":
        if dist.is_nccl_available():
            job.say(OK, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
        else:
            job.say(FAIL, "NCCL", "this torch has none", "install a CUDA build of torch")
    elif not dist.is_gloo_available():
        job.say(FAIL, "gloo", "this torch has none", "install torch from PyPI or pytorch.org")
    known = next((one for one in _NAMES if one in name.lower()), None)
    if device.type == "cuda" and known is None:
        job.say(
            WARN, "device", f"{name} is not in plan's table", "plan counts MFU as on an a100; its rates are measured"
        )
    memory = min(row[2] for row in rows) // (per_host if device.type == "cpu" else 1)
    job.machine = {
        "device": known or ("a100" if device.type == "cuda" else "cpu"),
        "name": name,
        "ranks": len(rows),
        "per_node": per_host,
        "memory_bytes": memory,
    }


def _memory() -> int:
    """Bytes that this machine could give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _clocks(job: Job) -> None:
    """Each rank's clock against rank 0's, by the quickest of a few round trips."""
    if not job.several:
        return
    job.meet("clocks")
    rank, size = job.world.rank, job.world.size
    offsets: dict[int, float] = {}
    with world_collective("round trips of clocks"):
        for other in range(1, size):
            if rank == 0:
                offsets[other] = min(_round_trip(other, job.control) for _ in range(_CLOCK_ROUNDS))[1]
            elif rank == other:
                for _ in range(_CLOCK_ROUNDS):
                    dist.recv(torch.empty(1, dtype=torch.float64), 0, group=job.control)
                    dist.send(torch.tensor([time.time()], dtype=torch.float64), 0, group=job.control)
    if rank == 0:
        worst = max(offsets, key=lambda one: abs(offsets[one]))
        value = f"at most {abs(offsets[worst]):.6f} s apart (rank {worst})"
        if abs(offsets[worst]) > _CLOCK_WARN_S:
            job.say(WARN, "clocks", value, "run chrony or ntpd on all machines: times in logs cannot be compared")
        else:
            job.say(OK, "clocks", value)


def _round_trip(other: int, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """(seconds, how far ``other``'s clock is ahead)."""
    theirs = torch.empty(1, dtype=torch.float64)
    began, before = time.perf_counter(), time.time()
    dist.send(torch.zeros(1, dtype=torch.float64), other, group=group)
    dist.recv(theirs, other, group=group)
    took = time.perf_counter() - began
    return took, float(theirs) - (before + took / 2)


def _folder(job: Job) -> None:
    if job.several:
        shared_folder(job, Path(job.options.folder))


def shared_folder(job: Job, folder: Path) -> None:
    """A file that rank 0 writes is seen by every rank, with its content, and gone for every rank after its rename."""
    nonce = secrets.token_hex(16)
    wait_s = min(job.options.timeout_s / 2, 10.0)  # the others wait for the ranks that do not see it
    name = job.all((nonce, str(folder)))[0][0]
    path, moved = folder / f".sixfold-doctor-{name}", folder / f".sixfold-doctor-{name}.moved"
    try:
        if job.world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        job.meet("written")
        seen = job.all(_appears(path, name, wait_s))
        job.meet("read")
        if job.world.rank == 0:
            path.rename(moved)
        job.meet("renamed")
        renamed = job.all(_appears(moved, name, wait_s))
    finally:
        if job.world.rank == 0:
            path.unlink(missing_ok=True)
            moved.unlink(missing_ok=True)
    for what, rows in (("a file that rank 0 wrote", seen), ("a file that rank 0 renamed", renamed)):
        blind = [rank for rank, there in enumerate(rows) if there is None]
        if blind:
            where = ", ".join(sorted({job.hosts[rank] for rank in blind})) if job.hosts else "their machines"
            text = f"rank {', '.join(map(str, blind[:8]))} ({where}) does not see {what}"
            job.say(FAIL, f"shared folder {folder}", text, "runs of several machines need one folder: name it by --dir")
            return
    slowest = max(seen)
    job.say(OK, f"shared folder {folder}", f"a file and its rename are seen by all ranks within {slowest:.3f} s")


def _appears(path: Path, content: str, timeout_s: float) -> float | None:
    """Seconds until ``path`` has ``content``; None: never within ``timeout_s``."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        try:
            os.listdir(path.parent)  # network file systems keep what they last saw of a folder
            if path.read_text() == content:
                return time.monotonic() - began
        except OSError:
            pass
        time.sleep(_POLL_S)
    return None


# ---- rates


def _products(job: Job) -> None:
    """Matrix products on all ranks at once: the slowest rank's rate is the job's."""
    job.meet("products")
    device = job.world.device
    rates = {name: _matmul_rate(device, dtype) for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))}
    moved = job.all(_memory_rate(device))
    job.say(OK, "memory", f"{min(moved) / 1e9:.1f} to {max(moved) / 1e9:.1f} GB/s of elementwise sums on a rank")
    rows = job.all(rates)
    for name in rates:
        found = [row[name] for row in rows]
        middle, slowest = statistics.median(found), min(found)
        value = f"{slowest / 1e12:.3f} to {max(found) / 1e12:.3f} TFLOP/s on a rank"
        if slowest < _SLOW * middle:
            who = found.index(slowest)
            job.say(
                WARN, f"products in {name}", f"{value}; rank {who} is the slowest", "look at its clock rate and load"
            )
        else:
            job.say(OK, f"products in {name}", value)
    job.machine |= {
        "flops": min(row["bf16"] for row in rows),
        "flops_fp32": min(row["fp32"] for row in rows),
        "memory_bytes_per_s": min(moved),
    }


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the median of as many square products as fit in ``_MEASURE_S``, two at least.

    Not of the best one: a step is made of all of them, on a machine that does other things too.
    """
    size = _MATMUL[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    _timed(lambda: a @ b, device)
    times, ends = [_timed(lambda: a @ b, device)], time.perf_counter() + _MEASURE_S
    while len(times) < 1_000 and time.perf_counter() < ends:
        times.append(_timed(lambda: a @ b, device))
    return 2.0 * size**3 / statistics.median(times)


def _memory_rate(device: torch.device) -> float:
    """Bytes per second that sums of float32 tensors of ``_SUMMED`` elements read and write, in the median."""
    a, b, out = (torch.ones(_SUMMED[device.type], device=device) for _ in range(3))
    times = [_timed(lambda: torch.add(a, b, out=out), device) for _ in range(12)][2:]
    return 3.0 * 4 * a.numel() / statistics.median(times)


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _collectives(job: Job) -> None:
    """The three collectives over all ranks, and over those of one machine where there are several."""
    if not job.several:
        job.say(WARN, "collectives", "one rank has nothing to send", "give --ranks 2, or start doctor by your launcher")
        return
    hosts = list(dict.fromkeys(job.hosts))
    near, far = None, None
    if len(hosts) == 1:
        near = _measure(job, None, job.world.size, "collectives on one machine")
    else:
        groups = [dist.new_group([r for r, h in enumerate(job.hosts) if h == host]) for host in hosts]
        mine = groups[hosts.index(job.hosts[job.world.rank])]
        size = job.hosts.count(job.hosts[job.world.rank])
        if all(job.all(size > 1)):
            near = _measure(job, mine, size, "collectives within a machine")
        far = _measure(job, None, job.world.size, "collectives over all machines")
    known = near or far
    assert known is not None, f"{job.world.size} ranks on {len(hosts)} machines measured nothing"
    job.machine |= {
        "near_bytes_per_s": (near or known)["all_gather"]["bytes_per_s"],
        "node_bytes_per_s": (far or known)["all_gather"]["bytes_per_s"],
        "latency_s": max((far or known)["all_gather"]["latency_s"], 1e-7),
        "collectives": {"near": near, "far": far},
    }


def _measure(job: Job, group: dist.ProcessGroup | None, size: int, what: str) -> dict[str, Any]:
    """Seconds of each collective at several sizes, fitted; a line each."""
    found: dict[str, Any] = {}
    device = job.world.device
    for name, passes in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        points = []
        for nbytes in sizes_of(device.type, size):
            job.meet(f"{name} of {nbytes}")
            with world_collective(f"{name} of {nbytes} bytes"):
                seconds = _collective_s(name, nbytes, size, device, group)
            # What a ring moves for each rank: the parts of all others, twice for an all-reduce.
            points.append((float(passes * (size - 1) * nbytes), seconds))
        slowest = [max(each) for each in zip(*(row for row in job.all([s for _, s in points])), strict=True)]
        points = [(nbytes, seconds) for (nbytes, _), seconds in zip(points, slowest, strict=True)]
        latency, rate = fit_line(points)
        found[name] = {"latency_s": latency, "bytes_per_s": rate, "points": points}
        job.say(OK, f"{what}, {name}", f"{latency * 1e6:.0f} us + bytes / {rate / 1e9:.2f} GB/s")
    return found


def sizes_of(kind: str, ranks: int) -> list[int]:
    """Bytes of a rank's part, ascending: many ranks send smaller ones, so that all of it has room."""
    most = _LARGEST[kind] // ranks // 4 * 4
    return sorted({max(min(nbytes, most), 4) for nbytes in _SIZES[kind]})


def _collective_s(name: str, nbytes: int, size: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Seconds of one call, the best of as many as fit in ``_MEASURE_S`` on rank 0's clock, three at least."""
    part, whole = torch.ones(nbytes // 4, device=device), torch.ones(size * nbytes // 4, device=device)
    gather_all: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
    scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    calls: Mapping[str, Callable[[], Any]] = {
        "all_gather": lambda: gather_all(whole, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    call = calls[name]
    once = max(_timed(call, device), _timed(call, device))
    # Every rank must call as often as the others: the count is agreed.
    count = torch.tensor(float(min(max(_MEASURE_S / max(once, 1e-6), 3), 50)), device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MIN, group=group)
    return min(_timed(call, device) for _ in range(int(count)))


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(latency, bytes per second) of ``seconds = latency + bytes / rate``: least squares of relative errors.

    Weights of 1/seconds^2 keep the largest size from deciding alone. A latency below 0 is 0.
    """
    rows = [(nbytes, seconds, 1.0 / seconds**2) for nbytes, seconds in points]
    total = sum(w for *_, w in rows)
    mean_x = sum(w * x for x, _, w in rows) / total
    mean_y = sum(w * y for _, y, w in rows) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in rows)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in rows) / spread if spread else 0.0
    latency = mean_y - slope * mean_x
    if latency < 0 or slope <= 0:
        latency = max(latency, 0.0) if slope > 0 else 0.0
        slope = sum(w * x * y for x, y, w in rows) / sum(w * x * x for x, _, w in rows)
    return latency, 1.0 / slope
