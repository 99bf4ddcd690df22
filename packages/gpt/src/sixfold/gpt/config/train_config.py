"""The configuration of a run: one frozen dataclass per TOML table, checked when it is made.

    presets.py, TOML, overrides --> toml.py --> TrainConfig (this file) --> rules.py --> loop.py, rendezvous.py

No torch: a typing error is reported within milliseconds, before a rank is started or a folder made.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, Self

from sixfold.gpt.config.lora import LoraConfig
from sixfold.gpt.config.model_config import GPTConfig
from sixfold.gpt.config.presets import preset_named
from sixfold.gpt.config.resume_rules import resume_changes
from sixfold.gpt.config.rules import check_config, check_world, refuse_path
from sixfold.gpt.config.table import AtLeast, Count, Fraction, OneOf, Positive, Rate, Size, Table, build
from sixfold.gpt.config.token_budgets import tokens_as_steps
from sixfold.gpt.config.toml import read_files, read_tables, write_tables
from sixfold.gpt.errors import ConfigError
from sixfold.pipeline.schedules import by_name, registered
from sixfold.pipeline.schedules.registry import Schedule

__all__ = [
    "TABLES", "CheckpointConfig", "DataChange", "DataConfig", "ElasticConfig", "EvalConfig", "FsdpConfig", "GPTConfig",
    "LogConfig", "LoopConfig", "LoraConfig", "OptimizerConfig", "ParallelConfig", "PipelineConfig", "RunConfig",
    "ScheduleConfig", "TrainConfig", "check_world", "resume_changes",
]  # fmt: skip

DTypeName = Literal["float32", "bfloat16", "float16"]
PLAN = "plan"  # of parallel.schedule: a program is searched
ScheduleName = Annotated[str, OneOf((*(entry.name for entry in registered()), PLAN))]
_MEASURED_FIRST = {1: "zb_h1", 2: "zb_v"}  # by stages of a rank, where a program is searched
_BUFFER_KEYS = (
    "gathered_bytes", "prefetch_bytes", "reduce_buffers", "align_bytes", "user_buffers", "bucket_bytes",
    "nccl_min_ctas", "nccl_max_ctas", "offload",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataChange(Table):
    """An entry of data.changes: from position ``at`` on another blend, or documents taken down.

    Fields left out keep what was.
    """

    TABLE: ClassVar[str] = "data.changes"
    at: Count
    blend: tuple[str, ...] = ()
    weights: tuple[Size, ...] = ()
    sequence_length: Count = 0
    drop: dict[str, tuple[Count, ...] | str] = field(default_factory=dict)  # dataset -> documents, or a file of them


@dataclass(frozen=True, kw_only=True)
class DataConfig(Table):
    """[data]: which prefixes are read, in which proportion, in rows of how many tokens."""

    TABLE: ClassVar[str] = "data"
    blend: tuple[str, ...]
    weights: tuple[Size, ...] = ()
    valid: tuple[str, ...] | dict[str, str | tuple[str, ...]] = ()  # () = from split; {NAME = prefixes}: several sets
    names: tuple[str, ...] = ()  # () = base names of the prefixes
    changes: tuple[DataChange, ...] = ()
    eod_mask_loss: bool = False
    split: str = "98,2,0"
    seq_length: Positive
    order: Literal["stateless", "megatron", "apportioned"] = "stateless"
    packing: Literal["concatenate", "best_fit"] = "concatenate"  # "best_fit": rows of whole documents
    deal: Literal["auto", "in_turn", "permuted"] = "auto"  # "permuted" (new runs): no rank has few datasets for ever
    blend_unit: Literal["rows", "tokens"] = "rows"  # what weights count where documents are packed
    document_shuffle: Literal["auto", "global", "block"] = "auto"  # "block": the order of 0.1.0
    max_epochs: Size = 4.0  # the run warns if training reads a dataset more often; 0 = never
    document_mask: bool = True
    cache_dir: str = ""
    tokenizer: str = ""  # "bytes" or a tokenizer.json; "" = what prepare wrote beside the pairs
    eod_token: str = ""  # of a tokenizer.json: the token that ends a document; "" = the usual one

    def check(self) -> None:
        if not self.blend:
            raise ConfigError("data.blend is []; it names at least one prefix")
        if self.weights and len(self.weights) != len(self.blend):
            raise ConfigError(
                f"data.weights has {len(self.weights)} entries and data.blend {len(self.blend)}; give one each"
            )
        if self.weights and not any(self.weights):
            raise ConfigError(f"data.weights is {list(self.weights)}; at least one weight is > 0")
        if self.names and len(self.names) != len(self.blend):
            raise ConfigError(
                f"data.names has {len(self.names)} entries and data.blend {len(self.blend)}; give one each"
            )
        twice = sorted({name for name in self.dataset_names if self.dataset_names.count(name) > 1})
        if twice:
            remedy = "make them differ" if self.names else "tell them apart by data.names"
            raise ConfigError(f"data.blend: two datasets are called {twice[0]!r}; {remedy}")
        try:
            shares = [float(part) for part in self.split.split(",")]
        except ValueError:
            shares = []
        if len(shares) != 3 or min(shares) < 0 or not 0 < shares[0] < float("inf") or not sum(shares) < float("inf"):
            raise ConfigError(f"data.split is {self.split!r}; it is three numbers >= 0, the first > 0, as 98,2,0")
        if self.valid and self.split != type(self).split:
            raise ConfigError(
                f"data.split is {self.split!r} and data.valid names {list(self.valid)}, with which nothing is split; "
                f"give one of them"
            )
        for name, prefixes in self.valid_sets.items():
            if isinstance(self.valid, dict) and not (name.isprintable() and name.strip() and prefixes):
                raise ConfigError(
                    f"data.valid has {name!r} = {list(prefixes)}; a validation set has a name that can be printed, and "
                    f'a prefix or several: data.valid = {{wiki = "data/wiki-valid"}}'
                )
        refuse_path("data.cache_dir", self.cache_dir)

    @property
    def dataset_names(self) -> tuple[str, ...]:
        """Names that fix the order of a run: ``names``, else base names, so that a moved folder changes nothing."""
        return self.names or tuple(PurePath(prefix).name for prefix in self.blend)

    def names_of(self, prefixes: Iterable[str]) -> tuple[str, ...]:
        """Names of any prefixes: those of the blend as ``dataset_names`` has them, else base names."""
        known = dict(zip(self.blend, self.dataset_names, strict=True))
        return tuple(known.get(prefix, PurePath(prefix).name) for prefix in prefixes)

    @property
    def dealt_as(self) -> Literal["in_turn", "permuted"]:
        """How the samples of a step are shared by the ranks of a new run: ``deal``, or what "auto" means."""
        if self.deal != "auto":
            return self.deal
        return "in_turn" if self.order == "megatron" else "permuted"

    @property
    def valid_sets(self) -> dict[str, tuple[str, ...]]:
        """The prefixes of each validation set by its name; of one without a name under ""; none: a share of the blend.

        The table of a set may hold one prefix as a text.
        """
        if not isinstance(self.valid, dict):
            return {"": self.valid} if self.valid else {}
        return {name: (one,) if isinstance(one, str) else one for name, one in self.valid.items()}

    @property
    def valid_prefixes(self) -> tuple[str, ...]:
        """Every prefix that an evaluation reads, if it reads no share of the blend."""
        return tuple(dict.fromkeys(prefix for one in self.valid_sets.values() for prefix in one))

    def blend_at(self, change: int) -> tuple[str, ...]:
        """The prefixes blended from ``changes[change]`` on."""
        named = [self.blend, *(one.blend for one in self.changes[: change + 1] if one.blend)]
        return named[-1]

    @property
    def retired_prefixes(self) -> tuple[str, ...]:
        """Prefixes that training reads at first and, from the last change of the blend on, no more."""
        changed = [number for number, change in enumerate(self.changes) if change.blend or change.weights]
        if not changed:
            return ()
        last, weights = self.blend_at(changed[-1]), self.changes[changed[-1]].weights
        read = {prefix for prefix, weight in zip(last, weights or (1.0,) * len(last), strict=True) if weight}
        return tuple(prefix for prefix in self.train_prefixes if prefix not in read)

    @property
    def train_prefixes(self) -> tuple[str, ...]:
        """Every prefix that training reads: those of the blend, then those that changes add."""
        return tuple(dict.fromkeys([*self.blend, *(prefix for one in self.changes for prefix in one.blend)]))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Table):
    """[parallel]: degrees of the mesh and how the layers lie on it."""

    TABLE: ClassVar[str] = "parallel"
    pp: Positive = 1
    cp: Positive = 1
    tp: Positive = 1
    ep: Positive = 1
    dp: Count = 0  # 0 = what the world leaves
    dp_replicate: Positive = 1
    sequence: bool = True
    tp_overlap: bool = False  # what linears read arrives in chunks, beside the products of those that are here
    cp_comm_type: Literal["all_gather", "p2p"] = "all_gather"  # how keys and values travel; "p2p" is a ring
    schedule: ScheduleName = "one_f_one_b"
    stages_per_rank: Positive = 1
    layers_per_stage: tuple[Count, ...] = ()
    sharding: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    grad_sum: Literal["backend", "rank_order", "tree"] | None = None  # None is fsdp.grad_sum; "tree": the same bits

    @property
    def stages(self) -> int:
        """Number of pipeline stages of the model."""
        return self.pp * self.stages_per_rank

    @property
    def entry(self) -> Schedule:
        """The schedule as it is registered; of a plan the one whose placement it has, and which is measured first."""
        planned = _MEASURED_FIRST.get(self.stages_per_rank, "zb_interleaved")
        return by_name(planned if self.schedule == PLAN else self.schedule)

    @property
    def world(self) -> int:
        """pp * dp * cp * tp, with dp = 1 where it is still 0: the ranks to start when nobody says how many."""
        return self.pp * max(self.dp, 1) * self.cp * self.tp


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Table):
    """[pipeline]: handed to sixfold.pipeline."""

    TABLE: ClassVar[str] = "pipeline"
    waves: Count = 0  # 0 = chunks / 2
    steps: Positive = 2
    group: Count = 0
    lookahead: Count = 2
    dynamic_shapes: bool | Literal["announced"] = False  # "announced": no host waits to hear that none changed
    edges: Literal["auto", "groups", "one"] = "auto"  # "one" communicator for all messages: less memory, no lookahead
    memory_cap: Size = 0.0  # of parallel.schedule "plan": microbatches that a rank may hold; 0 = as its base schedule
    plan_steps: Count = 2  # measured for a plan; 0 = costs of the model's sizes
    plan_seconds: Rate = 5.0  # of the search, for each number of microbatches


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(Table):
    """[fsdp]: fields of sixfold.fsdp's MixedPrecision and BufferConfig by the same names; None is a key not given."""

    TABLE: ClassVar[str] = "fsdp"
    reduce_dtype: DTypeName | None = None
    main_dtype: DTypeName = "float32"
    grad_sum: Literal["backend", "rank_order"] = "backend"
    grad_dtype: DTypeName | None = None
    cast_inputs: bool = True
    gathered_bytes: Literal["double", "all"] | Positive | None = None
    prefetch_bytes: Count | None = None
    reduce_buffers: Positive = 2
    align_bytes: Positive = 128
    user_buffers: Literal["off", "auto", "require"] = "auto"
    bucket_bytes: Positive | None = None
    nccl_min_ctas: Positive | None = None
    nccl_max_ctas: Positive | None = None
    offload: bool = False
    grad_reduce: Literal["auto", "last", "microbatch"] = "auto"
    checks: Literal["off", "order", "unit"] = "order"

    def dtypes(self) -> dict[str, str]:
        """The dtype fields of MixedPrecision that are given, as names of torch dtypes."""
        named = {key: getattr(self, key) for key in ("reduce_dtype", "main_dtype", "grad_dtype")}
        return {key: name for key, name in named.items() if name is not None}

    def buffers(self) -> dict[str, Any]:
        """The fields of BufferConfig."""
        return {key: getattr(self, key) for key in _BUFFER_KEYS}


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Table):
    """[train]: length, batch, precision. A batch counts samples of all ranks."""

    TABLE: ClassVar[str] = "train"
    steps: Count
    tokens: Count = 0  # if given, steps is the number of them that reads so many
    global_batch_size: Positive
    micro_batch_size: Positive
    batch_ramp: tuple[tuple[Count, Positive], ...] = ()  # [step, batch]: from that step on, that global batch
    seed: Count = 1234
    precision: Literal["bf16", "fp32", "fp8"] = "bf16"
    deterministic: bool = False
    compile: bool = False
    float8_products: bool = False  # of the layers' linears, by torchao (extra float8); compute capability 8.9 and later
    offload_activations: bool = False
    cuda_graphs: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    clip_grad: Size = 1.0  # 0 = no clipping
    z_loss: Size = 0.0  # weight of log(sum of exponentials of logits)^2 in the gradient; losses are told without it
    hidden_dropout: Fraction = 0.0  # share of what attention and the feed-forward part add that is 0 in training
    embedding_dropout: Fraction = 0.0  # the same of embedded tokens
    attention_dropout: Fraction = 0.0  # the same of attention's probabilities; refused
    label_smoothing: Fraction = 0.0  # share of a target that the vocabulary has alike, in the gradient alone
    frozen: tuple[str, ...] = ()  # beginnings of parameters' names, as "embedding", "layers.0-3", "layers.*.ffn"

    def check(self) -> None:
        steps = [step for step, _ in self.batch_ramp]
        if steps != sorted(set(steps)):
            raise ConfigError(f"train.batch_ramp starts at steps {steps}; they ascend")
        sizes = [batch for _, batch in self.batch_ramp]
        if steps and steps[0] == 0 and self.global_batch_size not in sizes:
            raise ConfigError(
                f"train.global_batch_size is {self.global_batch_size} and train.batch_ramp, which begins at step 0, "
                f"has no such batch: no step would have it. train.global_batch_size = {sizes[-1]} works, or a last "
                f"entry [step, {self.global_batch_size}]"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Table):
    """[optimizer]: AdamW, or Muon on the layers' matrices beside it; decoupled weight decay."""

    TABLE: ClassVar[str] = "optimizer"
    name: Literal["adamw", "muon"] = "adamw"
    lr: Size
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Rate = 1e-8
    weight_decay: Size = 0.1
    ema_decay: Fraction = 0.0  # of an average of the weights, evaluated beside them; 0 = there is none
    ema_warmup: bool = True  # its decay after update t is at most (1 + t) / (10 + t)

    def check(self) -> None:
        if not self.ema_warmup and not self.ema_decay:
            raise ConfigError(
                "optimizer.ema_warmup is false and optimizer.ema_decay 0.0, without which nothing reads it; leave it "
                "out, or set optimizer.ema_decay"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Table):
    """[schedule]: the learning rate over the run; learning_rate.py has the formulas."""

    TABLE: ClassVar[str] = "schedule"
    shape: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: Count = 0
    warmup_tokens: Count = 0  # if given, warmup_steps is the number of steps that reads so many
    decay_steps: Count = 0  # of wsd
    decay_tokens: Count = 0  # the same, of the last steps
    decay: Literal["linear", "cosine", "minus_sqrt", "exponential"] = "linear"  # of wsd
    min_lr_ratio: Annotated[float, AtLeast(0)] = 0.1


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Table):
    """[checkpoint]: when to save, what to keep, what to start from."""

    TABLE: ClassVar[str] = "checkpoint"
    every: Count = 0  # steps; 0 = by time alone
    every_minutes: Size = 30.0  # since the newest save began, on the clocks of all ranks; 0 = never by time
    keep: Positive = 2  # newest
    keep_every: Count = 0
    background: bool = True
    save_initial: bool = False
    init_from: str = ""
    resume: Literal["auto", "never", "must"] = "auto"

    def check(self) -> None:
        refuse_path("checkpoint.init_from", self.init_from)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Table):
    """[eval]: validation during the run."""

    TABLE: ClassVar[str] = "eval"
    every: Count = 0  # 0 = never
    batches: Positive = 8


