"""What a resumed run may change, and what its metrics say that it changed.

    starting_point.py --> resume_changes (this file)    loop.py --> noted_changes (this file) --> the line ``resume``
    trained_model.py  --> forget_idle_keys (this file)  configurations of release 0.1.0

Numbers and texts only: no torch, no files.
"""

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from sixfold.gpt.config.batch_schedule import samples_before
from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig

# A resumed run may change these; train.batch_ramp and data.changes only in their future.
_FREE_TABLES = ("parallel", "pipeline", "fsdp", "checkpoint", "eval", "log", "elastic", "run")
# data.document_shuffle is compared with what the checkpoint says of each dataset: 0.1.0 had no such key.
_FREE_KEYS = (
    "train.steps", "train.tokens", "train.micro_batch_size", "train.recompute", "train.offload_activations",
    "data.cache_dir", "data.document_shuffle", "data.max_epochs",
)  # fmt: skip
# A branch of a run: what is ahead of it is trained otherwise, and the line ``resume`` says how. None of these is in a
# checkpoint: it holds fp32 weights and moments, whatever the products were computed in, and options are the config's.
_NOTED_TABLE = "schedule"
_NOTED_KEYS = (
    "optimizer.lr", "optimizer.weight_decay", "optimizer.beta1", "optimizer.beta2", "optimizer.eps", "train.clip_grad",
    "train.precision", "train.compile", "train.deterministic", "train.global_batch_size", "model.router_aux_loss",
    "train.z_loss", "train.label_smoothing", "optimizer.ema_decay", "optimizer.ema_warmup",
    "train.hidden_dropout", "train.embedding_dropout", "train.float8_products",
)  # fmt: skip
# Noted too, of the tables that are free: what gradients are rounded to, and how much of a validation set is read.
_NOTED_OF_FREE = ("fsdp.reduce_dtype", "fsdp.main_dtype", "fsdp.grad_dtype", "fsdp.cast_inputs", "eval.batches")
# How a tokenizer is found: preflight compares it with what made the data. Training reads of it the end of a document
# alone, and that where data.eod_mask_loss is true; there its id may not change.
_TOKENIZER_KEYS = ("data.tokenizer", "data.eod_token")
_BATCH_KEYS = ("global_batch_size", "batch_ramp")  # may differ where each step that is done had the same batch
_NOTED_LENGTH = "train.steps"  # where the learning rate falls over them


def resume_changes(old: "TrainConfig", new: "TrainConfig", *, step: int = 0, same_end: bool = False) -> None:
    """Refuse to continue a run under a configuration that would have made its past differ.

    Args:
        old: what the run was made with.
        new: what it is to go on with.
        step: updates done so far; batches and data.changes from here on may differ.
        same_end: one id ends a document in both, under whatever name its tokenizer is found.
    Raises:
        ConfigError: naming each key that changed and may not, with both values.

    What is not in a checkpoint may change, as the learning rate and the precision; see ``noted_changes``.
    A prefix may move to another folder: the names of the datasets count (data.names, else base names), and blending
    compares what lies behind them. So may the tokenizer, where training reads nothing of it, or finds the same there.
    """
    before, after = _fixed_values(old, step), _fixed_values(new, step)
    reads_end = old.data.eod_mask_loss or new.data.eod_mask_loss
    free = () if reads_end and not same_end else _TOKENIZER_KEYS
    if new.data.deal == "auto":  # as before, whatever that was
        free = (*free, "data.deal")
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key] and key not in free}
    batches = _changed_batches(old, new, step)
    if changed or batches:
        pairs = ", ".join(f"{key} (was {was!r}, is {now!r})" for key, (was, now) in (changed | batches).items())
        ramp = _ramp_that_goes_on(old, new, step) if batches and not changed else ""
        raise ConfigError(
            f"a resumed run cannot change {pairs}; put back what was, or start a new run.dir "
            f"(with checkpoint.init_from for the weights){ramp}"
        )


def _changed_batches(old: "TrainConfig", new: "TrainConfig", step: int) -> dict[str, tuple[Any, Any]]:
    """Keys of the batch size that differ, with both values, if they make a step that is done another one."""
    # An index is built for the samples of the whole run.
    steps = step if new.data.order == "stateless" else max(step, new.train.steps)
    if _batches(old, steps) == _batches(new, steps):
        return {}
    pairs = {key: (getattr(old.train, key), getattr(new.train, key)) for key in _BATCH_KEYS}
    return {f"train.{key}": (_plain(was), _plain(now)) for key, (was, now) in pairs.items() if was != now}


def _batches(config: "TrainConfig", steps: int) -> list[list[int]]:
    """[first step, batch] of each stretch of the first ``steps`` steps in which the batch stays."""
    found: list[list[int]] = []
    for begin, batch in ((0, config.train.global_batch_size), *config.train.batch_ramp):
        if begin < steps:
            while found and found[-1][0] >= begin:
                found.pop()
            if not found or found[-1][1] != batch:
                found.append([begin, batch])
    return found


def _ramp_that_goes_on(old: "TrainConfig", new: "TrainConfig", step: int) -> str:
    """How to have the new batch size from here on, where that is all that was asked for."""
    if new.data.order != "stateless" or old.train.batch_ramp != new.train.batch_ramp:
        return ""
    size = new.train.global_batch_size
    return f"; for {size} from step {step} on: train.batch_ramp = {[*_batches(old, step), [step, size]]}"


