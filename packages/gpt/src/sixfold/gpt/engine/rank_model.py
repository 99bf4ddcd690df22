"""One rank's share of the run: its stages in one container, wrapped once by fsdp, driven by a pipeline program.

    config + mesh --> build (this file): GPTModel per local stage --> FullyShardedDataParallel
                                          stage handles --> sixfold.pipeline.Stage --> PipelineRunner
                                          optimizer over the rank's main parameters

[Note: one FSDP object per rank] A rank may hold several stages; they live in one ModuleDict keyed by stage number, so
that buffers, slots and recorded order are the rank's. The leading stage key is stripped wherever a canonical name is
meant.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

import sixfold.pipeline as pipeline
from sixfold.fsdp import FullyShardedDataParallel, StateRecord, fully_shard_optimizer
from sixfold.fsdp.residency import Action
from sixfold.gpt.config.frozen import is_frozen
from sixfold.gpt.config.rules import check_main_dtype
from sixfold.gpt.config.train_config import PLAN
from sixfold.gpt.data.loss_by_dataset import token_loss
from sixfold.gpt.engine.activation_offload import HostActivations, hooks_of
from sixfold.gpt.engine.fsdp_wrap import TIED, TIED_COPY, canonical, has_budget, wrapped
from sixfold.gpt.engine.gather_budget import gather_plan
from sixfold.gpt.engine.optimizer import Optimizers, build_optimizer
from sixfold.gpt.engine.weight_average import WeightAverage
from sixfold.gpt.engine.weight_versions import VersionedModel
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.decoder import Block, GPTModel
from sixfold.gpt.model.dropout import Dropout
from sixfold.gpt.model.float8_linear import use_float8
from sixfold.gpt.model.initial_weights import fill_elements
from sixfold.gpt.model.lora import add_adapters
from sixfold.gpt.model.loss import LossTerms
from sixfold.gpt.observe.straggler import Clock
from sixfold.gpt.parallel.agreement import all_or_raise, gather_objects
from sixfold.gpt.parallel.axes import Axes
from sixfold.gpt.parallel.mesh import RankMesh, pair_group
from sixfold.gpt.parallel.stages import stage_layers
from sixfold.gpt.parallel.weight_sharding import Cuts

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.data.token_stream import Microbatch
    from sixfold.gpt.launch.rendezvous import World

__all__ = [
    "TIED",
    "ModelProvider",
    "RankModel",
    "build_rank",
    "canonical",
    "check_compiler",
    "check_provider",
    "draw_start_values",
    "make_program",
]


class ModelProvider(Protocol):
    """A user's own decoder, one virtual stage at a time.

    The three positional arguments are Megatron's. A provider that takes ``stage``, ``num_stages`` or ``layers`` (or
    ``**kwargs``) is given them by name: the global number of the stage, how many there are, and the global numbers of
    its layers, as ``parallel.layers_per_stage`` cuts ``model.num_layers``. Only with them can one of several middle
    stages know which it is, and name its parameters apart from the others'.
    """

    def __call__(self, pre_process: bool, post_process: bool, vp_stage: int, **which: Any) -> nn.Module: ...


def make_program(config: TrainConfig, microbatches: int) -> pipeline.Program:
    """The lowered program of a step of ``microbatches`` microbatches, for every rank of a pipeline."""
    p = config.parallel
    schedule = p.entry
    if not schedule.flushed:  # a value of several batches, which the runner continues without end
        if schedule.name == "pipedream":
            return pipeline.pipedream(p.pp, 2 * p.pp)
        return pipeline.pipedream_2bw(p.pp, microbatches)
    options = {"group": config.pipeline.group} if config.pipeline.group else {}
    return pipeline.passes.lower(schedule.with_chunks(p.pp, microbatches, p.stages_per_rank, **options))


@dataclass(kw_only=True)
class RankModel:
    """What a rank trains: the wrapped container, its optimizer and the runner that drives both.

    Attributes:
        tied_group: the first and the last stage's rank where both hold a copy of the tied embedding, else None.
        tied_copy: this rank's copy is the last stage's: counted in no norm, saved as a replica.
        tied_here: names of both copies where they lie on this rank; the second has no optimizer, and no checkpoint has
            it.
    """

    config: TrainConfig
    mesh: RankMesh
    device: torch.device
    model: FullyShardedDataParallel | VersionedModel
    optimizer: Optimizers
    runner: pipeline.PipelineRunner
    placement: tuple[int, ...]
    tied_group: dist.ProcessGroup | None = None
    tied_copy: bool = False
    tied_here: tuple[str, str] | None = None
    average: WeightAverage | None = None  # of its weights, where the config wants one
    activations: HostActivations | None = None  # where they wait for their backward; None: on the device
    stored_plan: dict[str, Any] | None = None  # of searched_schedule.py, or of a checkpoint
    eod: int | None = None  # the id that ends a document of its data, for checkpoints
    before_update: Callable[[], object] | None = None  # called when nothing but the update of a step is left
    origin: dict[str, Any] | None = None  # what an import said that [model] does not, for later checkpoints
    programs: dict[int, pipeline.Program] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    plans: dict[int, list[Action] | None] | None = None  # by microbatches; None where there is no byte budget

    @property
    def is_first(self) -> bool:
        """Stage 0 lives here."""
        return self.placement[0] == self.mesh.pp_rank

    @property
    def is_last(self) -> bool:
        """The last stage lives here, and with it the loss."""
        return self.placement[-1] == self.mesh.pp_rank

    def program(self, microbatches: int) -> pipeline.Program:
        """The program for a step of that many microbatches; made once for each number (a batch ramp has several)."""
        if microbatches not in self.programs:
            self.programs[microbatches] = make_program(self.config, microbatches)
        return self.programs[microbatches]

    def follow(self, microbatches: int) -> pipeline.Program:
        """The program of the step that begins now; under a byte budget fsdp gathers as planned for it."""
        program = self.program(microbatches)
        if self.plans is not None:
            assert isinstance(self.model, FullyShardedDataParallel), "only fsdp gathers"
            if microbatches not in self.plans:
                units = self.model.report()["units"]
                unit_bytes = {name: unit["gathered_bytes"] for name, unit in units.items()}
                budget = self.config.fsdp.gathered_bytes
                assert isinstance(budget, int), f"gathered_bytes is {budget!r} and there are plans"
                self.plans[microbatches] = gather_plan(program, self.mesh.pp_rank, unit_bytes, budget_bytes=budget)
            if (plan := self.plans[microbatches]) is not None:
                self.model.use_plan(plan)
        return program

    def expect_older(self) -> bool:
        """Make room for a checkpoint's older version of the weights, if this schedule reads one."""
        if not isinstance(self.model, VersionedModel) or not self.model.delayed:
            return False
        self.model.expect_older()
        return True

    def go_on_behind(self, step: int) -> None:
        """The batch behind ``step`` reads the older version, which was loaded."""
        assert isinstance(self.model, VersionedModel), "expect_older said so"
        # A runner's state is of the program that it was made with; one of other microbatches goes on from there.
        self.model.go_on(self.runner, make_program(self.config, self.mesh.pp), step)

    def state_records(self, *, weights_only: bool = False) -> list[StateRecord]:
        """Live aliases of everything to save that lies here: weights, their average if it has begun, optimizer state.

        Args:
            weights_only: no optimizer state.
        """
        found = self._weights()
        if self.average is not None:
            found += self.average.state_records()
        for part in () if weights_only else self.optimizer.parts:
            found += [record for record in self.model.state_records(part) if record.key != "param"]
        if not weights_only and isinstance(self.model, VersionedModel):
            found += self.model.older_records()
        return found

    def _weights(self) -> list[StateRecord]:
        return [record for record in self.model.state_records() if not self.is_second_table(record.name)]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it weights and their average have changed places. Collective over the mesh."""
        assert self.average is not None, "optimizer.ema_decay is 0"
        if self.before_update is not None:
            self.before_update()  # a snapshot that is still being copied is of the weights
        self.average.swap()
        self._renew_copies()
        try:
            yield
        except BaseException:
            self.average.swap()  # for who saves them; nothing is computed with them any more
            raise
        self.average.swap()
        self._renew_copies()

    def _renew_copies(self) -> None:
        """Make all copies of the main weights anew, which were written."""
        self.copy_table()
        self.model.refresh()

    def run_program(
        self, batch: Sequence[Microbatch], program: pipeline.Program, *, timed: bool = False
    ) -> pipeline.StepResult:
        """Forwards and backwards of this rank's microbatches.

        Args:
            timed: the result has events, also where no report takes the times of each step's messages.
        """
        with hooks_of(self.activations):
            return self.runner.step(
                [m.tokens for m in batch] if self.is_first else None,
                [m.rows for m in batch] if self.is_last else None,
                kwargs=[m.kwargs for m in batch],
                program=program,
                profile=timed or times_messages(self.config, self.mesh, self.device),
            )

    def finish_grad_sync(self) -> None:
        """The step's gradients are summed over the data-parallel ranks."""
        assert isinstance(self.model, FullyShardedDataParallel), "with versions of weights the program sums them"
        self.model.finish_grad_sync()

    def settle(self) -> None:
        """Nothing is in flight after it: weights are those of all batches so far. Collective over the pipeline."""
        if isinstance(self.model, VersionedModel):
            self.model.drain(self.runner)

    def materialize_state(self) -> None:
        """Make the optimizer's state as its first step would, without a step."""
        for part in self.optimizer.parts:
            self.model.materialize_state(part)

    def is_second_table(self, name: str) -> bool:
        """``name``, as in the container, is the copy in the head of a table that lies here too."""
        return self.tied_here is not None and name == self.tied_here[1]

    def copy_table(self) -> None:
        """The head's copy of a table that lies here gets its values."""
        if self.tied_here is not None:
            mains = dict(self.model.main_parameters())
            first, second = (mains.get(name) for name in self.tied_here)
            if first is not None and second is not None:
                with torch.no_grad():
                    second.copy_(first)

    def counts_in_norm(self, name: str) -> bool:
        """Whether a main parameter, named as in the container, is counted on this rank: a copy is not."""
        if self.is_second_table(name):
            return False
        name = canonical(name)
        return not (self.tied_copy and name == TIED) and self.mesh.cuts.replica(name) == 0


