"""A figure stands in one results file, and the pages that quote it say what the newest measurement says."""

import prose
import pytest
import site_figures
import site_told
from repository_helpers import PACKAGES, ROOT

FOLDERS = ("start", "do", "move", "understand", "guide")
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/README.md",
    *(package.folder / "README.md" for package in PACKAGES),
    *(path for folder in FOLDERS for path in sorted((ROOT / "docs" / folder).glob("*.md"))),
]


def test_every_number_that_a_page_tells_is_that_of_its_row_in_the_results():
    wrong = [fault for one in site_told.told(ROOT) if (fault := site_told.fault(one, ROOT))]
    assert not wrong, "\n".join(wrong)


def test_no_page_tells_a_figure_that_was_measured_again_since():
    wrong = [
        f"{one.page} says {one.number} of {one.row!r}, of {one.file}; since then {', '.join(later)}"
        for one in site_told.told(ROOT)
        if (later := site_told.newer(one, ROOT))
    ]
    assert not wrong, "\n".join(wrong)


def test_one_quantity_has_one_value_on_the_page_of_figures():
    named = [(row.package, row.what) for row in site_figures.figures(ROOT)]
    twice = sorted({name for name in named if named.count(name) > 1})
    assert not twice, f"docs/figures.toml has two rows each for {twice}: keep the newest, or say what differs"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_measured_figure_of_a_page_is_told_with_its_row(page):
    place = page.relative_to(ROOT).as_posix()
    wrong = site_told.without_entry(place, prose.sentences(page.read_text()), site_told.told(ROOT))
    assert not wrong, "without an entry in docs/told.toml:\n" + "\n".join(wrong)


def test_a_number_that_is_not_that_of_its_row_is_seen(tmp_path):
    results = (
        "## one\n\n| | here, s | peer |\n|---|---|---|\n| 2 ranks | 0.148 (0.2) | 1,387k |\n\nIn all 16.46 ms of 20.\n"
    )
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/results/r.md").write_text(results)
    (tmp_path / "docs").mkdir()

    def fault(words, row, column="", under=""):
        (tmp_path / "page.md").write_text(f"It says {words} here.".replace("{", "").replace("}", ""))
        where = f'file = "r", row = "{row}", columns = ["{column}"], under = "{under}"'
        entry = f'["page.md"]\nsays = [{{words = "{words}", {where}}}]'
        (tmp_path / "docs/told.toml").write_text(entry)
        (one,) = site_told.told(tmp_path)
        return site_told.fault(one, tmp_path)

    for right in ("{0.148}", "{0.15} s", "{0.1}", "{0.148 (0.2)}"):
        assert not fault(right, "2 ranks", "here, s"), right
    assert not fault("{1,387k}", "2 ranks", "peer", "one")
    assert not fault("{16.5 ms}", "In all")
    for wrong in ("{0.149}", "{0.14}", "{148}", "{0.148 (0.3)}", "{0.148 (0.2, 0)}"):
        assert "says" in fault(wrong, "2 ranks", "here, s"), wrong
    assert "says" in fault("{1,387 ms}", "2 ranks", "peer")
    assert "says" in fault("{16.46 us}", "In all")
    assert "0 places" in fault("{0.148}", "3 ranks", "here, s")
    assert "0 places" in fault("{0.148}", "2 ranks", "there")
    assert "0 places" in fault("{0.148}", "2 ranks", "here, s", "two")


def test_a_later_measurement_and_a_figure_without_an_entry_are_seen(tmp_path):
    results = tmp_path / "benchmarks/results"
    results.mkdir(parents=True)
    table = "| what | here |\n|---|---|\n| {} | {} |\n"
    (results / "2026-01-01-x.md").write_text(table.format("the door: save on 2 ranks", 1.05))
    (results / "2026-01-02-x.md").write_text(table.format("load on 4 ranks", 3.0))
    (results / "2026-01-03-y.md").write_text(table.format("save on 2 ranks", 9.0))
    row, says = "the door: save on 2 ranks", "takes 1.05 times as long"
    entry = {"page": "p.md", "says": says, "number": "1.05", "row": row, "column": "here", "under": ""}
    one = site_told.Told(file="2026-01-01-x", **entry)
    assert site_told.newer(one, tmp_path) == [], "another row, another package"
    (results / "2026-01-04-x.md").write_text(table.format("save on 2 ranks", 1.107))
    assert site_told.newer(one, tmp_path) == ["2026-01-04-x: 1.107"]
    sentences = ["It takes 1.05 times as long.", "It takes 2.1 times as long and 40 us, within 30 s."]
    found = site_told.without_entry("p.md", sentences, [one])
    assert [fault.split(": ")[1] for fault in found] == ["2.1 times as", "40 us"]
    assert len(site_told.without_entry("q.md", sentences, [one])) == 3
