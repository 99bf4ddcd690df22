"""Snapshots of a GPU's memory: which step and rank has one, and what is refused. tests/gpu has one of a GPU."""

from pathlib import Path

import pytest
import torch
from config_helpers import MINIMAL, config_with, words_of

from sixfold.gpt.commands.cli import main
from sixfold.gpt.config.train_config import LogConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.memory_snapshot import check_memory_steps, recorded


@pytest.fixture
def calls(monkeypatch):
    """What is asked of torch, in order; a snapshot is a file with a word."""
    found = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all", **_: found.append(f"record {enabled}")
    )

    def dump(path):
        found.append(f"write {Path(path).name}")
        Path(path).write_text("snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return found


def test_only_the_steps_and_ranks_that_are_named_are_recorded(tmp_path, calls):
    log = LogConfig(memory_steps=(2, 4), memory_ranks=(1,))
    for step in range(1, 6):
        for rank in range(3):
            with recorded(tmp_path, log, step, rank):
                pass
    assert [word for word in calls if word.startswith("write")] == [
        "write step-00000002-rank-1.pickle", "write step-00000004-rank-1.pickle",
    ]  # fmt: skip
    assert calls[:3] == ["record all", "write step-00000002-rank-1.pickle", "record None"]
    with recorded(tmp_path, LogConfig(memory_steps=(1,), memory_ranks=()), 1, 7):
        pass
    assert calls[-2] == "write step-00000001-rank-7.pickle", "() is all ranks"


def test_a_step_that_runs_out_of_memory_leaves_its_snapshot_and_its_error(tmp_path, calls):
    with pytest.raises(RuntimeError, match="out of memory"), recorded(tmp_path, LogConfig(memory_steps=(1,)), 1, 0):
        raise RuntimeError("CUDA out of memory")
    assert (tmp_path / "memory" / "step-00000001-rank-0.pickle").exists() and calls[-1] == "record None"


def test_a_snapshot_that_cannot_be_written_ends_no_run(tmp_path, calls, capsys):
    (tmp_path / "memory").write_text("a file")
    with recorded(tmp_path, LogConfig(memory_steps=(1,)), 1, 0):
        pass
    assert "the memory snapshot of step 1 is not kept" in capsys.readouterr().err and calls[-1] == "record None"


def test_a_cpu_and_a_rank_that_is_not_there_are_refused(tmp_path, capsys):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    check_memory_steps(LogConfig(), cpu, 1)
    check_memory_steps(LogConfig(memory_steps=(1,)), cuda, 1)
    with pytest.raises(ConfigError) as error:
        check_memory_steps(LogConfig(memory_steps=(1,)), cpu, 1)
    assert words_of(error).startswith("log.memory_steps is [1] and the device 'cpu'")
    with pytest.raises(ConfigError) as error:
        check_memory_steps(LogConfig(memory_steps=(1,), memory_ranks=(0, 8)), cuda, 8)
    assert words_of(error).startswith("log.memory_ranks has 8, and the run has 8 ranks")
    with pytest.raises(ConfigError, match=r"log\.memory_steps is \[3\] and run\.device 'cpu'"):
        config_with("log.memory_steps=[3]", "run.device=cpu")


def test_the_option_asks_for_the_first_two_updates_unless_the_file_names_others(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(MINIMAL)
    command = ["train", str(tmp_path / "run.toml"), "--print-config", "--profile-memory"]
    assert main(command) == 0 and "memory_steps = [1, 2]" in capsys.readouterr().out
    assert main([*command, "log.memory_steps=[7]"]) == 0 and "memory_steps = [7]" in capsys.readouterr().out
    assert main([*command, "run.device=cpu"]) == 2 and "log.memory_steps" in capsys.readouterr().err
