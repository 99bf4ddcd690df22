"""One package in an empty venv, as a user would install it.

wheels, bases --> an empty venv --> its imports, its tests of one process (this file) --> isolation, release, lowest
"""

import functools
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from checks.commands import single_process_tests
from checks.installs import make_base, wheel_builder
from checks.places import (
    BASE_DEFAULT,
    BASES_OF,
    CONSTRAINTS,
    NO_TESTS_COLLECTED,
    PACKAGES,
    ROOT,
    TEST_TOOLS,
    VARIABLES,
    WHEELS,
)  # fmt: skip
from checks.wheels import build_wheel

if TYPE_CHECKING:
    import nox


def run_alone(
    session: "nox.Session",
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
    site = Path(str(run("-c", "import site; print(site.getsitepackages()[0])", silent=True)).strip())
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
