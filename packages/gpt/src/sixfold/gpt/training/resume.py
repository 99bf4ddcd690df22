"""How a run begins: its first line, and what it continues from.

    starting_point.py --> restore (this file) --> weights, optimizer state, progress; lines of metrics.jsonl

A checkpoint whose bytes are not those that were written gives way to the one before: starting_point.py has the note.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sixfold.dist_ckpt import CorruptError
from sixfold.gpt.checkpoints import training_state
from sixfold.gpt.checkpoints.starting_point import StartingPoint, older_start, set_aside
from sixfold.gpt.checkpoints.trained_model import IMPORTED, saved_config
from sixfold.gpt.config.resume_rules import noted_changes
from sixfold.gpt.data.token_stream import continue_data, epochs_of
from sixfold.gpt.machine.devices import cpu_has_bfloat16
from sixfold.gpt.parallel.agreement import all_or_raise, gather_objects
from sixfold.gpt.parallel.mesh import RankMesh
from sixfold.gpt.training.config_warnings import config_warnings

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.training.loop import Run


def restore(run: Run, start: StartingPoint, source: Path | None) -> None:
    """Continue from a checkpoint, or take the weights of ``source``, or stay with those that were drawn."""
    mesh = run.rank.mesh
    if start.newest is not None:
        start, common = _load_newest(run, start)
        if IMPORTED not in common:  # which has read none of our data
            all_or_raise(mesh.control, mesh.size, lambda: continue_data(run.train_data, common["data"], run.config))
        all_or_raise(mesh.control, mesh.size, lambda: _tell_damage(run, start) if mesh.rank == 0 else None)
        newest = start.newest
        assert newest is not None, "a checkpoint was loaded"
        past = saved_config(newest) if run.metrics is not None and IMPORTED not in common else None
        changed = {} if past is None else noted_changes(past, run.config, step=run.progress.step)
        run.note("resume", step=run.progress.step, checkpoint=str(newest), layout=mesh.layout, changed=changed)
        _tell(run, past)
    else:
        if source is not None:
            training_state.load_weights(run.rank, source)
        _tell(run, None)
    if run.rank.average is not None and not run.rank.average.has_begun:
        run.rank.average.begin()


def _tell(run: Run, past: TrainConfig | None) -> None:
    """What few people mean, on stderr, by one rank."""
    if run.metrics is not None:
        slow = run.rank.device.type == "cpu" and not cpu_has_bfloat16()
        for line in config_warnings(run.config, past, run.progress.step, slow_bfloat16=slow):
            print(f"sixfold: {line}", file=sys.stderr, flush=True)


def _load_newest(run: Run, start: StartingPoint) -> tuple[StartingPoint, dict[str, Any]]:
    """Load the newest checkpoint whose bytes are those that were written; its common data."""
    while True:
        assert start.newest is not None, "older_start finds a checkpoint or raises"
        try:
            run.progress, common = training_state.load(run.rank, start.newest)
        except CorruptError as error:  # raised on all ranks alike
            start = older_start(run.config, run.rank.mesh, start, error)
        else:
            return start, common


def _tell_damage(run: Run, start: StartingPoint) -> None:
    """A line of metrics.jsonl, and one on stderr, for each checkpoint that could not be continued from."""
    for step, aside, why in set_aside(start):
        run.note("damaged", step=step, checkpoint=str(aside), why=why)
        print(
            f"sixfold: the checkpoint of step {step} is damaged and was renamed to {aside.name}: {why}; the run goes "
            f"on from step {run.progress.step}",
            file=sys.stderr,
            flush=True,
        )


def start_line(run: Run, mesh: RankMesh, step: int) -> None:
    """The ``start`` line: what runs, on which ranks. Collective over all ranks."""
    ranks = gather_objects(
        mesh.control, mesh.size, {"rank": mesh.rank, "pid": os.getpid(), "host": socket.gethostname()}
    )
    run.note(
        "start",
        step=step,
        world=mesh.size,
        layout=mesh.layout,
        schedule=run.config.parallel.schedule,
        sharding=run.config.parallel.sharding,
        order=run.config.data.order,
        epochs=epochs_of(run.train_data, run.config),
        ranks=ranks,
        parameters=run.config.model.num_parameters,
        versions=run.versions,
    )
