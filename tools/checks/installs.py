"""The venvs of the sessions. Each is made once and kept for as long as what it depends on stays the same.

    constraints.txt, pyproject.toml, requirements --> .nox/shared, docs, release, builder, bases (this file)

Where wheels come from is pip's own business (its configuration and environment); which versions is constraints.txt's,
in every pip call but the site's, whose requirements pin all that they bring.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checks.places import (
    BASES,
    BUILDER,
    CONSTRAINTS,
    DOCS,
    DOCS_REQUIREMENTS,
    LOADED_BY_MOST,
    RELEASE,
    ROOT,
    SESSION_DEADLINE_S,
    SHARED,
    SOURCES,
    TEST_TOOLS,
    VARIABLES,
    c_sources,
    distribution_folders,
)  # fmt: skip

if TYPE_CHECKING:
    import nox


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """A Python and the variables it runs under."""

    python: str
    variables: dict[str, str]
    arguments: list[str]  # of the session, without those that choose the environment

    def run(self, session: "nox.Session", *command: str, success_codes: tuple[int, ...] = (0,)) -> None:
        session.run(self.python, *command, env=self.variables, external=True, success_codes=success_codes)


# ---- the shared venv


def shared_environment(session: "nox.Session") -> Environment:
    """The venv of all sessions but isolation: made by the first, found by the others.

    With ``--system-torch`` among the session's arguments it is the Python on the path, and nothing is installed.
    """
    arguments = [argument for argument in session.posargs if argument != "--system-torch"]
    variables = dict(VARIABLES)
    if len(arguments) < len(session.posargs):
        sources = [*ROOT.glob("packages/*/src"), ROOT / "tools/ranktest/src"]
        variables["PYTHONPATH"] = os.pathsep.join([*map(str, sources), os.environ.get("PYTHONPATH", "")])
        return Environment(python=shutil.which("python") or "python3", variables=variables, arguments=arguments)
    made_once(SHARED, shared_key(), functools.partial(install_shared, session))
    variables["PATH"] = os.pathsep.join([str(SHARED / "bin"), os.environ["PATH"]])
    return Environment(python=str(SHARED / "bin" / "python"), variables=variables, arguments=arguments)


def install_shared(session: "nox.Session") -> None:
    """Make .nox/shared what constraints.txt and the pyproject.toml files say."""
    if sys.version_info < (3, 11):  # noqa: UP036 - nox itself runs on older ones
        session.error(f"Sixfold needs Python 3.11 or newer; nox runs on {sys.version.split()[0]}")
    python = str(SHARED / "bin" / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "venv", str(SHARED), external=True)
    # Of 14,000 files a run loads one in ten: each is compiled when it is first loaded, and not all of them here.
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", str(CONSTRAINTS))
    session.run(*pip, "-r", str(CONSTRAINTS), external=True)
    editables = [f"--editable={folder}" for folder in distribution_folders()]
    # Meanwhile, what most sessions load is compiled once, and not by each of those that begin together.
    loading = subprocess.Popen([python, "-c", f"import {LOADED_BY_MOST}"], env={**os.environ, **VARIABLES})
    try:
        with one_at_a_time(SOURCES):
            session.run(*pip, "--no-deps", "--no-build-isolation", *editables, external=True)
    finally:
        loading.wait()


def shared_key() -> str:
    """A digest of everything that the shared venv depends on."""
    paths = [path for folder in distribution_folders() for path in [folder / "pyproject.toml", *c_sources(folder)]]
    content = b"".join(path.read_bytes() for path in [*paths, CONSTRAINTS])
    return hashlib.sha256(f"{ROOT} {sys.version}".encode() + content).hexdigest()


# ---- small ones


def docs_python(session: "nox.Session") -> str:
    """The venv that builds the site and has its peers: what two files in docs/ pin, and behind it the shared venv."""

    def install() -> None:
        new_venv(session, DOCS, "--no-compile", "--no-deps", *(f"-r{path}" for path in DOCS_REQUIREMENTS))
        (site,) = (DOCS / "lib").glob("python3.*/site-packages")
        behind = SHARED / site.relative_to(DOCS)  # may still be without anything
        (site / "shared.pth").write_text(f"import site; site.addsitedir({str(behind)!r})\n")

    made_once(DOCS, key_of(str(DOCS).encode(), *(path.read_bytes() for path in DOCS_REQUIREMENTS)), install)
    return str(DOCS / "bin" / "python")


def release_python(session: "nox.Session") -> str:
    """The venv that builds and checks what is uploaded: of tools/release/requirements.txt."""
    wanted = ROOT / "tools/release/requirements.txt"
    pins = ("-c", str(CONSTRAINTS), "-r", str(wanted), "setuptools", "wheel")
    key = key_of(str(RELEASE).encode(), wanted.read_bytes(), CONSTRAINTS.read_bytes())
    made_once(RELEASE, key, lambda: new_venv(session, RELEASE, *pins))
    return str(RELEASE / "bin" / "python")


def wheel_builder(session: "nox.Session") -> Environment:
    """A venv of setuptools alone, which is there long before the shared one is."""
    key = key_of(str(BUILDER).encode(), CONSTRAINTS.read_bytes())
    made_once(BUILDER, key, lambda: new_venv(session, BUILDER, "-c", str(CONSTRAINTS), "setuptools", "wheel"))
    return Environment(python=str(BUILDER / "bin" / "python"), variables=dict(VARIABLES), arguments=[])


def make_base(session: "nox.Session", requirement: str, constraints: Path = CONSTRAINTS) -> Path:
    """The site-packages of a venv that holds one requirement of ours and the test tools."""
    place = BASES / requirement
    key = key_of(f"{place} {TEST_TOOLS}".encode(), constraints.read_bytes())
    pins = ("--no-compile", "-c", str(constraints), requirement, *TEST_TOOLS)
    made_once(place, key, lambda: new_venv(session, place, *pins))
    (site,) = (place / "lib").glob("python3.*/site-packages")
    return site


@contextlib.contextmanager
def empty_venv(session: "nox.Session", name: str) -> Iterator[str]:
    """The Python of a new venv without pip, which is gone afterwards."""
    place = ROOT / ".nox" / name
    session.run(sys.executable, "-m", "venv", "--without-pip", "--clear", str(place), external=True)
    yield str(place / "bin" / "python")
    shutil.rmtree(place)


def new_venv(session: "nox.Session", place: Path, *wanted: str) -> None:
    """An empty venv at ``place``, into which pip installs what its arguments name."""
    session.run(sys.executable, "-m", "venv", "--clear", str(place), external=True)
    session.run(str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted, external=True)


# ---- once, and one at a time


def key_of(*parts: bytes) -> str:
    """A digest of this Python and what is given."""
    digest = hashlib.sha256(sys.version.encode())
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def made_once(place: Path, key: str, make: Callable[[], None]) -> None:
    """``make`` the venv at ``place``, unless it was made whole under this ``key``."""
    stamp = place / "stamp"
    with one_at_a_time(place):
        if not stamp.exists() or stamp.read_text() != key:
            make()
            stamp.write_text(key)


@contextlib.contextmanager
def one_at_a_time(place: Path) -> Iterator[None]:
    """Two runs of nox may want the same venv or wheel; the second waits for the first to have made it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        until = time.monotonic() + SESSION_DEADLINE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"{lock.name} was held for {SESSION_DEADLINE_S:.0f} s by another nox") from None
                time.sleep(0.2)
        yield