def _stage_modules(
    config: TrainConfig, axes: Axes, mine: list[int], placement: tuple[int, ...], provider: ModelProvider | None
) -> nn.ModuleDict:
    last = len(placement) - 1
    layers = stage_layers(config.model.num_layers, len(placement), config.parallel.layers_per_stage)
    covered = [i for block in layers for i in block]
    assert covered == list(range(config.model.num_layers)), f"stages hold layers {covered} of {config.model.num_layers}"
    container = nn.ModuleDict()
    for chunk, s in enumerate(mine):
        if provider is not None:
            which = {"stage": s, "num_stages": len(placement), "layers": layers[s]}
            container[str(s)] = provider(s == 0, s == last, chunk, **_taken_by(provider, which))
            continue
        stage = GPTModel(
            config.model,
            axes=axes,
            pre_process=s == 0,
            post_process=s == last,
            vp_stage=chunk,
            layers=layers[s],
            two_tables=config.two_tables,
            device="meta",
        )
        add_adapters(stage, config.lora)
        stage.recompute = config.train.recompute
        stage.loss_terms = LossTerms(z_loss=config.train.z_loss, label_smoothing=config.train.label_smoothing)
        stage.dropout = Dropout(
            seed=config.train.seed, hidden=config.train.hidden_dropout, embedding=config.train.embedding_dropout
        )
        if config.train.float8_products:
            use_float8(stage)
        if config.train.compile:
            for block in stage.layers.values():
                block.compile_layer()  # type: ignore[operator]
        container[str(s)] = stage
    one_table = config.model.tie_embeddings and not config.two_tables
    if one_table and provider is None and {0, last} <= set(mine) and last > 0:
        # Both ends on this rank: one Parameter, so no second sum, no second record.
        container[str(last)].embedding.weight = container["0"].embedding.weight  # type: ignore[union-attr]
    return container


