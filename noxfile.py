"""Every check of this repository, by name: ``nox -l`` lists them, ``nox`` runs what CI runs.

    packages/*/pyproject.toml, constraints.txt --> one shared venv (.nox/shared) --> lint, types, tests, ...
                                               --> wheels --> a fresh venv per package --> isolation
    ci --> four lanes, each a nox of its own that runs one of these sessions after the other
    isolation --> .nox/ci/<package>.json: what passed --> in ci, rest (or tests) runs what is left

Packages are found by their folders; a session that works on one takes its folder's name: ``nox -s "tests(pipeline)"``.
Nothing but nox is presupposed. Where wheels come from is pip's own business (its configuration and environment);
which versions is constraints.txt's, in every pip call.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
CONSTRAINTS = ROOT / "constraints.txt"
SHARED = ROOT / ".nox" / "shared"
WHEELS = ROOT / ".nox" / "wheels"
BASES = ROOT / ".nox" / "bases"
BUILDER = ROOT / ".nox" / "builder"
SOURCES = ROOT / ".nox" / "sources"  # held while setuptools writes into a package's folder
LOGS = ROOT / ".nox" / "ci"
RELEASE = ROOT / ".nox" / "release"
DOCS = ROOT / ".nox" / "docs"
DOCS_REQUIREMENTS = ROOT / "docs" / "requirements.txt"
# Options under which a package's tests (or those beside packages/) run whole, not in the default command's samples.
FULL = dict.fromkeys(PACKAGES, ()) | {
    "indexed-data": ("--kills=1000",),
    "pipeline": ("--full-matrix", "--mutants=1000", "--random-runs=1000", "--all-bubbles", "--all-exports"),
    "fsdp": ("--all-pairs", "--random-programs=200"),
    "gpt": (
        "--resume-matrix", "--random-layouts=100", "--all-meshes", "--memory-matrix", "--compiled-ranks",
        "--expert-layouts", "--context-matrix", "--instants=400",
    ),
    "tests-integration": ("--all-jobs",),
}  # fmt: skip
FULL_DEADLINE_S = 3600  # of one test: a whole matrix may be one
ONCE = ROOT / "tools" / "once"  # the folder of a pytest plugin: what passed in isolation is not run again by ci
# What the isolated venv of a package finds installed, besides pytest: installed once, seen through a .pth file.
# tools/check_isolation.py asserts that the package's own metadata asks for all of it.
BASES_OF = {"indexed-data": ("numpy",), "blending": ("numpy",), "gpt": ("numpy", "torch")}
BASE_DEFAULT = ("torch",)
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
LOADED_BY_MOST = "pytest, hypothesis, torch.distributed.checkpoint, torch.distributed.fsdp, torch._dynamo"
# Further runs of a package's tests where it stands alone: blending as installed where no compiler is.
ALSO_ISOLATED = {"blending": [["--without-extension", "-k", "test_order or test_quota or test_sample or test_native"]]}
WHEEL_LIMIT_BYTES = {"indexed-data": 70_000, "dist-ckpt": 330_000, "fsdp": 220_000, "gpt": 300_000, "pipeline": 275_000}
WHEEL_LIMIT_DEFAULT_BYTES = 200_000
LANES = 4  # sessions of `ci` that run at a time: two for the cores of the smallest machine, two while ranks wait
SESSION_DEADLINE_S = 1800.0
NO_TESTS_COLLECTED = 5  # pytest's exit status
# Of every process of a session. Bytecode is kept even where the user's own variable says otherwise: hundreds of
# processes load torch, in three times the time where each compiles it.
VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["ci"]

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
    environment = with_once(shared_environment(session))
    command = [*single_process_tests(package), "-p", "once", *environment.arguments]
    environment.run(session, *command, success_codes=(0, NO_TESTS_COLLECTED))


@nox.session(venv_backend="none")
@each_package
def rest(session: nox.Session, package: str) -> None:
    """What ci runs behind isolation: `tests` without what passed there, and `ranks`, in one process."""
    environment = with_once(shared_environment(session))
    folder = ROOT / "packages" / package / "tests"
    command = [
        *of_ranks(environment, folder),
        f"--ignore={folder / 'gpu'}",
        "-p",
        "once",
        "--proved",
        str(proof_of(package)),
    ]
    environment.run(session, *command, *environment.arguments, success_codes=(0, NO_TESTS_COLLECTED))


@nox.session(venv_backend="none")
@each_distribution
def ranks(session: nox.Session, package: str) -> None:
    """The tests of one package that start several ranks."""
    if not rank_tests(package):
        session.skip(f"{package} has no tests of several ranks")
    environment = shared_environment(session)
    environment.run(session, *of_ranks(environment, rank_tests(package)[0].parent), *environment.arguments)


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """All packages together, under torchrun too; `-- --system-torch` installs nothing."""
    environment = shared_environment(session)
    environment.run(session, *of_ranks(environment, ROOT / "tests-integration"), *environment.arguments)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the site into site/, and run what it, the READMEs and the examples tell a reader to run."""
    environment = shared_environment(session)
    python, variables = docs_python(session), environment.variables | {"NO_MKDOCS_2_WARNING": "1"}
    session.run(python, "-m", "mkdocs", "build", "--quiet", "--clean", env=variables, external=True)
    # What the schedule explorer loads: npm fetches a pinned Pyodide; without npm it says so, and the page does.
    session.run(python, "tools/explorer/build.py", "site", external=True)
    session.log(f"the site is {(ROOT / 'site' / 'index.html').relative_to(ROOT)}; it opens as a file")
    tests = [ROOT / "tests-integration" / name for name in ("test_site.py", "test_docs.py", "test_moves.py")]
    environment.run(session, *pytest_on(*tests), "--whole-site", *environment.arguments)
    page = ROOT / "tests-integration" / "test_explorer_page.py"  # in a browser, where there is one
    session.run(python, *pytest_on(page), "-rs", "--whole-site", env=environment.variables, external=True)


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
def types(session: nox.Session) -> None:
    """mypy --strict on all packages and tools, or on the modules that follow: `-- -p sixfold.gpt`."""
    environment = shared_environment(session)
    modules = [*map(module_of, PACKAGES), "ranktest"]
    tools = [path.stem for folder in ("docsite", "release") for path in sorted((ROOT / "tools" / folder).glob("*.py"))]
    everything = [*(f"--package={name}" for name in [*modules, "explorer"]), *(f"--module={name}" for name in tools)]
    environment.run(session, "-m", "mypy", *(environment.arguments or everything))


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
@each_package
def release(session: nox.Session, package: str) -> None:
    """Build into dist/release/ what is uploaded of one package, test each file alone, say what to upload."""
    python, folder = release_python(session), ROOT / "dist" / "release" / package
    session.run(python, str(ROOT / "tools/release/versions.py"), package, external=True)
    artefacts = (python, str(ROOT / "tools/release/artefacts.py"))
    session.run(*artefacts, "build", package, str(folder), external=True)
    for path in sorted(folder.iterdir()):
        runs = ALSO_ISOLATED[package] if path.name.endswith("-py3-none-any.whl") and package in ALSO_ISOLATED else [[]]
        with empty_venv(session, f"release-{package}") as python:
            run_alone(session, package, str(path), python=python, runs=runs)
    session.run(*artefacts, "tell", package, str(folder), external=True)


