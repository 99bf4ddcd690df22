"""`nox -s gpu` without a GPU: its groups, the clock, the page, and what ends a group early.

A stand-in runs the groups, or pytest runs test files that need no device.
"""

import json
import sys
import textwrap
import time

import pytest
from repository_helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from checks import gpu_run
from checks.gpu_groups import GROUPS, LEAST_S, RESERVE_S, TOTAL_S, Group, ends_of, listing
from checks.gpu_page import Outcome, page, slug
from checks.gpu_run import new_file, run_gpu, run_group

MACHINE = {
    "devices": 1, "device": "NVIDIA H200", "gib": 139.8, "capability": "9.0", "cores": 16, "python": "3.12.3",
    "torch": "2.11.0", "cuda": "13.0", "nccl": "2.28.9", "torchao": "0.18.0", "commit": "abc1234", "changed": True,
}  # fmt: skip
TESTS = Group(name="tests", tells="it works", share_s=50, places=("packages/x/tests/gpu/test_x.py",))
OTHERS = Group(name="others", tells="so do they", share_s=20, places=("packages/y/tests/gpu/test_y.py",))
SPEED = Group(
    name="speed",
    tells="how fast",
    share_s=30,
    places=("packages/x/benchmarks/one_gpu.py",),
    arguments=("--seconds", "9"),
)
GREEN = {"records": [{"collected": ["a"]}, {"begun": "a"}, {"node": "a", "outcome": "passed", "seconds": 1, "why": ""}]}


