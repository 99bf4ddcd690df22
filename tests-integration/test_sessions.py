"""What noxfile.py's sessions run, by a session that only takes notes: nothing is installed, no test is run.

noxfile.py, tools/checks --> Notes: the commands --> this file
"""

import importlib.util
import sys

import pytest
from repository_helpers import PACKAGE_NAMES, ROOT

nox = pytest.importorskip("nox", reason="nox is what runs these tests, but for who runs pytest by hand")


@pytest.fixture(scope="module")
def noxfile():
    specification = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(specification)
    path = list(sys.path)
    specification.loader.exec_module(module)
    yield module
    sys.path[:] = path


class Notes:
    """As much of nox's session as the sessions use; commands that hold a word of ``red`` fail."""

    def __init__(self, *posargs, red=()):
        self.posargs, self.red, self.commands, self.logged = ["--system-torch", *posargs], red, [], []

    def run(self, *command, success_codes=(0,), **_):
        self.commands.append(command)
        if any(word in part for word in self.red for part in command):
            raise nox.command.CommandFailed(f"{command} failed")

    def error(self, text):
        raise RuntimeError(text)

    def log(self, text):
        self.logged.append(text)


def test_full_goes_on_behind_a_red_package_and_lists_all_reds_at_the_end(noxfile):
    notes = Notes(red=("packages/blending/", "ranktest"))
    with pytest.raises(RuntimeError, match=r"red: blending, ranktest; "):
        noxfile.full.func(notes)
    wanted = [f"packages/{name}/tests" for name in PACKAGE_NAMES] + ["tools/ranktest/tests", "tests-integration"]
    every_case = [command for command in notes.commands if "--every-case" in command]
    assert [command[5] for command in every_case] == [str(ROOT / place) for place in wanted]
    freed = {command[5]: command[6] for command in notes.commands if "--every-case" not in command}
    modes = {"fsdp": "--fill-freed", "pipeline": "--debug-memory", "dist-ckpt": "--fill-recycled"}
    assert freed == {str(ROOT / f"packages/{name}/tests"): mode for name, mode in modes.items()}
    green = Notes()
    noxfile.full.func(green)
    assert green.commands == notes.commands


@pytest.mark.parametrize("session", ["tests", "rest"])
def test_only_ci_leaves_out_what_isolation_proved(noxfile, session):
    by_hand, by_ci = Notes("-x"), Notes("-x", "--after-isolation")
    run = getattr(noxfile, session).func
    run(by_hand, "blending")
    run(by_ci, "blending")
    (hand,), (ci,) = by_hand.commands, by_ci.commands
    assert not [part for part in hand if "proved" in part or "isolation" in part]
    assert ci[: len(hand)] == hand
    assert ci[len(hand) :: 2] == ("--proved", "--of")
    turns = [arguments for turn in noxfile.turns_of_ci() for arguments in turn]
    left = [arguments for arguments in turns if arguments[0].startswith(("tests(", "rest("))]
    assert len(left) == len(PACKAGE_NAMES) and all(arguments[-1] == "--after-isolation" for arguments in left)


def test_a_proof_is_of_the_files_that_were_tested(noxfile, tmp_path, monkeypatch):
    from checks import commands

    monkeypatch.setattr(commands, "source_of", lambda name: tmp_path / name)
    tests = tmp_path / "blending/tests"
    (tests / "__pycache__").mkdir(parents=True)
    before = commands.tree_of("blending")
    (tests / "test_new.py").write_text("def test_one(): pass\n")
    after = commands.tree_of("blending")
    assert after != before
    (tests / "__pycache__/test_new.pyc").write_text("")
    assert commands.tree_of("blending") == after


def test_the_parts_import_only_what_stands_above_them():
    import checks

    order = [line.split()[0] for line in checks.__doc__.splitlines() if line.startswith("    ")]
    assert sorted(order) == sorted(p.stem for p in (ROOT / "tools/checks").glob("*.py") if p.stem != "__init__")
    for place, name in enumerate(order):
        text = (ROOT / f"tools/checks/{name}.py").read_text()
        used = {
            line.split()[1].removeprefix("checks.") for line in text.splitlines() if line.startswith("from checks.")
        }
        assert used <= set(order[:place]), name


def test_a_small_machine_runs_a_part_of_the_slow_tests_by_the_commit_and_a_large_one_all(noxfile):
    from checks.lanes import session_step, turn_of_ci
    from checks.places import TURNS

    parts = [turn_of_ci(2, head=f"{number:08x}ffff") for number in (0, 1, TURNS - 1, TURNS)]
    assert parts == [f"0/{TURNS}", f"1/{TURNS}", f"{TURNS - 1}/{TURNS}", f"0/{TURNS}"]
    assert turn_of_ci(2) == turn_of_ci(4) != ""
    assert turn_of_ci(2, head="") == f"0/{TURNS}", "without git"
    assert turn_of_ci(8, head="00000001") == ""
    assert session_step(["rest(fsdp)"], "1/4").variables == {"SIXFOLD_TURN": "1/4"}


def test_gpu_lists_without_a_device_and_runs_with_one_alone(noxfile, monkeypatch, tmp_path):
    notes = Notes("--list")
    noxfile.gpu.func(notes)
    [listed] = notes.logged
    assert "packages/gpt/benchmarks/one_gpu.py" in listed
    machine = {"devices": 0, "torch": "2.13.0"}
    monkeypatch.setattr(noxfile, "machine_of", lambda python, variables: machine)
    with pytest.raises(RuntimeError, match=r"torch 2\.13\.0 sees no CUDA device: nothing was run"):
        noxfile.gpu.func(Notes())
    seen = {}

    def run(python, variables, of_pytest, found, **options):
        seen.update(options, of_pytest=of_pytest)
        return ROOT / "benchmarks/results/new.md", ["kernels"]

    machine["devices"] = 1
    monkeypatch.setattr(noxfile, "run_gpu", run)
    with pytest.raises(RuntimeError, match=r"not all passed: kernels; benchmarks/results/new\.md says what"):
        noxfile.gpu.func(Notes("-k", "varlen"))
    assert seen["of_pytest"] == ["-k", "varlen"]
    assert seen["command"] == "nox -s gpu -- --system-torch -k varlen"
