"""``sixfold doctor``: is this machine, or this allocation, fit to train, and how fast is it?

    limits, folders, versions (this file) + what ranks measure (doctor_ranks.py) --> findings, machine (this file)
                                          --> a line each, sixfold-machine.json --> sixfold plan --machine

No torch here: what is wrong with limits is told although ranks cannot be started. Under a launcher every rank examines
itself and rank 0 speaks; else ranks are started here. Every wait has a deadline.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError, TrainError
from sixfold.gpt.launch.spawn import start_ranks

OK, WARN, FAIL = "ok", "warn", "fail"
_PACKAGES = ("torch", "numpy", "sixfold-gpt", "sixfold-fsdp", "sixfold-pipeline", "sixfold-dist-ckpt")
_AFTER_REPORT_S = 10.0  # for the other ranks to end
_RANKS_REMEDY = "look at what stands above, and whether python -c 'import torch' works"
_FEW = 2**30  # bytes free of /dev/shm and of a folder below which a run is likely to end badly


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: ``ok``, ``warn`` or ``fail``, what was looked at, what was found, and what to do about it."""

    level: str
    what: str
    value: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:4s} {self.what}: {self.value}{f'; {self.remedy}' if self.remedy else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is examined.

    Attributes:
        folder: where runs are to lie; ranks write and read a small file there.
        device: "auto", "cpu" or "cuda".
        timeout_s: longest wait for another rank in one check.
    """

    folder: str
    device: str = "auto"
    timeout_s: float = 30.0


def local_checks(folder: str) -> list[Finding]:
    """What a process can see of its own machine."""
    return [
        _versions(),
        _limit("open files", resource.RLIMIT_NOFILE, least=256, wanted=4096, remedy="ulimit -n 65536"),
        _limit("processes", resource.RLIMIT_NPROC, least=128, wanted=1024, remedy="ulimit -u 65536"),
        _locked_memory(),
        _shared_memory(),
        _folder(folder),
    ]


def _versions() -> Finding:
    found, missing = [f"python {platform.python_version()}"], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    text = ", ".join(found)
    if missing:
        return Finding(FAIL, "versions", f"{text}; missing {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Finding(OK, "versions", text)


def _limit(what: str, kind: int, *, least: int, wanted: int, remedy: str) -> Finding:
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return Finding(OK, what, "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} at most")
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    level = FAIL if soft < least else WARN
    return Finding(level, what, f"{soft} at most, a run wants {wanted}", f"{remedy} (the hard limit is {most})")


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not Path("/dev/infiniband").exists():
        return Finding(OK, "locked memory", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes at most")
    return Finding(
        WARN, "locked memory", f"{soft} bytes at most, and InfiniBand registers buffers in it", "ulimit -l unlimited"
    )


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding(FAIL, "/dev/shm", error.strerror or str(error), "mount a tmpfs there")
    level = OK if free >= _FEW else WARN if free >= _FEW // 16 else FAIL
    return Finding(level, "/dev/shm", f"{free / 2**30:.2f} GiB free", "" if level == OK else "docker run --shm-size=8g")


def _folder(folder: str) -> Finding:
    """It can be written, a file renamed, and how O_DIRECT is taken."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".sixfold-doctor-", delete=False) as file:
            file.write(b"sixfold")
        moved = f"{file.name}.moved"
        os.rename(file.name, moved)
        direct = _takes_direct(moved)
        os.unlink(moved)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(FAIL, f"folder {folder}", f"{error.strerror or error}", "name one that can be written by --dir")
    value = f"written, renamed, O_DIRECT {'taken' if direct else 'not taken'}, {free / 2**30:.1f} GiB free"
    if free < _FEW:
        return Finding(WARN, f"folder {folder}", value, "free some space, or name another by --dir")
    return Finding(OK, f"folder {folder}", value)


def _takes_direct(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True


# ---- the whole


@dataclass(frozen=True, kw_only=True)
class Report:
    """All findings, and what ``plan`` reads (None where nothing could be measured)."""

    findings: list[Finding]
    machine: dict[str, Any] | None

    @property
    def failed(self) -> bool:
        """Something does not work."""
        return any(one.level == FAIL for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The object of ``--json`` and of the file."""
        return {
            "time": time.time(),
            "host": socket.gethostname(),
            "failed": self.failed,
            "findings": [asdict(one) for one in self.findings],
            "machine": self.machine,
        }


def examine_here(options: Options, ranks: int) -> Report:
    """Look at this machine, with ``ranks`` ranks that are started here."""
    findings = local_checks(options.folder)
    with tempfile.TemporaryDirectory(prefix="sixfold-doctor-") as folder:
        path = Path(folder) / "report.json"
        try:
            start_ranks(_rank_here, ranks, (options, str(path)), watch=_ends(path, 20 * options.timeout_s))
        except (TrainError, OSError) as error:
            if not path.exists():
                findings.append(Finding(FAIL, f"{ranks} ranks on this machine", _last_line(error), _RANKS_REMEDY))
        if path.exists():
            found = json.loads(path.read_text())
            return Report(findings=findings + [Finding(**one) for one in found["findings"]], machine=found["machine"])
    return Report(findings=findings, machine=None)


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _ends(path: Path, seconds: float) -> Callable[[], None]:
    """Ends ranks that are still there a while after the report, or after all time for it."""
    ends: list[float] = [time.monotonic() + seconds]

    def watch() -> None:
        if path.exists():
            ends[0] = min(ends[0], time.monotonic() + _AFTER_REPORT_S)
        if time.monotonic() > ends[0]:
            raise TrainError(f"ranks have not ended within {seconds:g} s")

    return watch


def _rank_here(options: Options, path: str) -> int:
    """Body of a rank that was started here."""
    from sixfold.gpt.machine.rank_checks import examine_rank

    report = examine_rank(options)
    if report is not None:
        found = {"findings": [asdict(one) for one in report.findings], "machine": report.machine}
        half = Path(f"{path}.half")
        half.write_text(json.dumps(found))
        half.rename(path)
    return 0


def run(options: Options, *, ranks: int | None, out: str, as_object: bool) -> int:
    """What ``sixfold doctor`` does; its exit status."""
    from sixfold.gpt.launch.rendezvous import detect

    _refuse_foreign(Path(out))
    if detect(os.environ) is None:
        report: Report | None = examine_here(options, ranks or _default_ranks())
    else:
        from sixfold.gpt.machine.rank_checks import examine_rank

        report = examine_rank(options, local=True)
    if report is None:  # another rank speaks
        return 0
    found = report.as_json()
    if report.machine is not None:
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found) if as_object else _text(report, out))
    return 1 if report.failed else 0


def _refuse_foreign(out: Path) -> None:
    """Refuse to replace what doctor did not write, before minutes are spent."""
    try:
        found = json.loads(out.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        found = None
    if not (isinstance(found, dict) and {"findings", "machine"} <= found.keys()):
        raise ConfigError(f"{out} exists and doctor did not write it; choose another --out, or remove it")


def _default_ranks() -> int:
    """A rank for each GPU, else two: the least that has something to say to each other."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return gpus or 2


def _text(report: Report, out: str) -> str:
    lines: Sequence[str] = [str(one) for one in report.findings]
    counts = {level: sum(one.level == level for one in report.findings) for level in (OK, WARN, FAIL)}
    wrote = "" if report.machine is None else f"; sixfold plan CONFIG --machine {out}"
    return "\n".join([*lines, f"{counts[OK]} ok, {counts[WARN]} warn, {counts[FAIL]} fail{wrote}"])