@nox.session(venv_backend="none")
@each_package
def lowest(session: nox.Session, package: str) -> None:
    """One package beside the oldest numpy and torch that it allows; `-- --required` fails where they cannot be had."""
    asked = [oldest(name) for name in BASES_OF.get(package, BASE_DEFAULT)]
    kept = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith(("numpy==", "torch=="))]
    constraints = BASES / f"lowest-{package}.txt"
    constraints.parent.mkdir(parents=True, exist_ok=True)
    constraints.write_text("\n".join([*kept, *asked]) + "\n")
    python = shared_environment(session).python
    for requirement in asked:
        look = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(BASES / "oldest"), requirement]
        if subprocess.run(look, capture_output=True, check=False).returncode:
            told = f"{requirement} is in none of the indexes that pip is configured with; give it one that has it"
            session.error(told) if "--required" in session.posargs else session.skip(told)
    with empty_venv(session, f"lowest-{package}") as python:
        run_alone(session, package, f"sixfold-{package}", python=python, bases=asked, constraints=constraints)


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """The large matrices, every pair, resume and instant, and every case of the tests marked `sampled`. Hours."""
    environment = shared_environment(session)
    for package, options in FULL.items():
        folder = ROOT / "packages" / package / "tests" if package in PACKAGES else ROOT / package
        command = [*pytest_on(folder), *options, "--every-case", f"--timeout={FULL_DEADLINE_S}"]
        environment.run(session, *command, *environment.arguments)


