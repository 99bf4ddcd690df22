"""The site: its links, blocks, errors and figures, without what builds it.

tools/docsite: site_pages, site_raises, ... --> this file; nox -s docs --> site/ --> the last tests here

A page is looked at as text, as `nox -s docs` hands it to the site's generator. Blocks that need torch or a shell,
and the built site itself, are that session's: `--whole-site`.
"""

import ast
import functools
import html
import posixpath
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import site_blocks
import site_errors
import site_figures
import site_pages
import site_raises
import site_reference
from repository_helpers import PACKAGES, ROOT

BUILT = ROOT / "site"
LOADED = r'<(?:script|link|img|iframe|source)[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"'
each_package = pytest.mark.parametrize("package", site_raises.BASES)


@functools.cache
def ids_of(address: str) -> set[str]:
    """Addresses inside a page: of headings, as the site makes them, and those given in HTML."""
    text = site_pages.pages()[address].text
    found = set(re.findall(r'\bid="([^"]+)"', text))
    for line, is_code in site_pages.lines_of(text):
        heading = re.match(r"#{1,6} +(.*)", line)
        if heading and not is_code:
            plain = html.unescape(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])).strip().lower()
            found.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain)))
    return found


def test_every_link_of_the_site_leads_to_a_page_and_a_heading():
    pages = site_pages.pages()
    pictures = set(site_pages.pictures())
    wrong = []
    for address, page in pages.items():
        for line, is_code in site_pages.lines_of(page.text):
            for match in [] if is_code else site_pages.links_in(line):
                target, anchor = match["target"], (match["anchor"] or "")[1:]
                if "://" in target or target.startswith("mailto:"):
                    continue
                there = posixpath.normpath(posixpath.join(posixpath.dirname(address), target)) if target else address
                if there not in pages and there not in pictures and not (ROOT / "docs" / there).is_file():
                    wrong.append(f"{address}: {match[0]}: no such page")
                elif anchor and there in pages and anchor.lower() not in ids_of(there):
                    wrong.append(f"{address}: {match[0]}: no such heading")
    assert not wrong, "\n".join(wrong)


def test_every_page_of_a_section_is_in_the_list_of_its_section():
    wrong = [
        address
        for folder in site_pages.SECTIONS
        for address in site_pages.pages()
        if address.startswith(folder) and address not in site_pages.section(folder)
    ]
    assert not wrong, f"their section's README.md does not link them: {wrong}"


# ---- blocks

WRITTEN = [
    path
    for pattern in (
        "start/*.md",
        "do/*.md",
        "understand/*.md",
        "guide/blending-*.md",
        "guide/dist-ckpt-*.md",
        "guide/fsdp-*.md",
        "guide/gpt-*.md",
        "guide/indexed-data-*.md",
        "guide/pipeline-*.md",
    )
    for path in sorted((ROOT / "docs").glob(pattern))
]


