"""The command: JSON as the contract says, exit codes, files."""

import json
import os
import subprocess
import sys

import pytest

from sixfold.pipeline import Costs, Program, schedules, simulate, verify
from sixfold.pipeline.cli import main
from sixfold.pipeline.passes import lower, unshard


@pytest.fixture
def run(capsys):
    def run(*arguments):
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize("name", schedules.__all__)
def test_simulate_says_what_simulate_says(run, name):
    status, out, _ = run(
        "simulate", name.replace("_", "-"), "--ranks", "4", "--microbatches", "8", "--forward", "1", "--backward-input",
        "1.5", "--backward-weight", "0.5", "--hop", "0.25", "--json",
    )  # fmt: skip
    program = getattr(schedules, name)(4, 8)
    timeline = simulate(program, Costs.per_rank(program, 1.0, 1.5, 0.5, 0.25))
    assert status == 0
    assert json.loads(out) == {
        "schedule": name,
        "ranks": 4,
        "microbatches": program.microbatches,
        "chunks": program.stages // 4,
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "bubble_over_total": timeline.bubble_over_total,
        "span_over_ideal": timeline.span_over_ideal,
        "peak_activations": list(timeline.peak_activations),
        "weight_versions": list(timeline.weight_versions),
        "messages": verify(program).messages,
    }


def test_chunks_waves_and_steps_reach_their_schedules(run):
    for arguments, program in [
        (("interleaved", "--chunks", "3"), schedules.interleaved(2, 4, 3)),
        (("hanayo", "--waves", "2"), schedules.hanayo(2, 4, 2)),
        (("pipedream-2bw", "--steps", "3"), schedules.pipedream_2bw(2, 4, 3)),
    ]:
        status, out, _ = run("draw", *arguments, "--ranks", "2", "--microbatches", "4")
        assert (status, out) == (0, str(program))


def test_verify_answers_with_a_counter_example(run, tmp_path):
    assert run("verify", "gpipe", "--ranks", "2", "--microbatches", "3", "--json") == (
        0,
        json.dumps({"valid": True, "messages": 6, "peak_activations": [3.0, 3.0]}) + "\n",
        "",
    )
    crossed = tmp_path / "crossed.txt"
    crossed.write_text(
        "0: 0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1\n"
        "1: 1RECV_F1 1RECV_F0 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1\n"
    )
    status, out, _ = run("verify", str(crossed), "--json")
    answer = json.loads(out)
    assert status == 1 and answer["valid"] is False
    assert set(answer) == {"valid", "error", "rank", "position", "action", "cycle"}
    status, out, err = run("verify", str(crossed))
    assert (status, out) == (1, "") and answer["error"] in err
    status, out, _ = run("verify", "gpipe", "--ranks", "2", "--microbatches", "3", "--memory-cap", "2", "--json")
    answer = json.loads(out)
    assert (status, answer["rank"], answer["position"], answer["action"]) == (1, 0, 2, "0F2")


def test_plan_gives_a_program_that_verifies(run):
    status, out, _ = run(
        "plan",
        "--ranks",
        "2",
        "--microbatches",
        "4",
        "--chunks",
        "2",
        "--memory-cap",
        "2",
        "--time-limit",
        "0.2",
        "--json",
    )
    answer = json.loads(out)
    assert status == 0
    keys = {"makespan", "bubble_over_ideal", "lower_bound", "gap", "placement", "peak_activations", "program"}
    assert set(answer) == keys
    program = Program.parse(answer["program"])
    assert list(program.placement) == answer["placement"]
    verify(program, memory_cap=2.0)
    assert simulate(program, Costs.per_rank(program)).makespan == pytest.approx(answer["makespan"])
    status, _, err = run("plan", "--ranks", "2", "--microbatches", "4", "--memory-cap", "0.5")
    assert status == 1 and "the least that any schedule needs is 1" in err


