"""Snapshots of a run that is kept alive end with it, and those of others stay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sixfold.gpt.elastic import memory_folder
from sixfold.gpt.elastic.memory_folder import PREFIX, snapshots_of
from sixfold.gpt.errors import ConfigError


def filled(folder, name):
    (folder / f"{PREFIX}{name}" / "attempt-1").mkdir(parents=True)


def names(folder):
    return sorted(one.name.removeprefix(PREFIX) for one in folder.iterdir())


def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_a_run_has_put_there_is_gone_at_its_end_also_behind_an_error(tmp_path):
    (tmp_path / "memory").mkdir()
    with pytest.raises(KeyError), snapshots_of(tmp_path / "run", tmp_path / "memory") as name:
        filled(tmp_path / "memory", name)
        raise KeyError
    assert names(tmp_path / "memory") == []


def test_two_runs_have_two_names_and_one_run_has_one_by_any_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for run in (tmp_path / "a", tmp_path / "b", Path("a")):
        with snapshots_of(run, tmp_path) as name:
            found.append(name)
    assert found[0] == found[2] != found[1]


def test_what_a_killed_supervisor_has_left_goes_and_what_is_of_others_stays(tmp_path):
    with snapshots_of(tmp_path / "run", tmp_path) as name:
        pass
    own = name.rpartition("-")[0]
    with snapshots_of(tmp_path / "other", tmp_path) as name:
        other = name.rpartition("-")[0]
    stay = [f"{own}-{os.getppid()}", f"{other}-{gone()}", f"{own}-mine", "llm-7b"]
    for one in (f"{own}-{gone()}", *stay):
        filled(tmp_path, one)
    with snapshots_of(tmp_path / "run", tmp_path):
        assert names(tmp_path) == sorted(stay)


def test_a_folder_that_is_not_there_is_refused_and_not_made(tmp_path):
    with pytest.raises(ConfigError, match=r"elastic.memory_folder is .*nowhere.* and no folder"):
        snapshots_of(tmp_path / "run", tmp_path / "nowhere").__enter__()
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_on_a_disk_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory_folder, "file_system_of", lambda folder: "ext4")
    with snapshots_of(tmp_path / "run", tmp_path):
        assert "in a file system of kind ext4 and no memory: each snapshot is written there" in capsys.readouterr().err
    monkeypatch.setattr(memory_folder, "file_system_of", lambda folder: None)
    with snapshots_of(tmp_path / "run", tmp_path):
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("folder", "kind"), [("/dev/shm", "tmpfs"), ("/proc/self", "proc")])
def test_the_kernel_says_what_a_folder_is_in(folder, kind):
    assert memory_folder.file_system_of(Path(folder)) == kind


def test_a_link_of_that_name_is_not_followed(tmp_path):
    (tmp_path / "theirs" / "file").mkdir(parents=True)
    with snapshots_of(tmp_path / "run", tmp_path) as name:
        (tmp_path / f"{PREFIX}{name}").symlink_to(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "file").exists()
