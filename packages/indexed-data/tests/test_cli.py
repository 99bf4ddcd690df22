"""The command: exit codes, JSON objects, one line per mistake, no tracebacks."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from indexed_data_helpers import pair_bytes, write_pair

from sixfold.indexed_data import build
from sixfold.indexed_data.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "héllo"}\n{"text": ""}\n{"text": "world"}\n')
    return tmp_path


@pytest.fixture
def pair():
    build(["a.jsonl"], "out")


def run(capsys, *argv):
    """Exit code, the JSON object on stdout, stderr."""
    code = main([*argv, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_build_reports_what_it_wrote(capsys):
    code, report, error = run(capsys, "build", "a.jsonl", "--output", "out", "--workers", "1")
    assert report.pop("seconds") >= 0
    assert (code, error) == (0, "")
    assert report == {
        "prefix": "out",
        "documents": 2,
        "sequences": 2,
        "tokens": 13,
        "dtype": "uint16",
        "bin_bytes": 26,
        "bad_lines": 0,
        "empty_documents": 1,
        "errors": [],
        "notes": [],
    }


def test_info_tells_counts_sizes_and_lengths(capsys, pair):
    code, report, _ = run(capsys, "info", "out")
    assert (code, report) == (
        0,
        {
            "prefix": "out",
            "documents": 2,
            "sequences": 2,
            "tokens": 13,
            "dtype": "uint16",
            "bin_bytes": 26,
            "idx_bytes": os.path.getsize("out.idx"),
            "trailing_bytes": 0,
            "sequence_length": {"min": 6, "max": 7, "mean": 6.5, "median": 6.5},
        },
    )


def test_info_of_an_empty_pair_has_no_lengths(capsys, folder):
    write_pair(folder / "e", "uint16", [])
    code, report, _ = run(capsys, "info", "e")
    assert (code, report["sequences"]) == (0, 0)
    assert report["sequence_length"] == {"min": None, "max": None, "mean": None, "median": None}


def test_show_gives_ids_and_text(capsys, pair):
    code, report, _ = run(capsys, "show", "out", "-2", "--offset", "1", "--length", "4", "--tokenizer", "bytes")
    assert code == 0
    assert report == {
        "prefix": "out",
        "sequence": -2,
        "length": 7,
        "offset": 1,
        "tokens": [195, 169, 108, 108],
        "text": "éll",
    }
    assert main(["show", "out", "1"]) == 0
    assert capsys.readouterr().out == "119 111 114 108 100 256\n"


def test_show_leaves_eod_out_and_marks_unknown_ids(capsys, folder):
    write_pair(folder / "x", "uint16", [[[97, 256, 5000, 98, 255]]])
    code, report, _ = run(capsys, "show", "x", "0", "--tokenizer", "bytes")
    assert (code, report["text"]) == (0, "a\ufffdb\ufffd")
    assert run(capsys, "show", "x", "0")[1]["text"] is None


def test_verify_exits_1_with_its_report(capsys, pair):
    assert run(capsys, "verify", "out", "--vocab-size", "257")[:2] == (
        0,
        {
            "prefix": "out",
            "ok": True,
            "problems": [],
            "sequences": 2,
            "documents": 2,
            "tokens": 13,
            "notes": ["1 blocks of out.bin were compared with their checksums"],
        },
    )
    code, report, error = run(capsys, "verify", "out", "--vocab-size", "200")
    assert (code, report["ok"]) == (1, False)
    assert set(report["problems"][0]) == {"rule", "where", "value", "expected"}
    assert error.startswith("sixfold-data: out.bin: document 0, sequence 0, position 6: found id 256")
    assert run(capsys, "verify", "nope")[0] == 1


def test_merge_joins_and_replaces_only_when_asked(capsys, pair):
    code, report, _ = run(capsys, "merge", "out", "out", "--output", "both")
    assert (code, report) == (
        0,
        {"output": "both", "inputs": ["out", "out"], "documents": 4, "sequences": 4, "tokens": 26},
    )
    before = pair_bytes("both")
    assert main(["merge", "out", "--output", "both"]) == 1
    assert pair_bytes("both") == before
    os.unlink("both.idx")
    assert main(["merge", "out", "--output", "both"]) == 1
    assert main(["merge", "out", "--output", "both", "--overwrite"]) == 0
    assert pair_bytes("both") == pair_bytes("out")


MISTAKES = {
    "missing input": ["build", "nope.txt", "--output", "x"],
    "pair is there": ["build", "a.jsonl", "--output", "out"],
    "missing pair": ["info", "nope"],
    "no such sequence": ["show", "out", "9"],
    "outside the sequence": ["show", "out", "0", "--offset", "99"],
    "unknown tokenizer": ["show", "out", "0", "--tokenizer", "nope"],
    "tokenizer that fails": ["show", "out", "0", "--tokenizer", "broken_tokenizer:Broken"],
    "missing part": ["merge", "out", "nope", "--output", "x"],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_data_exits_1_with_one_line_and_a_json_error(capsys, folder, pair, mistake):
    (folder / "broken_tokenizer.py").write_text(
        "class Broken:\n    vocab_size, eod = 999, 1\n    encode = list\n"
        "    def decode(self, ids):\n        raise KeyError(ids[0])\n"
    )
    code, report, error = run(capsys, *MISTAKES[mistake])
    assert code == 1
    assert set(report["error"]) == {"type", "message"}
    assert report["error"]["type"] == ("IndexError" if mistake == "no such sequence" else "IndexedDataError")
    assert error == f"sixfold-data: {report['error']['message']}\n"
    assert not os.path.exists("x.idx")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["brew"],
        ["build", "a.jsonl"],
        ["build", "--output", "x"],
        ["build", "a.jsonl", "--output", "x", "--workers", "0"],
        ["build", "a.jsonl", "--output", "x", "--dtype", "uint8"],
        ["build", "a.jsonl", "--output", "x", "--on-error", "shrug"],
        ["show", "out", "first"],
    ],
)
def test_wrong_usage_exits_2(capsys, argv):
    assert main(argv) == 2
    assert "usage:" in capsys.readouterr().err


def test_bad_lines_can_be_skipped_and_are_printed(capsys, folder):
    (folder / "b.jsonl").write_text('{"text": "x"}\nbad\n')
    assert main(["build", "b.jsonl", "--output", "out"]) == 1
    assert capsys.readouterr().err.startswith("sixfold-data: b.jsonl:2: not JSON")
    assert main(["build", "b.jsonl", "--output", "out", "--on-error", "skip"]) == 0
    assert "b.jsonl:2: not JSON" in capsys.readouterr().out
    assert main(["build", "b.jsonl", "--output", "out2", "--on-error", "skip", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_progress_bar_is_drawn_on_a_terminal_only(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["build", "a.jsonl", "a.jsonl", "--output", "out"]) == 0
    assert terminal.getvalue() == f"\r[{'.' * 30}] 0/1 parts\r[{'#' * 30}] 1/1 parts\n"
    assert main(["build", "a.jsonl", "--output", "quiet", "--quiet"]) == 0
    assert terminal.getvalue().count("\n") == 1


@pytest.mark.slow
def test_python_dash_m_is_the_same_command():
    command = [sys.executable, "-m", "sixfold.indexed_data"]
    done = subprocess.run([*command, "info", "nope"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("sixfold-data: nope.idx: found No such file")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_exits_130_without_a_traceback(folder):
    (folder / "slow.py").write_text(
        "import time\nclass Slow:\n    vocab_size, eod = 9, 8\n    def encode(self, text):\n"
        "        if len(text) > 100:  # the probe\n            return [1]\n"
        "        open('started', 'w').close()\n        time.sleep(60)\n"
    )
    argv = ["build", "a.jsonl", "--output", "x", "--tokenizer", "slow:Slow"]
    command = [sys.executable, "-m", "sixfold.indexed_data", *argv]
    # A shell starts background jobs with SIGINT ignored, and Python would inherit that.
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    deadline = time.monotonic() + 30
    while not os.path.exists("started") and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130
    assert error.startswith(
        "sixfold-data: interrupted at input part a.jsonl[0:50]; run the same command again to continue from "
    )
    assert error.count("\n") == 1
    assert not [name for name in os.listdir() if name.startswith("x")]


def test_a_reader_that_stops_reading_is_no_error():
    build(["a.jsonl"], "out")
    command = [sys.executable, "-m", "sixfold.indexed_data", "show", "out", "0"]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    shown.stdout.close()  # as head does when it has its lines
    assert (shown.stderr.read(), shown.wait()) == (b"", 0)
    shown.stderr.close()


def test_verify_counts_one_broken_rule_and_several(capsys, pair):
    main(["verify", "out", "--vocab-size", "100"])
    assert capsys.readouterr().out.startswith("out: 1 broken rule; ")


def test_show_of_a_number_that_the_pair_does_not_have(capsys, pair):
    assert main(["show", "out", "7"]) == 1
    assert capsys.readouterr().err == "sixfold-data: out: there is no sequence 7: the pair has 2, numbered from 0\n"
