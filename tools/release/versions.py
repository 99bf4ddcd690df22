"""Whether a package's version, change log and public names agree with its last release.

    pyproject.toml, CHANGELOG.md, tests/golden/api.txt, api-<last release>.txt --> faults (this file) --> release

    python tools/release/versions.py [package ...]              print the faults; exit 1 if there are any
    python tools/release/versions.py --tag pipeline-v0.2.0      package=pipeline, if that is a release of what is here
    python tools/release/versions.py --released package         after a release: its api.txt is the last release's

The public names of the last release are kept beside those of now: packages/<name>/tests/golden/api-<version>.txt.
Before 1.0 a name may go only with a new minor version, from 1.0 on with a new major one; a name that went stands in
the change log, above the heading of the last release.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
HEADING = re.compile(r"^## (\S+)", re.MULTILINE)
ENTRY = re.compile(r"^(\s*)(?:@\w+ )*(?:(?:async )?def |class |module )?([A-Za-z_]\w*)")


def names_of(snapshot: str) -> set[str]:
    """Dotted public names of a text of tools/api_snapshot.py; a class's fields and methods too."""
    names, module, owner = set(), "", ""
    for line in snapshot.splitlines():
        if line.startswith("# "):
            module = line[2:].strip()
        elif not line.startswith("@") and (entry := ENTRY.match(line)):
            indent, name = entry.groups()
            if not indent:
                owner = f"{module}.{name}"
                names.add(owner)
            else:
                names.add(f"{owner}.{name}")
    return names


def removed_names(before: str, now: str) -> list[str]:
    """What the one snapshot has and the other has not; of a class that went the class alone."""
    gone = names_of(before) - names_of(now)
    return sorted(name for name in gone if name.rpartition(".")[0] not in gone)


def may_remove(last: Version, now: Version) -> bool:
    """Whether a public name may go between two versions."""
    return now.major > last.major or (now.major == last.major == 0 and now.minor > last.minor)


def faults_of(version: str, changelog: str, now: str, last: str | None, before: str) -> list[str]:
    """What is wrong, a line each.

    Args:
        version: pyproject.toml's.
        changelog: the text of CHANGELOG.md.
        now, before: the public names of now and of the last release, as api_snapshot writes them.
        last: the version of the last release; None if there was none.
    """
    faults = []
    headings = list(HEADING.finditer(changelog))
    if not headings or headings[0][1] != version:
        top = headings[0][1] if headings else "nothing"
        faults.append(
            f"CHANGELOG.md begins with {top}, pyproject.toml has {version}; the first section is its version's"
        )
    if last is None:
        return faults
    if Version(version) <= Version(last):
        faults.append(f"the version is {version}, and {last} is released; a new one is larger")
    since = next((heading.start() for heading in headings if heading[1] == last), len(changelog))
    news = changelog[:since]
    gone = removed_names(before, now)
    if gone and not may_remove(Version(last), Version(version)):
        step = "minor" if Version(last).major == 0 else "major"
        faults.append(f"{', '.join(gone)} went since {last}; that needs a new {step} version, and this is {version}")
    for name in gone:
        if not re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", news):
            faults.append(f"{name} went since {last}, and CHANGELOG.md does not say so above {last}")
    return faults


def sibling_faults(requirements: list[str], versions: dict[str, str]) -> list[str]:
    """Ranges of siblings that leave out the sibling that is here."""
    faults = []
    for requirement in map(Requirement, requirements):
        name = requirement.name.removeprefix("sixfold-")
        if name in versions and not requirement.specifier.contains(versions[name], prereleases=True):
            faults.append(f"{requirement} leaves out {versions[name]}, the version of {name} that is here")
    return faults


def project_of(package: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    return project


def versions_here() -> dict[str, str]:
    names = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
    return {name: project_of(name)["version"] for name in names}


def golden(package: str) -> Path:
    return ROOT / "packages" / package / "tests" / "golden"


def last_release(package: str) -> Version | None:
    """The newest version whose public names are kept."""
    found = [Version(path.stem.removeprefix("api-")) for path in golden(package).glob("api-*.txt")]
    return max(found, default=None)


def faults(package: str) -> list[str]:
    """What is wrong with one package of this repository."""
    project, last = project_of(package), last_release(package)
    before = (golden(package) / f"api-{last}.txt").read_text() if last else ""
    changelog = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    now = (golden(package) / "api.txt").read_text()
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *(line for lines in extras for line in lines)]
    found = faults_of(project["version"], changelog, now, str(last) if last else None, before)
    return [f"{package}: {fault}" for fault in [*found, *sibling_faults(requirements, versions_here())]]


def package_of_tag(tag: str, versions: dict[str, str]) -> str:
    """The package that a tag such as ``pipeline-v0.2.0`` releases.

    Raises:
        ValueError: the tag names no package, or another version than the package's, or one of development.
    """
    package, _, version = tag.rpartition("-v")
    if package not in versions:
        raise ValueError(f"tag {tag}: no package {package!r}; a tag is <package>-v<version> of {', '.join(versions)}")
    if version != versions[package]:
        raise ValueError(f"tag {tag}: packages/{package}/pyproject.toml has version {versions[package]}")
    if Version(version).is_devrelease:
        raise ValueError(f"tag {tag}: {version} is of development, and is not released")
    return package


def record(package: str) -> Path:
    """Keep the public names of now as those of the release that pyproject.toml names."""
    version = Version(project_of(package)["version"])
    if version.is_devrelease:
        sys.exit(f"{package} has version {version}; a release has no .dev")
    for old in golden(package).glob("api-*.txt"):
        old.unlink()
    path = golden(package) / f"api-{version}.txt"
    path.write_text((golden(package) / "api.txt").read_text())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--tag", help="say which package this tag releases")
    parser.add_argument("--released", action="store_true", help="keep the public names of now as the last release's")
    arguments = parser.parse_args()
    if arguments.tag:
        try:
            print(f"package={package_of_tag(arguments.tag, versions_here())}")
        except ValueError as fault:
            sys.exit(str(fault))
        return
    packages = arguments.packages or sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
    if arguments.released:
        if not arguments.packages:
            parser.error("--released needs the packages that were released")
        for package in packages:
            print(record(package).relative_to(ROOT))
        return
    found = [fault for package in packages for fault in faults(package)]
    if found:
        sys.exit("\n".join(found))
    print(f"versions, change logs and public names agree: {', '.join(packages)}")


if __name__ == "__main__":
    main()
