"""``sixfold train``: ranks that are started here, or the rank that a launcher made of this process.

    cli.py --> run_train (this file) --> launch/spawn.py --> train_rank (this file), in each rank --> training/loop.py

A wrong configuration is refused before torch is imported, a rank started or a folder made.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sixfold.gpt.commands.arguments import configuration
from sixfold.gpt.errors import ConfigError, raised_inside
from sixfold.gpt.launch.interrupt import end_at_once
from sixfold.gpt.launch.spawn import RankError, failure_of, is_typed, start_ranks
from sixfold.gpt.launch.stop_signals import STOPPED, Interrupted, early_signals

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.elastic.generation import Generation
    from sixfold.gpt.elastic.heartbeat import Heartbeat
    from sixfold.gpt.launch.rendezvous import Rendezvous

PROGRESS_S = 5.0  # for the progress line of rank 0 to end with its run

# Who starts ranks anew where sixfold did not start them.
_RESTARTS = {
    "torchrun": "torchrun --max-restarts",
    "srun": "sbatch --requeue",
    "pytorchjob": "backoffLimit of the PyTorchJob",
    "sixfold": "the launcher",
}


def run_train(args: argparse.Namespace) -> int:
    """The verb ``train``: as a rank that a launcher started, or with ranks that are started here."""
    from sixfold.gpt.config.rules import check_main_dtype
    from sixfold.gpt.config.train_config import TrainConfig

    with early_signals():
        config = configuration(args, TrainConfig)
        if args.profile_memory and not config.log.memory_steps:
            config = replace(config, log=replace(config.log, memory_steps=(1, 2)))
        if args.print_config:
            sys.stdout.write(config.to_toml())
            return 0
        from sixfold.gpt.data.token_stream import preflight
        from sixfold.gpt.files.run_dir import check_run_dir
        from sixfold.gpt.launch.rendezvous import detect

        on_nodes = nodes_of(args, config)
        rendezvous = detect(os.environ)
        if on_nodes is not None and rendezvous is not None and rendezvous.launcher == "srun":
            rendezvous = None  # it has started a task for each node, which starts the ranks
        if rendezvous is not None and args.max_restarts:
            raise ConfigError(
                f"--max-restarts is {args.max_restarts} and {rendezvous.launcher} started this rank; give the number "
                f"to {_RESTARTS[rendezvous.launcher]}: a run that is started again goes on from its newest checkpoint"
            )
        if rendezvous is not None and args.keep_alive:
            raise ConfigError(
                f"--keep-alive is given and {rendezvous.launcher} started this rank; it is for ranks that "
                f"`sixfold train` starts itself, on one machine or on those of --nodes. "
                f"{_RESTARTS[rendezvous.launcher]} starts a run again, which then goes on from its newest checkpoint"
            )
        ranks = rendezvous.size if rendezvous else args.ranks or default_ranks(config)
        nodes = None
        if on_nodes is not None:
            nodes, ranks = on_nodes
        _check_world(config, ranks)
        check_main_dtype(config)
        preflight(config)
        if rendezvous is None:
            check_run_dir(config.run.dir, joins=nodes is not None)
        if rendezvous is not None:
            if signal.getsignal(signal.SIGINT) is end_at_once:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on the loop's
            return _be_a_rank(config, rendezvous)
        if not args.keep_alive:
            return restarted(config, args.max_restarts, lambda one: run_ranks(one, ranks))
        return restarted(config, args.max_restarts, lambda one: run_kept_alive(one, ranks, nodes=nodes))


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of a run that is kept alive, which of them this one is, and how many ranks each has room for."""

    addresses: tuple[tuple[str, int], ...]
    me: int
    ranks: int


