"""Every check of this repository, by name: ``nox -l`` lists them, ``nox`` runs what CI runs.

    packages/*/pyproject.toml, constraints.txt --> one shared venv (.nox/shared) --> lint, types, tests, ...
                                               --> wheels --> a fresh venv per package --> isolation
    ci --> four lanes, each a nox of its own that runs one of these sessions after the other
    isolation --> .nox/ci/<package>.json: what passed --> in ci, rest (or tests) runs what is left

Packages are found by their folders; a session that works on one takes its folder's name: ``nox -s "tests(pipeline)"``.
Nothing but nox is presupposed. What the sessions are made of is in tools/checks.
"""

import functools
import os
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).parent / "tools"))  # nox runs this file as no script and as no module

from checks.alone import run_alone
from checks.commands import of_ranks, proves, pytest_on, single_process_tests, with_once
from checks.gpu_groups import listing
from checks.gpu_run import machine_of, run_gpu
from checks.installs import (
    docs_python,
    empty_venv,
    make_base,
    release_python,
    shared_environment,
    shared_key,
)  # fmt: skip
from checks.lanes import Step, run_in_lane, run_turns, session_step, turn_of_ci, turns_of_ci
from checks.places import (
    ALSO_ISOLATED,
    BASE_DEFAULT,
    BASES,
    BASES_OF,
    CONSTRAINTS,
    DOCS_LANES,
    DOCS_LOGS,
    FULL,
    FULL_DEADLINE_S,
    INTEGRATION,
    LANES,
    LOGS,
    NAN_MODES,
    NO_TESTS_COLLECTED,
    ONCE,
    PACKAGES,
    ROOT,
    SHARED,
    c_sources,
    module_of,
    rank_tests,
    tests_of,
)  # fmt: skip
from checks.wheels import build_wheel, oldest

__all__ = ["SHARED", "shared_key"]  # where the shared venv is, and what of: for who makes it without nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["ci"]

each_package = nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
each_distribution = nox.parametrize("package", [nox.param(name, id=name) for name in [*PACKAGES, "ranktest"]])


# ---- training and tests, in the shared venv


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a GPT on this Python's own documentation; arguments after -- go to `sixfold demo`."""
    environment = shared_environment(session)
    environment.run(session, "-m", "sixfold.gpt", "demo", *environment.arguments)


@nox.session(venv_backend="none")
@each_package
def tests(session: nox.Session, package: str) -> None:
    """The tests of one package that need one process."""
    environment = with_once(shared_environment(session), package)
    command = [*single_process_tests(package), *environment.arguments]
    environment.run(session, *command, success_codes=(0, NO_TESTS_COLLECTED))


@nox.session(venv_backend="none")
@each_package
def rest(session: nox.Session, package: str) -> None:
    """`tests` and `ranks` in one process; ci, which runs it behind isolation, leaves out what passed there."""
    environment = with_once(shared_environment(session), package)
    folder = tests_of(package)
    command = [*of_ranks(environment, folder), f"--ignore={folder / 'gpu'}", *environment.arguments]
    environment.run(session, *command, success_codes=(0, NO_TESTS_COLLECTED))


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
    environment.run(session, *of_ranks(environment, INTEGRATION), *environment.arguments)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Tests and benchmarks of one GPU in eight minutes, and a page of results; `-- --list` says what runs and when.

    `-- --system-torch` takes the machine's own build of torch. What else follows `--` is pytest's.
    """
    if "--list" in session.posargs:
        session.log(listing())
        return
    environment = shared_environment(session)
    machine = machine_of(environment.python, environment.variables)
    if not machine["devices"]:
        session.error(f"torch {machine['torch']} sees no CUDA device: nothing was run, and no page written")
    path, red = run_gpu(
        environment.python,
        environment.variables,
        environment.arguments,
        machine,
        command=" ".join(["nox -s gpu", *(["--", *session.posargs] if session.posargs else [])]),
        date=time.strftime("%Y-%m-%d"),
    )
    session.log(f"results: {path.relative_to(ROOT)}")
    if red:
        session.error(f"not all passed: {', '.join(red)}; {path.relative_to(ROOT)} says what, .nox/gpu has the output")


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """The large matrices, every pair, resume and instant, every `sampled` case; tests with freed memory NaN. Hours."""
    environment, red = shared_environment(session), []
    runs = [(name, name, (*options, "--every-case")) for name, options in FULL.items()]
    runs += [(f"{name} {mode}", name, (mode,)) for name, mode in NAN_MODES.items()]
    for label, name, options in runs:
        command = [*pytest_on(tests_of(name)), *options, f"--timeout={FULL_DEADLINE_S}"]
        try:
            environment.run(session, *command, *environment.arguments, success_codes=(0, NO_TESTS_COLLECTED))
        except CommandFailed:  # the others are run all the same: hours are not to end at the first
            red.append(label)
    if red:
        session.error(f"red: {', '.join(red)}; of {len(runs)} runs of tests the others are green")


# ---- what is written: code, types, pages


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
    everything = [
        *(f"--package={name}" for name in [*modules, "explorer", "checks"]),
        *(f"--module={name}" for name in tools),
    ]
    environment.run(session, "-m", "mypy", *(environment.arguments or everything))


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the site into site/, and run what it and the READMEs tell a reader to run; examples: `integration`."""
    with ThreadPoolExecutor(1) as other:
        making = other.submit(docs_python, session)  # pip keeps one core busy, and two venvs are to be filled
        environment = shared_environment(session)
        python = making.result()
    variables = environment.variables | {"NO_MKDOCS_2_WARNING": "1"}

    def step(name: str, *command: str, success: tuple[int, ...] = (0,), of: str = python) -> Step:
        return Step(name=name, command=(of, *command), logs=DOCS_LOGS, variables=variables, success=success)

    def tests(name: str, *arguments: str, of: str = python) -> Step:
        command = (*pytest_on(INTEGRATION / f"{name}.py"), "--whole-site", "-rs", *arguments, *environment.arguments)
        some = (0, NO_TESTS_COLLECTED) if environment.arguments else (0,)
        return step(" ".join([name, *arguments]), *command, success=some, of=of)

    site = [
        step("mkdocs", "-m", "mkdocs", "build", "--quiet", "--clean"),
        # What the schedule explorer loads: npm fetches a pinned Pyodide; without npm it says so, and the page does.
        step("explorer", "tools/explorer/build.py", "site"),
        tests("test_site", "-k", "not blocks_of_a_page"),
        tests("test_site_page"),  # in a browser, where there is one
        tests("test_explorer_page"),
    ]
    # As a reader has it: beside the peers' torchvision, which is of another build, transformers loads no model.
    documents = tests("test_docs", "-k", "not example_runs", of=environment.python)
    apart = [[tests("test_site", "-k", "blocks_of_a_page")], [tests("test_moves")], [documents]]
    failed = run_turns([site, *apart], DOCS_LANES)
    session.log(f"the site is {(ROOT / 'site' / 'index.html').relative_to(ROOT)}; it opens as a file")
    if failed:
        session.error(f"failed: {', '.join(failed)}; their output is above and in {DOCS_LOGS.relative_to(ROOT)}")