def test_export_writes_what_the_passes_make(run, tmp_path):
    common = ("--ranks", "2", "--microbatches", "3")
    assert run("export", "zb-h1", *common, "--format", "csv")[1] == schedules.zb_h1(2, 3).to_csv()
    assert run("export", "zb-h1", *common, "--format", "text")[1] == str(schedules.zb_h1(2, 3))
    wanted = lower(unshard(schedules.zb_h1(2, 3), max_active=2))
    assert run("export", "zb-h1", *common, "--format", "csv", "--lowered", "--unshard", "2")[1] == wanted.to_csv()
    file = tmp_path / "a.csv"
    assert run("export", "zb-h1", *common, "--format", "csv", "--lowered", "-o", str(file))[:2] == (0, "")
    assert file.read_bytes() == lower(schedules.zb_h1(2, 3)).to_csv().encode()
    assert run("verify", str(file))[0] == 0
    assert json.loads(run("export", "gpipe", *common, "--format", "text", "--json")[1])["text"] == str(
        schedules.gpipe(2, 3)
    )
    status, _, err = run("export", "pipedream", *common, "--format", "csv")
    assert status == 1 and "CSV has no STEP" in err


@pytest.mark.slow
def test_draw_takes_a_measured_trace(run, tmp_path):
    common = ("one_f_one_b", "--ranks", "2", "--microbatches", "3")
    trace = tmp_path / "measured.json"
    assert run("draw", *common, "--hop", "0.5", "--format", "trace", "-o", str(trace))[0] == 0
    status, out, _ = run("draw", *common, "--measured", str(trace))
    assert status == 0 and out.startswith("simulated\n0: 0F0") and "measured\n0: 0F0" in out
    assert run("draw", *common, "--measured", str(trace), "--format", "svg")[1].count("<title>") == 24
    pytest.importorskip("matplotlib", reason="PNG is the extra plot, which needs matplotlib")
    assert run("draw", *common, "--format", "png", "-o", str(tmp_path / "a.png"))[0] == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_measured_trace_gives_the_simulation_beside_it_its_times(run, tmp_path):
    common, trace = ("zb_h1", "--ranks", "2", "--microbatches", "3"), tmp_path / "measured.json"
    times = ("--forward", "0.003", "--backward-input", "0.004", "--backward-weight", "0.005", "--hop", "0.001")
    assert run("draw", *common, *times, "--format", "trace", "-o", str(trace))[0] == 0
    _, out, _ = run("draw", *common, "--measured", str(trace))
    simulated, measured = out.removeprefix("simulated\n").split("measured\n")
    assert simulated == measured
    _, out, _ = run("draw", *common, "--measured", str(trace), "--forward", "0.006")
    simulated, measured = out.removeprefix("simulated\n").split("measured\n")
    assert len(simulated) > len(measured)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("simulate", "gpype", "--ranks", "2", "--microbatches", "2"), 2, "'gpype' is neither a file nor one of"),
        (("simulate", "gpipe"), 2, "gpipe needs --ranks and --microbatches"),
        (("simulate", "gpipe", "--ranks", "0", "--microbatches", "2"), 2, "ranks is 0; it is >= 1"),
        (("simulate", "gpipe", "--ranks", "2", "--microbatches", "2", "--chunks", "2"), 2, "gpipe takes no --chunks"),
        (("simulate", "gpipe", "--ranks", "2", "--microbatches", "2", "--hop", "nan"), 2, "hop is nan"),
        (("plan",), 2, "plan needs --ranks and --microbatches"),
        (("plan", "--ranks", "2", "--microbatches", "2", "--waves", "1"), 2, "plan takes no --waves"),
        (("simulate", "gpipe", "--ranks", "2", "--microbatches", "2", "--hop", "inf"), 2, "hop is inf"),
        (("plan", "--ranks", "2", "--microbatches", "2", "--chunks", "0"), 2, "chunks is 0; it is >= 1"),
        (("draw", "gpipe", "--ranks", "2", "--microbatches", "2", "--format", "png"), 2, "needs -o FILE"),
        (("draw", "gpipe", "--ranks", "2", "--microbatches", "2", "--measured", "/nowhere/x"), 2, "/nowhere/x"),
    ],
)
def test_arguments_that_make_no_sense_end_with_two(run, arguments, status, says):
    answer = run(*arguments)
    assert answer[0] == status and says in answer[2] and answer[1] == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"0F0,1F\r\n", "rank 0, column 1"),
        (b"", "no action with a microbatch"),
        (b"0F0,\xe9\r\n", "byte 4 is not UTF-8"),
        (b"\x00\x01", "column 0"),
    ],
)
def test_a_file_that_is_no_program_ends_with_one(run, tmp_path, content, says):
    bad = tmp_path / "bad.csv"
    bad.write_bytes(content)
    for verb in ("verify", "simulate", "draw"):
        status, out, err = run(verb, str(bad))
        assert status == 1 and says in err and out == ""
    assert run("draw", "gpipe", "--ranks", "1", "--microbatches", "1", "--measured", str(bad))[0] == 1
    assert run("draw", str(tmp_path))[0] == 2  # a folder


