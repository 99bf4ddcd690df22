"""Lists of design notes and of decisions, by package.

docs/design/<package>.md and <package>/*.md, docs/decisions/<package>.md --> pages (this file) --> site_pages.py
"""

import re
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("indexed-data", "blending", "dist-ckpt", "pipeline", "fsdp", "gpt", "repository")
DESIGN = """\
# Design notes

For those who change the code: one page per package, then one per folder of its code. A page says what holds today:
invariants and why, what else was tried and why not.
"""
DECISIONS = """\
# Decisions

Choices that someone will ask about: context, decision, consequence. One page per package, newest first. A decision
that changed has one entry, with both dates.
"""


def pages(root: Path) -> dict[str, str]:
    return {
        "design/README.md": _list(root / "docs/design", DESIGN, _notes),
        "decisions/README.md": _list(root / "docs/decisions", DECISIONS, _decisions),
    }


def _list(folder: Path, head: str, lines: Callable[[Path, str], list[str]]) -> str:
    return "\n".join(
        [head, *(line for package in PACKAGES for line in (f"## {package}\n", *lines(folder, package), ""))]
    )


def _notes(folder: Path, package: str) -> list[str]:
    rooms = sorted((folder / package).glob("*.md"))
    return [
        f"- [{heading(page)}]({page.relative_to(folder)})"
        for page in [folder / f"{package}.md", *rooms]
        if page.exists()
    ]


def _decisions(folder: Path, package: str) -> list[str]:
    page = folder / f"{package}.md"
    found = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE) if page.exists() else []
    return [f"- [{subject}]({page.name}#{anchor(subject)})" for subject in found]


def heading(path: Path) -> str:
    """The text of the page's first heading."""
    return next(line.removeprefix("# ").strip() for line in path.read_text().splitlines() if line.startswith("# "))


def anchor(heading: str) -> str:
    """The address of a heading in its page, as the site's generator makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