def nodes_of(args: argparse.Namespace, config: TrainConfig) -> tuple[Nodes, int] | None:
    """What --nodes, --node and --ranks say, and the ranks of the whole run. Machines that it does not need are spares.

    Raises:
        ConfigError: an option without the other, without --keep-alive, a number that the list does not have, or ranks
            that do not divide.
    """
    if args.nodes is None and args.node is None:
        return None
    if args.nodes is None or args.node is None:
        given, other = ("--node", "--nodes") if args.nodes is None else ("--nodes", "--node")
        raise ConfigError(f"{given} is given without {other}; give both: all machines, and which one this is, from 0")
    if not args.keep_alive:
        raise ConfigError("--nodes is given without --keep-alive, which it is for; otherwise use torchrun or srun")
    count, all_ranks = len(args.nodes), config.parallel.world if config.parallel.dp else 0
    if args.node >= count:
        raise ConfigError(f"--node is {args.node}, and --nodes has {count}; they are numbered from 0")
    each = args.ranks or -(-(all_ranks or default_ranks(config) * count) // count)
    if args.ranks is None and all_ranks % count:
        raise ConfigError(
            f"--nodes has {count} machines and the configuration {all_ranks} ranks, which do not divide; give --ranks, "
            "the number on each machine"
        )
    return Nodes(args.nodes, args.node, each), min(all_ranks or each * count, each * count)


def train_rank(config: TrainConfig) -> int:
    """Body of one rank of ``sixfold train``; its exit status."""
    from sixfold.gpt.training.loop import train

    try:
        return STOPPED if train(config).reason == "sigterm" else 0
    except Interrupted:  # of a rank that another launcher started: it had the terminal's Ctrl-C, too
        return STOPPED


def prepare_member(config: TrainConfig, memory_run: str, *_: object) -> None:
    """In a process that will be a rank: what takes long and needs no ranks."""
    if config.elastic.memory_every:
        from sixfold.gpt.training.kept_alive import tier_of

        tier_of(config, memory_run).fork_worker()


def train_generation(generation: Generation, heartbeat: Heartbeat, config: TrainConfig, memory_run: str) -> int:
    """Body of one rank of one generation of `run_kept_alive`; its exit status."""
    from sixfold.gpt.elastic.sizes import config_of
    from sixfold.gpt.launch import rendezvous
    from sixfold.gpt.training.kept_alive import KeptAlive
    from sixfold.gpt.training.loop import train_in

    kept, config = KeptAlive.of(generation, heartbeat, memory_run), config_of(config, generation.size)
    if generation.number > 1:  # whoever wrote "never" or "must" meant the first one
        config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
    if config.train.deterministic:
        rendezvous.make_deterministic(os.environ)
    place = rendezvous.Rendezvous(
        launcher="sixfold",
        rank=generation.rank,
        size=generation.size,
        local_rank=generation.place,
        url=generation.store,
    )
    world = rendezvous.join(place, device=config.run.device, timeout_s=config.run.timeout_seconds)
    try:
        return STOPPED if train_in(config, world, kept=kept).reason == "sigterm" else 0
    finally:
        rendezvous.leave(world)


def restarted(config: TrainConfig, most: int, run: Callable[[TrainConfig], int]) -> int:
    """``run(config)``, and again from the newest checkpoint when it failed, ``most`` times at most.

    A run that would fail again (its configuration, data or checkpoint are wrong, a value was not finite, memory or the
    disk is too small) is not started again; see spawn.is_final.
    """
    for number in range(1, most + 1):
        try:
            return run(config)
        except RankError as error:
            if error.final:
                raise
            sys.stdout.flush()
            print(f"sixfold: {error}; restart {number} of {most}", file=sys.stderr, flush=True)
        # Whoever wrote "never" or "must" meant the first start.
        config = replace(config, checkpoint=replace(config.checkpoint, resume="auto"))
    return run(config)


def run_ranks(config: TrainConfig, ranks: int) -> int:
    """Start ``ranks`` ranks here that train as ``config`` says, with a progress line. Returns the exit status."""
    from sixfold.gpt.observe.metrics import ProgressLine

    line = ProgressLine(Path(config.run.dir) / "metrics.jsonl", config.train.steps)
    try:
        return start_ranks(train_rank, ranks, (config,), watch=line.poll, tell=line.tell)
    finally:
        line.close()


def run_kept_alive(
    config: TrainConfig, ranks: int, also: Callable[[], None] = lambda: None, *, nodes: Nodes | None = None
) -> int:
    """As `run_ranks`; when a rank is lost another process takes its place, and the others go on in theirs.

    Args:
        ranks: of all machines. also: called about ten times a second.
    """
    from sixfold.gpt.elastic.memory_folder import snapshots_of
    from sixfold.gpt.elastic.sizes import sizes_of, taken
    from sixfold.gpt.elastic.supervisor import keep_alive
    from sixfold.gpt.observe.metrics import ProgressLine

    sizes, run_dir = sizes_of(config, ranks), Path(config.run.dir)
    if nodes is None:
        taken(run_dir, sizes)  # a word to a run before
    else:
        sizes = tuple(size for size in sizes if size <= nodes.ranks * len(nodes.addresses))
    line, elastic = ProgressLine(run_dir / "metrics.jsonl", config.train.steps), config.elastic

    def watch() -> None:
        line.poll()
        also()

    try:
        with snapshots_of(run_dir, Path(elastic.memory_folder)) as memory_run:
            start = keep_alive if nodes is None else partial(_keep_alive_on, config, nodes)
            return start(
                train_generation,
                ranks,
                (config, memory_run),
                prepare=prepare_member,
                spares=elastic.spares,
                attempts=elastic.attempts,
                hung_after_s=elastic.hung_after_seconds,
                sizes=sizes,
                replaces=elastic.replace,
                asked_ranks=lambda: taken(run_dir, sizes),
                watch=watch,
                tell=line.tell,
            )
    finally:
        line.close()


def _keep_alive_on(
    config: TrainConfig, nodes: Nodes, target: Callable[..., int], ranks: int, *args: Any, **options: Any
) -> int:
    """`keep_alive` for several machines, which are all started alike."""
    from sixfold.gpt.elastic.nodes import keep_alive_on
    from sixfold.gpt.files.run_dir import make_run_dir

    # A restart of the whole run resumes, also where its start was told not to; the rest is the same on all machines.
    alike = replace(config, checkpoint=replace(config.checkpoint, resume="auto")).to_toml()
    started = repr((alike, nodes.addresses, nodes.ranks, version("sixfold-gpt")))
    return keep_alive_on(
        nodes.addresses,
        nodes.me,
        target,
        ranks,
        *args,
        per_node=nodes.ranks,
        run_dir=make_run_dir(config.run.dir),
        run_digest=hashlib.sha256(started.encode()).hexdigest(),
        wait_s=config.run.timeout_seconds,
        **options,
    )


def _be_a_rank(config: TrainConfig, rendezvous: Rendezvous) -> int:
    """Train as the rank that torchrun, srun or a PyTorchJob made this process; rank 0 shows the progress line."""
    from sixfold.gpt.observe.metrics import ProgressLine

    if rendezvous.rank != 0:
        return _recorded(config, rendezvous)
    line, done = ProgressLine(Path(config.run.dir) / "metrics.jsonl", config.train.steps), threading.Event()

    def follow() -> None:
        while not done.wait(0.2):
            line.poll()

    thread = threading.Thread(target=follow, name="sixfold-progress", daemon=True)
    thread.start()
    try:
        return _recorded(config, rendezvous)
    finally:
        done.set()
        thread.join(PROGRESS_S)
        if not thread.is_alive():  # else it hangs in a read or a write, and so would this
            line.close()


def _recorded(config: TrainConfig, rendezvous: Rendezvous) -> int:
    """``train_rank``, whose error goes where torchrun reads it: it shows every rank's.

    Raises:
        RankError: for an error that says all by itself; then its one line is all that torchrun gets.
    """
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

    class Brief(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            if not is_typed(raised_inside(e)):
                return super().record_exception(e)
            cause, frames = e.__cause__, e.__traceback__
            e.__cause__ = e.__traceback__ = None  # a cause that is set also hides the context
            try:
                super().record_exception(e)
            finally:
                e.__cause__, e.__traceback__ = cause, frames

    try:
        return record(train_rank, Brief())(config) or 0
    except Exception as error:
        if not is_typed(raised_inside(error)):
            raise
        raise RankError(failure_of(error, rendezvous.rank, rendezvous.size)) from None


def _check_world(config: TrainConfig, ranks: int) -> None:
    from sixfold.gpt.config.rules import check_world

    check_world(config, ranks)


def default_ranks(config: TrainConfig) -> int:
    """Ranks to start when nobody says how many: the product of the degrees; with dp open, all GPUs that are here."""
    degrees = config.parallel.world
    if config.parallel.dp or config.run.device == "cpu" or not any(Path("/dev").glob("nvidia[0-9]*")):
        return degrees
    import torch

    return max(torch.cuda.device_count() // degrees, 1) * degrees
