"""The run: join the ranks, build, resume, loop, save.

    TrainConfig --> loop (this file): mesh --> build --> [ data --> step --> metrics --> checkpoint ]* --> TrainResult

Every rank runs this same code; a world of one has no process group and every group is None. State that outlives a rank
is a step number, ``samples`` consumed, and what training_state.py saves: a killed run continues from the newest whole
one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sixfold.dist_ckpt import AsyncSave, CorruptError, MemoryTier, retention
from sixfold.gpt.checkpoints import training_state
from sixfold.gpt.checkpoints.starting_point import (
    StartingPoint,
    data_state,
    initial_weights,
    same_config,
    settled,
    starting_point,
    step_of,
)
from sixfold.gpt.checkpoints.training_state import Progress
from sixfold.gpt.config.batch_schedule import batch_size
from sixfold.gpt.config.rules import check_world
from sixfold.gpt.config.train_config import PLAN
from sixfold.gpt.data import own_data
from sixfold.gpt.data.host_to_device import copy_streams
from sixfold.gpt.data.prefetch import Prefetch
from sixfold.gpt.data.token_stream import Microbatch, TokenStream, open_on_ranks
from sixfold.gpt.engine.activation_offload import check_offload
from sixfold.gpt.engine.nonfinite import blamed
from sixfold.gpt.engine.rank_model import ModelProvider, RankModel, build_rank, check_compiler, check_provider
from sixfold.gpt.engine.searched_schedule import plan_run
from sixfold.gpt.engine.step import Asks, NonFinite, StepOutcome, evaluate, train_step
from sixfold.gpt.engine.weight_average import decay_after
from sixfold.gpt.engine.weight_digests import WeightDigests
from sixfold.gpt.engine.weight_versions import NotFiniteError
from sixfold.gpt.errors import ConfigError, FinalError, NoTargetsError, TrainError
from sixfold.gpt.files.run_dir import make_run_dir, write_config
from sixfold.gpt.launch import rendezvous
from sixfold.gpt.launch.spawn import is_final
from sixfold.gpt.launch.stop_signals import Interrupted, StopFlag
from sixfold.gpt.machine.devices import peak_flops_of
from sixfold.gpt.model.float8_linear import check_float8
from sixfold.gpt.observe import digest_file, timeline
from sixfold.gpt.observe.curves import check_sinks, feeds_of
from sixfold.gpt.observe.memory_snapshot import check_memory_steps, recorded
from sixfold.gpt.observe.metrics import EVALUATIONS, MetricsWriter, read_all
from sixfold.gpt.observe.profiler import profiled
from sixfold.gpt.observe.software_versions import software_versions
from sixfold.gpt.observe.straggler import StragglerReport
from sixfold.gpt.parallel.agreement import all_or_raise, any_rank, from_rank_0, memory_errors, world_collective
from sixfold.gpt.parallel.mesh import make_mesh
from sixfold.gpt.parallel.sequence_parts import SequencePart
from sixfold.gpt.training.kept_alive import KeptAlive
from sixfold.gpt.training.learning_rate import learning_rate
from sixfold.gpt.training.replica_check import ReplicaCheck
from sixfold.gpt.training.resume import restore, start_line

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.data.token_stream import Datasets

CLOSE_S = 5.0  # for the data thread to end with its run


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How a run ended.

    Attributes:
        step: updates done. loss: of the last one, None if none was done.
        reason: "finished", or "sigterm": asked to stop, and saved.
    """

    step: int
    loss: float | None
    run_dir: Path
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Saved:
    """A save that has begun: seconds for which it waited for the one before and then blocked, and what writes it."""

    step: int
    waited_s: float
    blocked_s: float
    handle: AsyncSave | None  # None: it is whole


