"""What ci leaves out of `tests` has passed in `isolation`, and nothing there made it do less."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import importlib.util
import pytest

def test_passes(): pass
def test_fails(): assert flag
def test_is_skipped(): pytest.importorskip("made_up_peer")
@pytest.mark.xfail(reason="known")
def test_is_known_to_fail(): assert flag
@pytest.fixture
def torn():
    yield
    assert flag
def test_fails_when_torn_down(torn): pass
def test_does_less_without_a_peer():
    try:
        import made_up_peer
    except ImportError:
        pass
def test_asks_for_a_peer(): importlib.util.find_spec("made_up_peer")
def test_wants_what_is_nowhere():
    with pytest.raises(ImportError):
        import made_up_and_nowhere
@pytest.mark.parametrize("name", ["a", "ab", "a::b [c]"])
def test_has_names(name): pass
"""
FILES = {
    "test_one.py": f"flag = False\n{TESTS}",
    "test_two.py": "import importlib.util as u\nu.find_spec('made_up_peer')\ndef test_of_a_file_that_asked(): pass\n",
    "test_whole.py": "def test_of_a_whole_file(): pass\n",
    "pytest.ini": "[pytest]\n",
}


def run(folder: Path, *arguments: str) -> set[str]:
    """Names of the tests that ran, skipped ones too."""
    once = Path(__file__).parents[1] / "tools/once"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "once"]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(once), str(folder / "peers")]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run([*command, *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=60)
    return set(re.findall(r"::test_(.*?) (?:PASSED|FAILED|SKIPPED|XFAIL|XPASS)", done.stdout))


@pytest.mark.slow
def test_only_what_passed_alone_and_missed_nothing_is_left_out(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    everything = run(tmp_path, "--proved", "nowhere.json", "--proves", "proof.json", "--of", "these files")
    assert len(everything) == 13  # without a proof all run
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers/made_up_peer.py").write_text("")
    proof = json.loads((tmp_path / "proof.json").read_text())
    del proof["nodes"]["test_one.py::test_has_names[a]"]
    assert proof["files"] == ["test_two.py", "test_whole.py"]
    (tmp_path / "test_whole.py").write_text("raise RuntimeError('a file that is proved as a whole is not imported')")
    (tmp_path / "proof.json").write_text(json.dumps(proof))
    left_out = {"passes", "wants_what_is_nowhere", "has_names[ab]", "has_names[a::b [c]]", "of_a_whole_file"}
    assert run(tmp_path, "--proved", "proof.json", "--of", "these files") == everything - left_out
    (tmp_path / "test_whole.py").write_text(FILES["test_whole.py"])
    assert run(tmp_path, "--proved", "proof.json", "--of", "others") == everything
