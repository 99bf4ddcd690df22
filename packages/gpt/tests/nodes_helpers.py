"""Nodes on one machine: the command as a user starts it on each, in a session of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpt_helpers import tiny_config
from kept_alive_helpers import left_behind
from run_helpers import lines

from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.elastic.terms import FOLDER, Terms


def free_ports(count: int) -> list[int]:
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in opened]
    for one in opened:
        one.close()
    return ports


@dataclass
class Nodes:
    """The nodes of a run, and their commands."""

    folder: Path
    config: TrainConfig
    count: int
    ranks: int  # of each
    commands: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.ports = free_ports(self.count)
        self.path = self.folder / "run.toml"
        self.path.write_text(self.config.to_toml())

    def start(self, *nodes: int, list_of_nodes: str = "") -> None:
        addresses = list_of_nodes or ",".join(f"127.0.0.1:{port}" for port in self.ports)
        for node in nodes or range(self.count):
            words = [sys.executable, "-m", "sixfold.gpt", "train", str(self.path), "--keep-alive"]
            words += ["--nodes", addresses, "--node", str(node), "--ranks", str(self.ranks), *self.options]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            environ.pop("GLOO_SOCKET_IFNAME", None)
            with self.output(node).open("a") as file:
                self.commands[node] = subprocess.Popen(
                    words, stdout=file, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
                )

    def leader(self) -> int:
        """The node that leads now."""
        newest = Terms(Path(self.config.run.dir) / FOLDER).newest()
        assert newest is not None, self.told()
        return newest.node

    def output(self, node: int) -> Path:
        return self.folder / f"node-{node}.txt"

    def told(self) -> str:
        return "\n".join(f"--- node {node}\n{self.output(node).read_text()}" for node in range(self.count))

    def processes(self, node: int) -> list[int]:
        return [int(line.split()[0]) for line in left_behind(self.commands[node].pid)]

    def signal_node(self, node: int, number: signal.Signals) -> None:
        """To its command and all that it has started, at once."""
        for pid in self.processes(node):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            self.commands[node].wait(30)

    def wait_for(self, count: int, kind: str = "step", seconds: float = 90.0) -> None:
        path, deadline = Path(self.config.run.dir) / "metrics.jsonl", time.monotonic() + seconds
        while not path.exists() or len(lines(self.config, kind)) < count:
            assert time.monotonic() < deadline, f"no {count} lines {kind} within {seconds} s\n{self.told()}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        path = Path(self.config.run.dir) / "metrics.jsonl"
        while not path.exists() or max((one["step"] for one in lines(self.config, "step")), default=0) < step:
            assert time.monotonic() < deadline, f"step {step} was not done within {seconds} s\n{self.told()}"
            time.sleep(0.02)

    def end(self, *nodes: int, status: int = 0, seconds: float = 90.0) -> None:
        """All of them end with the status, and leave nothing."""
        for node in nodes or range(self.count):
            try:
                found = self.commands[node].wait(seconds)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"node {node} has not ended\n{self.told()}") from None
            # -15: it was being started when it was asked to stop
            assert found == status or (status, found) == (143, -signal.SIGTERM), self.told()
        deadline = time.monotonic() + 10
        while (left := [one for node in nodes or range(self.count) for one in self.processes(node)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        assert not left, left

    def stop(self, *nodes: int) -> None:
        """Have the run saved and ended, by a signal to those nodes, as a scheduler sends it; to all that live."""
        living = nodes or tuple(range(self.count))
        for node in living:
            self.commands[node].send_signal(signal.SIGTERM)
        self.end(*living, status=143)

    def kill(self) -> None:
        """Whatever is left."""
        for node, command in self.commands.items():
            for pid in (command.pid, *self.processes(node)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            command.wait(30)


def nodes_config(folder: Path, *overrides: str, run: str = "run") -> TrainConfig:
    """A run whose bits do not change with the number of ranks, nor with that of its steps."""
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    return tiny_config(
        folder,
        "parallel.grad_sum=tree", "train.global_batch_size=8", "train.micro_batch_size=1", "eval.every=0",
        "schedule.shape=constant", "log.digest_every=1",
        "elastic.hung_after_seconds=3.0", "run.timeout_seconds=60", "elastic.spares=0",
        f"elastic.memory_folder={memory}", *overrides,
        run=run,
    )  # fmt: skip
