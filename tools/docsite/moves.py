"""The pages docs/move/*.md: a usual program, ours, and the difference, which is made from the two.

    page --> Move: before, after, diff, commands, printed (this file) --> tests-integration/test_moves.py

    python tools/docsite/moves.py                  name the pages whose difference is not that of their programs; exit 1
    python tools/docsite/moves.py --write          write the differences anew
    python tools/docsite/moves.py --unpack PAGE FOLDER        before.py and after.py, as a reader saves them

A page has two python blocks, before.py and after.py in this order; a diff block; a sh block with the commands that run
them; and a text block with what every one of these commands prints.
"""

import argparse
import difflib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/move"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """What one page tells a reader to write and run."""

    before: str
    after: str
    diff: str
    commands: tuple[str, ...]
    printed: str


def move_of(text: str) -> Move:
    """The blocks of a page.

    Raises:
        ValueError: the page has not the blocks that each page has.
    """
    found = {language: [body for kind, body in FENCED.findall(text) if kind == language] for language in LANGUAGES}
    counts = {language: len(bodies) for language, bodies in found.items()}
    if counts != LANGUAGES:
        raise ValueError(f"the page has blocks {counts}; each page has {LANGUAGES}")
    before, after = found["python"]
    commands = tuple(line for line in found["sh"][0].splitlines() if line and not line.startswith("#"))
    return Move(before=before, after=after, diff=found["diff"][0], commands=commands, printed=found["text"][0])


LANGUAGES = {"python": 2, "diff": 1, "sh": 1, "text": 1}


def difference(before: str, after: str) -> str:
    """What `diff -U1 before.py after.py` shows."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "before.py", "after.py", n=1
    )
    return "".join(lines)


def with_difference(text: str) -> str:
    """The page with its diff block made anew."""
    move = move_of(text)
    return text.replace(f"```diff\n{move.diff}```", f"```diff\n{difference(move.before, move.after)}```")


def pages() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--unpack", nargs=2, type=Path, metavar=("PAGE", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.unpack:
        page, folder = arguments.unpack
        move = move_of(page.read_text())
        (folder / "before.py").write_text(move.before)
        (folder / "after.py").write_text(move.after)
        return
    stale = [path for path in pages() if with_difference(path.read_text()) != path.read_text()]
    for path in stale:
        if arguments.write:
            path.write_text(with_difference(path.read_text()))
        print(path.relative_to(ROOT))
    sys.exit(bool(stale) and not arguments.write)


if __name__ == "__main__":
    main()