class Run:
    """One rank's view of a run: what it trains, where it stands, and what it writes."""

    def __init__(
        self,
        config: TrainConfig,
        rank: RankModel,
        metrics: MetricsWriter | None,
        data: Datasets,
        kept: KeptAlive | None = None,
    ) -> None:
        self.config = config
        self.kept = kept
        self.tier: MemoryTier | None = None
        self.rank = rank
        self.metrics = metrics  # on rank 0 only
        self.train_data, valid_sets = data
        cp, copies = rank.mesh.axes.cp, copy_streams(rank.device)
        part = SequencePart(cp.rank, cp.size)
        self.stream = TokenStream(self.train_data, config, part=part, copies=copies)
        if not valid_sets and config.eval.every:
            raise ConfigError(
                f"eval.every is {config.eval.every} and data.split {config.data.split!r} leaves no validation data; "
                f"name some in data.valid, or set eval.every = 0"
            )
        self.valid = {name: TokenStream(one, config, part=part, copies=copies) for name, one in valid_sets.items()}
        if not isinstance(self.train_data, own_data.OwnData):
            rank.eod = int(self.train_data.config.tokenizer.eod)
        self.progress = Progress()
        self.loss: float | None = None
        self.versions = software_versions()
        self.root = Path(config.run.dir) / "checkpoints"
        self.digests: digest_file.DigestWriter | None = None  # on rank 0, where the config wants them
        self._weight_digests = WeightDigests(rank)
        self.replicas = ReplicaCheck(self, config.elastic.compare_replicas_every)
        self._stragglers = StragglerReport(rank, config.log)
        self._timelines = timeline.TimelineWriter(config.run.dir)
        self._prefetch: tuple[int, Prefetch[list[Microbatch]]] | None = None
        self._saved: _Saved | None = None  # the newest, until it is told of
        self._save_began = time.monotonic()  # the newest one, or the run
        self._told_at = time.monotonic(), 0  # when the newest step line was written, and tokens until then

    def note(self, kind: str, **fields: Any) -> None:
        """One line of metrics.jsonl, written by one rank."""
        if self.metrics is not None:
            self.metrics.write(kind, **fields)

    def close(self) -> None:
        """Let the data thread end, which reads files that its user may close or delete next; one that hangs is left."""
        if self._prefetch is not None:
            self._prefetch[1].wait(CLOSE_S)

    def _fetch(self, step: int, samples: int) -> list[Microbatch]:
        mesh, size = self.rank.mesh, batch_size(self.config, step)
        micro = self.config.train.micro_batch_size
        return self.stream.step(samples, size, micro, mesh.dp, mesh.dp_rank)

    def _valid_batch(self, name: str, number: int) -> Prefetch[list[Microbatch]]:
        valid, mesh, train = self.valid[name], self.rank.mesh, self.config.train
        size = train.global_batch_size
        return Prefetch(lambda: valid.step(number * size, size, train.micro_batch_size, mesh.dp, mesh.dp_rank))

    def coming_batch(self) -> list[Microbatch]:
        """This step's microbatches, without any being consumed."""
        step, samples = self.progress.step, self.progress.samples
        if self._prefetch is None or self._prefetch[0] != step:
            self._prefetch = (step, Prefetch(lambda: self._fetch(step, samples)))
        return self._await_data(f"step {step + 1}", self._prefetch[1])

    def next_batch(self) -> list[Microbatch]:
        """This step's microbatches; the next step's are fetched on a thread while this one runs."""
        batch, self._prefetch = self.coming_batch(), None
        step, samples = self.progress.step, self.progress.samples
        if step + 1 < self.config.train.steps:
            after = samples + batch_size(self.config, step)
            self._prefetch = (step + 1, Prefetch(lambda: self._fetch(step + 1, after)))
        return batch

    def _await_data(self, what: str, prefetch: Prefetch[list[Microbatch]]) -> list[Microbatch]:
        limit = self.config.run.timeout_seconds
        try:
            batch = prefetch.result(limit)
        except TimeoutError as error:
            raise TrainError(
                f"{what}: rank {self.rank.mesh.rank} did not read its data within {limit:g} s. Does the disk "
                "answer? A slow one needs a longer run.timeout_seconds"
            ) from error
        for microbatch in batch:
            microbatch.arrive()
        return batch

    def save(self, *, goes_on: bool) -> None:
        """Write a checkpoint of this step: in the background if training goes on and the config says so.

        Where the save before is still being written, this one waits for it: seconds for which it holds the run up.
        """
        began = time.monotonic()
        self.finish_save()
        waited = time.monotonic() - began
        self._fence()
        if self.kept is not None:
            self.kept.settle(self)
        self.replicas.before_save()
        self._save_began = time.monotonic()
        with world_collective(f"what was in flight at the save of step {self.progress.step}"):
            self.rank.settle()
        step = self.progress.step
        folder = retention.step_path(self.root, step)
        data = self.train_data.state_dict(self.progress.samples)
        background = goes_on and self.config.checkpoint.background
        with world_collective(f"save of step {step}"), self.rank.clock.part("save"):
            blocked, handle = training_state.save(
                self.rank, folder, self.progress, data, self.versions, background=background, since=self._since(folder)
            )
        self._saved = _Saved(step=step, waited_s=waited, blocked_s=blocked, handle=handle)
        if handle is None:
            self.finish_save()

    def _since(self, folder: Path) -> Path | None:
        """For a save that links files of what does not change: the newest checkpoint if parts are frozen, else None."""
        if not (self.config.train.frozen or self.config.lora.rank):
            return None

        def newest() -> Path | None:
            with suppress(CorruptError):
                return retention.latest(self.root) if self.root.is_dir() else None
            return None

        found = training_state.chosen(self.rank.mesh, newest, self.config.run.timeout_seconds)
        return None if found == folder else found

    def finish_save(self) -> None:
        """Wait for the newest save, say that it is there, and drop what retention says.

        A save that goes on, however slowly, is waited for; one that stands still ends by its own deadline.
        """
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        step, handle = saved.step, saved.handle
        if handle is not None:
            with world_collective(f"save of step {step}"), self.rank.clock.part("save"):
                handle.wait()
        whole_s = None if handle is None else handle.total_s
        if self.rank.mesh.rank == 0:
            self._fence()
            keep = self.config.checkpoint
            retention.prune(self.root, keep_last=keep.keep, keep_every=keep.keep_every or None)
        self.note(
            "save",
            step=step,
            checkpoint=str(retention.step_path(self.root, step)),
            blocked_seconds=saved.waited_s + saved.blocked_s,
            seconds=saved.waited_s + (saved.blocked_s if whole_s is None else whole_s),
        )

    def _fence(self) -> None:
        """Raises if another leader has begun another generation of this run."""
        if self.kept is not None and self.kept.fence is not None:
            self.kept.fence()

    def evaluation_due(self) -> bool:
        """Whether the step that was done last is one that is evaluated: each so many, and the last of the run."""
        every, step = self.config.eval.every, self.progress.step
        return bool(every) and step > 0 and (step % every == 0 or step == self.config.train.steps)

    @property
    def evaluations(self) -> list[tuple[str, str]]:
        """(kind of line, name of the set) of each: all sets with the weights, then all with their average."""
        kinds = ("eval",) if self.rank.average is None else EVALUATIONS
        return [(kind, name) for kind in kinds for name in self.valid]

    def unevaluated(self) -> list[tuple[str, str]]:
        """Those of ``evaluations`` for which metrics.jsonl has no loss of this step; rank 0 looks and tells all."""

        def look() -> list[tuple[str, str]]:
            lines = read_all(Path(self.config.run.dir) / "metrics.jsonl")
            found = {(r["kind"], r.get("name", "")) for r in lines if r.get("step") == self.progress.step}
            return [one for one in self.evaluations if one not in found]

        return from_rank_0(self.rank.mesh.control, self.rank.mesh.rank, self.rank.mesh.size, look)

    def evaluate(self, flag: StopFlag, wanted: Sequence[tuple[str, str]] | None = None) -> bool:
        """Loss on validation sets: always the same positions, whatever the training position is.

        Args:
            wanted: of ``evaluations``; None: all.
        Returns:
            False if it was given up because a rank was asked to stop; then a line is missing.
        """
        wanted = self.evaluations if wanted is None else wanted
        plain, averaged = ([one for one in wanted if one[0] == kind] for kind in EVALUATIONS)
        if not all(self._evaluate_set(*one, flag) for one in plain):
            return False
        with self.rank.averaged() if averaged else nullcontext():
            return all(self._evaluate_set(*one, flag) for one in averaged)

    def _evaluate_set(self, kind: str, name: str, flag: StopFlag) -> bool:
        what, began = f"evaluation {name and f'on {name!r} '}after step {self.progress.step}", time.monotonic()
        batches = (self._await_data(what, self._valid_batch(name, i)) for i in range(self.config.eval.batches))
        with world_collective(what):
            found = evaluate(self.rank, batches, lambda: any_rank(self.rank.mesh.control, flag.asked))
        if found is not None:
            seconds = time.monotonic() - began
            if self.kept is not None:
                self.kept.settle(self)
            told = {"name": name, "loss": found[0], "tokens": int(found[1]), "seconds": seconds}
            self.note(kind, step=self.progress.step, **told)
        return found is not None

    def save_is_due(self) -> bool:
        """Whether this rank's clock says so and its newest save is written; ranks differ, and agree in the step."""
        minutes = self.config.checkpoint.every_minutes
        writing = self._saved is not None and self._saved.handle is not None and not self._saved.handle.done()
        return bool(minutes) and not writing and time.monotonic() - self._save_began >= 60 * minutes

    def step(self, stop: bool) -> StepOutcome:
        """One update; what all ranks agreed on in it, as whether to stop and whether to save."""
        start = time.monotonic()
        at, number = self.progress, self.progress.step + 1  # the first update is step 1, as in the log
        with self.rank.clock.part("data"):
            batch = self.next_batch()
        data_seconds = time.monotonic() - start
        if self.kept is not None:
            self.kept.heartbeat.step_begins()
        lr, log = learning_rate(self.config, at.step), self.config.log
        traces = profiled(self.config.run.dir, log.profile_steps, number, self.rank.mesh.rank)
        memory = recorded(self.config.run.dir, log, number, self.rank.mesh.rank)
        try:
            with world_collective(f"step {number}"), traces, memory, self.rank.clock.part("compute"):
                asks = Asks(stop=stop, save=self.save_is_due())
                timed, ema_decay = number in log.timeline_steps, decay_after(self.config.optimizer, number)
                outcome = train_step(self.rank, batch, lr, asks, timed=timed, ema_decay=ema_decay)
        except NoTargetsError:
            raise NoTargetsError(self.config.data.eod_mask_loss, f"step {number}: ") from None
        except NotFiniteError as found:  # inside the program, where versions of weights are updated
            rank = self.rank.mesh.rank_of(found.rank)
            self.note("nonfinite", step=number, rank=rank, where=found.where, what="gradient")
            raise FinalError(f"step {number}: {found}") from found
        if isinstance(outcome, NonFinite):
            self._end_nonfinite(outcome, batch)
        size = batch_size(self.config, at.step)
        tokens = size * self.config.data.seq_length
        self.progress = Progress(step=number, samples=at.samples + size, tokens=at.tokens + tokens)
        self.loss = outcome.loss
        if self.kept is not None:
            self.kept.heartbeat.step_ends(number)
        now = time.monotonic()
        seconds = now - start
        if self.progress.step % log.every == 0 or self.progress.step == self.config.train.steps:
            self.note(
                "step",
                step=self.progress.step,
                loss=outcome.loss,
                grad_norm=outcome.grad_norm,
                lr=lr,
                tokens=self.progress.tokens,
                samples=self.progress.samples,
                batch_size=size,
                seconds=seconds,
                data_seconds=data_seconds,
                tokens_per_second=tokens / seconds,
                wall_tokens_per_second=(self.progress.tokens - self._told_at[1]) / (now - self._told_at[0]),
                mfu=None if self.rank.device.type == "cpu" else self._mfu(tokens / seconds),
                memory_bytes=outcome.memory_bytes,
                loss_by_dataset={self.train_data.names[i]: x for i, x in outcome.loss_by_dataset.items()},
                expert_load=outcome.expert_load,
            )
            self._told_at = now, self.progress.tokens
        if log.digest_every and (number % log.digest_every == 0 or number == self.config.train.steps):
            self.digest()
        if self.progress.step in log.timeline_steps:
            self._keep_timeline(outcome)
        self._stragglers.after_step(self.progress.step, outcome.ran, self.note)
        return outcome

    def open_digests(self) -> None:
        """On rank 0 alone."""
        if self.rank.mesh.rank == 0:
            self.digests = digest_file.DigestWriter(
                Path(self.config.run.dir) / digest_file.NAME, self.kept.fence if self.kept else None
            )

    def digest(self) -> None:
        """The digests of the weights as they are now, into digests.jsonl and one line of metrics.jsonl."""
        began = time.monotonic()
        with world_collective(f"digests of step {self.progress.step}"), self.rank.clock.part("compute"):
            found = self._weight_digests.take()
        if found is not None and self.digests is not None:
            self.digests.write(self.progress.step, found.whole, found.tensors)
            self.note("digest", step=self.progress.step, digest=found.whole, seconds=time.monotonic() - began)

    def _keep_timeline(self, outcome: StepOutcome) -> None:
        """The step as rank 0's pipeline ran it, for `sixfold timeline`."""
        if not self.rank.mesh.speaks:
            return
        step = self.progress.step
        with world_collective(f"timeline of step {step}"):
            measured = self.rank.runner.gather_timeline(outcome.ran)
        if measured is not None:
            kept = self._timelines.keep(step, outcome.program, measured)
            if kept is not None:
                self.note("timeline", step=step, **kept)

    def _mfu(self, tokens_per_second: float) -> float | None:
        peak = peak_flops_of(torch.cuda.get_device_name(self.rank.device))
        if peak is None:
            return None
        flops = self.config.model.flops_per_token(self.config.data.seq_length)
        return tokens_per_second * flops / (peak * self.rank.mesh.size)

    def _end_nonfinite(self, outcome: NonFinite, batch: list[Microbatch]) -> NoReturn:
        """Say where the first non-finite value arose, on every rank alike, and end the run with weights untouched."""
        at, number = self.progress, self.progress.step + 1
        what, rank, where = blamed(self.rank, batch, outcome.gradient, number)
        self.note("nonfinite", step=number, rank=rank, where=where, what=what)
        raise FinalError(
            f"step {number}, rank {rank}: the loss is {outcome.loss} and the gradient norm "
            f"{outcome.grad_norm}. The first value that is not finite is the {what}{where and f' of {where}'}. "
            "The weights are those before the step. Resume with a lower optimizer.lr, or look at the data of this "
            f"step, positions {at.samples} to {at.samples + batch_size(self.config, at.step) - 1}"
        )

    def loop(self, flag: StopFlag) -> str:
        """Train to the last step or to an agreed stop. Returns the reason."""
        every = self.config.checkpoint.every
        self._save_began = time.monotonic()
        self._told_at = time.monotonic(), self.progress.tokens
        flag.arm()  # what comes during the first step waits for its end: a rank that died in it would lose it for all
        while self.progress.step < self.config.train.steps:
            outcome = self.step(flag.asked)
            stopped = outcome.stop
            step = self.progress.step
            last = step == self.config.train.steps
            due = self.evaluation_due()
            # Saved before it is evaluated: whoever stops or kills a run in an evaluation loses nothing.
            saved = last or stopped or outcome.save or bool(every and step % every == 0)
            self.replicas.after_step(saves=saved)
            if self.kept is not None:
                self.kept.keep(self)
            if saved:
                self.save(goes_on=not (last or stopped))
            if due and not stopped:
                stopped = not self.evaluate(flag)
                if stopped and not saved:
                    self.save(goes_on=False)
            if stopped and (due or not last):
                return "sigterm"
        return "finished"