@nox.session(venv_backend="none")
def ci(session: nox.Session) -> None:
    """Every check, four sessions at a time; what `nox` alone runs. Output comes as each ends; logs in .nox/ci."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    failed = []
    with ThreadPoolExecutor(LANES) as lanes:
        start = time.monotonic()
        first, *others = turns_of_ci()
        running = [lanes.submit(run_in_lane, [["bases"], *first])]
        shared_environment(session)  # meanwhile: pip keeps one core busy
        installed = time.monotonic()
        running += [lanes.submit(run_in_lane, turn) for turn in others]
        for done in as_completed(running):
            failed += done.result()
    count, minutes, of_pip = sum(map(len, [first, *others])), time.monotonic() - start, installed - start
    session.log(f"{count} sessions in {LANES} lanes, {minutes / 60:.1f} minutes, of them {of_pip / 60:.1f} of pip")
    if failed:
        session.error(f"failed: {', '.join(sorted(failed))}; their output is above and in {LOGS.relative_to(ROOT)}")


def turns_of_ci() -> list[list[list[str]]]:
    """What follows ``nox -s``, in turns of one lane: those that take longest first, so that the lanes end together.

    The tests of a package run alone where it is installed alone; what was skipped there, or looked for a module that
    is not there, follows in the shared venv. Without the file, because isolation broke early, all of them do. Those of
    several ranks run in the same process, but of the two packages with most of them beside all that in another lane.
    """
    by_files = sorted(PACKAGES, key=lambda name: -len(list((ROOT / "packages" / name / "tests").rglob("test_*.py"))))
    large, others = by_files[:2], by_files[2:]
    apart = [[[f"isolation({name})"], [f"tests({name})", "--", "--proved", str(proof_of(name))]] for name in large]
    together = [[[f"isolation({name})"], [f"rest({name})"]] for name in others]
    first, second, *rest_of_them = together  # the first begins without the shared venv, while it is installed
    # Of the two largest the one with fewer files has the longer tests (240 s of a run, 180); so have the last two.
    longest = [*([[f"ranks({name})"]] for name in large), second, apart[-1], [["integration"]], *apart[:-1]]
    return [first, *longest, *reversed(rest_of_them), [["types"]], [["ranks(ranktest)"]], [["lint"]]]


def run_in_lane(turn: list[list[str]]) -> list[str]:
    """Sessions one after the other, whatever the first comes to: the names of those that failed."""
    failed = []
    for arguments in turn:
        status, seconds, log = run_session(arguments)
        print(
            f"{log.read_text(errors='replace')}\n==> {arguments[0]}: status {status} after {seconds:.0f} s", flush=True
        )
        if status:
            failed.append(arguments[0])
    return failed


def run_session(arguments: list[str]) -> tuple[int, float, Path]:
    """One session in a nox of its own: its status, seconds, and the file with its output."""
    log, start = LOGS / f"{arguments[0]}.log", time.monotonic()
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), "--session", *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(SESSION_DEADLINE_S)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
            out.write(f"\nkilled: still running after {SESSION_DEADLINE_S:.0f} s\n".encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a session may have left behind
            process.wait()
    return status, time.monotonic() - start, log


# ---- the session that has a fresh venv per package


@nox.session(venv_backend="venv", venv_params=["--without-pip"], reuse_venv=False)
@each_package
def isolation(session: nox.Session, package: str) -> None:
    """Install one wheel alone, as a user would; assert that no sibling comes with it; run its tests."""
    variables = {"PYTHONPATH": str(ONCE)}
    runs = [["-p", "once", "--proves", str(proof_of(package))], *ALSO_ISOLATED.get(package, [])]
    python = str(Path(session.virtualenv.bin, "python"))
    run_alone(session, package, f"sixfold-{package}", python=python, runs=runs, variables=variables)
    shutil.rmtree(session.virtualenv.location)


def run_alone(
    session: nox.Session,
    package: str,
    wanted: str,
    *,
    python: str,
    runs: Iterable[list[str]] = ([],),
    bases: Iterable[str] | None = None,
    constraints: Path = CONSTRAINTS,
    variables: dict[str, str] | None = None,
) -> None:
    """Install ``wanted``, a name or a file, into the empty venv of ``python``; run the tests of one process there.

    ``bases`` (numpy, torch) and the test tools are there before it, siblings are found as wheels.
    """
    builder = wheel_builder(session)
    for name in PACKAGES if package == "gpt" else [package]:
        build_wheel(session, builder, name, WHEELS)
    ranktest = build_wheel(session, builder, "ranktest", WHEELS)
    run = functools.partial(session.run, python, external=True)
    site = Path(run("-c", "import site; print(site.getsitepackages()[0])", silent=True).strip())
    needs = BASES_OF.get(package, BASE_DEFAULT)
    places = [make_base(session, requirement, constraints) for requirement in bases or needs]
    (site / "bases.pth").write_text("\n".join(map(str, places)) + "\n")
    pip = ("-m", "pip", "install", "--quiet", "--no-compile", "-c", str(constraints), "--find-links", str(WHEELS))
    run(*pip, wanted)
    run(str(ROOT / "tools/check_isolation.py"), package, *TEST_TOOLS, env=VARIABLES)
    if "torch" in needs:
        with zipfile.ZipFile(ranktest) as wheel:
            wheel.extractall(site)  # what pip does of a wheel in pure Python, without its two seconds
    for arguments in runs:
        command = [*single_process_tests(package), *arguments]
        run(*command, env={**VARIABLES, **(variables or {})}, success_codes=[0, NO_TESTS_COLLECTED])


@contextlib.contextmanager
def empty_venv(session: nox.Session, name: str) -> Iterator[str]:
    """The Python of a new venv without pip, which is gone afterwards."""
    place = ROOT / ".nox" / name
    session.run(sys.executable, "-m", "venv", "--without-pip", "--clear", str(place), external=True)
    yield str(place / "bin" / "python")
    shutil.rmtree(place)


@nox.session(venv_backend="none")
def bases(session: nox.Session) -> None:
    """What the isolated venvs find installed beside a package; made once, by this session or the first isolation."""
    for requirement in sorted({name for package in PACKAGES for name in BASES_OF.get(package, BASE_DEFAULT)}):
        make_base(session, requirement)


def make_base(session: nox.Session, requirement: str, constraints: Path = CONSTRAINTS) -> Path:
    """The site-packages of a venv that holds one requirement of ours and the test tools; made once."""
    place = BASES / requirement
    key = hashlib.sha256(f"{place} {sys.version} {TEST_TOOLS}".encode() + constraints.read_bytes()).hexdigest()
    python, stamp = str(place / "bin" / "python"), place / "stamp"
    with one_at_a_time(place):
        if not stamp.exists() or stamp.read_text() != key:
            shutil.rmtree(place, ignore_errors=True)
            session.run(sys.executable, "-m", "venv", str(place), external=True)
            pip = (python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", str(constraints))
            session.run(*pip, requirement, *TEST_TOOLS, external=True)
            stamp.write_text(key)
    (site,) = (place / "lib").glob("python3.*/site-packages")
    return site


def wheel_builder(session: nox.Session) -> Environment:
    """A venv of setuptools alone, which is there long before the shared one is."""
    python, stamp, key = BUILDER / "bin" / "python", BUILDER / "stamp", hashlib.sha256(CONSTRAINTS.read_bytes())
    key.update(f"{BUILDER} {sys.version}".encode())
    with one_at_a_time(BUILDER):
        if not stamp.exists() or stamp.read_text() != key.hexdigest():
            session.run(sys.executable, "-m", "venv", "--clear", str(BUILDER), external=True)
            pip = (str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS))
            session.run(*pip, "setuptools", "wheel", external=True)
            stamp.write_text(key.hexdigest())
    return Environment(python=str(python), variables=dict(VARIABLES), arguments=[])


def release_python(session: nox.Session) -> str:
    """The venv that builds and checks what is uploaded: of tools/release/requirements.txt."""
    python, stamp, wanted = RELEASE / "bin" / "python", RELEASE / "stamp", ROOT / "tools/release/requirements.txt"
    pins = wanted.read_bytes() + CONSTRAINTS.read_bytes()
    key = hashlib.sha256(f"{RELEASE} {sys.version}".encode() + pins).hexdigest()
    with one_at_a_time(RELEASE):
        if not stamp.exists() or stamp.read_text() != key:
            session.run(sys.executable, "-m", "venv", "--clear", str(RELEASE), external=True)
            pip = (str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS))
            session.run(*pip, "-r", str(wanted), "setuptools", "wheel", external=True)
            stamp.write_text(key)
    return str(python)


def oldest(name: str) -> str:
    """What the packages allow at the least, as pip is asked for it; of torch the build without CUDA."""
    texts = [(ROOT / "packages" / package / "pyproject.toml").read_text() for package in PACKAGES]
    (bound,) = {found for text in texts for found in re.findall(rf'"{name}>=([\d.]+)"', text)}
    version = bound + ".0" * (2 - bound.count("."))
    return f"{name}=={version}+cpu" if name == "torch" else f"{name}=={version}"


# ---- the shared venv


def shared_environment(session: nox.Session) -> Environment:
    """The venv of all sessions but isolation: made by the first, found by the others.

    With ``--system-torch`` among the session's arguments it is the Python on the path, and nothing is installed.
    """
    arguments = [argument for argument in session.posargs if argument != "--system-torch"]
    variables = dict(VARIABLES)
    if len(arguments) < len(session.posargs):
        sources = [*ROOT.glob("packages/*/src"), ROOT / "tools/ranktest/src"]
        variables["PYTHONPATH"] = os.pathsep.join([*map(str, sources), os.environ.get("PYTHONPATH", "")])
        return Environment(python=shutil.which("python") or "python3", variables=variables, arguments=arguments)
    with one_at_a_time(SHARED):
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
    stamp.write_text(shared_key())


def docs_python(session: nox.Session) -> str:
    """The venv that builds the site: what docs/requirements.txt pins, and behind it the shared venv."""
    python, stamp = DOCS / "bin" / "python", DOCS / "stamp"
    key = hashlib.sha256(f"{DOCS} {sys.version}".encode() + DOCS_REQUIREMENTS.read_bytes()).hexdigest()
    with one_at_a_time(DOCS):
        if not stamp.exists() or stamp.read_text() != key:
            shutil.rmtree(DOCS, ignore_errors=True)
            session.run(sys.executable, "-m", "venv", str(DOCS), external=True)
            pip = (str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(DOCS_REQUIREMENTS))
            session.run(*pip, external=True)
            (site,), (shared,) = ((place / "lib").glob("python3.*/site-packages") for place in (DOCS, SHARED))
            (site / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
            stamp.write_text(key)
    return str(python)


def shared_key() -> str:
    """A digest of everything that the shared venv depends on."""
    digest = hashlib.sha256(f"{ROOT} {sys.version}".encode())
    for folder in distribution_folders():
        for path in [folder / "pyproject.toml", *c_sources(folder)]:
            digest.update(path.read_bytes())
    digest.update(CONSTRAINTS.read_bytes())
    return digest.hexdigest()


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


# ---- commands


def with_once(environment: Environment) -> Environment:
    """Of the same Python, which also finds the plugin of tools/once."""
    path = filter(None, [str(ONCE), environment.variables.get("PYTHONPATH")])
    return replace(environment, variables=environment.variables | {"PYTHONPATH": os.pathsep.join(path)})


def pytest_on(*folders: Path) -> list[str]:
    return ["-m", "pytest", "-q", "--durations=5", *map(str, folders)]


def of_ranks(environment: Environment, folder: Path) -> list[str]:
    """pytest; where ranktest is installed and used, torch is loaded once for it and for the ranks."""
    installed = Path(environment.python).is_relative_to(SHARED)
    early = installed and any("ranktest" in path.read_text() for path in folder.rglob("*.py"))
    return [*pytest_on(folder), *(["--early-server"] if early else [])]


def single_process_tests(package: str) -> list[str]:
    folder = ROOT / "packages" / package / "tests"
    return [*pytest_on(folder), f"--ignore={folder / 'ranks'}", f"--ignore={folder / 'gpu'}"]


def proof_of(package: str) -> Path:
    """The file in which isolation says what passed."""
    return LOGS / f"{package}.json"


def rank_tests(package: str) -> list[Path]:
    folder = ROOT / "tools/ranktest/tests" if package == "ranktest" else ROOT / "packages" / package / "tests/ranks"
    return sorted(folder.glob("test_*.py"))


def build_wheel(session: nox.Session, builder: Environment, package: str, folder: Path) -> Path:
    """Build one wheel into ``folder``, unless it is there for these very sources, and check its size."""
    source = ROOT / "tools/ranktest" if package == "ranktest" else ROOT / "packages" / package
    name = "ranktest" if package == "ranktest" else f"sixfold_{package.replace('-', '_')}"
    key, stamp = wheel_key(source), folder / f"{name}.key"
    with one_at_a_time(folder / name):
        wheels = list(folder.glob(f"{name}-*.whl"))
        if len(wheels) != 1 or not stamp.exists() or stamp.read_text() != key:
            for old in wheels:
                old.unlink()
            pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-c", str(CONSTRAINTS))
            with one_at_a_time(SOURCES):
                # setuptools would pack what an earlier build left here, deleted files included.
                shutil.rmtree(source / "build", ignore_errors=True)
                builder.run(session, *pip, "--wheel-dir", str(folder), str(source))
            stamp.write_text(key)
        (wheel,) = folder.glob(f"{name}-*.whl")
    limit_bytes = WHEEL_LIMIT_BYTES.get(package, WHEEL_LIMIT_DEFAULT_BYTES)
    size_bytes = wheel.stat().st_size
    if size_bytes > limit_bytes:
        session.error(f"{wheel.name} has {size_bytes} bytes; its limit is {limit_bytes}")
    session.log(f"{wheel.name}: {size_bytes} bytes")
    return wheel


def wheel_key(source: Path) -> str:
    """A digest of all that goes into a wheel: names and bytes."""
    digest = hashlib.sha256(sys.version.encode() + CONSTRAINTS.read_bytes())
    named = [source / name for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md")]
    for path in [*named, *sorted(source.glob("src/**/*")), *sorted(source.glob("native/**/*"))]:
        if path.is_file() and not re.search(r"__pycache__|\.egg-info/|\.so$", str(path)):
            digest.update(f"\0{path.relative_to(source)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def distribution_folders() -> list[Path]:
    return [ROOT / "tools/ranktest", *(ROOT / "packages" / name for name in PACKAGES)]


def c_sources(folder: Path) -> list[Path]:
    """What a distribution compiles, and how: setup.py and native/, if it has them; an editable is built from it too."""
    return sorted(path for pattern in ("setup.py", "native/*.[ch]") for path in folder.glob(pattern))


def module_of(package: str) -> str:
    return "sixfold." + package.replace("-", "_")