def test_arguments_beside_a_file_agree_with_it(run, tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")  # some editors begin a file so
    assert run("verify", str(file), "--ranks", "1", "--microbatches", "1")[0] == 0
    for arguments, status, says in [
        (("--ranks", "2"), 2, "--ranks is 2; the program in"),
        (("--chunks", "2"), 2, "a program in a file takes no --chunks"),
        (("--microbatches", "2"), 1, "0F1 is missing"),
        (("--microbatches", "0"), 1, "microbatches is 0; it is >= 1"),
    ]:
        answer = run("verify", str(file), *arguments)
        assert answer[0] == status and says in answer[2]


def test_the_ending_of_a_file_says_its_format_in_any_case(run, tmp_path):
    common = ["zb_h1", "--ranks", "2", "--microbatches", "3"]
    for ending, form in (("svg", "svg"), ("SVG", "svg"), ("json", "trace"), ("txt", "text"), ("", "text")):
        file = tmp_path / f"drawing.{ending}"
        assert run("draw", *common, "-o", str(file))[0] == 0
        assert file.read_text() == run("draw", *common, "--format", form)[1]
    assert run("draw", *common, "-o", str(file := tmp_path / "drawing.svg"), "--format", "text")[0] == 0
    assert file.read_text() == run("draw", *common)[1]
    (rows := tmp_path / "UP.CSV").write_text("0F0,0B0\n1F0,1B0\n")
    assert run("verify", str(rows))[0] == 0


def test_a_program_that_hangs_is_drawn_as_text_and_simulate_shows_its_counter_example(run, tmp_path):
    file = tmp_path / "hangs.txt"
    file.write_text("0: 0F0 0B0 0F1 0B1\n1: 1F1 1B1 1F0 1B0\n")
    assert run("draw", str(file))[:2] == (0, file.read_text())
    status, _, err = run("simulate", str(file))
    assert status == 1 and ">>" in err
    assert run("draw", str(file), "--format", "svg")[0] == 1


@pytest.mark.slow
def test_a_program_is_read_from_standard_input_and_an_unknown_verb_ends_with_two():
    command = [sys.executable, "-m", "sixfold.pipeline"]
    done = subprocess.run(
        [*command, "verify", "-", "--json"], input="0: 0F0 0B0\n", capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, json.loads(done.stdout)["valid"]) == (0, True)
    assert subprocess.run([*command, "paint"], capture_output=True, timeout=60).returncode == 2
    rows = "0F0,0B0\r\n1F0,1B0\r\n"  # CSV, as export writes it
    done = subprocess.run([*command, "verify", "-"], input=rows, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error_and_the_exit_status_stands():
    common = ["--ranks", "2", "--microbatches", "3", "--json"]
    for arguments, status in [(["verify", "gpipe"], 0), (["verify", "gpipe", "--memory-cap", "1"], 1)]:
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "sixfold.pipeline", *arguments, *common],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (status, b"")