def train_in(
    config: TrainConfig,
    world: rendezvous.World,
    model_provider: ModelProvider | None = None,
    datasets: own_data.Datasets | None = None,
    kept: KeptAlive | None = None,
) -> TrainResult:
    """`train` for ranks that have met already: ``world`` is this process among them, ``kept`` its generation."""
    config = replace(config, parallel=check_world(config, world.size))
    if config.train.deterministic:
        rendezvous.make_deterministic(os.environ)
    mesh = make_mesh(config.parallel, world, world.device, config.run.timeout_seconds)
    all_or_raise(mesh.control, mesh.size, lambda: check_provider(config, model_provider))
    if config.train.compile:
        all_or_raise(mesh.control, mesh.size, lambda: check_compiler(world.device))
    if config.train.float8_products:
        all_or_raise(mesh.control, mesh.size, lambda: check_float8(world.device))
    if config.train.offload_activations:
        all_or_raise(mesh.control, mesh.size, lambda: check_offload(world.device))

    all_or_raise(mesh.control, mesh.size, lambda: check_sinks(config.log))
    if config.log.memory_steps:
        all_or_raise(mesh.control, mesh.size, lambda: check_memory_steps(config.log, world.device, world.size))
    same_config(config, mesh)
    fence = None if kept is None else kept.fence
    start = starting_point(config, mesh, datasets, joins=fence is not None)
    config = all_or_raise(mesh.control, mesh.size, lambda: settled(config, start.newest))
    source = None if start.newest is not None else initial_weights(config, mesh)
    fresh = start.newest is None and source is None
    with memory_errors(mesh.rank, config):
        rank = build_rank(config, mesh, world, model_provider=model_provider, draw=fresh)
    path = Path(config.run.dir) / "metrics.jsonl"
    with ExitStack() as opened:  # in the task: it may be open when another rank is lost before all know

        def open_metrics() -> MetricsWriter | None:
            if mesh.rank != 0:
                return None
            make_run_dir(config.run.dir)
            writer = opened.enter_context(MetricsWriter(path, fence))  # refused while another run is at work here
            write_config(config)
            return writer

        metrics = all_or_raise(mesh.control, mesh.size, open_metrics)
        data = open_on_ranks(config, mesh, datasets, lambda: data_state(start))
        run = all_or_raise(mesh.control, mesh.size, lambda: Run(config, rank, metrics, data, kept))
        if kept is not None:
            run.tier = kept.tier(config, mesh)
        reason = _train(run, start, source)
    return TrainResult(step=run.progress.step, loss=run.loss, run_dir=Path(config.run.dir), reason=reason)