def test_every_gpu_test_is_in_one_group_and_all_end_in_eight_minutes():
    named = [place for group in GROUPS for place in group.places]
    tests = [str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/tests/gpu/test_*.py")]
    scripts = [str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/benchmarks/one_gpu.py")]
    assert sorted(named) == sorted([*tests, *scripts])
    assert TOTAL_S == 8 * 60 >= ends_of()[-1] + RESERVE_S
    assert all(len({"/benchmarks/" in place for place in group.places}) == 1 for group in GROUPS)
    assert len({slug(group.name) for group in GROUPS}) == len(GROUPS), "each has an output of its own"


def test_a_list_says_what_runs_in_which_order_and_by_when():
    assert listing([TESTS, SPEED]) == textwrap.dedent("""\
        ends by
          50 s  tests: it works
                python -m pytest packages/x/tests/gpu/test_x.py -m gpu
          80 s  speed: how fast
                python packages/x/benchmarks/one_gpu.py --seconds 9""")


class Clock:
    """Groups take the seconds that ``takes`` gives them, and what they were allowed is noted."""

    def __init__(self, **takes):
        self.takes, self.now, self.allowed, self.commands = takes, 0.0, {}, []

    def __call__(self):
        return self.now

    def run(self, group, words, limit_s):
        self.allowed[group.name] = limit_s
        self.commands.append(words)
        taken = self.takes[group.name]
        self.now += min(taken, limit_s) + (5 if taken > limit_s else 0)  # what hangs takes a while to end
        found = {"figures": {"ours": {"step_s": 0.3}}} if group.benchmark else GREEN
        return Outcome(group=group, status=0, seconds=taken, stopped=taken > limit_s, **found)


def run(folder, clock, groups, of_pytest=()):
    return run_gpu(
        "python", {}, of_pytest, MACHINE, command="nox -s gpu", date="2026-11-28", results=folder, groups=groups,
        run=clock.run, clock=clock,
    )  # fmt: skip


def test_what_a_group_leaves_over_the_next_have_and_what_hangs_takes_from_no_other(tmp_path):
    quick = Clock(tests=12, others=3, speed=40)
    path, red = run(tmp_path, quick, [TESTS, OTHERS, SPEED])
    assert quick.allowed == {"tests": 50, "others": 58, "speed": 85}
    assert red == []
    assert path.name == "2026-11-28-gpu-nvidia-h200.md"
    hangs = Clock(tests=999, others=3, speed=40)
    second, red = run(tmp_path, hangs, [TESTS, OTHERS, SPEED])
    assert hangs.allowed == {"tests": 50, "others": 15, "speed": 42}
    assert red == ["tests"]
    assert second.name == "2026-11-28-gpu-nvidia-h200-2.md"
    assert path.read_text().count("| 12 |") == 1


def test_a_group_without_time_is_told_with_its_command(tmp_path):
    small = Group(name="small", tells="little", share_s=LEAST_S + 4, places=("packages/y/tests/gpu/test_y.py",))
    clock = Clock(tests=999, small=1)
    path, red = run(tmp_path, clock, [TESTS, small])
    assert red == ["tests", "small"]
    assert "small" not in clock.allowed
    assert "- small: 9 s were left: `python -m pytest packages/y/tests/gpu/test_y.py -m gpu`" in path.read_text()


def test_arguments_are_pytests_and_benchmarks_which_do_not_take_them_are_not_run(tmp_path):
    clock = Clock(tests=1, speed=1)
    path, red = run(tmp_path, clock, [TESTS, SPEED], of_pytest=["-k", "varlen"])
    [command] = clock.commands
    assert command[-2:] == ["-k", "varlen"]
    assert red == []
    told = "- speed: pytest was given -k varlen: `python packages/x/benchmarks/one_gpu.py --seconds 9`"
    assert told in path.read_text()


def test_the_page_is_there_and_true_when_the_session_is_ended_within_a_group(tmp_path):
    def ended(group, words, limit_s):
        raise KeyboardInterrupt

    clock = Clock()
    clock.run = ended
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, clock, [TESTS, SPEED])
    [path] = tmp_path.iterdir()
    assert path.read_text().count("not reached") == 2


def test_the_page_of_results():
    records = [
        {"collected": ["t.py::a", "t.py::b", "t.py::c", "t.py::d", "t.py::e"]},
        {"begun": "t.py::a"}, {"node": "t.py::a", "outcome": "passed", "seconds": 0.1, "why": ""},
        {"begun": "t.py::b"}, {"node": "t.py::b", "outcome": "skipped", "seconds": 0, "why": "needs two devices"},
        {"begun": "t.py::c"}, {"node": "t.py::c", "outcome": "failed", "seconds": 0.1, "why": "assert 1 | 2"},
        {"begun": "t.py::d"},
    ]  # fmt: skip
    figures = {"plain": {"step_s": 0.30691, "tokens_per_second": 53390.2}, "ours": {"error": "not reached"}}
    outcomes = [
        Outcome(group=TESTS, status=-11, seconds=31.4, records=records),
        Outcome(group=SPEED, status=-9, seconds=30.2, stopped=True, figures=figures),
        Outcome(group=OTHERS, why="3 s were left"),
    ]
    assert page("2026-11-28", MACHINE, "nox -s gpu", outcomes) == textwrap.dedent("""\
        # One GPU, 2026-11-28: NVIDIA H200

        - 1 x NVIDIA H200, 140 GiB, compute capability 9.0; 16 cores
        - Python 3.12.3, torch 2.11.0, CUDA 13.0, NCCL 2.28.9, torchao 0.18.0
        - commit abc1234, with changes that are not committed

            nox -s gpu

        The groups in the order in which they ran, 480 s at most in all.

        | group | what it tells | passed | failed | skipped | not run | seconds |
        |---|---|---|---|---|---|---|
        | tests | it works | 1 | 2 | 1 | 1 | 31 |
        | speed | how fast | 1 of 2 cases | stopped |  |  | 30 |
        | others | so do they |  |  |  | all |  |

        ## Failed

        - `t.py::c`: assert 1 \\| 2
        - `t.py::d`: the process ended in it: status -11

        ## Skipped

        - 1: needs two devices

        ## Not run

        - tests: 1 tests: its process ended with status -11: `python -m pytest packages/x/tests/gpu/test_x.py -m gpu`
        - speed: what follows in it: stopped after 30 s: `python packages/x/benchmarks/one_gpu.py --seconds 9`
        - others: 3 s were left: `python -m pytest packages/y/tests/gpu/test_y.py -m gpu`

        ## speed

            python packages/x/benchmarks/one_gpu.py --seconds 9

        | | step_s | tokens_per_second | error |
        |---|---|---|---|
        | plain | 0.3069 | 53,390 |  |
        | ours |  |  | not reached |
        """)  # fmt: skip


@pytest.fixture
def group_of(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_run, "FOLDER", tmp_path / "out")

    def make(text, kind="tests/gpu", name="test_here.py"):
        place = tmp_path / kind / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(textwrap.dedent(text))
        return Group(name="here", tells="", share_s=50, places=(str(place),))

    return make


def ran(group, limit_s=60.0):
    variables = {"PYTHONPATH": str(ROOT / "tools"), "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    return run_group(group, group.command(sys.executable, gpu_run.out_of(group)), limit_s, variables)


def by_name(outcome):
    return {node.partition("::")[2]: found for node, found in outcome.tests.items()}


@pytest.mark.slow
def test_what_became_of_each_test_is_known_also_behind_one_that_ends_the_process(group_of):
    outcome = ran(group_of("""
        import os
        import pytest

        pytestmark = pytest.mark.gpu

        @pytest.fixture
        def broken():
            yield
            raise OSError("no way back")

        def test_good(): pass
        def test_bad(): assert 1 + 1 == 3, "sums"
        def test_torn(broken): pass
        @pytest.mark.skipif(True, reason="needs two devices")
        def test_other(): pass
        def test_crash(): os._exit(3)
        def test_after(): pass
    """))  # fmt: skip
    found = by_name(outcome)
    assert outcome.status == 3
    assert not outcome.stopped
    assert not outcome.green
    assert found["test_good"] == ("passed", "")
    assert found["test_bad"][0] == "failed"
    assert "sums" in found["test_bad"][1]
    assert found["test_torn"] == ("failed", "OSError: no way back")
    assert found["test_other"] == ("skipped", "needs two devices")
    assert found["test_crash"][0] == "lost"
    assert found["test_after"][0] == "not run"


@pytest.mark.slow
def test_a_test_that_hangs_is_ended_by_the_clock_with_what_it_started(group_of, tmp_path):
    group = group_of(f"""
        import subprocess, sys, time
        import pytest

        pytestmark = pytest.mark.gpu

        def test_good(): pass
        def test_hangs():
            code = "import time, pathlib; time.sleep(4); pathlib.Path({str(tmp_path / "left")!r}).touch()"
            subprocess.run([sys.executable, "-c", code])
    """)
    start = time.monotonic()
    outcome = ran(group, 3.0)
    assert time.monotonic() - start < 10
    assert outcome.stopped
    assert not outcome.green
    found = by_name(outcome)
    assert found["test_good"][0] == "passed"
    assert found["test_hangs"][0] == "lost"
    time.sleep(max(0.0, 5.0 - (time.monotonic() - start)))
    assert not (tmp_path / "left").exists()


@pytest.mark.slow
def test_a_file_that_cannot_be_loaded_is_red_and_says_why(group_of):
    outcome = ran(group_of("import no_such_module_of_ours"))
    assert not outcome.green
    assert "- here: status 2: " in page("2026-11-28", MACHINE, "nox -s gpu", [outcome])


def test_a_benchmark_that_fails_keeps_the_figures_that_it_has(group_of):
    group = group_of(
        """
        import json, pathlib, sys
        found = {"plain": {"step_s": 0.5}, "ours": {"error": "out of memory"}}
        pathlib.Path(sys.argv[-1]).write_text(json.dumps(found))
        raise SystemExit("failed: ours")
        """,
        kind="benchmarks",
        name="one_gpu.py",
    )
    outcome = ran(group)
    assert outcome.figures["plain"] == {"step_s": 0.5}
    assert not outcome.green
    assert "- here: status 1: failed: ours" in page("2026-11-28", MACHINE, "nox -s gpu", [outcome])


def test_a_case_that_a_device_cannot_run_is_told_and_a_group_without_any_result_is_red():
    some = {"plain": {"step_s": 0.5}, "float8": {"left out": "this device is NVIDIA A100"}}
    outcome = Outcome(group=SPEED, status=0, figures=some)
    assert outcome.green
    text = page("2026-11-28", MACHINE, "nox -s gpu", [outcome])
    assert "| speed | how fast | 1 of 2 cases |" in text
    assert "| float8 |  | this device is NVIDIA A100 |" in text
    assert not Outcome(group=SPEED, status=0, figures={"float8": {"left out": "none"}}).green
    assert not Outcome(group=SPEED, status=0, figures=some | {"ours": {"error": "not reached"}}).green
    skipped = [{"collected": ["a"]}, {"node": "a", "outcome": "skipped", "seconds": 0, "why": "no device"}]
    assert not Outcome(group=TESTS, status=0, records=skipped).green


def test_a_line_that_was_cut_is_left_out():
    assert gpu_run.whole_lines('{"begun": "a"}\n{"node": "a", "outc') == [{"begun": "a"}]


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "a.md").write_text("of a person")
    assert [new_file(tmp_path, "a").name for _ in range(2)] == ["a-2.md", "a-3.md"]
    assert (tmp_path / "a.md").read_text() == "of a person"


def test_the_machine_says_how_many_devices_torch_sees(tmp_path):
    found = gpu_run.machine_of(sys.executable, {})
    assert json.loads(json.dumps(found))["torch"]
    assert found["devices"] >= 0
    (tmp_path / "torch.py").write_text("raise ImportError('no libcudart')")
    with pytest.raises(RuntimeError, match=r"cannot load torch: ImportError: no libcudart"):
        gpu_run.machine_of(sys.executable, {"PYTHONPATH": str(tmp_path)})