def check_provider(config: TrainConfig, provider: ModelProvider | None) -> None:
    """Refuse keys that only GPTModel reads beside a model_provider, which would not, and one that is for such a model.

    Raises:
        ConfigError: naming the key.
    """
    if provider is None:
        check_main_dtype(config)
    flushed = config.parallel.entry.flushed
    if provider is not None and not flushed:
        raise ConfigError(
            f"parallel.schedule is {config.parallel.schedule!r}, whose weights gpt fills itself, and there is a "
            "model_provider: parallel.schedule = 'one_f_one_b' works"
        )
    for key in ("tp", "cp", "ep"):
        degree = getattr(config.parallel, key)
        if provider is not None and degree > 1:
            raise ConfigError(
                f"parallel.{key} is {degree}, which splits GPTModel and not the module of a model_provider: "
                f"parallel.{key} = 1 works, with more of parallel.pp or dp"
            )
    fp8 = config.train.precision == "fp8"  # of the matrices that GPTModel's names say
    for key, value, off in (
        ("train.precision", config.train.precision, "bf16" if fp8 else config.train.precision),
        ("train.compile", config.train.compile, False),
        ("train.float8_products", config.train.float8_products, False),
        ("train.recompute", config.train.recompute, "none"),
        ("train.z_loss", config.train.z_loss, 0.0),
        ("train.label_smoothing", config.train.label_smoothing, 0.0),
        ("train.hidden_dropout", config.train.hidden_dropout, 0.0),
        ("train.embedding_dropout", config.train.embedding_dropout, 0.0),
        ("train.frozen", config.train.frozen, ()),
        ("lora.rank", config.lora.rank, 0),
        ("optimizer.name", config.optimizer.name, "adamw"),
        ("model.num_experts", config.model.num_experts, 0),
    ):
        if provider is not None and value != off:
            raise ConfigError(
                f"{key} is {value!r}, which is of GPTModel and not of a model_provider: leave it {off!r}, and let the "
                f"provider's module do it"
            )


