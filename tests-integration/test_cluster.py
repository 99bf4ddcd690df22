"""benchmarks/cluster: what it would start can be planned and is accepted, and a finished run is a row of its table."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from repository_helpers import ROOT

from sixfold.gpt import TrainConfig
from sixfold.gpt.commands.cli import main
from sixfold.gpt.config.rules import check_world
from sixfold.gpt.config.toml import read_file
from sixfold.gpt.machine.devices import device_named
from sixfold.gpt.plan.plan import plan_layout

CLUSTER = ROOT / "benchmarks/cluster"
CONFIGS = sorted(CLUSTER.glob("*.toml"))
PUBLISHED = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-70b-3d": 70_553_706_496}


@pytest.mark.parametrize("world", [64, 1024])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_configuration_is_accepted_and_fits_an_h100(path, world, capsys):
    config = TrainConfig.from_toml(path)
    assert config.model.num_parameters == PUBLISHED[path.stem]
    assert main(["train", str(path), "--print-config"]) == 0
    assert TrainConfig.from_text(capsys.readouterr().out) == config
    assert check_world(config, world).world == world
    planned = plan_layout(config, world, device_named("h100"))
    assert planned.fits and planned.step_s is not None and not planned.refused


def test_the_commands_of_the_readme_name_files_that_exist_and_overrides_that_are_accepted():
    text = (CLUSTER / "README.md").read_text()
    for name in re.findall(r"`([\w./-]+\.(?:toml|sh|sbatch|py|md))`", text):
        assert (CLUSTER / name).exists(), name
    commands = re.findall(r"(llama3-[\w-]+\.toml)((?: [a-z_]+\.[a-z_]+=\S+)+)", text)
    assert len(commands) >= 3
    for name, overrides in commands:
        TrainConfig.from_text(read_file(CLUSTER / name), overrides.split())


@pytest.mark.parametrize("script", sorted(CLUSTER.rglob("*.s[hb]*")), ids=lambda path: path.name)
def test_scripts_are_bash_that_parses(script):
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)


def test_a_finished_run_is_a_row_of_the_table(tmp_path):
    config = TrainConfig.from_toml(CONFIGS[0])
    (tmp_path / "config.toml").write_text(config.to_toml())
    layout = {"pp": 1, "dp": 64, "cp": 1, "tp": 1, "ep": 1}
    start = {"kind": "start", "layout": layout, "world": 64, "parameters": 7, "schedule": "x", "sharding": "y"}
    steps = [
        {
            "kind": "step", "step": n, "seconds": 100.0 if n <= 10 else 2.0, "tokens_per_second": 6400.0, "mfu": 0.25,
            "memory_bytes": n * 2**30, "loss": 1.0 / n,
        }
        for n in range(1, 21)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [start, *steps])))
    done = subprocess.run(
        [sys.executable, str(CLUSTER / "row.py"), str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    cells = done.stdout.strip().strip("|").split("|")
    header = next(line for line in (CLUSTER / "results.md").read_text().splitlines() if line.startswith("| parameters"))
    assert len(cells) == len(header.strip("|").split("|"))
    assert [cell.strip() for cell in cells[5:]] == ["2.000", "100", "25.0%", "20.00", "0.0500"]
