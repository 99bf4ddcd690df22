"""Which packages and nox sessions a change concerns: what the forge runs for it, and no more.

    git diff --name-only --> paths --> packages touched, and who depends on them (this file) --> sessions

    python tools/release/affected.py --base origin/main      packages=[...], sessions=[...], lowest=[...], for the forge

Who depends on whom is read from the pyproject.toml files, extras included. A path that no rule names
concerns everything.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What only a reader sees, or who talks to us; its blocks, links and names are tested by the session docs.
PROSE = (
    r"docs/", r"benchmarks/", r"[^/]+\.(md|cff|yml)$", r"LICENSE$", r"\.github/ISSUE_TEMPLATE/",
    r"packages/[^/]+/([^/]+\.md$|LICENSE$)", r"tools/(docsite|explorer)/",
)  # fmt: skip
EXAMPLES = r"packages/[^/]+/examples/"  # run with the tests of all packages together
BENCHMARKS = r"packages/[^/]+/benchmarks/"  # run by hand; lint reads them


@dataclass(frozen=True, kw_only=True, slots=True)
class Concern:
    """What a change concerns."""

    packages: tuple[str, ...]
    sessions: tuple[str, ...]


def arrows(root: Path = ROOT) -> dict[str, set[str]]:
    """Package --> the siblings that its pyproject.toml asks for, by way of an extra too."""
    found = {}
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        extras = project.get("optional-dependencies", {})
        lines = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
        named = (re.match(r"[A-Za-z0-9._-]+", line) for line in lines)
        names = {match[0].lower() for match in named if match}
        found[path.parent.name] = {name.removeprefix("sixfold-") for name in names if name.startswith("sixfold-")}
    return found


def with_dependents(names: Iterable[str], arrows: Mapping[str, set[str]]) -> set[str]:
    """The packages named, those that ask for one of them, those that ask for these, and so on."""
    reached = set(names)
    while True:
        more = {package for package, asked in arrows.items() if asked & reached} - reached
        if not more:
            return reached
        reached |= more


def concern(paths: Iterable[str], arrows: Mapping[str, set[str]], with_ranks: Iterable[str]) -> Concern:
    """What changed files concern.

    Args:
        paths: relative to the repository, as git prints them.
        arrows: as ``arrows()`` gives them.
        with_ranks: packages, and ranktest, that have tests of several ranks.
    """
    touched, sessions = set(), {"lint"}
    for path in paths:
        package = re.match(r"packages/([^/]+)/", path)
        if any(re.match(rule, path) for rule in PROSE):
            sessions |= {"docs", "types"} if path.startswith("tools/") else {"docs"}
        elif re.match(EXAMPLES, path):
            sessions |= {"integration", "docs"}
        elif re.match(BENCHMARKS, path):
            continue
        elif package and package[1] in arrows:
            touched.add(package[1])
        elif path.startswith("tests-integration/"):
            sessions |= {"integration", "docs"}
        else:
            touched |= {*arrows, "ranktest"}
    packages = with_dependents(touched - {"ranktest"}, arrows)
    if touched:
        sessions |= {"types", "integration", "docs"}
        sessions |= {f"{name}({package})" for package in packages for name in ("isolation", "tests", "lowest")}
        sessions |= {f"ranks({name})" for name in packages | touched if name in set(with_ranks)}
    return Concern(packages=tuple(sorted(packages)), sessions=tuple(sorted(sessions)))


def ranked(root: Path = ROOT) -> set[str]:
    """The packages, and ranktest, that have tests of several ranks."""
    found = {path.parts[-4] for path in root.glob("packages/*/tests/ranks/test_*.py")}
    return found | {"ranktest"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", help="the commit to compare with; without it, or where git has none, everything")
    base = parser.parse_args().base
    paths = ["noxfile.py"]
    if base and set(base) != {"0"}:  # a forge gives zeros as the parent of a new branch
        command = ["git", "diff", "--name-only", f"{base}...HEAD"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{' '.join(command)}: {done.stderr.strip()}; taking everything", file=sys.stderr)
        else:
            paths = done.stdout.split("\n")[:-1]
    found = concern(paths, arrows(), ranked())
    print(f"packages={json.dumps(found.packages)}")
    oldest = [session for session in found.sessions if session.startswith("lowest(")]  # on the oldest Python alone
    print(f"sessions={json.dumps([session for session in found.sessions if session not in oldest])}")
    print(f"lowest={json.dumps(oldest)}")


if __name__ == "__main__":
    main()
