"""Faults at named instants of a run that is kept alive, and what such a run leaves."""

from __future__ import annotations

import errno
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_helpers import assert_same_tensors, final_tensors, lines

from sixfold.dist_ckpt.memory_tier.generations import whole_ones
from sixfold.gpt.commands.train import prepare_member, train_generation
from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.elastic.generation import Generation
from sixfold.gpt.elastic.heartbeat import Heartbeat
from sixfold.gpt.elastic.memory_folder import PREFIX, snapshots_of
from sixfold.gpt.elastic.supervisor import keep_alive

# Name of an instant -> what is called there. "after": when it has returned, as in the middle of what calls it.
IN_A_STEP = {
    "when data is there": ("sixfold.gpt.training.loop", "Run.next_batch", "after", 1),
    "when targets are counted": ("sixfold.gpt.engine.step", "_sum_targets", "after", 1),
    "in a forward": ("sixfold.gpt.model.decoder", "Block.forward", "before", 3),
    "between two microbatches": ("sixfold.gpt.engine.rank_model", "token_loss", "after", 1),
    "before gradients are reduced": ("sixfold.fsdp", "FullyShardedDataParallel.finish_grad_sync", "before", 1),
    "before the norm is summed": ("sixfold.gpt.engine.step", "_square_sum", "before", 1),
    "in a collective of torch": ("torch.distributed", "all_reduce", "before", 1),
    "in the agreement of a step": ("sixfold.gpt.engine.step", "_agree", "before", 1),
    "before the optimizer": ("sixfold.gpt.engine.optimizer", "Optimizers.step", "before", 1),
    "in the optimizer": ("torch.optim.adamw", "AdamW.step", "before", 1),
    "after the optimizer": ("sixfold.gpt.engine.optimizer", "Optimizers.step", "after", 1),
    "before a snapshot": ("sixfold.gpt.training.kept_alive", "KeptAlive.keep", "before", 1),
    "when the snapshot of before is settled": ("sixfold.dist_ckpt.memory_tier.tier", "MemoryTier._settle", "before", 1),
    "in the copy of a snapshot": ("sixfold.dist_ckpt.background.arena", "Arena.take", "after", 1),
    "after a snapshot": ("sixfold.gpt.training.kept_alive", "KeptAlive.keep", "after", 1),
    "before a save": ("sixfold.gpt.training.loop", "Run.save", "before", 1),
    "in a save": ("sixfold.dist_ckpt.storage.frame_file", "FrameFile.finish", "before", 1),
    "after a save": ("sixfold.gpt.training.loop", "Run.finish_save", "after", 2),
    "in an evaluation": ("sixfold.gpt.training.loop", "Run._valid_batch", "before", 2),
    "in a comparison": ("sixfold.gpt.engine.replica_digests", "_gathered", "before", 1),  # where a run makes some
}
IN_A_RECOVERY = {  # of the generation that follows, whose ranks come back
    "while ranks meet": ("sixfold.gpt.launch.rendezvous", "_make_group", "before", 1),
    "while groups are made": ("sixfold.gpt.training.loop", "make_mesh", "before", 1),
    "while the engine is built": ("sixfold.gpt.training.loop", "build_rank", "after", 1),
    "when it is asked what is in memory": ("sixfold.dist_ckpt.memory_tier.tier", "MemoryTier._meet", "before", 1),
    "while state is taken back": ("sixfold.gpt.checkpoints.training_state", "_take", "before", 1),
    "when state is back": ("sixfold.gpt.training.kept_alive", "KeptAlive.tell", "before", 1),
}
INSTANTS = IN_A_STEP | IN_A_RECOVERY


class DeviceLost(RuntimeError):
    """An error that is nobody's configuration."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank at an instant, once, in one generation; a Flip of replica_helpers is one too."""

    instant: str
    rank: int
    # "SIGKILL", "SIGSTOP", "error"; "worker", "stopped worker"; "flipped bit": in memory, then SIGKILL; "host": its
    # memory is gone, and then this process; "no room for copies": of other hosts; "full memory": of the tmpfs.
    action: str
    generation: int = 1
    step: int = 3  # the step at hand, counted from 1; 0: from the start of the generation on

    def put(self) -> None:
        """Patch this process."""
        module, name, when, nth = INSTANTS[self.instant]
        holder, attribute = _found(module, name)
        calls, armed = [0], [self.step == 0]
        real = getattr(holder, attribute)

        def patched(*args: Any, **kwargs: Any) -> Any:
            calls[0] += armed[0]
            strikes = armed[0] and calls[0] == nth
            if strikes and when == "before":
                self._strike()
            result = real(*args, **kwargs)
            if strikes and when == "after":
                self._strike()
            return result

        setattr(holder, attribute, patched)
        if self.step:
            self._arm_at_step(armed)

    def _arm_at_step(self, armed: list[bool]) -> None:
        from sixfold.gpt.training.loop import Run

        real = Run.step

        def step(run: Any, stop: bool) -> Any:
            armed[0] = run.progress.step + 1 == self.step
            return real(run, stop)

        Run.step = step  # type: ignore[method-assign]

    def _strike(self) -> None:
        if self.action == "error":
            raise DeviceLost("the device is gone")
        if self.action in ("worker", "stopped worker"):
            number = signal.SIGKILL if self.action == "worker" else signal.SIGSTOP
            os.kill(_tier()._saver._worker.process.pid, number)
            return
        if self.action == "full memory":
            _fill(_tier()._folder.root.parent.parent)
            return
        if self.action == "flipped bit":
            _flip_newest(_tier())
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "no room for copies":

            def full(*_: object) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            _tier()._server._take = full
            return
        if self.action == "host":
            shutil.rmtree(_tier()._folder.root, ignore_errors=True)
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), getattr(signal, self.action))