def test_every_block_is_whole_and_of_a_known_language():
    wrong = [f"{path.relative_to(ROOT)}: {fault}" for path in WRITTEN for fault in site_blocks.faults(path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_blocks_of_a_page_run_and_print_what_it_says(path, request, tmp_path):
    text = path.read_text()
    if not any(map(site_blocks.runs, site_blocks.blocks(text))):
        pytest.skip("no block of this page runs")
    if not site_blocks.is_quick(text) and not request.config.getoption("--whole-site"):
        pytest.skip("its blocks load torch or start commands: `nox -s docs` runs them")
    wrong = site_blocks.run(text, tmp_path)
    assert not wrong, "\n".join(wrong)


# ---- when it stops


@each_package
def test_every_typed_error_of_the_code_is_on_its_page(package):
    """An oracle of its own: of each ``raise`` whose text stands there the longest words between two values."""
    page = " ".join(html.unescape(site_pages.pages()[f"errors/{package}.md"].text).split())
    known, missing, seen = site_raises.kinds(package, ROOT), [], 0
    for path in sorted((ROOT / "packages" / package / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(call, ast.Call) or getattr(call.func, "id", "") not in known or not call.args:
                continue
            pieces = [getattr(piece, "value", "") for piece in getattr(call.args[0], "values", call.args[:1])]
            words = max((" ".join(piece.split()) for piece in pieces if isinstance(piece, str)), key=len, default="")
            if len(words) >= 8:
                seen += 1
                if words not in page or f"{call.func.id}</a>" not in page:
                    missing.append(f"{path.name}: {call.func.id}: {words}")
    assert seen > 50, f"{seen} texts of {package} were looked for"
    assert not missing, "\n".join(missing)


@each_package
def test_every_class_and_message_has_cause_example_and_remedy(package):
    kinds, entries = site_raises.kinds(package, ROOT), site_errors.entries(package, ROOT)
    public = {kind.name for kind in site_errors.public(kinds.values())}
    assert set(site_errors.notes(package, ROOT).classes) == public, "classes of the code and of the data file"
    untold = [f"{one.module}: {one.kind}: {one.text}" for one, entry in entries.items() if entry is None]
    assert not untold, f"messages of {package} without an entry in docs/errors:\n" + "\n".join(untold)


@each_package
def test_every_entry_speaks_of_the_code_and_its_example_reads_like_it(package):
    said, found = site_errors.notes(package, ROOT), site_errors.messages(package, ROOT)
    wrong = [
        f"{entry.of}: no error of the code says {words!r}"
        for entry in said.messages
        for words in entry.texts
        if not any(site_errors.speaks_of(words, message) for message in found)
    ]
    wrong += [
        f"{entry.of}: none of its messages reads like {entry.example!r}"
        for entry in said.messages
        if not any(site_errors.matches(one.text, entry.example) for one in site_errors.of_entry(entry, package, ROOT))
    ]
    wrong += [
        f"no error of the code reads like the example of {entry.of}, {entry.example!r}"
        for entry in said.classes.values()
        if not any(site_errors.matches(one.text, entry.example) for one in telling_messages(package))
    ]
    assert not wrong, f"docs/errors/{package}: " + "\n".join(wrong)


def telling_messages(package: str) -> list[site_raises.Message]:
    """Those with words of their own: any text is one of ``{place}: {error}``."""
    found = site_errors.messages(package, ROOT)
    return [one for one in found if len(re.sub(r"\{[\w.]*\}|\W", "", one.text)) >= 8]


@each_package
def test_no_text_of_the_code_names_a_page_that_an_installed_wheel_does_not_have(package):
    wrong = [
        f"{path.name}:{node.lineno}: {node.value!r}"
        for path in sorted((ROOT / "packages" / package / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "see errors/" in node.value
    ]
    assert not wrong, "\n".join(wrong)


def headings(package: str) -> list[str]:
    found = [site_errors.heading_id(entry) for entry in site_errors.notes(package, ROOT).messages]
    assert set(found) <= ids_of(f"errors/{package}.md")
    return found


@each_package
def test_no_two_entries_have_one_heading(package):
    twice = [heading for heading, n in Counter(headings(package)).items() if n > 1]
    assert not twice


@each_package
def test_no_two_messages_have_one_address(package):
    anchors = list(site_errors.anchors(package, ROOT).values())
    assert len(set(anchors)) == len(anchors)


# ---- reference and figures


def test_the_commands_of_the_reference_are_those_that_the_packages_install():
    installed = {
        name: module.split(":")[0]
        for package in PACKAGES
        for name, module in package.project.get("scripts", {}).items()
    }
    assert installed.items() <= site_reference.COMMANDS.items()


def test_every_key_of_the_configuration_has_a_meaning():
    said = tomllib.loads((ROOT / "docs/reference/configuration.toml").read_text())
    tables = {table.name: {key.name: key for key in table.keys} for table in site_reference.tables(ROOT)}
    missing = [
        f"{name}.{key.name}"
        for name, keys in tables.items()
        for key in keys.values()
        if not key.meaning and key.name not in said.get(name, {})
    ]
    idle = [f"{name}.{key}" for name, keys in said.items() for key in keys if key not in tables.get(name, {})]
    assert not missing and not idle, f"without a meaning: {missing}; no key any more: {idle}"


def test_every_figure_is_in_its_results_file():
    wrong = [
        f"{figure.file} does not say {words!r}"
        for figure in site_figures.figures(ROOT)
        for words in (figure.result, figure.command, figure.machine)
        if not site_figures.says((ROOT / "benchmarks/results" / figure.file).read_text(), words)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_results_file_has_a_figure_or_a_reason():
    files = {path.name for path in (ROOT / "benchmarks/results").glob("*.md")}
    assert {figure.file for figure in site_figures.figures(ROOT)} | set(site_figures.left_out(ROOT)) == files


def test_the_rows_of_the_figures_stand_below_their_heads():
    lines = site_pages.pages()["figures.md"].text.splitlines()
    head = lines.index(next(line for line in lines if line.startswith("|---")))
    rows = lines[head + 1 : head + 1 + len(site_figures.figures(ROOT))]
    assert all(row.count(" | ") == lines[head - 1].count(" | ") and row.startswith("| ") for row in rows)


# ---- the built site


@pytest.fixture
def built(request) -> Path:
    if not request.config.getoption("--whole-site"):
        pytest.skip("the built site is looked at by `nox -s docs`, which builds it")
    assert (BUILT / "index.html").is_file(), f"{BUILT} is not built; `nox -s docs` builds it"
    return BUILT


def test_no_page_asks_another_machine_for_anything(built):
    wrong = [
        f"{path.relative_to(built)}: {found}"
        for path in built.rglob("*.html")
        for found in re.findall(LOADED, path.read_text())
    ]
    assert not wrong, "\n".join(wrong[:20])


def test_the_help_of_every_verb_is_in_the_reference(built):
    page = html.unescape((built / "reference/commands.html").read_text())
    for verb in ("sixfold train", "sixfold plan", "sixfold-data build", "sixfold-ckpt verify", "sixfold-pipeline draw"):
        assert f"usage: {verb}" in page, f"no help of `{verb}`"


@each_package
def test_every_public_name_is_in_the_reference(built, package):
    page = (built / f"reference/{package}.html").read_text()
    module = site_reference.module_of(package)
    missing = [name for name in site_reference.public_names(package, ROOT) if f'id="{module}.{name}"' not in page]
    known = [name for name in missing if not site_reference._is_module(module, name, ROOT)]
    assert not known, f"not in reference/{package}.html: {known}"


@each_package
def test_every_heading_of_an_entry_is_on_the_built_page(built, package):
    page = (built / f"errors/{package}.html").read_text()
    missing = [heading for heading in headings(package) if f'id="{heading}"' not in page]
    assert not missing
