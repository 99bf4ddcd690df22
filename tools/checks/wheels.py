"""A package's wheel, built once for the same sources, and its size.

packages/<name>/ --> build_wheel (this file) --> .nox/wheels, dist/
"""

import hashlib
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from checks.installs import Environment, one_at_a_time
from checks.places import (
    CONSTRAINTS,
    PACKAGES,
    ROOT,
    SOURCES,
    WHEEL_LIMIT_BYTES,
    WHEEL_LIMIT_DEFAULT_BYTES,
    source_of,
)  # fmt: skip

if TYPE_CHECKING:
    import nox


def build_wheel(session: "nox.Session", builder: Environment, package: str, folder: Path) -> Path:
    """Build one wheel into ``folder``, unless it is there for these very sources, and check its size."""
    source = source_of(package)
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


def oldest(name: str) -> str:
    """What the packages allow at the least, as pip is asked for it; of torch the build without CUDA."""
    texts = [(ROOT / "packages" / package / "pyproject.toml").read_text() for package in PACKAGES]
    (bound,) = {found for text in texts for found in re.findall(rf'"{name}>=([\d.]+)"', text)}
    version = bound + ".0" * (2 - bound.count("."))
    return f"{name}=={version}+cpu" if name == "torch" else f"{name}=={version}"
