"""Every check of this repository, by name: ``nox -l`` lists them, ``nox`` runs what CI runs.

    packages/*/pyproject.toml, constraints.txt --> one shared venv (.nox/shared) --> lint, types, tests, ...
                                               --> wheels --> a fresh venv per package --> isolation

Packages are found by their folders; a session that works on one takes its folder's name: ``nox -s "tests(pipeline)"``.
Nothing but nox is presupposed. Where wheels come from is pip's own business (its configuration and environment);
which versions is constraints.txt's, in every pip call.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
CONSTRAINTS = ROOT / "constraints.txt"
SHARED = ROOT / ".nox" / "shared"
WHEELS = ROOT / ".nox" / "wheels"
NUMPY_ONLY = ("indexed-data", "blending")  # their isolation has no torch, and so no ranktest
# Further runs of a package's tests where it stands alone: blending as installed where no compiler is.
ALSO_ISOLATED = {"blending": [["--without-extension", "-k", "test_order or test_quota or test_sample or test_native"]]}
WHEEL_LIMIT_BYTES = {"indexed-data": 50_000}
WHEEL_LIMIT_DEFAULT_BYTES = 200_000
BUILT: set[tuple[str, Path]] = set()  # wheels that this run of nox has built already, with their folders
NO_TESTS_COLLECTED = 5  # pytest's exit status

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "tests", "ranks", "isolation", "integration"]

each_package = nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
each_distribution = nox.parametrize("package", [nox.param(name, id=name) for name in [*PACKAGES, "ranktest"]])


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """A Python and the variables it runs under."""

    python: str
    variables: dict[str, str]
    arguments: list[str]  # of the session, without those that choose the environment

    def run(self, session: nox.Session, *command: str, success_codes: tuple[int, ...] = (0,)) -> None:
        session.run(self.python, *command, env=self.variables, external=True, success_codes=success_codes)


# ---- sessions that share one venv


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a GPT on this Python's own documentation; arguments after -- go to `sixfold demo`."""
    environment = shared_environment(session)
    environment.run(session, "-m", "sixfold.gpt", "demo", *environment.arguments)


@nox.session(venv_backend="none")
@each_package
def tests(session: nox.Session, package: str) -> None:
    """The tests of one package that need one process."""
    environment = shared_environment(session)
    environment.run(
        session, *single_process_tests(package), *environment.arguments, success_codes=(0, NO_TESTS_COLLECTED)
    )