@dataclass(frozen=True, kw_only=True)
class LogConfig(Table):
    """[log]: what is written beside checkpoints."""

    TABLE: ClassVar[str] = "log"
    every: Positive = 1
    tensorboard: bool = False
    wandb: str = ""  # project of W&B, or team/project; "" = none
    profile_steps: tuple[Positive, ...] = ()  # updates traced by torch.profiler, a file per rank
    memory_steps: tuple[Positive, ...] = ()  # updates whose allocations on a GPU are kept, a file per rank
    memory_ranks: tuple[Count, ...] = (0,)  # ranks that do so; () = all
    straggler_every: Count = 100  # steps between reports of each rank's times; 0 = none
    straggler_factor: Annotated[float, AtLeast(1)] = 2.0  # a rank is named that takes so many times as long
    timeline_steps: tuple[Positive, ...] = ()  # updates whose pipeline is timed, for `sixfold timeline`
    digest_every: Count = 0  # steps between digests of the weights, for `sixfold verify-run`; 0 = none


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(Table):
    """[elastic]: what `sixfold train --keep-alive` does when a rank is lost, and how a rank that errs is found."""

    TABLE: ClassVar[str] = "elastic"
    spares: Count = 1  # processes that wait to take a lost rank's place
    attempts: Positive = 3  # recoveries in a row without a new step, before the run ends with its error
    # A process that a signal has stopped for so long is replaced. A step has five times as long, and four times as long
    # as the longest one before.
    hung_after_seconds: Rate = 10.0
    replace: bool = True  # False: a lost process has taken its device with it; spares come next, then fewer ranks
    dp: tuple[Positive, ...] = ()  # data-parallel degrees with which the run may go on; empty: halves of its own
    memory_every: Count = 1  # steps between snapshots in memory, from which the run goes on; 0 = none
    memory_lazy: bool = False  # their copy is made beside the next step, and whole at its end
    memory_folder: str = "/dev/shm"
    memory_replicas: Count = 1  # copies of each in the memory of other nodes; where there are fewer, so many
    compare_replicas_every: Count = 0  # steps between comparisons of the bits of all copies of a shard; 0 = none

    def check(self) -> None:
        refuse_path("elastic.memory_folder", self.memory_folder)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Table):
    """[run]: where the run lies and what it may wait for."""

    TABLE: ClassVar[str] = "run"
    dir: str
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_seconds: Annotated[float, AtLeast(1)] = 600.0  # ranks take seconds to meet

    def check(self) -> None:
        if not self.dir:
            raise ConfigError("run.dir is empty; it is the folder of the run")
        refuse_path("run.dir", self.dir)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run, one attribute per table, checked between tables when it is made.

    Raises:
        ConfigError: naming keys, values, the rule and a value that works.
    """

    model: GPTConfig
    data: DataConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    train: LoopConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    run: RunConfig

    def __post_init__(self) -> None:
        check_config(self)

    @property
    def grad_sum(self) -> str:
        """How gradients are added: parallel.grad_sum, else fsdp.grad_sum."""
        return self.parallel.grad_sum or self.fsdp.grad_sum

    @property
    def two_tables(self) -> bool:
        """The head has a copy of a tied embedding also where both lie on one rank: pp does not change how they are
        added."""
        return self.model.tie_embeddings and self.grad_sum == "tree"

    @classmethod
    def from_toml(
        cls,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        overrides: Sequence[str] = (),
        *,
        preset: str = "",
    ) -> Self:
        """Read a TOML file, or several, of which a later one says keys anew.

        Args:
            overrides: ``section.key=value``, the value TOML, else a text.
            preset: name of a published model, whose [model] the files may change; see presets.py.
        Raises:
            ConfigError: for everything that is wrong with a file, a name or a value.
        """
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        first = {"model": preset_named(preset)} if preset else {}
        values = read_files(paths, overrides, TABLES, first=first)
        return cls._of(values, " and ".join(map(str, paths)) or f"preset {preset}")

    @classmethod
    def from_text(cls, text: str, overrides: Sequence[str] = (), *, source: str = "configuration") -> Self:
        """As ``from_toml``, of TOML text; ``source`` says in errors where the text is from."""
        return cls._of(read_tables(text, overrides, TABLES, source), source)

    @classmethod
    def _of(cls, values: Mapping[str, dict[str, Any]], source: str) -> Self:
        if not values["model"]:
            for found in (values["run"].get("dir"), values["checkpoint"].get("init_from")):
                if isinstance(found, str) and found and os.path.isfile(os.path.join(found, "config.toml")):
                    raise ConfigError(
                        f"{source} has no table [model]; copy the table [model] of {found}/config.toml into the "
                        "configuration"
                    )
        tokens_as_steps(values)
        return cls(**{name: build(table, values[name], name) for name, table in TABLES.items()})

    def to_toml(self) -> str:
        """Every table and key as TOML text; ``from_toml`` makes an equal configuration of it."""
        return write_tables(asdict(self))


TABLES: Mapping[str, type[Table]] = {
    table.TABLE: table
    for table in (
        GPTConfig, DataConfig, ParallelConfig, PipelineConfig, FsdpConfig, LoopConfig, LoraConfig, OptimizerConfig,
        ScheduleConfig, CheckpointConfig, EvalConfig, LogConfig, ElasticConfig, RunConfig,
    )
}  # fmt: skip