@nox.session(venv_backend="none")
@each_package
def bench(session: nox.Session, package: str) -> None:
    """The pytest-benchmark files of one package, each with its peer or floor beside it."""
    environment = shared_environment(session)
    folder = ROOT / "packages" / package / "benchmarks"
    if not list(folder.glob("bench_*.py")):
        session.skip(f"{package} has no benchmarks")
    environment.run(session, *pytest_on(folder), "-o", "python_files=bench_*.py", *environment.arguments)


# ---- wheels and releases


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


@nox.session(venv_backend="venv", venv_params=["--without-pip"], reuse_venv=False)
@each_package
def isolation(session: nox.Session, package: str) -> None:
    """Install one wheel alone, as a user would; assert that no sibling comes with it; run its tests."""
    variables = {"PYTHONPATH": str(ONCE)}
    runs = [proves(package), *ALSO_ISOLATED.get(package, [])]
    python = str(Path(session.virtualenv.bin, "python"))
    run_alone(session, package, f"sixfold-{package}", python=python, runs=runs, variables=variables)
    shutil.rmtree(session.virtualenv.location)


@nox.session(venv_backend="none")
def bases(session: nox.Session) -> None:
    """What the isolated venvs find installed beside a package; made once, by this session or the first isolation."""
    for requirement in sorted({name for package in PACKAGES for name in BASES_OF.get(package, BASE_DEFAULT)}):
        make_base(session, requirement)


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


# ---- everything


@nox.session(venv_backend="none")
def ci(session: nox.Session) -> None:
    """Every check, four sessions at a time; what `nox` alone runs. Output comes as each ends; logs in .nox/ci.

    Of the slow tests a small machine runs a part, by the commit; `nox -s "rest(fsdp)"` and `full` run all.
    """
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    failed = []
    turn = turn_of_ci(os.cpu_count() or 1)
    step = functools.partial(session_step, turn=turn)
    with ThreadPoolExecutor(LANES) as lanes:
        start = time.monotonic()
        first, *others = turns_of_ci()
        running = [lanes.submit(run_in_lane, map(step, [["bases"], *first]))]
        shared_environment(session)  # meanwhile: pip keeps one core busy
        installed = time.monotonic()
        running += [lanes.submit(run_in_lane, map(step, sessions)) for sessions in others]
        for done in as_completed(running):
            failed += done.result()
    count, minutes, of_pip = sum(map(len, [first, *others])), time.monotonic() - start, installed - start
    session.log(f"{count} sessions in {LANES} lanes, {minutes / 60:.1f} minutes, of them {of_pip / 60:.1f} of pip")
    session.log(f"of the slow tests part {turn}; all: nox -s full" if turn else "all of the slow tests")
    if failed:
        session.error(f"failed: {', '.join(sorted(failed))}; their output is above and in {LOGS.relative_to(ROOT)}")