def check_compiler(device: torch.device) -> None:
    """What torch.compile needs on a CPU.

    Raises:
        ConfigError: there is no C++ compiler.
    """
    name = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(name) is None:
        raise ConfigError(
            f"train.compile is true, and torch.compile on a CPU needs a C++ compiler: {name} is not in PATH; install "
            f"one, or name one in CXX, or set train.compile = false"
        )


def _taken_by(provider: ModelProvider, which: dict[str, Any]) -> dict[str, Any]:
    """Those of ``which`` that ``provider`` has arguments for."""
    arguments = inspect.signature(provider).parameters
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):
        return which
    return {name: value for name, value in which.items() if name in arguments}


def _check_names(container: nn.ModuleDict, mesh: RankMesh) -> None:
    """A provider's stages have names of their own: a checkpoint knows a parameter or buffer by its name alone.

    Raises:
        ConfigError: on all ranks: the name and both stages.
    """
    mine = list(container.state_dict(keep_vars=True))
    stage_of: dict[str, int] = {}
    named = {name for names in gather_objects(mesh.control, mesh.size, mine) for name in names}
    for stage, name in sorted((int(name.partition(".")[0]), canonical(name)) for name in named):
        if stage_of.setdefault(name, stage) != stage:
            raise ConfigError(
                f"{name} is a name of stage {stage_of[name]} and of stage {stage} of the model_provider; let it take "
                f"the arguments stage and layers, and name what it keeps by global layer numbers, or register a buffer "
                f"that can be computed anew with persistent=False"
            )


def _tables_here(placement: tuple[int, ...]) -> tuple[str, str]:
    """Names in the container of the embedding and of the head's copy of it."""
    last = len(placement) - 1
    return f"0.{TIED}", f"{last}.{TIED if last else TIED_COPY}"


