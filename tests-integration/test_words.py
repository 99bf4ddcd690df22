"""A page is understood at the first reading: short sentences, short lines, plain turns of phrase."""

import re

import prose
import pytest
from repository_helpers import PACKAGE_NAMES, PACKAGES, ROOT

MOST_README_LINES, MOST_README_COLUMNS = 150, 100
MOST_PAGE_LINES = 220
MOST_LINES_OF_DECISIONS = 400  # of a page with a package's; of one of them, and of a line:
MOST_DECISION_LINES, MOST_DECISION_COLUMNS = 6, 110
DECISION = re.compile(r"## \S.* \((?:20\d\d-\d\d-\d\d, changed )?(20\d\d-\d\d-\d\d)\)")
READMES = [ROOT / "README.md", *(package.folder / "README.md" for package in PACKAGES)]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
FOLDERS = ("start", "do", "move", "understand", "guide")
PAGES = [
    *READMES,
    ROOT / "docs/README.md",
    ROOT / "docs/explorer.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks/README.md",
    *(path for folder in FOLDERS for path in sorted((ROOT / "docs" / folder).glob("*.md"))),
    *sorted((ROOT / "docs/design").glob("[!2]*.md")),
    *sorted((ROOT / "docs/design").glob("*/*.md")),
    *DECISIONS,
]


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_has_short_sentences_and_plain_words(page):
    reading = prose.read(page.read_text())
    faults = [f"{prose.count(sentence)} words: {sentence}" for sentence in reading.too_long] + reading.banned
    if reading.mean > prose.MOST_WORDS_ON_AVERAGE:
        faults.append(f"{reading.mean:.1f} words in the mean sentence; at most {prose.MOST_WORDS_ON_AVERAGE}")
    assert not faults, f"python tests-integration/prose.py {name(page)}\n" + "\n".join(faults)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_and_its_lines_are_short(page):
    lines = page.read_text().splitlines()
    faults = []
    if page in READMES:
        faults += [f"line {at}: {len(line)}" for at, line in enumerate(lines, 1) if len(line) > MOST_README_COLUMNS]
    most = MOST_README_LINES if page in READMES else MOST_PAGE_LINES
    most = MOST_LINES_OF_DECISIONS if page in DECISIONS else most
    if len(lines) > most:
        faults.append(f"{len(lines)} lines; at most {most}")
    assert not faults, "\n".join(faults)


def test_decisions_lie_in_one_page_per_package():
    found = {path.name for path in (ROOT / "docs/decisions").iterdir()}
    own = {f"{package}.md" for package in (*PACKAGE_NAMES, "repository")}
    assert found == own, f"{sorted(found - own)}: a decision is an entry at the top of docs/decisions/<package>.md"


@pytest.mark.parametrize("page", DECISIONS, ids=name)
def test_decisions_are_short_and_dated_and_the_newest_comes_first(page):
    _, *entries = re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)
    faults, dates = [], []
    for heading, *lines in map(str.splitlines, entries):
        said = [line for line in lines if line]
        if not (dated := DECISION.fullmatch(heading)):
            faults.append(f"{heading}: it ends with (date) or (date, changed date)")
        elif not 0 < len(said) <= MOST_DECISION_LINES or max(map(len, said)) > MOST_DECISION_COLUMNS:
            faults.append(f"{heading}: {len(said)} lines, at most {MOST_DECISION_LINES} of {MOST_DECISION_COLUMNS}")
        else:
            dates.append(dated.group(1))
    assert not faults, "\n".join(faults)
    assert dates == sorted(dates, reverse=True), f"not the newest first: {dates}"


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
