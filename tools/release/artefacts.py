"""Build what is uploaded of one package, look into it, and say what to do with it.

    packages/<name>/ --> sdist --> wheel, and a pure one where there are C sources (this file) --> dist/release/<name>/

    python tools/release/artefacts.py build pipeline dist/release/pipeline
    python tools/release/artefacts.py tell pipeline dist/release/pipeline     after the tests: what to upload

The wheel is built from the sdist and not from the folder, so that the sdist is known to hold all that it needs. A pure
wheel is the sdist without its setup.py: pip takes it where no wheel of the machine's sort is.
Runs in the venv of tools/release/requirements.txt.
"""

import argparse
import email.message
import email.parser
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def build(package: str, folder: Path) -> list[Path]:
    """The sdist and wheels of ``package`` in ``folder``, which is emptied first."""
    source = ROOT / "packages" / package
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        # A copy: what earlier builds left in the source would be packed too, deleted files included.
        kept = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.so", "dist")
        copy = Path(shutil.copytree(source, Path(scratch) / package, ignore=kept))
        run_build(copy, folder)
        if (copy / "setup.py").exists():
            (sdist,) = folder.glob("*.tar.gz")
            with tarfile.open(sdist) as tar:
                tar.extractall(scratch, filter="data")
            pure = Path(scratch) / sdist.name.removesuffix(".tar.gz")
            (pure / "setup.py").unlink()
            run_build(pure, folder, "--wheel")
    return sorted(folder.iterdir())


def run_build(source: Path, folder: Path, *options: str) -> None:
    """pypa/build with the setuptools of this venv; without options the wheel is built from the sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), *options, str(source)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")


def faults(path: Path, package: str, project: dict[str, Any]) -> list[str]:
    """What is wrong with the insides of a wheel or an sdist, a line each."""
    names, metadata = contents(path)
    module = package.replace("-", "_")
    found = []
    if path.suffix == ".whl":
        wanted = [f"sixfold/{module}/__init__.py", f"sixfold/{module}/py.typed"]
        alien = [name for name in names if not name.startswith((f"sixfold/{module}/", f"sixfold_{module}-"))]
        found += [f"holds {name}, which is not of sixfold.{module}" for name in alien]
        licence = any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    else:
        wanted = ["pyproject.toml", "README.md", "CHANGELOG.md", f"src/sixfold/{module}/py.typed"]
        licence = "LICENSE" in names
    found += [f"holds no {name}" for name in wanted if name not in names]
    found += [] if licence else ["holds no LICENSE, which Apache-2.0 asks for"]
    waste = [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".key", ".orig"))]
    found += [f"holds {name}" for name in waste]
    version = metadata["Version"]
    if version != project["version"]:
        found.append(f"says version {version}, pyproject.toml {project['version']}")
    if not str(metadata.get_payload() or "").strip():
        found.append("has no long description, so its page would be empty")
    return [f"{path.name} {fault}" for fault in found]


def contents(path: Path) -> tuple[set[str], email.message.Message]:
    """The names in a wheel or sdist (of an sdist without its folder), and its metadata."""
    parser = email.parser.Parser()
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            names = {name for name in wheel.namelist() if not name.endswith("/")}
            (place,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            return names, parser.parsestr(wheel.read(place).decode())
    with tarfile.open(path) as tar:
        top = path.name.removesuffix(".tar.gz")
        names = {name.name.removeprefix(f"{top}/") for name in tar if name.isfile()}
        file = tar.extractfile(f"{top}/PKG-INFO")
        assert file is not None, f"{path} has a folder for its PKG-INFO"
        return names, parser.parsestr(file.read().decode())


def is_uploadable(path: Path) -> bool:
    """An index takes sdists, pure wheels, and wheels of a named Linux; not those of just this machine."""
    if path.suffix != ".whl":
        return True
    tags = parse_wheel_filename(path.name)[3]
    return not any(tag.platform.startswith("linux") for tag in tags)


def tell(package: str, folder: Path) -> str:
    """What to upload and under which tag, as text."""
    files = sorted(folder.iterdir())
    (sdist,) = (path for path in files if path.suffix != ".whl")
    version = parse_sdist_filename(sdist.name)[1]
    lines = [f"sixfold-{package} {version}:"]
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"  {path.stat().st_size:>9,} bytes  sha256 {digest}  {path.name}")
    ours = [path for path in files if not is_uploadable(path)]
    lines += [
        f"{path.name} is of this machine, and an index does not take it. In its place: those that cibuildwheel makes, "
        f"`python -m cibuildwheel --platform linux packages/{package}`"
        for path in ours
    ]
    if Version(str(version)).is_devrelease:
        base = Version(str(version)).base_version
        lines.append(f"Not for upload: {version} is of development. Set {base} in pyproject.toml and CHANGELOG.md.")
        return "\n".join(lines)
    named = " ".join(str(path) for path in files if path not in ours)
    tag = f"{package}-v{version}"
    lines += [
        "To release it:",
        f"  git tag -a {tag} -m 'sixfold-{package} {version}' && git push origin {tag}",
        f"  python -m twine upload {named}",
        f"  python tools/release/versions.py --released {package}    # commit what it writes",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("verb", choices=["build", "tell"])
    parser.add_argument("package")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "tell":
        print(tell(arguments.package, arguments.folder))
        return
    project = tomllib.loads((ROOT / "packages" / arguments.package / "pyproject.toml").read_text())["project"]
    files = build(arguments.package, arguments.folder)
    found = [fault for path in files for fault in faults(path, arguments.package, project)]
    if found:
        sys.exit("\n".join(found))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=True)


if __name__ == "__main__":
    main()
