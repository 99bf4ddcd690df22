"""What a process sees of its own machine: versions, limits, shared memory, folders. And what a check says.

    Options --> local_checks (this file)       --> Findings --> Report --> doctor.py
                rank_checks.py, between ranks  --> Findings ----^

No torch here: what is wrong with limits is told although ranks cannot be started.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OK, WARN, FAIL = "ok", "warn", "fail"
_PACKAGES = ("torch", "numpy", "sixfold-gpt", "sixfold-fsdp", "sixfold-pipeline", "sixfold-dist-ckpt")
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
