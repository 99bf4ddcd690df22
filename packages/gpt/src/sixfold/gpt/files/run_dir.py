"""The folder of a run: that it can be one, and that no other run writes there.

    run.dir --> check_run_dir (this file) --> ConfigError before a rank starts
    configuration --> write_config (this file) --> config.toml
    metrics.jsonl of a run that goes on --> hold, check_free (this file): a lock that ends with its process

[Note: two runs in one folder] They would mix their lines and save over each other's checkpoints. The rank that writes
metrics.jsonl holds a lock on it (flock): the kernel ends it with the process, so nothing stale is left behind. A file
system without such locks is used without.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from sixfold.gpt.config.toml import write_tables
from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig

# Every run's config.toml has all of these, of any release.
TABLES = (
    "model", "data", "parallel", "pipeline", "fsdp", "train", "optimizer", "schedule", "checkpoint", "eval", "log",
    "run",
)  # fmt: skip
FOLDERS, FILES = ("checkpoints",), ("config.toml", "metrics.jsonl", "digests.jsonl")


def check_run_dir(directory: str, *, joins: bool = False) -> None:
    """Refuse a folder that a run cannot write, before a rank starts; makes nothing.

    Args:
        joins: a run that is at work there is not refused; this is one of its machines.
    Raises:
        ConfigError: a file where a folder is to be, or the reverse; a folder that may not be written.
    """
    path = Path(directory)
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists() or folder.is_symlink())
    if not there.is_dir():
        raise ConfigError(f"run.dir is {directory!r} and {there} is a file; choose another run.dir, or move the file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir is {directory!r} and {there} may not be written; choose another run.dir")
    for name in FOLDERS:
        if (path / name).exists() and not (path / name).is_dir():
            raise ConfigError(f"run.dir is {directory!r} and {path / name} is a file; a run keeps a folder there")
    for name in FILES:
        if (path / name).is_dir():
            raise ConfigError(f"run.dir is {directory!r} and {path / name} is a folder; a run keeps a file there")
    _refuse_foreign(path)
    if not joins:
        check_free(path / "metrics.jsonl")


def _refuse_foreign(path: Path) -> None:
    """Refuse a folder whose files no run wrote: a run writes over config.toml, and behind the lines of the others.

    Raises:
        ConfigError: naming the file.
    """
    metrics, config = path / "metrics.jsonl", path / "config.toml"
    for lines in (metrics, path / "digests.jsonl"):
        if lines.is_file() and not _is_of_a_run(lines):
            raise ConfigError(
                f"run.dir is {str(path)!r} and no run wrote the {lines.name} there; choose another run.dir, or move "
                f"the file"
            )
    # A run that ended before its first line, and an import, have no metrics.jsonl.
    if config.is_file() and not metrics.exists() and not (path / "checkpoints").exists():
        try:
            whole = set(TABLES) <= tomllib.loads(config.read_text(encoding="utf-8")).keys()
        except (OSError, ValueError):
            whole = False
        if not whole:
            raise ConfigError(
                f"run.dir is {str(path)!r} and no run wrote the {config.name} there; choose another run.dir, or move "
                f"the file"
            )


def _is_of_a_run(metrics: Path) -> bool:
    """Whether it begins as ours do, as far as a kill let it; one that cannot be read is told elsewhere."""
    begins = b'{"kind"'
    try:
        with metrics.open("rb") as file:
            first = file.readline(len(begins)).strip()
    except OSError:
        return True
    return begins.startswith(first)


def make_run_dir(directory: str) -> Path:
    """The folder, made if it is not there.

    Raises:
        ConfigError: the system refuses.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir is {directory!r} and cannot be made ({error.strerror}: {error.filename}); choose another run.dir"
        ) from error
    return path


def write_config(config: TrainConfig) -> None:
    """Write the resolved configuration into the run's folder, whole or not at all: config.toml, for people to read.

    Only of a run that holds its metrics.jsonl: what lies here is of the run that is at work.

    A config.toml of the user's own (they complete that of an import, and start from it) is left alone: what is
    resolved has the overrides of one start, and no comments. Then it is config.resolved.toml.
    """
    folder = make_run_dir(config.run.dir)
    place = folder / "config.toml"
    if not _is_of_a_start(place):
        print(
            f"sixfold: {place} is not as a run writes it, and stays; what this start has resolved is in "
            f"config.resolved.toml beside it",
            file=sys.stderr,
            flush=True,
        )
        place = folder / "config.resolved.toml"
    draft = folder / f".config.toml.{os.getpid()}"
    draft.write_text(config.to_toml(), encoding="utf-8")
    draft.replace(place)


def _is_of_a_start(path: Path) -> bool:
    """Whether a config.toml, or none, is as a run or an import writes it: byte for byte, and with all its tables."""
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
        canonical = write_tables(tables) == text
    except FileNotFoundError:
        return True
    except (OSError, ValueError, AttributeError):  # not TOML, or keys outside of tables
        return False
    return canonical and (set(TABLES) <= tables.keys() or tables.keys() == {"model"})


def check_free(metrics: Path) -> None:
    """Refuse a folder in which another run is at work.

    Raises:
        ConfigError: with its process and host.
    """
    if metrics.is_file() and os.access(metrics, os.W_OK):
        file = os.open(metrics, os.O_RDWR)
        try:
            hold(file, metrics)
        finally:
            os.close(file)


def hold(file: int, metrics: Path) -> None:
    """Lock the open file ``metrics`` for as long as it is open.

    Raises:
        ConfigError: another run holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(
                f"run.dir is {str(metrics.parent)!r} and another run is at work there ({_holder(metrics)}); choose "
                f"another run.dir, or end that run"
            ) from error


def _holder(metrics: Path) -> str:
    """Rank 0 of the last start, as metrics.jsonl has it."""
    for line in reversed(metrics.read_bytes().splitlines()):
        if b'"start"' in line:
            try:
                rank = json.loads(line)["ranks"][0]
                return f"process {rank['pid']} on {rank['host']}"
            except (ValueError, LookupError, TypeError):
                continue
    return "a process that has not begun its first step"
