"""The page of figures: what benchmarks/results/ holds, in one table.

    benchmarks/results/*.md + docs/figures.toml --> page (this file) --> site_pages.py

The data file names, for each results file, its figures: what was measured, against whom, by which command, and the
result in the words of the file. A test looks each of them up in the file.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRAPPED = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One row. ``ours``, ``command`` and ``machine`` are words of the results file."""

    file: str
    package: str
    what: str
    peer: str
    result: str
    command: str
    machine: str

    @property
    def date(self) -> str:
        return self.file[:10]


def figures(root: Path) -> list[Figure]:
    """Newest first; of a day, by package."""
    found = []
    for file, said in _said(root).items():
        for row in said.get("figure", []):
            own = {"machine": said["machine"], "command": said.get("command", ""), "package": said["package"]}
            found.append(Figure(file=f"{file}.md", **(own | row)))
    return sorted(sorted(found, key=lambda figure: figure.package), key=lambda figure: figure.date, reverse=True)


def left_out(root: Path) -> dict[str, str]:
    """Results files without a row, each with its reason."""
    return {f"{file}.md": said["none"] for file, said in _said(root).items() if "none" in said}


def plain(text: str) -> str:
    """Words with one space between them and no marks of Markdown, to look for one text in another."""
    return WRAPPED.sub(" ", re.sub(r"[`*|]", " ", text)).strip()


def says(text: str, words: str) -> bool:
    """Whether one line or paragraph of a results file has all of ``words``, which " ... " keeps apart."""
    lines = [*text.splitlines(), *text.split("\n\n")]
    return any(all(plain(part) in plain(line) for part in words.split(" ... ")) for line in lines)


def pages(root: Path) -> dict[str, str]:
    lines = [PAGE.rstrip()]
    for row in figures(root):
        file = f"[{row.date} {row.package}](../benchmarks/results/{row.file})"
        what = f"{row.what}<br><small>{file}; `{row.command}`; {row.machine}</small>"
        result = row.result.replace(" ... ", "; ")
        cells = (what, f"**{result}**", row.peer or "none")
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    lines += ["", "## Files without a row", ""]
    lines += [f"- [{file}](../benchmarks/results/{file}): {why}" for file, why in left_out(root).items()]
    return {"figures.md": "\n".join(lines) + "\n"}


def _said(root: Path) -> dict[str, dict[str, Any]]:
    path = root / "docs/figures.toml"
    return tomllib.loads(path.read_text())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGE = """\
# Figures

Every figure has a file in `benchmarks/results/` with the command, machine, scale and date; this table is made from
them. A ratio is ours to the peer's of one run, in turns, unless the file says otherwise. Most were taken on two CPU
cores: they say nothing of a network or a GPU.

| what; its file, command and machine | result | peer |
|---|---|---|
"""
