"""Lists of design notes and decision records, by package and date.

docs/design/*.md, docs/decisions/*.md --> pages (this file) --> site_pages.py
"""

from pathlib import Path

PACKAGES = ("indexed-data", "blending", "dist-ckpt", "pipeline", "fsdp", "gpt", "repository")
KINDS = {
    "design": ("Design notes", "Half a page per subject: goal, what, alternatives and why not, invariants, figures."),
    "decisions": (
        "Decision records",
        "Ten lines each: a choice that someone will ask about; what would change it.",
    ),
}


def pages(root: Path) -> dict[str, str]:
    return {f"{folder}/README.md": _list(root / "docs" / folder, *said) for folder, said in KINDS.items()}


def _list(folder: Path, title: str, meaning: str) -> str:
    parts = [
        f"# {title}\n",
        f"{meaning} A note is not rewritten when the code moves on; a newer one says so.\n",
    ]
    for package in PACKAGES:
        found = sorted(folder.glob(f"????-??-??-{package}*.md"))
        parts.append(f"## {package}\n")
        if (page := folder / f"{package}.md").exists():  # the page to come in by; those with a date are a diary
            parts.append(f"- [{heading(page)}]({page.name})")
        parts += [f"- {path.name[:10]} [{heading(path)}]({path.name})" for path in found]
        parts.append("")
    return "\n".join(parts)


def heading(path: Path) -> str:
    """The text of the page's first heading."""
    return next(line.removeprefix("# ").strip() for line in path.read_text().splitlines() if line.startswith("# "))
