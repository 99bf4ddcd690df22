"""Rules between the tables of a configuration, and between a configuration and its world.

    train_config.py --> check_config        (this file)      made
    rendezvous.py   --> check_world         (this file)      the number of ranks is known
    degrees.py has what tp, cp and ep divide, resume_rules.py has the rules between a run and its past.

Numbers only: no torch, no files. The pure functions here read a TrainConfig and never make one.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from sixfold.gpt.config.batch_schedule import batch_sizes, samples_before
from sixfold.gpt.config.degrees import check_degrees, check_ranks, length_unit, multiples
from sixfold.gpt.config.frozen import check_frozen
from sixfold.gpt.config.lora import check_lora
from sixfold.gpt.config.token_budgets import check_tokens
from sixfold.gpt.errors import ConfigError
from sixfold.pipeline.schedules import by_name, registered

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import ParallelConfig, TrainConfig

_SCHEDULES = tuple(entry.name for entry in registered())

# What a run cannot do: key, the values that it takes, what to write instead, and what the key would switch on.
_UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("pipeline.steps", lambda value: value == 2, "2, or no such key", "another number of batches in a program"),
    ("train.cuda_graphs", lambda value: not value, "train.compile instead", "graph capture"),
    (
        "train.attention_dropout",
        lambda value: not value,
        "train.hidden_dropout",
        "dropout of probabilities, which kernels of attention never write,",
    ),
    (
        "data.changes",
        lambda value: not any(change.sequence_length for change in value),
        "changes of blend and weights",
        "a sequence length that changes within a run",
    ),
    ("fsdp.nccl_min_ctas", lambda value: value is None, "NCCL_MIN_CTAS of NCCL itself", "a bound of NCCL's blocks"),
    ("fsdp.nccl_max_ctas", lambda value: value is None, "NCCL_MAX_CTAS of NCCL itself", "a bound of NCCL's blocks"),
    ("fsdp.user_buffers", lambda value: value != "require", "auto or off", "registering buffers with NCCL"),
)


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
    check_degrees(config)
    check_lora(config)
    check_frozen(config)
    _check_stages(config)
    check_tokens(config)
    _check_schedule_lr(config)
    if not config.parallel.entry.flushed:
        check_versions(config)
    if config.grad_sum == "tree":
        _check_tree(config)
    if config.fsdp.offload and config.optimizer.name == "muon":
        raise ConfigError(
            "fsdp.offload is true and optimizer.name 'muon', whose step needs the momentum of all its matrices at "
            "once; optimizer.name = 'adamw' works, or fsdp.offload = false"
        )
    _check_dropout(config)
    _check_average(config)
    if config.train.float8_products:
        _check_float8(config)
    if config.train.offload_activations and config.run.device == "cpu":
        raise ConfigError(
            "train.offload_activations is true and run.device 'cpu', where activations are in host memory; "
            "train.offload_activations = false works"
        )
    if config.log.memory_steps and config.run.device == "cpu":
        raise ConfigError(
            f"log.memory_steps is {list(config.log.memory_steps)} and run.device 'cpu', whose allocator keeps no "
            "record; log.memory_steps = [] works, and `sixfold plan` says what memory is for"
        )
    if config.model.num_experts:
        _check_experts(config)
    _check_changes(config)
    for name, batch in batch_sizes(config):
        _check_batch(name, batch, config.train.micro_batch_size, max(config.parallel.dp, 1))


def _check_dropout(config: "TrainConfig") -> None:
    for key in ("hidden_dropout", "embedding_dropout"):
        if getattr(config.train, key) and config.train.compile:
            raise ConfigError(
                f"train.{key} is {getattr(config.train, key)} and train.compile true: what is dropped depends on the "
                f"number of a layer, and compiled layers share one program; train.compile = false works"
            )


def _check_average(config: "TrainConfig") -> None:
    if config.optimizer.ema_decay and config.fsdp.main_dtype != "float32":
        raise ConfigError(
            f"optimizer.ema_decay is {config.optimizer.ema_decay} and fsdp.main_dtype {config.fsdp.main_dtype!r}, in "
            f"which an average would lose what an update adds; fsdp.main_dtype = 'float32' works"
        )


def _check_float8(config: "TrainConfig") -> None:
    """What float8 products need of other keys; of the device float8_linear.py."""
    parallel, loop = config.parallel, config.train
    # A weight's gradient is a product over tokens; with parallel.tp_overlap over those of up to four chunks.
    multiple = 64 if parallel.tp_overlap else 16
    tokens = loop.micro_batch_size * config.data.seq_length // parallel.cp
    unit = lcm(length_unit(parallel), parallel.cp * multiple // gcd(multiple, loop.micro_batch_size))
    lengths = " or ".join(str(n) for n in multiples(unit, config.data.seq_length))
    for key, value, works, needed, why in (
        ("train.precision", loop.precision, loop.precision == "bf16", "'bf16'",
         "its operands are rounded from bfloat16"),
        ("lora.rank", config.lora.rank, not config.lora.rank, "0", "an adapter is a product of its own"),
        ("run.device", config.run.device, config.run.device != "cpu", "'cuda'", "no CPU multiplies float8 numbers"),
        ("data.seq_length", config.data.seq_length, not tokens % multiple, lengths,
         f"a product over the {tokens} tokens of a microbatch takes a multiple of {multiple}"),
    ):  # fmt: skip
        if not works:
            raise ConfigError(
                f"{key} is {value!r} and train.float8_products true: {why}; {key} = {needed} works, or "
                f"train.float8_products = false"
            )


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


def check_main_dtype(config: "TrainConfig") -> None:
    """Of GPTModel, whose weights are float32 where they are drawn, loaded and saved; a model of one's own may be other.

    Raises:
        ConfigError: fsdp would round them.
    """
    if config.fsdp.main_dtype != "float32":
        raise ConfigError(
            f"fsdp.main_dtype is {config.fsdp.main_dtype!r} and the weights of GPTModel are float32, which it would "
            f"round; fsdp.main_dtype = 'float32' works, and train.precision says what products are computed in"
        )


def refuse_path(name: str, value: str) -> None:
    """Refuse what would become a strangely named folder of the working directory.

    Raises:
        ConfigError: ``~``, which shells replace and files do not know, or a URL.
    """
    if value == "~" or value.startswith("~/"):
        raise ConfigError(f"{name} is {value!r}; ~ is not replaced here: write the folder's path out")
    if "://" in value:
        raise ConfigError(f"{name} is {value!r}; it is a folder of a mounted file system, not a URL: mount it")


def check_versions(config: "TrainConfig") -> None:
    """What schedules that keep versions of the weights need: whole weights, and updates of one stage at a time."""
    parallel, name = config.parallel, config.parallel.schedule
    needs: list[tuple[str, object, object, str]] = [
        ("parallel.sharding", parallel.sharding, "no_shard", "its versions are of whole weights"),
        ("parallel.tp", parallel.tp, 1, "the program of a stage sums no gradients over tp"),
        ("parallel.ep", parallel.ep, 1, "the program of a stage sums all gradients over the same ranks"),
        ("train.clip_grad", config.train.clip_grad, 0.0, "stages are updated one after another, and no norm is of all"),
        ("train.compile", config.train.compile, False, "a compiled layer keeps the weights it first saw"),
        ("train.float8_products", config.train.float8_products, False, "its products read versions of the weights"),
        ("train.frozen", list(config.train.frozen), [], "its versions are of all weights of a stage"),
        ("optimizer.ema_decay", config.optimizer.ema_decay, 0.0, "where a step ends, stages have had other updates"),
        ("log.timeline_steps", list(config.log.timeline_steps), [],
         "a step has parts of several batches, which no program on paper has; log.profile_steps traces it"),
        ("log.digest_every", config.log.digest_every, 0, "where a step ends, stages have weights of different batches"),
        ("elastic.compare_replicas_every", config.elastic.compare_replicas_every, 0,
         "where a step ends, stages have weights of different batches"),
    ]  # fmt: skip
    if config.train.precision == "fp8":
        needs.append(("train.precision", "fp8", "bf16", "weights are quantised where they are sharded"))
    if config.pipeline.edges == "one":
        needs.append(("pipeline.edges", "one", "auto", "no order of all messages is proved where batches overlap"))
    if parallel.pp > 1:
        tied = "first and last stage are updated at different times"
        needs.append(("model.tie_embeddings", config.model.tie_embeddings, False, tied))
    plain = type(config.fsdp)()
    for field in fields(plain):
        if field.name not in ("grad_sum", "checks", "cast_inputs"):
            key = f"fsdp.{field.name}"
            needs.append((key, getattr(config.fsdp, field.name), getattr(plain, field.name), "it shards nothing"))
    for key, value, needed, why in needs:
        if value != needed:
            written = str(needed).lower() if isinstance(needed, bool) else repr(needed)  # as a file takes it
            remedy = "leave the key out" if needed is None else f"{key} = {written} works"
            raise ConfigError(f"{key} is {value!r} and parallel.schedule {name!r}: {why}; {remedy}")
    if parallel.dp or parallel.pp == 1:
        check_microbatches(config, max(parallel.dp, 1))


def check_microbatches(config: "TrainConfig", dp: int) -> None:
    """PipeDream updates after every microbatch; 2BW's two versions are enough from pp - 1 microbatches on."""
    parallel, micro = config.parallel, config.train.micro_batch_size
    for key, batch in batch_sizes(config):
        m = batch // (micro * dp)
        if parallel.schedule == "pipedream" and m != 1:
            raise ConfigError(
                f"{key} is {batch}, which is {m} microbatches (train.micro_batch_size * parallel.dp = {micro * dp}), "
                f"and parallel.schedule 'pipedream' updates after each: {key} = {micro * dp} works"
            )
        if parallel.schedule == "pipedream_2bw" and m < parallel.pp - 1:
            raise ConfigError(
                f"{key} is {batch}, which is {m} microbatches, and parallel.schedule {parallel.schedule!r} on "
                f"parallel.pp = {parallel.pp} ranks takes {parallel.pp - 1} or more: "
                f"{key} = {micro * dp * (parallel.pp - 1)} works"
            )


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
            f"{degrees} times parallel.dp = {parallel.dp} is {parallel.world} ranks, and {world} are there; "
            f"a world of {parallel.world} works, or {_fitting(parallel.pp, model_ranks, world)}"
        )
    if world < 1 or world % model_ranks:
        worlds = " or ".join(str(n) for n in multiples(model_ranks, world))
        remedy = f", or {_fitting(parallel.pp, model_ranks, world)}" if world > 0 else ""
        raise ConfigError(f"{degrees} does not divide the world of {world} ranks; a world of {worlds} works{remedy}")
    resolved = replace(parallel, dp=world // model_ranks)
    check_ranks(config, resolved)
    if config.grad_sum == "tree":
        _check_tree_ranks(config, resolved)
    if not parallel.entry.flushed:
        check_microbatches(config, resolved.dp)
    for name, batch in batch_sizes(config):
        _check_batch(name, batch, config.train.micro_batch_size, resolved.dp)
    return resolved


def _check_tree(config: "TrainConfig") -> None:
    """What a tree over the microbatches of a batch is not combined with."""
    fsdp, parallel = config.fsdp, config.parallel
    needs: list[tuple[str, object, object, str]] = [
        ("fsdp.main_dtype", fsdp.main_dtype, "float32", "its sums are in float32"),
        ("fsdp.reduce_dtype", fsdp.reduce_dtype or fsdp.main_dtype, fsdp.main_dtype,
         "what travels would be rounded, and how much travels depends on the ranks"),
        ("fsdp.grad_reduce", fsdp.grad_reduce == "last", False, "each microbatch is reduced when its backward ends"),
        ("parallel.schedule", parallel.entry.flushed, True, "weights of several versions are no function of the batch"),
    ]  # fmt: skip
    works = {"fsdp.reduce_dtype": "leave the key out", "fsdp.grad_reduce": "fsdp.grad_reduce = 'auto' works",
             "parallel.schedule": "parallel.schedule = 'one_f_one_b' works"}  # fmt: skip
    for key, value, needed, why in needs:
        if value != needed:
            table, _, name = key.partition(".")
            shown = getattr(getattr(config, table), name)
            remedy = works.get(key, f"{key} = '{needed}' works")
            raise ConfigError(f"{key} is {shown!r} and parallel.grad_sum 'tree': {why}; {remedy}")
    if parallel.dp:
        _check_tree_ranks(config, parallel)


def _check_tree_ranks(config: "TrainConfig", parallel: "ParallelConfig") -> None:
    for key, ranks in (("dp * cp", parallel.dp * parallel.cp), ("dp_replicate", parallel.dp_replicate)):
        if ranks & (ranks - 1):
            less = 1 << (ranks.bit_length() - 1)
            raise ConfigError(
                f"parallel.{key} is {ranks} and parallel.grad_sum 'tree': gradients of ranks are added in pairs, and "
                f"pairs in pairs; {less} or {2 * less} works, or parallel.grad_sum = 'rank_order'"
            )


def _check_batch(name: str, batch: int, micro: int, dp: int) -> None:
    if batch % (micro * dp):
        works = " or ".join(str(n) for n in multiples(micro * dp, batch))
        raise ConfigError(
            f"{name} is {batch} and train.micro_batch_size * parallel.dp is {micro} * {dp} = {micro * dp}; "
            f"the first is a multiple of the second: {works} works"
        )


def _check_experts(config: "TrainConfig") -> None:
    """What experts are not combined with."""
    experts = f"model.num_experts {config.model.num_experts}"
    if not config.parallel.entry.flushed:
        raise ConfigError(
            f"parallel.schedule is {config.parallel.schedule!r} and {experts}, of whose weights no versions are kept; "
            "parallel.schedule = 'one_f_one_b' works"
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
    chunks = parallel.entry.chunks
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
    for key in ("memory_cap", "plan_steps", "plan_seconds"):
        value, idle = getattr(config.pipeline, key), getattr(type(config.pipeline), key)
        if value != idle and parallel.schedule != "plan":
            raise ConfigError(
                f"pipeline.{key} is {value} and parallel.schedule {parallel.schedule!r} is not searched; leave the key "
                "out, or set parallel.schedule = 'plan'"
            )
    _check_search(config)
    if 0 < config.pipeline.group < parallel.pp:
        raise ConfigError(
            f"pipeline.group is {config.pipeline.group} and parallel.pp {parallel.pp}; in smaller "
            f"groups ranks wait for each other for ever: pipeline.group = {parallel.pp} works, or 0 for the default"
        )


def _check_search(config: "TrainConfig") -> None:
    """Rank 0 searches a plan for each number of microbatches; the others wait no longer than for all else."""
    counts = len({batch for _, batch in batch_sizes(config)})
    each, limit = config.pipeline.plan_seconds, config.run.timeout_seconds
    if config.parallel.schedule == "plan" and config.parallel.pp > 1 and each * counts >= limit:
        raise ConfigError(
            f"pipeline.plan_seconds is {each:g} for each of {counts} global batch sizes, and run.timeout_seconds "
            f"{limit:g}, after which the ranks that wait for the plan give up; pipeline.plan_seconds = "
            f"{limit / counts / 2:g} works, or run.timeout_seconds = {2 * each * counts:g}"
        )


def _check_schedule_lr(config: "TrainConfig") -> None:
    schedule, steps = config.schedule, config.train.steps
    if schedule.shape != "wsd" and schedule.decay_steps:
        key = "decay_tokens" if schedule.decay_tokens else "decay_steps"  # the steps of tokens are not what was written
        raise ConfigError(
            f"schedule.{key} is {getattr(schedule, key)} and schedule.shape {schedule.shape!r}; "
            f"it is 0 unless the shape is 'wsd'"
        )
    if schedule.shape != "wsd" and schedule.decay != type(schedule).decay:
        raise ConfigError(
            f"schedule.decay is {schedule.decay!r} and schedule.shape {schedule.shape!r}, which has no such part; "
            f"leave the key out, or set schedule.shape = 'wsd'"
        )
    if schedule.shape == "constant" and schedule.min_lr_ratio != type(schedule).min_lr_ratio:
        raise ConfigError(
            f"schedule.min_lr_ratio is {schedule.min_lr_ratio} and schedule.shape 'constant', which never falls; leave "
            f"the key out"
        )
    room = max(steps - schedule.warmup_steps, 0)
    behind_warmup = samples_before(config, steps) - samples_before(config, steps - room)
    tokens = behind_warmup * config.data.seq_length
    if steps and schedule.decay_tokens > tokens:
        raise ConfigError(
            f"schedule.decay_tokens is {schedule.decay_tokens}, and behind schedule.warmup_steps "
            f"{schedule.warmup_steps} the run of train.steps {steps} reads {tokens}; "
            f"schedule.decay_tokens = {tokens} works"
        )
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
    if config.data.deal == "permuted" and order == "megatron":
        raise ConfigError(
            f"data.deal is {config.data.deal!r} and data.order is {order!r}, in which ranks take samples in turn; "
            "data.deal = 'in_turn' works"
        )
    if config.data.packing != "concatenate" and order != "stateless":
        raise ConfigError(
            f"data.packing is {config.data.packing!r} and data.order is {order!r}, which cuts documents that stand end "
            "to end; data.order = 'stateless' works"
        )
    for number, change in enumerate(changes):
        what = f"data.changes[{number}]"
        if number and change.at <= changes[number - 1].at:
            raise ConfigError(f"{what}.at is {change.at}, and {changes[number - 1].at} comes before it; at ascends")
        if not change.blend and not change.weights and not change.sequence_length and not change.drop:
            raise ConfigError(f"{what} at {change.at} changes nothing; give blend, weights or drop")
        _check_drop(config, what, change.drop)
        blend = config.data.blend_at(number)
        if change.weights and len(change.weights) != len(blend):
            raise ConfigError(
                f"{what}.weights has {len(change.weights)} entries and the blend has {len(blend)}; give one each"
            )
        step = bisect_left(range(change.at + 1), change.at, key=lambda step: samples_before(config, step))
        if samples_before(config, step) != change.at:
            near = " or ".join(str(samples_before(config, one)) for one in (step - 1, step))
            raise ConfigError(f"{what}.at is {change.at}, inside a step; it is where a step begins: {near} works")


def _check_drop(config: "TrainConfig", what: str, drop: Mapping[str, object]) -> None:
    """Documents are of datasets that training reads, each said once: by its prefix or by its name."""
    prefixes = config.data.train_prefixes
    names = config.data.names_of(prefixes)
    for key in drop:
        if key not in (*prefixes, *names):
            raise ConfigError(
                f"{what}.drop names {key!r}, of which training reads nothing; it names datasets of data.blend or of a "
                f"change: {', '.join(names)}"
            )
    said = config.data.names_of(drop)
    twice = next((name for name in said if said.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{what}.drop names {twice} twice, by its prefix and by its name; give one list")


def _fitting(pp: int, model_ranks: int, world: int) -> str:
    """A parallel.pp near ``pp`` that divides the world when the other degrees stay."""
    others = model_ranks // pp
    fits = [n for n in range(1, world + 1) if world % (n * others) == 0]
    if not fits:
        return "other degrees"
    near = min(fits, key=lambda n: (abs(n - pp), n))
    return f"parallel.pp = {near} with parallel.dp = {world // (near * others)}"
