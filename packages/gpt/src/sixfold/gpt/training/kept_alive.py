"""What a run does more when it is kept alive: it beats, it takes its state back, it says what was lost.

    elastic/member.py --> generation, heartbeat --> KeptAlive (this file) --> loop.py

The ranks of a generation are a run that resumes, as any other; the next one of the same process takes nothing from it.

[Note: nodes and copies] What one supervisor has started is lost together with its host. So it is a domain of the tier,
and copies go to the hosts of other supervisors. Where there are fewer of those than copies wanted, there are fewer
copies, and the run goes on. It says so where copies can be expected: on several nodes, or where there were several.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sixfold.dist_ckpt import CorruptError, MemoryTier, StorageError
from sixfold.gpt.checkpoints import training_state
from sixfold.gpt.checkpoints.starting_point import StartingPoint, step_of
from sixfold.gpt.data.token_stream import continue_data
from sixfold.gpt.elastic.generation import Generation
from sixfold.gpt.elastic.heartbeat import LATE, Heartbeat
from sixfold.gpt.elastic.memory_folder import PREFIX
from sixfold.gpt.launch.rendezvous import node_host
from sixfold.gpt.launch.stop_signals import StopFlag
from sixfold.gpt.parallel.agreement import all_or_raise, gather_objects, world_collective
from sixfold.gpt.parallel.mesh import RankMesh

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.training.loop import Run


@dataclass(kw_only=True, slots=True)
class KeptAlive:
    """One generation of a run, for this rank.

    Attributes:
        flag: of this process, through all generations: a signal between two of them counts in the next.
    """

    generation: Generation
    heartbeat: Heartbeat
    flag: StopFlag
    memory_run: str  # the name of the run among those that have snapshots in memory
    is_full: bool = False  # no room for snapshots, and that was told
    is_lone: bool = False  # copies do not arrive elsewhere, and that was told
    is_begun: bool = False  # a snapshot whose end is not known yet
    last_step: int = 0  # of the last snapshot, or from which the generation went on
    few: str = ""  # why there are fewer copies on other nodes than wanted
    in_memory: tuple[int, ...] = ()  # steps of whole snapshots when the generation began
    untold: list[dict[str, Any]] = field(default_factory=list)  # of the generation before: see observe/metrics.py

    @classmethod
    def of(cls, generation: Generation, heartbeat: Heartbeat, memory_run: str) -> KeptAlive:
        """This process in ``generation``."""
        flag = _flag()
        flag.arm()
        flag.asked = flag.asked or generation.stop
        return cls(generation=generation, heartbeat=heartbeat, flag=flag, memory_run=memory_run)

    @property
    def fence(self) -> Callable[[], None] | None:
        """Raises if this generation is of an older term; None on one node."""
        term = self.generation.term
        return None if term is None else term.check

    def tier(self, config: TrainConfig, mesh: RankMesh) -> MemoryTier | None:
        """Where snapshots lie; None without any. Versions of weights are of different steps, and in no snapshot.

        Collective over all ranks. See [Note: nodes and copies].
        """
        if not config.elastic.memory_every or not config.parallel.entry.flushed:
            return None
        tier, wanted = tier_of(config, self.memory_run), config.elastic.memory_replicas
        told = gather_objects(mesh.control, mesh.size, (tier.domain, max(_nodes_before())))
        nodes = len({domain for domain, _ in told})
        most = max(nodes, *(before for _, before in told))
        _nodes_before().add(most)
        copies = min(wanted, nodes - 1)
        tier.regroup(mesh.control, replicas=copies)
        if copies < wanted and max(most, wanted) > 1:
            self.few = (
                f"elastic.memory_replicas is {wanted}, and the run is on {nodes} node{'s' * (nodes > 1)}: copies of a "
                f"snapshot on other nodes: {copies}"
            )
        return tier

    def newest_step(self, run: Run, start: StartingPoint) -> int:
        """The step from which this generation goes on. Collective over all ranks."""
        if run.tier is not None and self.generation.number > 1:
            self.in_memory = tuple(run.tier.steps())
        return max(step_of(start.newest), *self.in_memory, 0)

    def take_back(self, run: Run, start: StartingPoint, step: int) -> bool:
        """Take state from memory, unless a checkpoint is newer. Collective over all ranks.

        Raises:
            CorruptError: what is in memory is damaged, and there is no checkpoint either. StorageError: likewise, it is
                so full that nothing can be loaded.
        """
        mesh, on_disk = run.rank.mesh, step_of(start.newest)
        if run.tier is None or step not in self.in_memory:
            return False
        try:
            found = training_state.load_snapshot(run.rank, run.tier)
        except (CorruptError, StorageError) as error:
            if start.newest is None:
                raise
            found, why = None, str(error)
        else:
            why = "" if found is None else f"the newest snapshot that is whole is of step {found[0].step}"
        if found is None or found[0].step < on_disk:
            self._say(mesh, f"{why}; the run goes on from {start.newest}")
            return False
        run.progress, common = found
        self.untold = common[training_state.UNTOLD]
        all_or_raise(mesh.control, mesh.size, lambda: continue_data(run.train_data, common["data"], run.config))
        run.note("resume", step=run.progress.step, checkpoint="memory", layout=mesh.layout, changed={})
        return True

    def keep(self, run: Run) -> None:
        """A snapshot of the step that was done, if one is due. Collective over all ranks.

        Where copies are compared it is taken of the first step that was compared since it is due. Then the step before
        is told. See [Note: what is told stays] (observe/metrics.py).
        """
        at, every = run.progress, run.config.elastic.memory_every
        tier = run.tier
        if tier is None or at.step // every == self.last_step // every or not run.replicas.is_compared:
            return
        self.last_step = at.step
        with world_collective(f"snapshot of step {at.step}"), run.rank.clock.part("save"):
            state = training_state.whole_state(run.rank, at, run.train_data.state_dict(at.samples), run.versions)
            state |= training_state.untold(run.rank, [] if run.metrics is None else [*run.metrics.untold])

            def begin() -> None:
                run.rank.before_update = tier.save(at.step, state, lazy=run.config.elastic.memory_lazy).fence

            self.is_begun = self._has_room(run, begin)
        self._say_uncopied(run, tier)
        if run.metrics is not None:
            run.metrics.tell(at.step - self.is_begun)

    def settle(self, run: Run) -> None:
        """The last snapshot has ended, well or not, and its step is told. Collective over all ranks."""
        if run.tier is not None and self.is_begun:
            with world_collective(f"snapshot of step {self.last_step}"), run.rank.clock.part("save"):
                self._has_room(run, run.tier.wait)
            self.is_begun = False
        if run.metrics is not None:
            run.metrics.tell()

    def _has_room(self, run: Run, task: Callable[[], object]) -> bool:
        """Whether ``task`` finds the snapshot before whole, if there was one, and room. Raises on all ranks alike.

        Memory that is full costs the snapshot, not the run: what was there before stays, and a loss takes more time.
        """
        try:
            task()
        except StorageError as error:
            if not self.is_full:
                why = str(error).partition("; an older")[0]
                run.note("no_snapshot", step=run.progress.step, why=why)
                self._say(run.rank.mesh, f"{why}; the run goes on without a snapshot in memory until there is room")
            self.is_full = True
            return False
        self.is_full = self.is_full and not self.is_begun
        return True

    def _say_uncopied(self, run: Run, tier: MemoryTier) -> None:
        why = tier.unreplicated
        if why is not None and not self.is_lone:
            self._tell_uncopied(run, f"a snapshot lacks a copy on another node: {why}; the run goes on")
        self.is_lone = why is not None

    def _tell_uncopied(self, run: Run, why: str) -> None:
        run.note("no_replica", step=run.progress.step, why=why)
        self._say(run.rank.mesh, why)

    def _say(self, mesh: RankMesh, text: str) -> None:
        if mesh.rank == 0:
            print(f"sixfold: {text}", file=sys.stderr, flush=True)

    def tell(self, run: Run, *, from_memory: bool) -> None:
        """A line of metrics.jsonl, when the state is there from which a later generation goes on."""
        self.last_step = run.progress.step
        if self.generation.number > 1:
            run.note(
                "recovery",
                step=run.progress.step,
                generation=self.generation.number,
                lost=[{"rank": one.rank, "why": one.why} for one in self.generation.lost],
                source="memory" if from_memory else "disk" if run.progress.step else "the start",
                seconds=time.monotonic() - self.generation.lost_at,
            )
        if run.metrics is not None:
            run.metrics.tell_again(self.untold)
            elastic = run.config.elastic
            each = elastic.memory_every == 1 and elastic.compare_replicas_every <= 1
            run.metrics.holds = run.tier is not None and each
        if self.few:
            self._tell_uncopied(run, self.few)


@cache
def _flag() -> StopFlag:
    """Of this process."""
    return StopFlag()


def tier_of(config: TrainConfig, memory_run: str) -> MemoryTier:
    """Where the snapshots of this process lie; it outlives generations, and so does its worker."""
    elastic = config.elastic  # a worker that is stopped is given up as a late step is, and not at the run's deadline
    timeout_s = min(config.run.timeout_seconds, LATE * elastic.hung_after_seconds)
    return _tier(elastic.memory_folder, memory_run, timeout_s, node_host(os.environ))


@cache
def _tier(folder: str, run: str, timeout_s: float, address: str | None) -> MemoryTier:
    """Below the folder of this supervisor, which has its process number. See [Note: nodes and copies]."""
    domain = f"{socket.gethostname()}-{run.rpartition('-')[2]}"
    place = Path(folder) / f"{PREFIX}{run}"
    return MemoryTier(place, "gpt", domain=domain, replicas=0, timeout_s=timeout_s, address=address)


@cache
def _nodes_before() -> set[int]:
    """How many nodes generations of this process had."""
    return {1}
