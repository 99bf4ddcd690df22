"""The pages of the site as text, before any site generator sees them.

    docs/**/*.md, READMEs, results of benchmarks --> pages (this file) --> hooks.py (mkdocs), test_site.py
    code of the packages --> site_errors, site_figures, site_reference --+

A page has an address inside the site (``errors/fsdp.md``). Links are written as they are on disk, so that they lead
somewhere in the repository too; here they become links inside the site. A link to a source file leads to a page
that shows it; one to a folder becomes plain text. No mkdocs here: the tests of the default command need none.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import site_errors
import site_figures
import site_notes
import site_raises
import site_reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SECTIONS = ("start/", "move/", "do/", "understand/", "errors/", "reference/")  # of mkdocs.yml's navigation
OUTSIDE = ("packages/*/README.md", "packages/*/CHANGELOG.md", "benchmarks/**/*.md", "CONTRIBUTING.md")
# On disk -> in the site: the repository's README says what the home page says; from the others pages are made.
HOME = {
    "README.md": "README.md",
    "docs/errors": "errors/README.md",
    "docs/reference": "reference/README.md",
    "docs/figures.toml": "figures.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".c": "c", ".h": "c"}
LINK = re.compile(
    r"(?P<start>!?\[[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*\]\()(?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?(?P<end>\))"
)
CODE = re.compile(r"(`+)(?:(?!`).)+\1")
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    text: str
    place: str  # in the repository: what its links are relative to
    made: bool  # not a file below docs/


@functools.cache
def pages() -> dict[str, Page]:
    """Every page by its address, links turned."""
    found = dict(_on_disk())
    for address, text in _made():
        found[address] = Page(text=text, place=f"docs/{address}", made=True)
    site_raises.source.cache_clear()  # the syntax trees of all packages
    addresses = {page.place: address for address, page in found.items()} | HOME
    sources = dict(_sources(found, addresses))
    addresses |= {page.place: address for address, page in sources.items()}
    turned = {
        address: Page(text=_turned(page, address, addresses), place=page.place, made=page.made)
        for address, page in found.items()
    }
    return turned | sources


def pictures() -> dict[str, Path]:
    """Pictures outside docs/ that a page shows, by their address."""
    found = {}
    for page in dict(_on_disk()).values():
        for place in _targets(page):
            path = ROOT / place
            if path.suffix in (".svg", ".png") and path.is_file() and not place.startswith("docs/"):
                found[place] = path
    return found


def section(folder: str) -> list[str]:
    """The pages of a section: its README first, then those that it links, in its order, but for other sections'."""
    readme = f"{folder}README.md"
    if readme not in pages():
        return []
    linked = [os.path.normpath(f"{folder}{target}") for target in links(pages()[readme].text)]
    own = [page for page in linked if page in pages() and not page.startswith(tuple({*SECTIONS} - {folder}))]
    return list(dict.fromkeys([readme, *own]))


def titles(folder: str) -> dict[str, str]:
    """What the lists and tables of a section's README call its pages, by their address."""
    found: dict[str, str] = {}
    for line, is_code in lines_of(pages()[f"{folder}README.md"].text):
        for match in [] if is_code or not line.startswith(("- ", "| ")) else links_in(line):
            found.setdefault(os.path.normpath(f"{folder}{match['target']}"), match["start"][1:-2])
    return found


def links(text: str) -> list[str]:
    """Targets of the links of a page, without their anchors; those to other sites left out."""
    return [
        match["target"]
        for line, is_code in lines_of(text)
        if not is_code
        for match in links_in(line)
        if match["target"] and "://" not in match["target"]
    ]


def links_in(line: str) -> list[re.Match[str]]:
    """Links of a line, but for what only looks like one inside of code."""
    code = [span.span() for span in CODE.finditer(line)]
    middles = [(match, match.start("target") - 1) for match in LINK.finditer(line)]
    return [match for match, middle in middles if not any(start <= middle < end for start, end in code)]


def lines_of(text: str) -> Iterator[tuple[str, bool]]:
    """Lines, each with whether it is code: within a fenced block, or HTML as site_errors makes it."""
    fence = None
    for line in text.splitlines():
        mark = FENCE.match(line)
        if fence is None and mark:
            fence = mark["ticks"]
            yield line, True
        elif fence is not None:
            if mark and mark["ticks"] == fence and line.strip() == fence:
                fence = None
            yield line, True
        else:
            yield line, line.startswith("<li")


def _on_disk() -> Iterator[tuple[str, Page]]:
    for path in sorted(DOCS.rglob("*.md")):
        place = path.relative_to(ROOT).as_posix()
        yield place.removeprefix("docs/"), Page(text=path.read_text(), place=place, made=False)
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            yield place, Page(text=path.read_text(), place=place, made=True)


def _made() -> Iterator[tuple[str, str]]:
    makers: list[Callable[[Path], dict[str, str]]] = [
        site_errors.pages, site_figures.pages, site_notes.pages, site_reference.pages
    ]  # fmt: skip
    for maker in makers:
        yield from maker(ROOT).items()


def _targets(page: Page) -> Iterator[str]:
    """What a page links to, as places in the repository."""
    for target in links(page.text):
        yield os.path.normpath(os.path.join(os.path.dirname(page.place), target))


def _sources(found: dict[str, Page], addresses: dict[str, str]) -> Iterator[tuple[str, Page]]:
    """A page for each file of the repository that is linked and is no page: its text."""
    for place in sorted({place for page in found.values() for place in _targets(page)}):
        path = ROOT / place
        if place in addresses or not path.is_file() or path.suffix in (".svg", ".png", ".md"):
            continue
        language = LANGUAGES.get(path.suffix, "text")
        text = f"# {place}\n\n````{language}\n{path.read_text()}````\n"
        yield f"source/{place}.md", Page(text=text, place=place, made=True)


def _turned(page: Page, address: str, addresses: dict[str, str]) -> str:
    here = os.path.dirname(address)

    def turn_all(line: str) -> str:
        for match in reversed(links_in(line)):
            line = line[: match.start()] + turn(match) + line[match.end() :]
        return line

    def turn(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if not target or "://" in target:
            return match[0]
        place = os.path.normpath(os.path.join(os.path.dirname(page.place), target))
        if place.startswith("docs/") and place not in addresses:  # a picture, or a page that is not there
            return f"{match['start']}{os.path.relpath(place.removeprefix('docs/'), here or '.')}{anchor}{match['end']}"
        if place in addresses:
            return f"{match['start']}{os.path.relpath(addresses[place], here or '.')}{anchor}{match['end']}"
        if (ROOT / place).suffix in (".svg", ".png"):
            return f"{match['start']}{os.path.relpath(place, here or '.')}{match['end']}"
        return match["start"].removesuffix("](").lstrip("![")

    written = [line if is_code else turn_all(line) for line, is_code in lines_of(page.text)]
    return "\n".join(spaced(written)) + "\n"


def spaced(lines: list[str]) -> Iterator[str]:
    """Lists as the site's Markdown wants them: an empty line before the first item, as the forge's does not."""
    before, in_code = "", False
    for line in lines:
        if FENCE.match(line):
            in_code = not in_code
        item = re.match(r"(?:[-*]|\d+\.) ", line)
        if item and not in_code and before.strip() and not re.match(r"(?:[-*]|\d+\.) |\s", before):
            yield ""
        yield line
        before = line
