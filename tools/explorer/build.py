"""What the explorer's page needs beside it in the built site: the Python runtime, and the Python that it runs.

    npm's package "pyodide" (pinned, its hash checked) --> SITE/explorer/pyodide/
    tools/explorer, packages/pipeline                  --> SITE/explorer/python.zip   (this file)

python tools/explorer/build.py site

npm's own client fetches the package, as its configuration says; the archive is kept in .nox/pyodide. None of its
files are in the repository, and nothing is fetched by a reader's browser but from the site itself. Where npm cannot
be had the archive may be put there by hand; without it the site has the page and no runtime, which the page says.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = "314.0.7"
SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
CACHE = ROOT / ".nox" / "pyodide"
SOURCES = ROOT / "packages" / "pipeline" / "src"
FETCH_S = 300


class BuildError(Exception):
    """What was fetched is not what is pinned."""


class NotHere(BuildError):
    """The runtime cannot be had on this machine; the message says why."""


def fetched(cache: Path = CACHE) -> Path:
    """The archive of the pinned package, from ``cache`` or by npm.

    Raises:
        NotHere: there is no npm, or it fails.
        BuildError: the archive is another one than the pinned.
    """
    archive = cache / f"pyodide-{VERSION}.tgz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        if (npm := shutil.which("npm")) is None:
            raise NotHere(f"npm is not on the path; it fetches the package pyodide {VERSION}")
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [npm, "pack", f"pyodide@{VERSION}", "--pack-destination", folder]
            try:
                done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=FETCH_S, check=False)
            except subprocess.TimeoutExpired:
                raise NotHere(f"npm pack pyodide@{VERSION} took longer than {FETCH_S} s") from None
            if done.returncode:
                raise NotHere(f"npm pack pyodide@{VERSION} ended with {done.returncode}:\n{done.stderr.strip()}")
            (Path(folder) / archive.name).replace(archive)
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != SHA512:
        archive.unlink()
        raise BuildError(f"pyodide {VERSION} has the sha512 {found}; {SHA512} is pinned. It was thrown away")
    return archive


def put_runtime(archive: Path, folder: Path) -> None:
    """The files of ``archive`` that a page loads, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as package:
        for name in FILES:
            content = package.extractfile(f"package/{name}")
            assert content is not None, f"{name} is no file"
            (folder / name).write_bytes(content.read())


def put_python(target: Path) -> None:
    """The package's sources and the page's, as the worker unpacks them."""
    sources = [(path, path.relative_to(SOURCES)) for path in sorted((SOURCES / "sixfold" / "pipeline").rglob("*.py"))]
    own = Path(__file__).parent
    sources += [(path, Path("explorer") / path.name) for path in sorted(own.glob("*.py")) if path.name != "build.py"]
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, name in sources:
            # One date, so that a page's bytes change only with its sources.
            archive.writestr(zipfile.ZipInfo(str(name)), path.read_bytes(), zipfile.ZIP_DEFLATED)


def build(site: Path) -> None:
    """All of it, for a site whose pages are already there."""
    put_python(site / "explorer" / "python.zip")
    put_runtime(fetched(), site / "explorer" / "pyodide")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    try:
        build(parser.parse_args().site)
    except NotHere as error:
        # The rest of the site stands without it, and the page itself says what it lacks.
        print(f"the schedule explorer is built without its runtime: {error}", file=sys.stderr)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
