"""When a run compares copies of its shards, and what it does if they differ.

    loop.py --> ReplicaCheck (this file) --> engine/replica_digests.py --> Verdict --> a line of metrics.jsonl, an error

[Note: the state that all agreed on] Copies are compared when the run has its state, every so many steps, and before
each save; a snapshot in memory is taken only of a step that was compared. So whoever goes back to the newest of them
goes back to a state on which all agreed.

[Note: two that differ] Without a majority nobody knows who is wrong, and the steps since then are done once more. The
lines of metrics.jsonl tell the next attempt, whoever starts it, that this has happened: up to the first line "agree" of
that step or a later one. A second time in between is final.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sixfold.gpt.engine.replica_digests import Comparison, ReplicaDigests
from sixfold.gpt.errors import ReplicasDifferAgainError, ReplicasDifferError
from sixfold.gpt.parallel.agreement import from_rank_0, world_collective

if TYPE_CHECKING:
    from sixfold.gpt.training.loop import Run

KIND = "replicas"  # of lines of metrics.jsonl
AGREE, DIFFER, UNDECIDED = "agree", "differ", "undecided"


class ReplicaCheck:
    """Of one run, on one rank; every rank has one."""

    def __init__(self, run: Run, every: int) -> None:
        self._run, self._every = run, every
        self._digests = ReplicaDigests(run.rank)
        self._compared: int | None = None  # the step that was compared last
        self._doubtful: int | None = None  # at which there was no majority, and which has not been passed since

    def begin(self) -> None:
        """Compare what the run begins with. Collective over all ranks."""
        if not self._every:
            return
        run, mesh = self._run, self._run.rank.mesh
        path = Path(run.config.run.dir) / "metrics.jsonl"
        self._doubtful = from_rank_0(mesh.control, mesh.rank, mesh.size, lambda: doubtful_step(path))
        if not self.compare().copies and mesh.rank == 0:
            print(
                f"sixfold: elastic.compare_replicas_every is {self._every}, and at this layout no two ranks hold the "
                f'same shard: nothing is compared. parallel.dp_replicate = 2 or parallel.sharding = "no_shard" keep '
                f"copies",
                file=sys.stderr,
                flush=True,
            )

    def after_step(self, *, saves: bool) -> None:
        """Compare, if it is time or the step is saved. Collective over all ranks."""
        if self._every and (saves or self._run.progress.step % self._every == 0):
            self.compare()

    def before_save(self) -> None:
        """Compare what has not been compared yet. Collective over all ranks."""
        if not self.is_compared:
            self.compare()

    @property
    def is_compared(self) -> bool:
        """Whether the run may go back to its state as it is now: it has been compared, or nothing ever is."""
        return not self._every or self._compared == self._run.progress.step

    def compare(self) -> Comparison:
        """Collective over all ranks.

        Raises:
            ReplicasDifferError: on all ranks alike.
        """
        run, began = self._run, time.monotonic()
        step = run.progress.step
        with world_collective(f"comparison of copies after step {step}"), run.rank.clock.part("compute"):
            found = self._digests.compare()
        verdict = found.verdict
        result = AGREE if verdict.agree else UNDECIDED if verdict.undecided else DIFFER
        again = result == UNDECIDED and self._doubtful is not None
        error = None if verdict.agree else _error(found, step, self._doubtful if again else None)
        run.note(
            KIND,
            step=step,
            result=result,
            ranks=[] if error is None else list(error.ranks),
            tensor=None if error is None else error.tensor,
            shards=found.shards,
            seconds=time.monotonic() - began,
        )
        if error is not None:
            raise error
        self._compared = step
        if self._doubtful is not None and step >= self._doubtful:
            self._doubtful = None
        return found


def doubtful_step(metrics: Path) -> int | None:
    """The step of the last line "undecided", unless the run has agreed on it or a later one since."""
    found = None
    for line in metrics.read_bytes().splitlines() if metrics.exists() else ():
        if f'"{KIND}"'.encode() not in line:
            continue
        try:
            record = json.loads(line)
        except ValueError:  # cut by a kill
            continue
        if record.get("kind") != KIND:
            continue
        if record["result"] == UNDECIDED:
            found = record["step"]
        elif record["result"] == AGREE and found is not None and record["step"] >= found:
            found = None
    return found


def _error(found: Comparison, step: int, before: int | None) -> ReplicasDifferError:
    """``before``: the step at which there was no majority either, when these steps were done the first time."""
    verdict = found.verdict
    accused = {
        rank: f"rank {rank} has other bits of {_shown(shards)} after step {step} than most ranks that hold a copy"
        for rank, shards in verdict.minority.items()
    }
    if not verdict.undecided:
        return ReplicasDifferError(
            f"{'; '.join(accused.values())}. The memory or the processor of that rank made an error. Start again, best "
            f"on another machine in its place: the run goes on from the newest checkpoint, on which all agreed",
            step=step,
            tensor=str(next(iter(verdict.minority.values()))[0]),
            ranks=tuple(accused),
            accused=accused,
        )
    shard, camps = next(iter(verdict.undecided.items()))
    ranks = tuple(sorted({rank for all_of in verdict.undecided.values() for camp in all_of for rank in camp}))
    who, what = " and ".join(_ranks(camp) for camp in camps), _shown(list(verdict.undecided))
    if before is None:
        return ReplicasDifferError(
            f"{who} have different bits of {what} after step {step}, and no majority says which are right. Start "
            f"again: the run goes on from the newest checkpoint, on which all agreed, and does these steps once more",
            step=step,
            tensor=str(shard),
            ranks=ranks,
            accused=accused,
        )
    return ReplicasDifferAgainError(
        f"{who} have different bits of {what} after step {step}, as before at step {before}, though these steps were "
        f"done again. Test the memory and the processors of these ranks, or leave them out. Is it a kernel that gives "
        f"other bits each time? train.deterministic = true refuses those that torch knows",
        step=step,
        tensor=str(shard),
        ranks=ranks,
        accused=accused,
    )


def _shown(shards: Sequence[object]) -> str:
    return f"{shards[0]}" + (f" and {len(shards) - 1} more shards" if len(shards) > 1 else "")


def _ranks(ranks: tuple[int, ...]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
