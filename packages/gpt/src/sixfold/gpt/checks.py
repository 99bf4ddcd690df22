"""Rules between the tables of a configuration, and between a configuration and its world or its past.

    config.py --> check_config        (this file)      made
    launch.py --> check_world         (this file)      the number of ranks is known
    loop.py   --> resume_changes      (this file)      an older configuration lies in the run folder

Numbers only: no torch, no files. The pure functions here read a TrainConfig and never make one.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sixfold.gpt.errors import ConfigError
from sixfold.pipeline.schedules import by_name, registered

if TYPE_CHECKING:
    from sixfold.gpt.config import ParallelConfig, TrainConfig

# Without weight versions.
_SCHEDULES = tuple(entry.name for entry in registered() if entry.flushed)

# What a run cannot do: key, the values that it takes, what to write instead, and what the key would switch on.
_UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("parallel.tp", lambda value: value == 1, "1", "tensor parallelism"),
    ("parallel.cp", lambda value: value == 1, "1", "context parallelism"),
    ("parallel.ep", lambda value: value == 1, "1", "expert parallelism"),
    ("parallel.schedule", lambda value: value in _SCHEDULES, " or ".join(_SCHEDULES), "this schedule"),
    ("model.num_experts", lambda value: value == 0, "0", "mixture of experts"),
    ("model.experts_per_token", lambda value: value == 2, "no such key", "mixture of experts"),
    ("model.router_aux_loss", lambda value: value == 0.01, "no such key", "mixture of experts"),
    ("pipeline.steps", lambda value: value == 2, "no such key", "pipedream_2bw, which alone reads it,"),
    ("train.precision", lambda value: value != "fp8", "bf16 or fp32", "fp8"),
    ("train.offload_activations", lambda value: not value, "train.recompute instead", "offloading activations"),
    ("train.cuda_graphs", lambda value: not value, "train.compile instead", "graph capture"),
    ("optimizer.name", lambda value: value == "adamw", "adamw", "Muon"),
    (
        "data.changes",
        lambda value: not any(change.sequence_length for change in value),
        "changes of blend and weights",
        "a sequence length that changes within a run",
    ),
    (
        "fsdp.gathered_bytes",
        lambda value: isinstance(value, str),
        "double or all",
        "a byte budget for gathered weights",
    ),
    ("fsdp.bucket_bytes", lambda value: value is None, "no such key", "merging and splitting units"),
    ("fsdp.nccl_min_ctas", lambda value: value is None, "NCCL_MIN_CTAS of NCCL itself", "a bound of NCCL's blocks"),
    ("fsdp.nccl_max_ctas", lambda value: value is None, "NCCL_MAX_CTAS of NCCL itself", "a bound of NCCL's blocks"),
    ("fsdp.user_buffers", lambda value: value != "require", "auto or off", "registering buffers with NCCL"),
    ("fsdp.offload", lambda value: not value, "parallel.sharding over more ranks", "optimizer state in host memory"),
)

# A resumed run may change these; train.batch_ramp and data.changes only in their future.
_FREE_TABLES = ("parallel", "pipeline", "fsdp", "checkpoint", "eval", "log", "run")
# data.document_shuffle is compared with what the checkpoint says of each dataset: 0.1.0 had no such key.
_FREE_KEYS = (
    "train.steps", "train.micro_batch_size", "train.recompute", "data.cache_dir", "data.document_shuffle",
    "data.max_epochs",
)  # fmt: skip


def check_config(config: "TrainConfig") -> None:
    """Refuse a configuration that no world can run, or that asks for what is not supported.

    Raises:
        ConfigError: naming keys, both numbers and a nearest value that works.
    """
    check_rules(config)
    for refused in refusals(config):
        raise ConfigError(refused)


def check_rules(config: "TrainConfig") -> None:
    """Refuse what no world can run; what is not supported passes: it can be planned."""
    _check_tensor_parallel(config)
    _check_stages(config)
    if config.parallel.dp:
        _check_copies(config.parallel)
    _check_schedule_lr(config)
    _check_changes(config)
    for name, batch in global_batches_of(config):
        _check_batch(name, batch, config.train.micro_batch_size, max(config.parallel.dp, 1))


def refusals(config: "TrainConfig") -> list[str]:
    """A line for each key that asks for what a run does not support."""
    found = []
    for key, works, instead, what in _UNSUPPORTED:
        table, _, attribute = key.partition(".")
        value = getattr(getattr(config, table), attribute)
        if not works(value):
            shown = list(value) if isinstance(value, tuple) else value
            found.append(f"{key} is {shown!r}; {what} is not supported: use {instead}")
    return found


def refuse_path(name: str, value: str) -> None:
    """Refuse what would become a strangely named folder of the working directory.

    Raises:
        ConfigError: ``~``, which shells replace and files do not know, or a URL.
    """
    if value == "~" or value.startswith("~/"):
        raise ConfigError(f"{name} is {value!r}; ~ is not replaced here: write the folder's path out")
    if "://" in value:
        raise ConfigError(f"{name} is {value!r}; it is a folder of a mounted file system, not a URL: mount it")


def forget_idle_keys(values: dict[str, dict[str, Any]]) -> None:
    """Take out of a saved configuration's tables what release 0.1.0 accepted without effect and a new run is refused.

    A checkpoint must stay readable. A path that 0.1.0 took as it stood (``~``, a URL) is led by ``./``: that folder.
    """
    if values["data"].get("valid"):
        values["data"].pop("split", None)
    if values["schedule"].get("shape") == "constant":
        values["schedule"].pop("min_lr_ratio", None)
    if values["parallel"].get("schedule") != "interleaved":
        values["pipeline"].pop("group", None)
    if values["parallel"].get("schedule") != "hanayo":
        values["pipeline"].pop("waves", None)
    for table, key in (("pipeline", "steps"), ("model", "experts_per_token"), ("model", "router_aux_loss")):
        values[table].pop(key, None)
    for table, key in (("run", "dir"), ("checkpoint", "init_from"), ("data", "cache_dir")):
        path = values[table].get(key, "")
        if path.startswith("~") or "://" in path:
            values[table][key] = "./" + path.replace("://", ":/")


def check_world(config: "TrainConfig", world: int) -> "ParallelConfig":
    """The parallel table with ``dp`` filled in for ``world`` ranks.

    Raises:
        ConfigError: pp * dp * cp * tp is not ``world``, or a global batch is not divisible by micro batch times dp.
    """
    parallel = config.parallel
    model_ranks = parallel.pp * parallel.cp * parallel.tp
    degrees = f"parallel.pp * cp * tp = {parallel.pp} * {parallel.cp} * {parallel.tp} = {model_ranks}"
    if parallel.dp and parallel.dp * model_ranks != world:
        raise ConfigError(
            f"{degrees} times parallel.dp = {parallel.dp} is {parallel.world} ranks and the world has {world}; "
            f"a world of {parallel.world} works, or {_fitting(parallel.pp, model_ranks, world)}"
        )
    if world < 1 or world % model_ranks:
        worlds = " or ".join(str(n) for n in _multiples(model_ranks, world))
        remedy = f", or {_fitting(parallel.pp, model_ranks, world)}" if world > 0 else ""
        raise ConfigError(f"{degrees} does not divide the world of {world} ranks; a world of {worlds} works{remedy}")
    resolved = replace(parallel, dp=world // model_ranks)
    _check_copies(resolved)
    for name, batch in global_batches_of(config):
        _check_batch(name, batch, config.train.micro_batch_size, resolved.dp)
    return resolved


def resume_changes(old: "TrainConfig", new: "TrainConfig", *, step: int = 0) -> None:
    """Refuse to continue a run under a configuration that would have made its past differ.

    Args:
        old: what the run was made with.
        new: what it is to go on with.
        step: updates done so far; entries of train.batch_ramp and data.changes from here on may differ.
    Raises:
        ConfigError: naming each key that changed and may not, with both values.

    A prefix may move to another folder: the names of the datasets count (data.names, else base names), and blending
    compares what lies behind them.
    """
    before, after = _fixed_values(old, step), _fixed_values(new, step)
    changed = [key for key in before if before[key] != after[key]]
    if changed:
        pairs = ", ".join(f"{key} (was {before[key]!r}, is {after[key]!r})" for key in changed)
        raise ConfigError(
            f"a resumed run cannot change {pairs}; put back what was, or start a new run.dir "
            f"(with checkpoint.init_from for the weights)"
        )


def global_batches_of(config: "TrainConfig") -> list[tuple[str, int]]:
    """Every global batch size of the run in samples, with the key that sets it."""
    ramp = [(f"train.batch_ramp[{index}]", batch) for index, (_, batch) in enumerate(config.train.batch_ramp)]
    return [("train.global_batch_size", config.train.global_batch_size), *ramp]


def _check_batch(name: str, batch: int, micro: int, dp: int) -> None:
    if batch % (micro * dp):
        works = " or ".join(str(n) for n in _multiples(micro * dp, batch))
        raise ConfigError(
            f"{name} is {batch} and train.micro_batch_size * parallel.dp is {micro} * {dp} = {micro * dp}; "
            f"the first is a multiple of the second: {works} works"
        )


def _check_tensor_parallel(config: "TrainConfig") -> None:
    model, tp = config.model, config.parallel.tp
    for key, value in (
        ("model.num_attention_heads", model.num_attention_heads),
        ("model.num_query_groups", model.num_query_groups),
        ("the padded vocabulary (model.vocab_size, model.vocab_multiple)", model.padded_vocab_size),
    ):
        if value % tp:
            near = min((d for d in range(1, value + 1) if value % d == 0), key=lambda d: (abs(d - tp), d))
            raise ConfigError(f"{key} is {value} and parallel.tp is {tp}; tp divides it: parallel.tp = {near} works")
    chunks = 2 * config.parallel.cp
    if config.parallel.cp > 1 and config.data.seq_length % chunks:
        works = " or ".join(str(n) for n in _multiples(chunks, config.data.seq_length))
        raise ConfigError(
            f"data.seq_length is {config.data.seq_length}; it is a multiple of 2 * parallel.cp = {chunks}: "
            f"{works} works"
        )


def _check_stages(config: "TrainConfig") -> None:
    parallel, layers = config.parallel, config.model.num_layers
    cut = parallel.layers_per_stage
    if cut and len(cut) != parallel.stages:
        raise ConfigError(
            f"parallel.layers_per_stage has {len(cut)} entries and parallel.pp * stages_per_rank is {parallel.stages}; "
            f"give one per stage"
        )
    if cut and sum(cut) != layers:
        raise ConfigError(
            f"parallel.layers_per_stage sums to {sum(cut)} and model.num_layers is {layers}; they are equal"
        )
    chunks = by_name(parallel.schedule).chunks
    if chunks not in (None, 1, parallel.stages_per_rank):
        raise ConfigError(
            f"parallel.stages_per_rank is {parallel.stages_per_rank} and parallel.schedule {parallel.schedule!r} puts "
            f"{chunks} stages on a rank; parallel.stages_per_rank = {chunks} works"
        )
    if chunks == 1 and parallel.stages_per_rank > 1:
        several = [repr(name) for name in _SCHEDULES if by_name(name).chunks != 1]
        raise ConfigError(
            f"parallel.stages_per_rank is {parallel.stages_per_rank} and parallel.schedule {parallel.schedule!r} puts "
            f"one stage on a rank; parallel.schedule = {' or '.join(several)} takes several"
        )
    if parallel.schedule == "hanayo":
        waves = config.pipeline.waves or parallel.stages_per_rank // 2
        if parallel.stages_per_rank != 2 * waves or not waves:
            raise ConfigError(
                f"parallel.schedule is 'hanayo' with parallel.stages_per_rank {parallel.stages_per_rank} and "
                f"pipeline.waves {config.pipeline.waves}; a wave is two stages on a rank: parallel.stages_per_rank = "
                f"{2 * max(waves, 1)} works, with pipeline.waves = 0"
            )
    elif config.pipeline.waves:
        raise ConfigError(
            f"pipeline.waves is {config.pipeline.waves} and parallel.schedule {parallel.schedule!r} has none; "
            f"pipeline.waves = 0 works, or parallel.schedule = 'hanayo'"
        )
    if config.pipeline.group and parallel.schedule != "interleaved":
        raise ConfigError(
            f"pipeline.group is {config.pipeline.group} and parallel.schedule {parallel.schedule!r} has no groups; "
            f"pipeline.group = 0 works, or parallel.schedule = 'interleaved'"
        )
    if 0 < config.pipeline.group < parallel.pp:
        raise ConfigError(
            f"pipeline.group is {config.pipeline.group} and parallel.pp {parallel.pp}; in smaller "
            f"groups ranks wait for each other for ever: pipeline.group = {parallel.pp} works, or 0 for the default"
        )


def _check_copies(parallel: "ParallelConfig") -> None:
    """HSDP: each of dp_replicate copies has as many ranks."""
    copies, dp = parallel.dp_replicate, parallel.dp
    if dp % copies:
        near = min((d for d in range(1, dp + 1) if dp % d == 0), key=lambda d: abs(d - copies))
        raise ConfigError(
            f"parallel.dp_replicate is {copies} and parallel.dp {dp}; the first divides the second: "
            f"parallel.dp_replicate = {near} works"
        )


def _check_schedule_lr(config: "TrainConfig") -> None:
    schedule, steps = config.schedule, config.train.steps
    if schedule.shape != "wsd" and schedule.decay_steps:
        raise ConfigError(
            f"schedule.decay_steps is {schedule.decay_steps} and schedule.shape {schedule.shape!r}; "
            f"it is 0 unless the shape is 'wsd'"
        )
    if schedule.shape == "constant" and schedule.min_lr_ratio != type(schedule).min_lr_ratio:
        raise ConfigError(
            f"schedule.min_lr_ratio is {schedule.min_lr_ratio} and schedule.shape 'constant', which never falls; leave "
            f"the key out"
        )
    room = max(steps - schedule.warmup_steps, 0)
    if steps and schedule.decay_steps > room:
        raise ConfigError(
            f"schedule.warmup_steps {schedule.warmup_steps} + schedule.decay_steps {schedule.decay_steps} is more than "
            f"train.steps {steps}; schedule.decay_steps = {room} works"
        )


def _check_changes(config: "TrainConfig") -> None:
    """A blend changes between two steps, later than the change before it, and only in the order that has no index.

    Blocks of documents are of that order alone, too.
    """
    changes, order = config.data.changes, config.data.order
    if changes and order != "stateless":
        raise ConfigError(
            f"data.changes has {len(changes)} entries and data.order is {order!r}, whose index is built for one blend; "
            "data.order = 'stateless' works"
        )
    if config.data.document_shuffle == "block" and order != "stateless":
        raise ConfigError(
            f"data.document_shuffle is 'block' and data.order is {order!r}, which shuffles all documents of a dataset "
            "together; data.document_shuffle = 'auto' works"
        )
    for number, change in enumerate(changes):
        what = f"data.changes[{number}]"
        if number and change.at <= changes[number - 1].at:
            raise ConfigError(f"{what}.at is {change.at}, and {changes[number - 1].at} comes before it; at ascends")
        if not change.blend and not change.weights and not change.sequence_length:
            raise ConfigError(f"{what} at {change.at} changes nothing; give blend or weights")
        blend = config.data.blend_at(number)
        if change.weights and len(change.weights) != len(blend):
            raise ConfigError(
                f"{what}.weights has {len(change.weights)} entries and the blend has {len(blend)}; give one each"
            )
        step = bisect_left(range(change.at + 1), change.at, key=lambda step: _samples(config, step))
        if _samples(config, step) != change.at:
            near = " or ".join(str(_samples(config, one)) for one in (step - 1, step))
            raise ConfigError(f"{what}.at is {change.at}, inside a step; it is where a step begins: {near} works")


def _fixed_values(config: "TrainConfig", step: int) -> dict[str, Any]:
    """Key -> value of all that a resumed run keeps."""
    values: dict[str, Any] = {}
    for table, keys in asdict(config).items():
        if table not in _FREE_TABLES:
            values.update(
                {f"{table}.{key}": value for key, value in keys.items() if f"{table}.{key}" not in _FREE_KEYS}
            )
    values["train.batch_ramp"] = [list(entry) for entry in config.train.batch_ramp if entry[0] < step]
    values["data.changes"] = [
        change | {"blend": list(config.data.names_of(change["blend"]))}
        for change in values["data.changes"]
        if change["at"] < _samples(config, step)
    ]
    if config.data.order != "stateless":  # an index is built for the samples of the whole run
        values["train.steps"] = config.train.steps
    values["data.blend"] = list(config.data.dataset_names)
    values["data.valid"] = list(config.data.names_of(config.data.valid))
    del values["data.names"]  # told as data.blend
    return values


def _samples(config: "TrainConfig", step: int) -> int:
    """Samples that ``step`` updates have consumed."""
    starts = [(0, config.train.global_batch_size), *config.train.batch_ramp, (step, 0)]
    total = 0
    for (begin, batch), (end, _) in pairwise(starts):
        total += max(min(end, step) - begin, 0) * batch
    return total


def _multiples(unit: int, value: int) -> list[int]:
    """The multiples of ``unit`` just below and above ``value``, those > 0."""
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def _fitting(pp: int, model_ranks: int, world: int) -> str:
    """A parallel.pp near ``pp`` that divides the world when the other degrees stay."""
    others = model_ranks // pp
    fits = [n for n in range(1, world + 1) if world % (n * others) == 0]
    if not fits:
        return "other degrees"
    near = min(fits, key=lambda n: (abs(n - pp), n))
    return f"parallel.pp = {near} with parallel.dp = {world // (near * others)}"