def _plain(value: Any) -> Any:
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def noted_changes(old: "TrainConfig", new: "TrainConfig", *, step: int = 0) -> dict[str, list[Any]]:
    """What a branch of a run changes, ``{"optimizer.lr": [was, is]}``: all that may change and trains otherwise.

    And what it is evaluated on, ``data.valid`` and ``eval.batches``. Not what only rounds sums otherwise, as a layout.

    Args:
        step: updates done so far: the batches and the blend ahead of it may differ.
    """
    before, after = asdict(old), asdict(new)
    keys = [*_NOTED_KEYS, *_NOTED_OF_FREE, *(f"{_NOTED_TABLE}.{key}" for key in before[_NOTED_TABLE])]
    keys += _noted_here(old, new)
    pairs = {}
    for name in keys:
        table, _, key = name.partition(".")
        if before[table][key] != after[table][key]:
            pairs[name] = [_plain(before[table][key]), _plain(after[table][key])]
    for name, tell in (("data.valid", _valid_names), ("data.changes", partial(_changes_ahead, step=step))):
        was, now = tell(old), tell(new)
        if was != now:
            pairs[name] = [was, now]
    return pairs


def _noted_here(old: "TrainConfig", new: "TrainConfig") -> list[str]:
    """Keys that train otherwise beside some values of others, and beside the rest only round sums otherwise."""
    both, keys = (old, new), []
    if any(config.schedule.shape != "constant" for config in both):
        keys.append(_NOTED_LENGTH)
    end = max(config.train.steps for config in both)
    if _batches(old, end) != _batches(new, end):
        keys.append("train.batch_ramp")
    if not all(config.parallel.entry.flushed for config in both):  # gradients of older weights
        keys.append("parallel.schedule")
    if any(config.parallel.schedule == "pipedream" for config in both):  # older by the stages that follow
        keys += ["parallel.pp", "parallel.layers_per_stage"]
    if any(config.model.num_experts and config.model.router_aux_loss for config in both):  # a loss of a microbatch
        keys.append("train.micro_batch_size")
    return keys


def _changes_ahead(config: "TrainConfig", step: int) -> list[dict[str, Any]]:
    """The entries of data.changes behind ``step`` updates, datasets by name, without fields that were left out."""
    named = config.data.names_of
    found = [
        {
            "at": change.at,
            "blend": list(named(change.blend)),
            "weights": list(change.weights),
            "drop": {named([key])[0]: _plain(value) for key, value in sorted(change.drop.items())},
        }
        for change in config.data.changes
        if change.at >= samples_before(config, step)
    ]
    return [{key: value for key, value in one.items() if key == "at" or value} for one in found]


def _valid_names(config: "TrainConfig") -> dict[str, list[str]]:
    """Names of the datasets of each validation set."""
    return {name: list(config.data.names_of(prefixes)) for name, prefixes in config.data.valid_sets.items()}


def forget_idle_keys(values: dict[str, dict[str, Any]]) -> None:
    """Take out of a saved configuration's tables what release 0.1.0 accepted without effect and a new run is refused.

    A checkpoint must stay readable. One that does not say how samples were dealt is of a release that dealt them in
    turn. A path that 0.1.0 took as it stood (``~``, a URL) is led by ``./``: that folder.
    """
    values["data"].setdefault("deal", "in_turn")
    if values["data"].get("valid"):
        values["data"].pop("split", None)
    if values["schedule"].get("shape") == "constant":
        values["schedule"].pop("min_lr_ratio", None)
    if values["parallel"].get("schedule") != "interleaved":
        values["pipeline"].pop("group", None)
    if values["parallel"].get("schedule") != "hanayo":
        values["pipeline"].pop("waves", None)
    values["pipeline"].pop("steps", None)
    if not values["model"].get("num_experts"):
        for key in ("experts_per_token", "router_aux_loss"):
            values["model"].pop(key, None)
    for table, key in (("run", "dir"), ("checkpoint", "init_from"), ("data", "cache_dir")):
        path = values[table].get(key, "")
        if path.startswith("~") or "://" in path:
            values[table][key] = "./" + path.replace("://", ":/")


def _fixed_values(config: "TrainConfig", step: int) -> dict[str, Any]:
    """Key -> value of all that a resumed run keeps."""
    values: dict[str, Any] = {}
    for table, keys in asdict(config).items():
        if table not in (*_FREE_TABLES, _NOTED_TABLE):
            named = {f"{table}.{key}": value for key, value in keys.items()}
            values.update({name: value for name, value in named.items() if name not in (*_FREE_KEYS, *_NOTED_KEYS)})
    del values["train.batch_ramp"]  # compared step by step
    values["data.changes"] = [  # documents that are dropped: token_stream.py compares them, wherever they stand
        change
        | {"blend": list(config.data.names_of(change["blend"])), "drop": sorted(config.data.names_of(change["drop"]))}
        for change in values["data.changes"]
        if change["at"] < samples_before(config, step)
    ]
    if config.data.order != "stateless":  # an index is built for the samples of the whole run
        values["train.steps"] = config.train.steps
    values["data.blend"] = list(config.data.dataset_names)
    # Other validation sets are another evaluation and the same training; without any a share of the blend is held out.
    values["data.valid"] = "given" if config.data.valid else "none"
    del values["data.names"]  # told as data.blend
    return values
