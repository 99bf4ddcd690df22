"""What the schedule explorer's page computes: the package's own figures, proofs and words, within its bounds.

The page itself, in a browser, is ``test_explorer_page.py``'s.
"""

import json
import re
import shlex
import subprocess
import sys
import zipfile
from xml.etree import ElementTree

import pytest
from repository_helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from explorer import build
from explorer.answer import answer, export, menu, reply, table
from explorer.examples import EXAMPLES
from explorer.marked import draw_marked
from explorer.request import ACTIONS, LIMITS, OWN, PLAN, Request
from explorer.words import ends_of, inputs, words

from sixfold.pipeline import Costs, Program, ScheduleError, schedules, simulate, verify, zb_v
from sixfold.pipeline.cli import main as command

SVG = "{http://www.w3.org/2000/svg}"
COSTS = {"forward": 1.0, "backward_input": 1.5, "backward_weight": 0.5, "hop": 0.25}
PAGE = (ROOT / "docs" / "explorer.md").read_text()


def by_eye(row, at, cells=11):
    """The window of a row around a place, as the package's report has it."""
    start = max(0, min(at - cells // 2, len(row) - cells))
    return row[start : start + cells]


# ---- answers


@pytest.mark.parametrize("name", schedules.__all__)
def test_the_figures_are_those_of_the_command_that_the_page_names(name, capsys):
    found = answer(Request(schedule=name, ranks=3, microbatches=5, chunks=3, **COSTS))
    assert command([*shlex.split(found["command"])[1:], "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert found["figures"] == {key: said[key] for key in found["figures"]}
    assert [rank["peak"] for rank in found["ranks"]] == said["peak_activations"]
    assert [rank["versions"] for rank in found["ranks"]] == said["weight_versions"]
    assert found["messages"] == said["messages"]
    assert found["verdict"] == {"valid": True}


@pytest.mark.parametrize("name", schedules.__all__)
def test_an_action_begins_when_the_last_of_what_its_words_name_is_there(name):
    program = answer_program(name)
    costs = Costs.per_rank(program, *COSTS.values())
    timeline = simulate(program, costs)
    said, ends, free = words(program, costs, timeline), ends_of(costs, timeline), {}
    for rank, action, start, end in timeline.events:
        first = next(action.each())
        there = [arrival for _, _, arrival in inputs(program, costs, ends, first)]
        assert start == pytest.approx(max([free.get(rank, 0.0), *there]), abs=1e-9), str(action)
        assert all(f"{maker} of rank {at}" in said[str(action)] for maker, at, _ in inputs(program, costs, ends, first))
        free[rank] = end
    assert said.keys() == {str(action) for _, action, _, _ in timeline.events}


def answer_program(name):
    return schedules.by_name(name).make(3, 5)


def test_words_say_what_an_action_is_and_what_it_waits_for():
    said = answer(Request(schedule="one_f_one_b", ranks=2, microbatches=2, hop=0.5))["words"]
    assert said["1F1"] == (
        "1F1: forward of microbatch 1 on stage 1 (rank 1). From 4.5 to 5.5. "
        "Waits for 0F1 of rank 0, there at 2.5 and for its rank, which runs 1B0 until 4.5."
    )
    assert said["0F0"] == "0F0: forward of microbatch 0 on stage 0 (rank 0). From 0 to 1. Waits for nothing."
    assert said["0B0"].endswith("Uses what 0F0 left on this rank.")


def test_every_box_of_the_picture_has_words():
    for name in ("dualpipe_v", "pipedream"):
        found = answer(Request(schedule=name))
        titles = [title.text for title in ElementTree.fromstring(found["svg"]).iter(f"{SVG}title")]
        assert titles
        assert {title.split(" ")[0] for title in titles} == found["words"].keys()


def test_a_cap_that_is_passed_shows_the_picture_and_the_first_action_above_it():
    found = answer(Request(memory_cap=3))
    with pytest.raises(ScheduleError) as refused:
        verify(zb_v(4, 8), memory_cap=3)
    assert found["verdict"]["error"] == str(refused.value)
    assert [rank["over"] for rank in found["ranks"]] == [peak > 3 for peak in verify(zb_v(4, 8)).peak_activations]
    assert found["svg"] == answer(Request())["svg"]
    assert answer(Request(memory_cap=4))["verdict"] == {"valid": True}


def test_a_search_keeps_the_cap_and_says_how_far_it_can_be_off():
    found = answer(Request(schedule=PLAN, ranks=2, microbatches=4, memory_cap=2))
    assert max(rank["peak"] for rank in found["ranks"]) <= 2
    assert found["search"]["lower_bound"] * (1 + found["search"]["gap"]) == pytest.approx(found["figures"]["makespan"])


def test_the_table_has_every_schedule_with_the_figures_of_its_own_page():
    rows = {row["name"]: row for row in table(Request(ranks=6, microbatches=4, memory_cap=3))}
    assert sorted(rows) == sorted(schedules.__all__)
    assert "microbatches" in rows["pipedream_2bw"]["refused"]
    found = answer(Request(schedule="one_f_one_b", ranks=6, microbatches=4, memory_cap=3))
    assert rows["one_f_one_b"]["bubble"] == found["figures"]["bubble_over_ideal"]
    assert rows["one_f_one_b"]["fits"] is found["verdict"]["valid"] is False


@pytest.mark.parametrize("form", ["csv", "lowered", "text"])
def test_a_saved_program_is_the_one_that_was_shown(form):
    file = export(Request(ranks=2, microbatches=3), form)
    saved = Program.parse(file["content"]) if form == "text" else Program.from_csv(file["content"])
    assert saved.lowered == (form == "lowered")
    shown = answer(Request(schedule=OWN, program=file["content"]))
    assert shown["figures"] == answer(Request(ranks=2, microbatches=3))["figures"]


# ---- programs of the reader's own


def test_the_examples_are_what_they_are_called():
    verdicts = {name: answer(Request(schedule=OWN, program=text))["verdict"] for name, text in EXAMPLES.items()}
    assert [name for name, verdict in verdicts.items() if verdict["valid"]] == ["1F1B, right"]
    for name, verdict in verdicts.items():
        assert ("deadlock" in name) == bool(verdict.get("cycle")), name


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "right" not in name])
def test_a_counter_example_shows_the_cells_that_the_report_marks(name):
    verdict = answer(Request(schedule=OWN, program=EXAMPLES[name]))["verdict"]
    picture = ElementTree.fromstring(verdict["svg"])
    shown = [
        group.find(f"{SVG}text").text for group in picture.iter(f"{SVG}g") if group.get("class") in ("wrong", "absent")
    ]
    assert shown == (re.findall(r">>(.*?)<<", verdict["error"]) or ["1F"])
    arrows = [path for path in picture.iter(f"{SVG}path") if path.get("class") == "wait"]
    assert len(arrows) == len(verdict["cycle"])
    assert picture.get("aria-label")


def test_a_long_row_is_shown_around_the_place_that_is_wrong():
    rows = [[str(action) for action in row] for row in zb_v(2, 20).ranks]
    rows[1][30] = "nonsense"
    picture = ElementTree.fromstring(draw_marked(rows, ScheduleError("wrong", rank=1, position=30)))
    cells = [group.find(f"{SVG}text").text for group in picture.iter(f"{SVG}g")]
    assert cells == by_eye(rows[0], 30) + by_eye(rows[1], 30)


def test_what_was_pasted_is_text_in_the_picture_and_nothing_else():
    pasted = '0F0,<script>alert("1")</script>\n'
    verdict = answer(Request(schedule=OWN, program=pasted))["verdict"]
    texts = [text.text for text in ElementTree.fromstring(verdict["svg"]).iter(f"{SVG}text")]
    assert '<script>alert("1")</script>' in texts
    assert "<script" not in verdict["svg"]


@pytest.mark.parametrize(
    ("values", "words_of_error"),
    [
        ({"ranks": 17}, "ranks is 17; this page takes 1..16"),
        ({"microbatches": 2.5}, "microbatches is 2.5; it is a whole number"),
        ({"hop": "x"}, "hop is 'x'; it is a number"),
        ({"schedule": "none"}, "there is no schedule 'none'"),
        ({"colour": 1}, "there is no setting 'colour'"),
        ({"schedule": OWN}, "the program is empty"),
        ({"schedule": OWN, "program": "x" * 200_001}, "has 200001 characters"),
        ({"schedule": "zb_interleaved", "ranks": 16, "microbatches": 64, "chunks": 4}, f"this page draws {ACTIONS}"),
        ({"schedule": "pipedream_2bw", "ranks": 8, "microbatches": 2}, "microbatches"),
    ],
)
def test_what_cannot_be_is_refused_in_the_packages_form(values, words_of_error):
    refused = json.loads(reply(json.dumps({"ask": "answer", "request": values})))["refused"]
    assert refused["type"] == "ScheduleError"
    assert words_of_error in refused["error"]


# ---- the page's controls, and what its worker loads


def test_the_page_offers_every_schedule_and_the_bounds_that_are_checked():
    groups = {}
    for entry in menu()["schedules"]:
        groups.setdefault(entry["group"], []).append(entry["name"])
    assert groups.pop("Other") == [PLAN, OWN]
    assert sorted(name for names in groups.values() for name in names) == sorted(schedules.__all__)
    assert groups["No flush between batches"] == ["pipedream", "pipedream_2bw"]
    assert "zb_h1" in groups["Backward split in I and W"]
    assert "gpipe" in groups["Backward whole"]
    start = menu()["start"]
    sliders = re.findall(
        r'name="(\w+)" type="range" min="([\d.]+)" max="([\d.]+)" step="[\d.]+" value="([\d.]+)"', PAGE
    )
    assert {name for name, *_ in sliders} == LIMITS.keys()
    for name, least, most, value in sliders:
        assert (float(least), float(most)) == ((0, LIMITS[name][1]) if name == "memory_cap" else LIMITS[name])
        assert float(value) == (start[name] or 0)
    labelled = set(re.findall(r'<label for="([\w-]+)"', PAGE))
    assert {f"sx-{name}" for name in LIMITS} | {"sx-schedule", "sx-program", "sx-form", "sx-zoom"} <= labelled


@pytest.mark.slow
def test_what_the_worker_unpacks_answers_without_torch_and_numpy(tmp_path):
    build.put_python(tmp_path / "python.zip")
    with zipfile.ZipFile(tmp_path / "python.zip") as archive:
        archive.extractall(tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from explorer.answer import reply\n"
        """print(reply('{"ask": "answer", "request": {}}'))\n"""
        "assert not {'torch', 'numpy', 'concurrent'} & set(sys.modules), set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answer"] == answer(Request())


def test_a_runtime_with_another_hash_is_refused_and_thrown_away(tmp_path):
    archive = tmp_path / f"pyodide-{build.VERSION}.tgz"
    archive.write_bytes(b"something else")
    with pytest.raises(build.BuildError, match="is pinned"):
        build.fetched(tmp_path)
    assert not archive.exists()


def test_without_npm_the_reason_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.NotHere, match="npm is not on the path"):
        build.fetched(tmp_path)