def _train(run: Run, start: StartingPoint, source: Path | None) -> str:
    """From where the run begins to its end; the reason."""
    flag = StopFlag() if run.kept is None else run.kept.flag
    mesh = run.rank.mesh
    feeds, ended, goes_on = feeds_of(run.config) if mesh.rank == 0 else [], False, False
    try:
        if run.config.log.digest_every:
            all_or_raise(mesh.control, mesh.size, run.open_digests)
        begins_at = step_of(start.newest) if run.kept is None else run.kept.newest_step(run, start)
        start_line(run, mesh, begins_at)
        from_memory = run.kept is not None and run.kept.take_back(run, start, begins_at)
        if not from_memory:
            restore(run, start, source)
        fresh = start.newest is None and not from_memory
        if run.kept is not None:
            run.kept.tell(run, from_memory=from_memory)
        if run.config.log.digest_every:
            run.digest()  # of the weights that it begins with: those of the checkpoint, or the initial ones
        run.replicas.begin()
        if run.config.parallel.schedule == PLAN:
            plan_run(run)
        if run.config.checkpoint.save_initial and fresh:
            run.save(goes_on=run.config.train.steps > 0)
        if not fresh and run.evaluation_due() and (missing := run.unevaluated()):
            run.evaluate(flag, missing)  # the run ended between this step's save and its evaluation
        with memory_errors(mesh.rank, run.config):
            reason = run.loop(flag)
        run.finish_save()
        if run.kept is not None:
            run.kept.settle(run)
        run.note("end", step=run.progress.step, reason=reason)
        ended = True
    except BaseException as error:
        goes_on = run.kept is not None and not is_final(error)
        if goes_on:
            raise  # the run has not ended, and a save of a generation that has does not get far
        with suppress(TrainError):  # a full disk may refuse this too; the first error is the one to raise
            run.finish_save()
        with suppress(TrainError):
            run.note("end", step=run.progress.step, reason="error")
        raise
    finally:
        if run.kept is None:
            flag.disarm()
        run.close()
        for feed in feeds:
            feed.close(failed=not (ended or goes_on), waits=not goes_on)
        if run.digests is not None:
            run.digests.close()
    if reason == "sigterm" and flag.interrupted:
        raise Interrupted(f"stopped by Ctrl-C after step {run.progress.step}, which is saved in {run.root}")
    return reason