def draw_start_values(
    model: FullyShardedDataParallel | VersionedModel,
    config: TrainConfig,
    cuts: Cuts,
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Fill this rank's shards with initial weights, of parameters whose canonical names are ``wanted``."""
    seed = config.train.seed
    for record in model.state_records():
        name, shape = canonical(record.name), record.global_shape
        if wanted(name):
            fill_elements(config.model, seed, name, shape, record.start, record.tensor, cuts.of(name))
    model.refresh()


def _versioned_rank(
    config: TrainConfig,
    mesh: RankMesh,
    world: World,
    container: nn.ModuleDict,
    program: pipeline.Program,
    *,
    draw: bool,
) -> RankModel:
    """The rank of a run whose schedule keeps versions of the weights: no fsdp, optimizers step in the program."""
    if config.train.precision == "bf16":
        container.to(torch.bfloat16)
    container.to_empty(device=world.device)
    model = VersionedModel(container, config, mesh)
    if draw:
        draw_start_values(model, config, mesh.cuts)
    stages = [
        pipeline.Stage(container[str(s)], s, data_parallel=weights, optimizer=weights)  # type: ignore[arg-type]
        for s, weights in model.weights.items()
    ]
    return RankModel(
        config=config,
        mesh=mesh,
        device=world.device,
        model=model,
        optimizer=model.optimizer,
        runner=_runner(config, mesh, world, program, stages),
        placement=program.placement,
        activations=_activations(config, world),
    )


def times_messages(config: TrainConfig, mesh: RankMesh, device: torch.device) -> bool:
    """Whether the straggler report needs the times of messages; a GPU's cannot be had without waiting for it."""
    return bool(config.log.straggler_every) and mesh.pipeline is not None and device.type == "cpu"


def _runner(
    config: TrainConfig, mesh: RankMesh, world: World, program: pipeline.Program, stages: list[pipeline.Stage]
) -> pipeline.PipelineRunner:
    timed = config.parallel.schedule == PLAN or times_messages(config, mesh, world.device)
    return pipeline.PipelineRunner(
        program,
        stages,
        mesh.pipeline,
        token_loss,
        scale="sum",
        timeout_s=config.run.timeout_seconds,
        store=world.store,
        lookahead=config.pipeline.lookahead,
        dynamic_shapes=config.pipeline.dynamic_shapes,
        edges=None if config.pipeline.edges == "auto" else config.pipeline.edges,
        profile=timed or bool(config.log.timeline_steps),
    )


def _activations(config: TrainConfig, world: World) -> HostActivations | None:
    return HostActivations(world.device) if config.train.offload_activations else None


def build_rank(
    config: TrainConfig,
    mesh: RankMesh,
    world: World,
    *,
    model_provider: ModelProvider | None = None,
    draw: bool = True,
) -> RankModel:
    """Build this rank's stages, sharded and ready to step. Collective over the mesh.

    Args:
        model_provider: replaces GPTModel. The module it returns is called as ``module(x, **kwargs)`` with the kwargs
            of GPTModel.forward, the last stage returning per-token losses. Its attribute ``fsdp_unit_modules``, if
            there is one, names the fsdp units; its parameters are initialised by itself, alike on all ranks.
            Evaluation runs it in eval mode. Randomness of its own, as dropout, is no part of a checkpoint.
        draw: fill the shards with initial weights; False leaves memory as it is, for weights that will be loaded.
    Raises:
        ConfigError: two stages of a model_provider have a parameter of one name.
    """
    program = make_program(config, mesh.pp)
    placement = program.placement
    mine = [s for s, rank in enumerate(placement) if rank == mesh.pp_rank]
    container = all_or_raise(
        mesh.control, mesh.size, lambda: _stage_modules(config, mesh.axes, mine, placement, model_provider)
    )
    if model_provider is not None:
        _check_names(container, mesh)
    else:
        for name, parameter in container.named_parameters():
            parameter.requires_grad_(not is_frozen(config, canonical(name)))
    if not config.parallel.entry.flushed:
        return _versioned_rank(config, mesh, world, container, program, draw=draw)
    first, last = placement[0], placement[-1]
    tied = config.model.tie_embeddings and model_provider is None and first != last
    ends_here = config.model.tie_embeddings and model_provider is None and first == last == mesh.pp_rank
    one_table = ends_here and not config.two_tables  # one Parameter in two places: the root unit's
    tied_here = _tables_here(placement) if ends_here and config.two_tables else None
    units: list[Any] = [Block] if any(isinstance(m, Block) for m in container.modules()) else []
    for module in container.values():
        units.extend(getattr(module, "fsdp_unit_modules", ()))
        if model_provider is None and not one_table:
            tables = ("embedding", "head", "tied_head")
            units.extend(getattr(module, name) for name in tables if hasattr(module, name))
    second = None if tied_here is None else tied_here[1]
    groups = [(name, p) for name, p in container.named_parameters() if name != second]
    optimizer = build_optimizer(config.optimizer, [(canonical(name), p) for name, p in groups])
    own = model_provider is None
    model = all_or_raise(mesh.control, mesh.size, lambda: wrapped(config, mesh, world, container, units, own=own))
    for part in optimizer.parts:
        fully_shard_optimizer(part, model)
    if draw and model_provider is None:
        draw_start_values(model, config, mesh.cuts)
    # Whatever the number of microbatches: a schedule of split backwards may have a whole one here and there.
    fused = not config.parallel.entry.split
    handles = {s: model.stage_handle(container[str(s)], fused=fused) for s in mine}
    stages = [pipeline.Stage(container[str(s)], s, data_parallel=handle) for s, handle in handles.items()]
    runner = _runner(config, mesh, world, program, stages)
    rank = RankModel(
        config=config,
        mesh=mesh,
        device=world.device,
        model=model,
        optimizer=optimizer,
        runner=runner,
        placement=placement,
        tied_group=pair_group(mesh, first, last) if tied else None,
        tied_copy=tied and mesh.pp_rank == last,
        tied_here=tied_here,
        plans={} if own and has_budget(config) else None,
        activations=_activations(config, world),
    )
    if config.optimizer.ema_decay:
        rank.average = WeightAverage(rank._weights)
    return rank