@nox.session(venv_backend="none")
@each_distribution
def ranks(session: nox.Session, package: str) -> None:
    """The tests of one package that start several ranks."""
    folder = ROOT / "tools/ranktest/tests" if package == "ranktest" else ROOT / "packages" / package / "tests/ranks"
    if not list(folder.glob("test_*.py")):
        session.skip(f"{package} has no tests of several ranks")
    environment = shared_environment(session)
    environment.run(session, *pytest_on(folder), *environment.arguments)


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """All packages together, under torchrun too; `-- --system-torch` installs nothing."""
    environment = shared_environment(session)
    environment.run(session, *pytest_on(ROOT / "tests-integration"), *environment.arguments)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Run what the READMEs and examples tell a reader to run. Part of integration."""
    environment = shared_environment(session)
    environment.run(session, *pytest_on(ROOT / "tests-integration/test_docs.py"), *environment.arguments)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Tests that need CUDA devices; `-- --system-torch` takes the machine's own build of torch."""
    environment = shared_environment(session)
    folders = sorted(ROOT.glob("packages/*/tests/gpu"))
    environment.run(session, *pytest_on(*folders), "-m", "gpu", *environment.arguments)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    environment = shared_environment(session)
    environment.run(session, "-m", "ruff", "check", ".")
    environment.run(session, "-m", "ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
@each_distribution
def types(session: nox.Session, package: str) -> None:
    """mypy --strict on the sources of one package."""
    environment = shared_environment(session)
    environment.run(session, "-m", "mypy", "-p", "ranktest" if package == "ranktest" else module_of(package))


@nox.session(venv_backend="none")
@each_package
def bench(session: nox.Session, package: str) -> None:
    """The pytest-benchmark files of one package, each with its peer or floor beside it."""
    environment = shared_environment(session)
    folder = ROOT / "packages" / package / "benchmarks"
    if not list(folder.glob("bench_*.py")):
        session.skip(f"{package} has no benchmarks")
    environment.run(session, *pytest_on(folder), "-o", "python_files=bench_*.py", *environment.arguments)


@nox.session(venv_backend="none")
@each_package
def wheels(session: nox.Session, package: str) -> None:
    """Build one package's wheel into dist/, and check its size; one with C sources holds what they compile to."""
    wheel = build_wheel(session, shared_environment(session), package, ROOT / "dist")
    if c_sources(ROOT / "packages" / package) and not any(
        name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist()
    ):
        session.error(f"{wheel.name} has no compiled extension: is there a C compiler?")


@nox.session(venv_backend="none")
def ci(session: nox.Session) -> None:
    """What `nox` alone runs."""
    for name in ("lint", "types", "tests", "ranks", "isolation", "integration"):
        session.notify(name)


# ---- the session that has a fresh venv per package


@nox.session(venv_backend="venv", reuse_venv=False)
@each_package
def isolation(session: nox.Session, package: str) -> None:
    """Install one wheel alone, as a user would; assert that no sibling comes with it; run its tests."""
    builder = shared_environment(session)
    for name in PACKAGES:  # siblings too: gpt needs its five
        build_wheel(session, builder, name, WHEELS)
    pip = ("-m", "pip", "install", "--quiet", "--no-compile", "-c", str(CONSTRAINTS), "--find-links", str(WHEELS))
    session.run("python", *pip, f"sixfold-{package}")
    session.run("python", str(ROOT / "tools/check_isolation.py"), package)
    session.run("python", *pip, "pytest", "pytest-timeout", "hypothesis")
    if package not in NUMPY_ONLY:
        build_wheel(session, builder, "ranktest", WHEELS)
        session.run("python", *pip, "ranktest")
    variables = {"OMP_NUM_THREADS": "1"}
    session.run("python", *single_process_tests(package), env=variables, success_codes=[0, NO_TESTS_COLLECTED])
    for arguments in ALSO_ISOLATED.get(package, []):
        session.run("python", *single_process_tests(package), *arguments, env=variables)
    shutil.rmtree(session.virtualenv.location)  # it has done its work; with a torch each, six of them fill a disk


# ---- the shared venv


def shared_environment(session: nox.Session) -> Environment:
    """The venv of all sessions but isolation: made by the first, found by the others.

    With ``--system-torch`` among the session's arguments it is the Python on the path, and nothing is installed.
    """
    arguments = [argument for argument in session.posargs if argument != "--system-torch"]
    variables = {"OMP_NUM_THREADS": "1"}
    if len(arguments) < len(session.posargs):
        sources = [*ROOT.glob("packages/*/src"), ROOT / "tools/ranktest/src"]
        variables["PYTHONPATH"] = os.pathsep.join([*map(str, sources), os.environ.get("PYTHONPATH", "")])
        return Environment(python=shutil.which("python") or "python3", variables=variables, arguments=arguments)
    with one_at_a_time():
        install_shared(session)
    variables["PATH"] = os.pathsep.join([str(SHARED / "bin"), os.environ["PATH"]])
    return Environment(python=str(SHARED / "bin" / "python"), variables=variables, arguments=arguments)


def install_shared(session: nox.Session) -> None:
    """Make .nox/shared what constraints.txt and the pyproject.toml files say; nothing to do in most runs."""
    stamp = SHARED / "stamp"
    if stamp.exists() and stamp.read_text() == shared_key():
        return
    if sys.version_info < (3, 11):  # noqa: UP036 - nox itself runs on older ones
        session.error(f"Sixfold needs Python 3.11 or newer; nox runs on {sys.version.split()[0]}")
    python = str(SHARED / "bin" / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "venv", str(SHARED), external=True)
    pip = (python, "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS))
    session.run(*pip, "-r", str(CONSTRAINTS), external=True)
    editables = [f"--editable={folder}" for folder in distribution_folders()]
    session.run(*pip, "--no-deps", "--no-build-isolation", *editables, external=True)
    stamp.write_text(shared_key())


def shared_key() -> str:
    """A digest of everything that the shared venv depends on."""
    digest = hashlib.sha256(f"{ROOT} {sys.version}".encode())
    for folder in distribution_folders():
        for path in [folder / "pyproject.toml", *c_sources(folder)]:
            digest.update(path.read_bytes())
    digest.update(CONSTRAINTS.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two nox runs may start together; the second waits for the first one's venv."""
    SHARED.parent.mkdir(exist_ok=True)
    with (SHARED.parent / "shared.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- commands


def pytest_on(*folders: Path) -> list[str]:
    return ["-m", "pytest", "-q", "--durations=5", *map(str, folders)]


def single_process_tests(package: str) -> list[str]:
    folder = ROOT / "packages" / package / "tests"
    return [*pytest_on(folder), f"--ignore={folder / 'ranks'}", f"--ignore={folder / 'gpu'}"]


def build_wheel(session: nox.Session, builder: Environment, package: str, folder: Path) -> Path:
    """Build one wheel into ``folder``, unless this run of nox has done so, and check its size."""
    source = ROOT / "tools/ranktest" if package == "ranktest" else ROOT / "packages" / package
    name = "ranktest" if package == "ranktest" else f"sixfold_{package.replace('-', '_')}"
    if (package, folder) in BUILT:
        return next(folder.glob(f"{name}-*.whl"))
    # setuptools would pack what an earlier build left here, deleted files included.
    shutil.rmtree(source / "build", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}-*.whl"):
        old.unlink()
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-c", str(CONSTRAINTS))
    builder.run(session, *pip, "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob(f"{name}-*.whl")
    limit_bytes = WHEEL_LIMIT_BYTES.get(package, WHEEL_LIMIT_DEFAULT_BYTES)
    size_bytes = wheel.stat().st_size
    if size_bytes > limit_bytes:
        session.error(f"{wheel.name} has {size_bytes} bytes; its limit is {limit_bytes}")
    session.log(f"{wheel.name}: {size_bytes} bytes")
    BUILT.add((package, folder))
    return wheel


def distribution_folders() -> list[Path]:
    return [ROOT / "tools/ranktest", *(ROOT / "packages" / name for name in PACKAGES)]


def c_sources(folder: Path) -> list[Path]:
    """What a distribution compiles, and how: setup.py and native/, if it has them; an editable is built from it too."""
    return sorted(path for pattern in ("setup.py", "native/*.[ch]") for path in folder.glob(pattern))


def module_of(package: str) -> str:
    return "sixfold." + package.replace("-", "_")