def train(
    config: TrainConfig,
    *,
    model_provider: ModelProvider | None = None,
    forward_step: Callable[..., Any] | None = None,
    datasets: own_data.Datasets | None = None,
) -> TrainResult:
    """Train as ``config`` says, in this process. It is one process alone, or a rank of torchrun, srun or a PyTorchJob.

    Args:
        model_provider: builds a stage of another decoder; see ``sixfold.gpt.engine.rank_model.build_rank``.
        forward_step: only None; a model_provider's module computes its losses itself.
        datasets: map-style datasets in place of token files, by the names in data.blend and data.valid.
    Returns:
        How the run ended, on every rank.
    Raises:
        KeyboardInterrupt: on a rank that got Ctrl-C, after the current step is done and saved.
        ConfigError: the config cannot work with these ranks or this data.
        TrainError: the run failed. The next start resumes from the newest whole checkpoint in ``run.dir``.
    """
    if forward_step is not None:
        raise ConfigError("forward_step is not supported: let a model_provider's module compute its losses")
    place = rendezvous.detect(os.environ)
    if place is None and config.parallel.world > 1:
        raise ConfigError(
            f"parallel.pp * dp * cp * tp is {config.parallel.world} ranks and this process is alone; "
            f"`sixfold train` and torchrun start them, train() itself is one of them"
        )
    if config.train.deterministic:
        rendezvous.make_deterministic(os.environ)
    world = rendezvous.join(place, device=config.run.device, timeout_s=config.run.timeout_seconds)
    try:
        return train_in(config, world, model_provider, datasets)
    finally:
        rendezvous.leave(world)
