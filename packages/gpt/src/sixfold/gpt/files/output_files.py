"""Files that a command is told to write: nothing is replaced but what sixfold wrote itself.

    loss_plot.py, timeline.py, doctor.py --> refuse_foreign (this file)

A picture that is drawn again while a run goes on replaces the older one: it carries ``MARK``. Whatever has no mark is
somebody else's.
"""

from __future__ import annotations

import json
from pathlib import Path

from sixfold.gpt.errors import ConfigError

MARK = "written by sixfold, which may write it anew"
_ENDS = 1 << 16  # bytes at both ends of a file in which its mark lies


def refuse_foreign(path: Path) -> None:
    """Refuse to replace a file that has no mark.

    Raises:
        ConfigError: naming it.
    """
    if not path.exists():
        return
    found = path.read_bytes()
    if MARK.encode() not in found[:_ENDS] + found[-_ENDS:]:
        raise ConfigError(f"{path} exists and nothing says that sixfold wrote it; choose another --out, or remove it")


def marked(text: str, suffix: str) -> str:
    """``text`` with the mark where its format has room for words; a .txt ends with it."""
    if suffix == ".json":
        return json.dumps(json.loads(text) | {"otherData": {"file": MARK}})
    return f"{text}\n<!-- {MARK} -->\n" if suffix == ".svg" else f"{text}\n({MARK})\n"