def _tier() -> Any:
    """Of this process."""
    gc.unfreeze()  # else objects of before a generation are not listed
    return next(one for one in gc.get_objects() if type(one).__name__ == "MemoryTier")


def _fill(folder: Path) -> None:
    """No byte is left."""
    with (folder / "ballast").open("ab", buffering=0) as file:
        for piece in (bytes(2**16), bytes(2**12)):
            try:
                while file.write(piece):
                    pass
            except OSError:
                pass


def _flip_newest(tier: Any) -> None:
    """Damage the newest snapshot of which each rank's part is there; sizes stay."""
    deadline = time.monotonic() + 30
    while not (whole := whole_ones({"": tier._folder.listing()})[0]):
        assert time.monotonic() < deadline, "no snapshot is whole"
        time.sleep(0.01)
    for file in tier._folder.path(whole[0].generation).glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.unlink()  # it may be linked elsewhere
        file.write_bytes(data)


def _found(module: str, name: str) -> tuple[Any, str]:
    holder: Any = importlib.import_module(module)
    *parts, attribute = name.split(".")
    for part in parts:
        holder = getattr(holder, part)
    return holder, attribute


def faulty_generation(
    generation: Generation, heartbeat: Heartbeat, config: TrainConfig, memory_runs: list[str], faults: tuple[Fault, ...]
) -> int:
    """`train_generation`, in which the faults of this rank and generation happen."""
    for fault in faults:
        if fault.generation in (0, generation.number) and fault.rank == generation.rank:
            fault.put()
    return train_generation(generation, heartbeat, config, _of_member(memory_runs))


def _prepare(config: TrainConfig, memory_runs: list[str], *_: object) -> None:
    prepare_member(config, _of_member(memory_runs))


def _of_member(memory_runs: list[str]) -> str:
    """That of the stand-in for a node on which this process is: two members each, in turns."""
    member = int(multiprocessing.current_process().name.rpartition(" ")[2])
    return memory_runs[member // 2 % len(memory_runs)]


def run_kept_alive(
    config: TrainConfig,
    ranks: int,
    *faults: Fault,
    watch: Callable[[], None] | None = None,
    attempts: int = 3,
    nodes: int = 1,
    **options: Any,
) -> list[str]:
    """Train as ``config`` says while faults happen; what the supervisor told.

    Args:
        nodes: stand-ins on this machine, which differ in the folder of their snapshots.
    """
    told: list[str] = []
    folder = Path(config.elastic.memory_folder)
    with snapshots_of(Path(config.run.dir), folder) as memory_run, ExitStack() as at_end:
        memory_runs = [memory_run, *(f"{memory_run}-{node}" for node in range(1, nodes))]
        for name in memory_runs[1:]:
            at_end.callback(shutil.rmtree, folder / f"{PREFIX}{name}", ignore_errors=True)
        status = keep_alive(
            faulty_generation,
            ranks,
            (config, memory_runs, faults),
            prepare=_prepare,
            spares=config.elastic.spares,
            attempts=attempts,
            hung_after_s=config.elastic.hung_after_seconds,
            replaces=config.elastic.replace,
            watch=watch,
            tell=told.append,
            **options,
        )
    assert status == 0, told
    return told


def assert_same_run(config: TrainConfig, other: TrainConfig) -> None:
    """Bit for bit the same losses, norms, rates and positions of every step, and the same state at the end."""
    assert _steps(config) == _steps(other)
    assert_same_tensors(final_tensors(config), final_tensors(other))


def _steps(config: TrainConfig) -> list[tuple[Any, ...]]:
    last = {entry["step"]: entry for entry in lines(config, "step")}  # of a step that was done again the last counts
    names = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
    return [tuple(last[step][name] for name in names) for step in sorted(last)]


def pids(config: TrainConfig) -> list[list[int]]:
    """Of each generation, by rank."""
    return [[rank["pid"] for rank in entry["ranks"]] for entry in lines(config, "start")]


def left_behind(session: int) -> list[str]:
    """Processes of a session, which a command began that has ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            if os.getsid(int(place.name)) == session and state != "Z":  # that one has ended, and init looks soon
                found.append(f"{place.name} {(place / 'cmdline').read_bytes()}")
        except OSError:  # it has ended
            continue
    return found
