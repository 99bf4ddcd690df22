"""Lists of design notes and of decisions, by package.

docs/design/*.md, docs/decisions/<package>.md --> pages (this file) --> site_pages.py
"""

import re
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("indexed-data", "blending", "dist-ckpt", "pipeline", "fsdp", "gpt", "repository")
DESIGN = """\
# Design notes

One page per package, then its dated notes: goal, what, alternatives and why not, invariants, figures. A dated note
is not rewritten when the code moves on; a newer one says so.
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
    page = folder / f"{package}.md"  # the page to come in by; those with a date are a diary
    dated = [
        f"- {path.name[:10]} [{heading(path)}]({path.name})"
        for path in sorted(folder.glob(f"????-??-??-{package}*.md"))
    ]
    return [*([f"- [{heading(page)}]({page.name})"] if page.exists() else []), *dated]


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
