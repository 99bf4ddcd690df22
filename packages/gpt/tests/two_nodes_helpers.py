"""Two nodes on one machine: the examples for launchers, run as two groups of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def command_of(script: Path, words: list[str], folder: Path) -> list[str]:
    """The command that ``srun`` in a batch script starts for each task, recorded by a stand-in for srun."""
    stand_in = folder / "srun"
    stand_in.write_text(f'#!/bin/sh\nprintf "%s\\\\n" "$@" > {folder}/recorded\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", script, *words], env=environment, check=True, timeout=60)
    recorded = (folder / "recorded").read_text().splitlines()
    return recorded[recorded.index("sixfold") :]


def start_node(node: int, config: Path, port: int, *overrides: str, output: Path) -> subprocess.Popen[bytes]:
    """torchrun_two_nodes.sh as node ``node``, with one rank."""
    environment = {
        **os.environ,
        "TORCHRUN": str(torchrun(output.parent)),
        "RANKS_PER_NODE": "1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = ["bash", EXAMPLES / "torchrun_two_nodes.sh", str(node), "127.0.0.1", config, *overrides]
    with output.open("w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def torchrun(folder: Path) -> Path:
    """A command ``torchrun`` of this Python, written once: the kernel refuses writes to a file that is being run."""
    path = folder / "torchrun"
    if not path.exists():
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
        path.chmod(0o755)
    return path
