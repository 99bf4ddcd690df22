"""A page is understood at the first reading: short sentences, short lines, plain turns of phrase."""

import tomllib

import prose
import pytest
from repository_helpers import PACKAGES, ROOT

MOST_README_LINES, MOST_README_COLUMNS = 150, 100
MOST_PAGE_LINES = 220
LATER = tomllib.loads((ROOT / "tests-integration/words.toml").read_text())
READMES = [ROOT / "README.md", *(package.folder / "README.md" for package in PACKAGES)]
FOLDERS = ("start", "do", "move", "understand", "guide")
PAGES = [
    *READMES,
    ROOT / "docs/README.md",
    ROOT / "docs/explorer.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks/README.md",
    *(path for folder in FOLDERS for path in sorted((ROOT / "docs" / folder).glob("*.md"))),
    *(ROOT / f"docs/design/{package.name}.md" for package in PACKAGES),
]


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_has_short_sentences_and_plain_words(page):
    reading = prose.read(page.read_text())
    faults = [f"{prose.count(sentence)} words: {sentence}" for sentence in reading.too_long] + reading.banned
    if reading.mean > prose.MOST_WORDS_ON_AVERAGE:
        faults.append(f"{reading.mean:.1f} words in the mean sentence; at most {prose.MOST_WORDS_ON_AVERAGE}")
    if name(page) in LATER["sentences"]:
        assert faults, f"{name(page)} reads well now: take it out of tests-integration/words.toml"
        pytest.skip("not rewritten yet: tests-integration/words.toml")
    assert not faults, f"python tests-integration/prose.py {name(page)}\n" + "\n".join(faults)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_and_its_lines_are_short(page):
    lines = page.read_text().splitlines()
    faults = []
    if page in READMES:
        faults += [f"line {at}: {len(line)}" for at, line in enumerate(lines, 1) if len(line) > MOST_README_COLUMNS]
    most = MOST_README_LINES if page in READMES else MOST_PAGE_LINES
    if len(lines) > most:
        faults.append(f"{len(lines)} lines; at most {most}")
    if name(page) in LATER["lines"]:
        assert faults, f"{name(page)} is short now: take it out of tests-integration/words.toml"
        pytest.skip("not rewritten yet: tests-integration/words.toml")
    assert not faults, "\n".join(faults)


def test_every_page_of_the_list_is_a_page():
    listed = {page for pages in LATER.values() for page in pages}
    assert listed <= set(map(name, PAGES)), listed - set(map(name, PAGES))


def test_the_reader_counts_words_of_sentences_not_of_code_pictures_and_headings():
    text = """# A heading. With two sentences

One two `three four` [five six](a.md). Seven eight, e.g. nine
ten. The file `a.py` is read!

```
not. Counted.
```

- An item of five words
| cell one | is told of it |
|---|---|
![no](words.svg)
"""
    assert prose.sentences(text) == [
        "One two code five six.",
        "Seven eight, e.g  nine ten.",
        "The file code is read!",
        "An item of five words",
        "cell one",
        "is told of it",
    ]
    assert prose.read(text).banned == ["'is told of': say who says what: 'the run warns about'"]
    assert prose.read(" ".join(["word"] * 41) + ".").too_long
