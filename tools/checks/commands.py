"""pytest over a package's tests, and what need not run twice.

isolation --> .nox/ci/<package>.json: what passed --> ci's `tests` and `rest` run what is left (this file)
"""

import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path

from checks.installs import Environment
from checks.places import CONSTRAINTS, LOGS, ONCE, PACKAGES, RANKTEST, ROOT, SHARED, source_of, tests_of
from checks.wheels import wheel_key

AFTER_ISOLATION = "--after-isolation"  # the argument with which ci, and nobody else, runs `tests` and `rest`


def pytest_on(*folders: Path) -> list[str]:
    return ["-m", "pytest", "-q", "--durations=5", *map(str, folders)]


def single_process_tests(package: str) -> list[str]:
    folder = tests_of(package)
    return [*pytest_on(folder), f"--ignore={folder / 'ranks'}", f"--ignore={folder / 'gpu'}"]


def of_ranks(environment: Environment, folder: Path) -> list[str]:
    """pytest; where ranktest is installed and used, torch is loaded once for it and for the ranks."""
    installed = Path(environment.python).is_relative_to(SHARED)
    early = installed and any("ranktest" in path.read_text() for path in folder.rglob("*.py"))
    return [*pytest_on(folder), *(["--early-server"] if early else [])]


# ---- once


def with_once(environment: Environment, package: str) -> Environment:
    """Of the same Python, with the plugin of tools/once; in ci what isolation has just proved is left out."""
    path = filter(None, [str(ONCE), environment.variables.get("PYTHONPATH")])
    arguments = ["-p", "once"]
    for argument in environment.arguments:
        arguments += proved(package) if argument == AFTER_ISOLATION else [argument]
    variables = environment.variables | {"PYTHONPATH": os.pathsep.join(path)}
    return replace(environment, variables=variables, arguments=arguments)


def proves(package: str) -> list[str]:
    """pytest's arguments that write down what passes, and of what."""
    return ["-p", "once", "--proves", str(proof_of(package)), "--of", tree_of(package)]


def proved(package: str) -> list[str]:
    """pytest's arguments that leave out what ``proves`` wrote down of the very same files."""
    return ["--proved", str(proof_of(package)), "--of", tree_of(package)]


def proof_of(package: str) -> Path:
    return LOGS / f"{package}.json"


def tree_of(package: str) -> str:
    """A digest of what isolation installs and runs of a package: sources, tests, versions."""
    installed = PACKAGES if package == "gpt" else [package]  # gpt brings its siblings
    digest = hashlib.sha256("".join(wheel_key(source_of(name)) for name in [*installed, "ranktest"]).encode())
    for path in (ROOT / "conftest.py", ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(path.read_bytes())
    for folder in (source_of(package), RANKTEST, ONCE):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not re.search(r"__pycache__|\.egg-info/|\.so$|/build/|\.hypothesis/", str(path)):
                digest.update(f"\0{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
