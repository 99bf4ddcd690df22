"""What made a run.

software_versions (this file) --> the start line of metrics.jsonl, common data of checkpoints
"""

from __future__ import annotations

import platform
from importlib import metadata


def software_versions() -> dict[str, str]:
    """What made a run: python, torch and the six packages."""
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("indexed-data", "blending", "dist-ckpt", "pipeline", "fsdp", "gpt"):
        try:
            found[f"sixfold-{name}"] = metadata.version(f"sixfold-{name}")
        except metadata.PackageNotFoundError:
            found[f"sixfold-{name}"] = "not installed"
    return found
