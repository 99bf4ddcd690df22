"""Numbers that pages tell, beside the rows of results that they are of.

    docs/told.toml, benchmarks/results/*.md --> Told (this file): what a page says, what its row says --> test_told.py

An entry has the page's words, each number in braces, and for each number where it stands: a row by its first words and
a column by its head (or its number, where heads repeat), or, where that is empty, a sentence's words before it.
"""

import re
import tomllib
from dataclasses import dataclass
from decimal import ROUND_HALF_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path

from site_figures import plain

NUMBER = re.compile(r"(?<![\w.])(-?\d[\d,]*(?:\.\d+)?)(?: ?(k|ns|us|ms|s|min|x|%|points)(?!\w))?(?![\w.]*\d)")
UNIT = r" times (?:as|the|more|less|faster|longer)\b| times [\w-]+'s\b| ?k? ?(?:ns|us|ms|samples/s|tokens/s|GB/s)\b"
MEASURED = re.compile(rf"(?<![\w.])(\d[\d,.]*)(?:{UNIT})")  # seconds and bytes alone are settings as often
BRACES = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """One number, or some that belong together, of one page."""

    page: str
    says: str  # the page's words without braces
    number: str
    file: str
    row: str
    column: str | int  # empty: what follows `row` in a sentence
    under: str  # a heading, where a row stands in several tables


def told(root: Path) -> list[Told]:
    found = []
    for page, entries in tomllib.loads((root / "docs/told.toml").read_text()).items():
        for entry in entries["says"]:
            numbers = BRACES.findall(entry["words"])
            rows = entry["row"] if isinstance(entry["row"], list) else [entry["row"]] * len(numbers)
            columns = entry.get("columns", [""] * len(numbers))
            says, under = BRACES.sub(r"\1", entry["words"]), entry.get("under", "")
            for number, row, column in zip(numbers, rows, columns, strict=True):
                one = Told(page=page, says=says, number=number, file=entry["file"], row=row, column=column, under=under)
                found.append(one)
    return found


def fault(one: Told, root: Path) -> str:
    """What is wrong with one entry; empty if nothing is."""
    if plain(one.says) not in plain((root / one.page).read_text()):
        return f"{one.page} does not say {one.says!r}"
    text = section(read_results(one.file, root), one.under)
    cells = cells_of(text, one.row, one.column) if one.column else sentences_of(text, one.row)
    if len(cells) != 1:
        return f"{one.file}: {len(cells)} places are {one.row!r}, {one.column!r}; an entry names one"
    wanted, there = numbers_in(one.number), numbers_in(cells[0])
    if not wanted:
        return f"{one.page}: {one.number!r} has no number"
    if len(there) < len(wanted) or not all(map(agrees, wanted, there)):
        return f"{one.page} says {one.number!r} of {one.row!r}; {one.file} says {cells[0]!r}"
    return ""


def read_results(file: str, root: Path) -> str:
    return (root / f"benchmarks/results/{file}.md").read_text()


def section(text: str, under: str) -> str:
    """What stands below the heading that begins with ``under``, up to the next one; all of it without."""
    if not under:
        return text
    parts = re.split(r"^#+ +", text, flags=re.MULTILINE)
    return "\n".join(part for part in parts if part.startswith(under))


def cells_of(text: str, row: str, column: str | int) -> list[str]:
    """The cells in ``column`` of rows whose cells, one after the other, begin with ``row``."""
    found: list[str] = []
    head: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not head:
            head = cells
        elif plain(" ".join(cells)).startswith(plain(row)):
            place = column - 1 if isinstance(column, int) else head.index(column) if column in head else -1
            found += cells[place : place + 1] if place >= 0 else []
    return found


def sentences_of(text: str, words: str) -> list[str]:
    """What follows ``words``, wherever they stand."""
    return plain(text).split(plain(words))[1:]


def numbers_in(text: str) -> list[tuple[str, str]]:
    """Numbers with their units, which may be empty."""
    return [(number.replace(",", ""), unit) for number, unit in NUMBER.findall(text)]


def agrees(told: tuple[str, str], measured: tuple[str, str]) -> bool:
    """Whether a number is the measured one, rounded to the digits that are told; units where both have one."""
    (said, unit), (found, unit_there) = told, measured
    if unit and unit_there and unit != unit_there:
        return False
    step = Decimal(1).scaleb(-len(said.partition(".")[2]))
    return Decimal(said) in {Decimal(found).quantize(step, rule) for rule in (ROUND_HALF_UP, ROUND_HALF_DOWN)}


def newer(one: Told, root: Path) -> list[str]:
    """Later results files of the package that hold the same quantity, in the same column: "file: value" of each.

    A row is the same where its first cell is that of the entry's row, or the last words of it.
    """
    date, package = one.file[:10], one.file[11:]
    found = []
    for path in sorted((root / "benchmarks/results").glob(f"????-??-??-{package}.md")):
        if path.stem[:10] <= date or not isinstance(one.column, str) or not one.column:
            continue
        text = path.read_text()
        for name in first_cells(text):
            if plain(one.row).startswith(name) or plain(one.row).endswith(f" {name}"):
                found += [f"{path.stem}: {cell}" for cell in cells_of(text, name, one.column)]
    return found


def first_cells(text: str) -> list[str]:
    """What rows of tables begin with, if it is three words or more: fewer, as "mean", name a row of any table."""
    cells = (plain(line.strip("| ").split("|")[0]) for line in text.splitlines() if line.startswith("| "))
    return [cell for cell in cells if len(cell.split()) >= 3]


def without_entry(page: str, sentences: list[str], entries: list[Told]) -> list[str]:
    """Measured figures in a page's sentences that no entry of it has: times as fast, microseconds, rates."""
    said = " ".join(plain(one.says) for one in entries if one.page == page)
    known = {number for number, _ in numbers_in(said)}
    return [
        f"{page}: {match.group(0)}: {sentence}"
        for sentence in sentences
        for match in MEASURED.finditer(sentence)
        if match.group(1).replace(",", "") not in known
    ]
