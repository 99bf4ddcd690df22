"""What runs inside a rank's process.

    launch.py (Job, Call) --> run_rank (this file) --> launch.py (Report over a pipe)

A rank that has reported waits until it is released: were it to leave at once, its peers would see closed
connections and report those instead of what happened first.
"""

import datetime
import faulthandler
import importlib
import importlib.util
import marshal
import os
import pickle
import signal
import sys
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ranktest.lifetime import die_with_parent
from ranktest.messages import Call, Current, Job, Report

# gloo's own timeout lies beyond the job's deadline, so that a deadlock is reported by the stacks of all
# ranks and not by whichever rank happens to give up first.
GLOO_TIMEOUT_MARGIN_S = 30.0


def run_rank(rank: int, job: Job, call: Call, channel: Connection) -> None:
    """Body of a rank's process: set up, run, report, wait for the release, leave."""
    try:
        _prepare_process(rank, job)
        report = Report(kind="result", result=pickle.dumps(_run(rank, job, call)))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the test must hear of them
        kind = "skipped" if type(error).__name__ == "Skipped" else "failed"
        text = str(error) if kind == "skipped" else _own_frames(error)
        report = Report(kind=kind, text=text)
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send(report)
    channel.recv()  # released, or killed here
    if dist.is_initialized():
        dist.destroy_process_group()


def _prepare_process(rank: int, job: Job) -> None:
    """Own process group, output to a file, stacks to a file on SIGUSR1, one thread."""
    die_with_parent()
    os.setpgid(0, 0)
    folder = Path(job.folder)
    output = os.open(folder / f"rank-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # What pytest's capture left in sys writes to files of the server.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stacks = open(folder / f"rank-{rank}.stacks", "w")  # noqa: SIM115 - open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.cwd)
    torch.set_num_threads(1)


def _run(rank: int, job: Job, call: Call) -> Any:
    Current.store = dist.FileStore(str(Path(job.folder) / "store"), job.ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo",
        store=PrefixStore("group", Current.store),
        rank=rank,
        world_size=job.ranks,
        timeout=datetime.timedelta(seconds=job.timeout_s + GLOO_TIMEOUT_MARGIN_S),
    )
    # A rank connects as soon as its peers listen, and may be killed by its test before they see the connection.
    if Current.store.add("connected", 1) == job.ranks:
        Current.store.set("all connected", "")
    Current.store.wait(["all connected"], datetime.timedelta(seconds=job.timeout_s + GLOO_TIMEOUT_MARGIN_S))
    function: Any = _load_module(call)
    for name in call.qualname.split("."):
        function = getattr(function, name)
    return function(rank, job.ranks, *pickle.loads(call.arguments))


def _load_module(call: Call) -> types.ModuleType:
    """Import by name, or run the shipped code under the name that pytest gave the test module."""
    if not call.code:
        return importlib.import_module(call.module)
    parents = call.module.split(".")[:-1]
    for i in range(len(parents)):  # pickle imports the parents of a dotted name as well
        sys.modules.setdefault(".".join(parents[: i + 1]), types.ModuleType(parents[i]))
    spec = importlib.util.spec_from_file_location(call.module, call.path)
    assert spec is not None, f"{call.path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[call.module] = module
    exec(marshal.loads(call.code), module.__dict__)
    return module


def _own_frames(error: BaseException) -> str:
    """The traceback from the test's function on, without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
        frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames)))
